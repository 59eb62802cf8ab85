"""Reads `model.json`, the arguments of vLLM's engine, and `multi_lora.json`, the adapters that requests may name.

Names, defaults and texts are those of Triton's vLLM backend. Knows nothing of vLLM: which arguments there are, its
`AsyncEngineArgs` says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from charonia.backend import ModelSource
from charonia.errors import InvalidArgument, NotFound

ENGINE_FILE = "model.json"
LORA_FILE = "multi_lora.json"

_PATHS = ("model", "tokenizer", "hf_config_path", "download_dir")
"""Arguments that may be a directory beside the file."""


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """The arguments of the engine, and the directories of adapters by name, in the order of the file."""

    arguments: Mapping[str, Any]
    loras: Mapping[str, str]

    @property
    def enables_lora(self) -> bool:
        return bool(self.arguments.get("enable_lora"))

    @property
    def devices(self) -> int:
        """How many devices one engine takes."""
        return int(self.arguments.get("tensor_parallel_size", 1)) * int(self.arguments.get("pipeline_parallel_size", 1))

    @property
    def trusts_remote_code(self) -> bool:
        return _is_on(self.arguments.get("trust_remote_code", False))

    def with_empty_slot(self) -> EngineArguments:
        """The same with a slot for each adapter and one more, which stays empty.

        For CPUs: vLLM's kernels there run a request without adapter with what is in the last slot, when one with an
        adapter is in the same batch.
        """
        if not self.enables_lora or int(self.arguments.get("max_loras") or 1) > len(self.loras):
            return self
        return EngineArguments({**self.arguments, "max_loras": len(self.loras) + 1}, self.loras)

    def check_device(self, kind: str) -> None:
        """Raises `InvalidArgument` for an engine on several devices whose instance is of kind GPU: that is one."""
        if self.devices > 1 and kind == "GPU":
            raise InvalidArgument(
                "KIND_GPU is currently for single-GPU models, please specify KIND_MODEL in the model's config.pbtxt "
                "for multi-GPU models"
            )


def engine_arguments(source: ModelSource) -> EngineArguments:
    """Read both files of a version. A path that names a directory beside them is made absolute.

    Raises `NotFound` for a file that is missing, `InvalidArgument` for one that is not such an object.
    """
    directory = source.version_directory
    arguments = _object(
        directory / ENGINE_FILE,
        f"'{ENGINE_FILE}' containing vllm engine args must be provided in '{directory}'",
    )
    for name in _PATHS:
        if isinstance(arguments.get(name), str):
            arguments[name] = _beside(directory, arguments[name])
    if "enable_lora" not in arguments:
        return EngineArguments(arguments, {})
    # Triton's files have it as a string, too
    arguments["enable_lora"] = _is_on(arguments["enable_lora"])
    if not arguments["enable_lora"]:
        return EngineArguments(arguments, {})
    file = directory / LORA_FILE
    loras = _object(file, f"Triton backend cannot find {file}.")
    for name, path in loras.items():
        if not isinstance(path, str) or not path:
            raise InvalidArgument(f"'{LORA_FILE}' in '{directory}': adapter '{name}' must have a path, got {path!r}")
    return EngineArguments(arguments, {name: _beside(directory, path) for name, path in loras.items()})


def _object(file: Path, missing: str) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise NotFound(missing) from None
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"'{file.name}' in '{file.parent}' cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise InvalidArgument(f"'{file.name}' in '{file.parent}' must hold a JSON object")
    return found


def _beside(directory: Path, path: str) -> str:
    """A path as vLLM gets it: names of models on a hub stay as they are."""
    if not path or Path(path).is_absolute():
        return path
    found = directory / path
    return str(found.resolve()) if found.is_dir() else path


def _is_on(value: object) -> bool:
    return str(value).lower() == "true"
