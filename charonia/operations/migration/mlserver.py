"""Reads MLServer's `model-settings.json`, and the `settings.json` of its directory or the one above."""

from __future__ import annotations

import os
import re
from pathlib import Path

from charonia.errors import InvalidArgument

from .migrated_model import (
    DATA_TYPES,
    MigratedModel,
    MigratedTensor,
    RefusedModel,
    load_json,
    mapping,
    model_name,
    read_text,
    sequence,
    whole,
)

FILE = "model-settings.json"
_KNOWN = {"name", "implementation", "inputs", "outputs", "max_batch_size", "max_batch_time", "parameters", "platform",
          "versions", "$schema"}  # fmt: skip
_WHY = {
    "parallel_workers": "MLServer ignores it here: it is read from settings.json",
    "warm_workers": "instances are always started at load",
    "cache_enabled": "response_cache { enable: true } does it; the server needs --cache-config",
}
_SERVER_WHY = {
    "http_port": "--http-port of charonia serve",
    "grpc_port": "--grpc-port of charonia serve",
    "metrics_port": "--metrics-port of charonia serve",
    "host": "--http-address and --grpc-address of charonia serve",
    "max_gunicorn_workers": "--gateways of charonia serve",
    "cache_enabled": "--cache-config of charonia serve",
    "debug": "--log-verbose of charonia serve",
}


def read(path: Path) -> list[MigratedModel | RefusedModel]:
    """The model of a file, or those of a directory and the directories in it. Raises `InvalidArgument`."""
    if path.is_file():
        return [_read(path)]
    found = [path / FILE] if (path / FILE).is_file() else sorted(path.glob(f"*/{FILE}"))
    if not found:
        raise InvalidArgument(f"there is no {FILE} in '{path}'")
    return [_read(one) for one in found]


def _read(path: Path) -> MigratedModel | RefusedModel:
    try:
        return _model(path)
    except InvalidArgument as error:
        return RefusedModel(str(path), error.message)


def _model(path: Path) -> MigratedModel:
    settings = load_json(read_text(path), str(path))
    model = MigratedModel(
        model_name(str(settings.get("name") or path.parent.name), f"'{path}'"), f"MLServer's {path.name}"
    )
    parameters = mapping(settings.get("parameters"), "parameters")
    model.use_version("parameters.version", parameters.get("version"))
    model.max_batch_size = whole(settings.get("max_batch_size", 0), "max_batch_size")
    model.max_delay_us = int(1e6 * _seconds(settings.get("max_batch_time", 0)))
    model.inputs = _tensors(model, settings, "inputs")
    model.outputs = _tensors(model, settings, "outputs")
    _artefact(model, path.parent, parameters.get("uri"))
    if model.backend == "python":
        implementation = str(settings.get("implementation", ""))
        model.code = implementation
        model.steps = [f"initialize: load what {implementation or 'the implementation'}.load() loads",
                       "execute: what its predict() does with the inputs"]  # fmt: skip
        if not model.inputs or not model.outputs:
            model.steps.append("config.pbtxt: inputs and outputs, which the settings do not have")
        if implementation.startswith("mlserver_"):
            model.leave_out("implementation", f"{implementation} is MLServer's: call its library in model.py")
    for key in sorted(settings.keys() - _KNOWN):
        model.leave_out(key, _WHY.get(key, "has no counterpart"))
    for key in sorted(parameters.keys() - {"uri", "version"}):
        why = (
            "EXECUTION_ENV_PATH, see docs/howto/python-models.md"
            if key.startswith("environment")
            else "has no counterpart"
        )
        model.leave_out(f"parameters.{key}", why)
    _server(model, path.parent)
    return model


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 3600:
        raise InvalidArgument(f"'max_batch_time' must be a number of seconds from 0 to 3600, got {value!r}")
    return float(value)


def _tensors(model: MigratedModel, settings: dict[str, object], key: str) -> list[MigratedTensor]:
    tensors = []
    for item in sequence(settings.get(key), key):
        tensor = mapping(item, key)
        name, word = str(tensor.get("name", "")), str(tensor.get("datatype", ""))
        if word not in DATA_TYPES or not name:
            raise InvalidArgument(f"'{key}' has a tensor without a name or with the unknown datatype '{word[:40]}'")
        shape = [_size(size) for size in sequence(tensor.get("shape"), "shape")]
        if 0 in shape:
            raise InvalidArgument(f"'{key}': the shape of '{name}' must be sizes above 0, or -1")
        if model.max_batch_size > 0:
            if len(shape) > 1:
                shape = shape[1:]
            else:
                model.leave_out(f"{key}.{name}.shape", "with batching a request's shape is [n, 1] here, not [n]")
                shape = [1]
        tensors.append(MigratedTensor(name, DATA_TYPES[word], tuple(shape) or (1,)))
        if tensor.get("parameters"):
            model.leave_out(f"{key}.{name}.parameters", "content types are MLServer's codecs: convert in model.py")
    return tensors


def _size(written: object) -> int:
    """A size above 0, or -1; 0 for what is neither."""
    return int(str(written)) if re.fullmatch(r"-1|[1-9][0-9]{0,17}", str(written)) else 0


def _artefact(model: MigratedModel, directory: Path, uri: object) -> None:
    """Take over the file or directory that holds the model, if it lies beside its settings."""
    if not uri:
        return
    root = directory.resolve()
    target = (directory / str(uri)).resolve()
    if "://" in str(uri) or not target.is_relative_to(root) or not os.path.exists(target):
        model.leave_out("parameters.uri", f"'{uri}' is no file beside the settings: copy it into the version directory")
        return
    if target.is_file() and target.suffix == ".onnx":
        model.backend = "onnxruntime"
        model.files["model.onnx"] = target
    elif target.is_file():
        model.files[target.name] = target
    elif target != root:
        model.files |= {
            str(file.relative_to(root)): file
            for file in sorted(target.rglob("*"))
            if file.is_file() and file.resolve().is_relative_to(root)
        }
    else:
        model.leave_out("parameters.uri", "it is the settings' own directory: copy what the model needs from it")


def _server(model: MigratedModel, directory: Path) -> None:
    for place in (directory, directory.parent):
        if (place / "settings.json").is_file():
            settings = load_json(read_text(place / "settings.json"), str(place / "settings.json"))
            workers = settings.pop("parallel_workers", None)
            if workers is not None:
                try:
                    model.instances = whole(workers, "parallel_workers", 1024)
                except InvalidArgument as error:
                    raise InvalidArgument(f"'{place / 'settings.json'}': {error.message}") from None
            for key in sorted(settings):
                model.leave_out(f"settings.json: {key}", _SERVER_WHY.get(key, "has no counterpart in a model"))
            return
