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
    path = (root / chosen).resolve() if chosen else _found(source, root)
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
    """The directories below `adapters`, and what `multi_lora.json` names: paths relative to the version directory."""
    folder = root / ADAPTERS
    found = {path.name: str(path) for path in sorted(folder.iterdir()) if path.is_dir()} if folder.is_dir() else {}
    listed = root / MULTI_LORA
    if not listed.is_file():
        return found
    try:
        named = json.loads(listed.read_bytes())
    except ValueError as error:
        raise InvalidArgument(f"model '{source.name}': {MULTI_LORA} is not JSON: {error}") from None
    if not isinstance(named, dict) or not all(isinstance(path, str) for path in named.values()):
        raise InvalidArgument(f"model '{source.name}': {MULTI_LORA} must be an object from names to directories")
    for name, written in named.items():
        path = (root / written).resolve()
        if not path.is_relative_to(source.directory.resolve()):
            raise InvalidArgument(
                f"model '{source.name}': the adapter '{name}' in {MULTI_LORA} is outside the model's directory"
            )
        found[name] = str(path)
    return found
