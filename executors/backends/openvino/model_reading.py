"""Reads a model's file with OpenVINO, and gives it the names, types and shapes that the configuration wants."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from charonia.backend import GraphSignature, ModelSource, TensorSignature
from charonia.datatypes import DataType
from charonia.errors import CharoniaError, InternalError, InvalidArgument, Unsupported
from executors.backends.model_files import model_path
from executors.configuration.platforms import format_of
from protos import model_config_pb2 as pb

from . import tensorflow_files as tensorflow

_FORMATS = (".xml", ".onnx", ".tflite", ".pdmodel", ".graphdef", ".pb")
_WEIGHTS = {".xml": ".bin", ".pdmodel": ".pdiparams"}
"""Formats of two files: the library reads the second one, beside the first, by itself."""
_FROZEN = (".graphdef", ".pb")
_ELEMENT_TYPES = {
    "boolean": DataType.BOOL,
    "u8": DataType.UINT8,
    "u16": DataType.UINT16,
    "u32": DataType.UINT32,
    "u64": DataType.UINT64,
    "i8": DataType.INT8,
    "i16": DataType.INT16,
    "i32": DataType.INT32,
    "i64": DataType.INT64,
    "f16": DataType.FP16,
    "bf16": DataType.BF16,
    "f32": DataType.FP32,
    "f64": DataType.FP64,
}
_ELEMENTS = {pb.DataType.Value(datatype.config_name): word for word, datatype in _ELEMENT_TYPES.items()}


@dataclass(slots=True)
class ReadModel:
    """A model as it was read. `signature` has its tensors in their order."""

    core: Any
    model: Any
    signature: GraphSignature
    reader: Any = None
    """What made the model, and has to live as long."""


def read(source: ModelSource) -> ReadModel:
    """Read the file of a version. Raises `CharoniaError`, with OpenVINO's message where that is the reason."""
    path = _path(source)
    extension = source.parameter("CPU_EXTENSION_PATH")
    if extension is not None:
        source.check_native_code(f"'CPU_EXTENSION_PATH' {extension}")
    import openvino
    import openvino.frontend

    core, reader = openvino.Core(), None
    try:
        if extension is not None:
            core.add_extension(extension)
        if path.is_dir():
            model, names = tensorflow.read_saved_model(core, source, path)
        elif path.suffix in _FROZEN:
            reader = openvino.frontend.FrontEndManager().load_by_framework("tf")
            model, names = tensorflow.read_frozen_graph(reader, source, path)
        else:
            model = core.read_model(os.fspath(path))
            names = _names(source, model)
        _reshape(source, model, names)
        model = _convert(openvino, source, model, names)
        return ReadModel(core, model, _signature(source, model, names), reader)
    except CharoniaError:
        raise
    except Exception as error:
        raise tensorflow.conversion_error(source, error) or InternalError(f"openvino error: {reason(error)}") from None


def reason(error: Exception) -> str:
    """OpenVINO's message without the lines about its own source files."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith("Exception from src/")]
    return " ".join(said) or str(error).strip()


def _path(source: ModelSource) -> Path:
    default = format_of(source.config.backend, source.config.platform).files[0]
    path = model_path(source, default, may_be_directory=True)
    if path.is_dir():
        return path if (path / tensorflow.SAVED_MODEL).is_file() else model_path(source, default)
    if path.suffix not in _FORMATS:
        raise Unsupported(
            f"model '{source.name}': the {source.config.backend} backend reads {', '.join(_FORMATS)} and folders with "
            f"{tensorflow.SAVED_MODEL}, not '{path.name}'"
        )
    weights = path.with_suffix(_WEIGHTS.get(path.suffix, path.suffix))
    if not weights.resolve().is_relative_to(source.version_directory.resolve()):
        raise InvalidArgument(f"weights of '{source.name}' are outside the version directory")
    return path


def _names(source: ModelSource, model: Any) -> tensorflow.Names:
    """The names of inputs and outputs, in their order."""
    for side, nodes in zip(("input", "output"), _sides(model), strict=True):
        if not all(node.names for node in nodes):
            raise Unsupported(f"model '{source.name}' has an {side} without a name, which the openvino backend needs")
    inputs, outputs = ([node.any_name for node in side] for side in _sides(model))
    return inputs, outputs


def _sides(model: Any) -> tuple[Any, Any]:
    return model.inputs, model.outputs


def _reshape(source: ModelSource, model: Any, names: tensorflow.Names) -> None:
    """Give the inputs the shapes of the configuration, if it says so, and a batch dimension that may vary."""
    config = source.config
    batching = config.max_batch_size > 0
    written: dict[str, tuple[int, ...]] = {}
    if source.flag("RESHAPE_IO_LAYERS"):
        written = {
            item.name: tuple(item.reshape.shape if item.HasField("reshape") else item.dims)
            for item in config.input
            if not item.allow_ragged_batch
        }
    varies = batching and not source.flag("SKIP_OV_DYNAMIC_BATCHSIZE")
    shapes: dict[int, list[int]] = {}
    for index, (name, node) in enumerate(zip(names[0], model.inputs, strict=True)):
        before = _dims(node)
        after = ([-1, *written[name]] if batching else list(written[name])) if name in written else list(before)
        if varies and after:
            after[0] = -1
        if tuple(after) != before:
            shapes[index] = after
    if shapes:
        model.reshape(shapes)


def _convert(library: ModuleType, source: ModelSource, model: Any, names: tensorflow.Names) -> Any:
    """Let the model take and give the types that the configuration names, where they differ from the file's."""
    steps = None
    for written, known, nodes, side in (
        (source.config.input, names[0], model.inputs, "input"),
        (source.config.output, names[1], model.outputs, "output"),
    ):
        wanted = {item.name: _ELEMENTS.get(item.data_type) for item in written}
        for index, (name, node) in enumerate(zip(known, nodes, strict=True)):
            word = wanted.get(name)
            if word is not None and word != node.element_type.get_type_name():
                steps = steps or library.preprocess.PrePostProcessor(model)
                getattr(steps, side)(index).tensor().set_element_type(getattr(library.Type, word))
    return model if steps is None else steps.build()


def _signature(source: ModelSource, model: Any, names: tensorflow.Names) -> GraphSignature:
    inputs, outputs = (
        tuple(_tensor(source, node, name, side) for name, node in zip(known, nodes, strict=True))
        for known, nodes, side in zip(names, _sides(model), ("input", "output"), strict=True)
    )
    return GraphSignature(inputs, outputs)


def _tensor(source: ModelSource, node: Any, name: str, side: str) -> TensorSignature:
    word = node.element_type.get_type_name()
    datatype = _ELEMENT_TYPES.get(word)
    if datatype is None:
        hint = f"; {tensorflow.INSTALL}" if source.config.backend == "tensorflow" else ""
        raise Unsupported(f"model '{source.name}': unsupported type '{word}' of {side} '{name}'{hint}")
    return TensorSignature(name, datatype.value, _dims(node))


def _dims(node: Any) -> tuple[int, ...]:
    shape = node.partial_shape
    if shape.rank.is_dynamic:
        return ()
    return tuple(-1 if dim.is_dynamic else dim.get_length() for dim in shape)
