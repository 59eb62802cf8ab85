"""What a model file of PyTorch holds, and the signature of an exported program. Imports no torch, runs nothing.

All forms are zip archives with one folder at their root; they are told apart by what lies in it, not by their names.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from charonia.backend import ModelSource, TensorSignature
from charonia.errors import InternalError, InvalidArgument, Unsupported
from executors.backends.model_files import model_path

from .tensor_names import Structure

CODE = "model.py"
"""The runtime of a class with its weights, and its default file."""

_MAX_PROGRAM_BYTES = 1 << 28
"""Of the text of a program without weights: networks with 10,000 operators have some 10 MB."""
_DATATYPES = {
    1: "UINT8",
    2: "INT8",
    3: "INT16",
    4: "INT32",
    5: "INT64",
    6: "FP16",
    7: "FP32",
    8: "FP64",
    12: "BOOL",
    13: "BF16",
    28: "UINT16",
    34: "UINT32",
    35: "UINT64",
}
"""PyTorch's numbers of element types in an exported program."""
_PASSED = frozenset({"user_input", "constant_input"})
_CONSTANTS = frozenset({"as_int", "as_float", "as_bool", "as_string"})


class Form(Enum):
    """What a model file is."""

    SCRIPT = "TorchScript"
    PROGRAM = "an exported program"
    PACKAGE = "an AOTInductor package"
    CODE = "a class"


def model_file(source: ModelSource) -> tuple[Path, Form]:
    """The file of a version and its form.

    `default_model_filename`, or model.pt, else model.pt2; with `runtime: "model.py"` model.py comes first. Raises
    `NotFound` without a file, `Unsupported` for weights that lack their class, `InternalError` for no archive.
    """
    written = source.config.default_model_filename
    tried = [CODE] if source.config.runtime == CODE and written in ("", "model.pt") else []
    tried += [written or "model.pt", *(["model.pt2"] if written in ("", "model.pt") else [])]
    folder = source.version_directory
    path = model_path(source, tried[0], chosen=next((name for name in tried if (folder / name).exists()), tried[0]))
    if path.suffix == ".py":
        if source.config.runtime != CODE:
            raise InvalidArgument(
                f"model '{source.name}': '{path.name}' is code, which runs only with runtime: \"{CODE}\""
            )
        return path, Form.CODE
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError) as error:
        raise InternalError(f"failed to load model '{source.name}': '{path.name}' is no archive ({error})") from None
    inside = [name.partition("/")[2] for name in names]
    if any(name.startswith("data/aotinductor/") for name in inside):
        return path, Form.PACKAGE
    if any(name.startswith("models/") and name.endswith(".json") for name in inside):
        return path, Form.PROGRAM
    if any(name.startswith("code/") for name in inside):
        return path, Form.SCRIPT
    raise Unsupported(
        f"model '{source.name}': '{path.name}' holds weights and no model; write the class of the model into {CODE} "
        f'and set runtime: "{CODE}"'
    )


@dataclass(frozen=True, slots=True)
class Argument:
    """One value that a program takes or gives, by all its names: a tensor, or the constant it was exported with."""

    names: tuple[str, ...]
    is_tensor: bool = True
    tensor: TensorSignature | None = None
    """What is known of the tensor."""
    constant: Any = None


@dataclass(frozen=True, slots=True)
class ProgramText:
    """What an exported program says of itself."""

    takes: Structure
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]


def read_program(source: ModelSource, path: Path) -> ProgramText:
    """Read the signature of an exported program. Raises `InternalError` for one that cannot be understood."""
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = (name for name in archive.namelist() if name.partition("/")[2] == "models/model.json")
            if archive.getinfo(name).file_size > _MAX_PROGRAM_BYTES:
                raise ValueError("it is too large")
            graph_module = json.loads(archive.read(name))["graph_module"]
        return _program_text(graph_module)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, zipfile.BadZipFile) as error:
        raise InternalError(
            f"failed to load model '{source.name}': the exported program in '{path.name}' cannot be read: "
            f"{type(error).__name__}: {error}"
        ) from None


def _program_text(graph_module: Any) -> ProgramText:
    tensors = graph_module["graph"]["tensor_values"]
    call = next(entry["signature"] for entry in graph_module["module_call_graph"] if entry["fqn"] == "")
    takes, gives = Structure(call["in_spec"]), Structure(call["out_spec"])
    passed = [spec for spec in graph_module["signature"]["input_specs"] if spec.keys() & _PASSED]
    returned = [spec["user_output"] for spec in graph_module["signature"]["output_specs"] if "user_output" in spec]
    words = takes.arguments()
    by_forward = dict(zip(_top_level(words), call.get("forward_arg_names") or (), strict=False))
    inputs = []
    for word, spec in zip(words, passed, strict=True):
        names = (word, by_forward[word]) if word in by_forward else (word,)
        inputs.append(_argument(names, next(iter(spec.values())), tensors))
    outputs = [_argument((word,), spec, tensors) for word, spec in zip(gives.results(), returned, strict=True)]
    return ProgramText(takes, tuple(inputs), tuple(outputs))


def _top_level(words: list[str]) -> list[str]:
    """The arguments of `forward` in order, by structure: what lies within one counts once."""
    return list(dict.fromkeys("]".join(word.split("]")[:1]) + "]" for word in words))


def _argument(names: tuple[str, ...], spec: Any, tensors: Any) -> Argument:
    if "value" in spec:
        (kind, constant), *_ = spec["value"].items()
        return Argument(names, False, constant=None if kind == "as_none" else constant)
    held = spec["arg"]
    if "as_tensor" not in held:
        (kind, constant), *_ = held.items()
        return Argument(names, False, constant=constant if kind in _CONSTANTS else None)
    meta = tensors[held["as_tensor"]["name"]]
    datatype = _DATATYPES.get(meta["dtype"])
    if datatype is None:
        raise ValueError(f"an element type without a datatype of the interface: {meta['dtype']}")
    dims = tuple(size.get("as_int", -1) for size in meta["sizes"])
    return Argument(names, tensor=TensorSignature(names[0], datatype, dims))
