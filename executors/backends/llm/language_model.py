"""What a version's directory holds: a GGUF file, or OpenVINO's IR with its tokenizer; and the adapters beside it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from charonia.backend import ModelSource
from charonia.errors import InvalidArgument, NotFound
from charonia.generation.text_assets import TextAssets, assets_of_files

from .conversion import CONVERSIONS, IR, converted, default_directory

GGUF = "model.gguf"
ADAPTERS = "adapters"
MULTI_LORA = "multi_lora.json"
CHANGES = "charonia.adapter_changes"
"""A parameter: a JSON object from names of adapters to directories, as `MULTI_LORA`, and null for those not served."""
CONTEXT = "charonia.context"
_ASSETS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """The files of a version. `adapters` are the directories of its adapters, by name."""

    graph: Path
    assets: TextAssets
    adapters: dict[str, str]


def find_model(source: ModelSource) -> LanguageModel:
    """The files of a version, its GGUF file converted if need be. Blocks.

    Raises `NotFound` without a model, `InvalidArgument` or `Unsupported` for files of another form.
    """
    root = source.version_directory.resolve()
    chosen = source.config.default_model_filename
    # a configuration that was completed names the first of the usual files, also where another one is used
    path = _found(source, root) if chosen in ("", GGUF) else (root / chosen).resolve()
    if not path.is_relative_to(root):
        raise InvalidArgument(f"default model filename '{chosen}' of '{source.name}' is outside the version directory")
    if path.is_dir():
        path = path / IR
    if not path.is_file():
        raise NotFound(f"unable to find '{path}' for model '{source.name}'")
    if path.suffix == ".gguf":
        place = source.parameter(CONVERSIONS)
        path = converted(path, Path(place) if place else default_directory()) / IR
    elif path.suffix != ".xml":
        raise InvalidArgument(f"model '{source.name}': the llm backend reads .gguf and .xml, not '{path.name}'")
    files = {name: (path.parent / name).read_bytes() for name in _ASSETS if (path.parent / name).is_file()}
    assets = assets_of_files(files, context=source.integer(CONTEXT) or None)
    return LanguageModel(path, assets, adapter_directories(source, root))


def _found(source: ModelSource, root: Path) -> Path:
    """An IR if there is one, else `model.gguf`, else the only GGUF file."""
    for name in (IR, GGUF):
        if (root / name).is_file():
            return root / name
    candidates = sorted(root.glob("*.gguf"))
    if len(candidates) != 1:
        raise NotFound(f"unable to find '{root / GGUF}' or '{root / IR}' for model '{source.name}'")
    return candidates[0].resolve()


def adapter_directories(source: ModelSource, root: Path) -> dict[str, str]:
    """The directories below `adapters`, what `multi_lora.json` names, and what `CHANGES` says of both.

    Paths are relative to the version directory, and inside the model's. Raises `InvalidArgument` for others.
    """
    folder = root / ADAPTERS
    found = {path.name: str(path) for path in sorted(folder.iterdir()) if path.is_dir()} if folder.is_dir() else {}
    listed = root / MULTI_LORA
    if listed.is_file():
        found |= _named(source, root, MULTI_LORA, listed.read_bytes())
    if (said := source.parameter(CHANGES)) is not None:
        found |= _named(source, root, CHANGES, said, removes=True)
    return {name: path for name, path in found.items() if path}


def _named(source: ModelSource, root: Path, where: str, text: str | bytes, *, removes: bool = False) -> dict[str, str]:
    """The directories that a JSON object names; "" for null, which is refused unless it `removes` an adapter."""
    try:
        named = json.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"model '{source.name}': {where} is not JSON: {error}") from None
    if not isinstance(named, dict) or not all(isinstance(p, str) or (removes and p is None) for p in named.values()):
        raise InvalidArgument(f"model '{source.name}': {where} must be an object from names to directories")
    found = {}
    for name, written in named.items():
        path = (root / written).resolve() if written is not None else None
        if path is not None and not path.is_relative_to(source.directory.resolve()):
            raise InvalidArgument(
                f"model '{source.name}': the adapter '{name}' in {where} is outside the model's directory"
            )
        found[name] = str(path) if path is not None else ""
    return found


def added_adapters(source: ModelSource) -> set[str]:
    """The names of the adapters that `CHANGES` adds; `adapter_directories` has checked it."""
    changes = json.loads(source.parameter(CHANGES) or "{}")
    return {name for name, path in changes.items() if path is not None}
