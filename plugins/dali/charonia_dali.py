"""DALI pipelines (`backend: "dali"`): model.dali as `Pipeline.serialize` writes it, or dali.py with `@autoserialize`.

A pipeline may read files and the library is large: so models run in a sandbox. Names, parameters and files are those of
Triton's backend. One sample that cannot be processed ends a pipeline of DALI's for good, so that it is made again then.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from charonia.backend import (
    Array,
    Backend,
    Format,
    GraphSignature,
    InstanceSpec,
    Model,
    ModelRequest,
    ModelResponse,
    ModelSource,
    TensorSignature,
)
from charonia.datatypes import DataType
from charonia.errors import CharoniaError, InternalError, InvalidArgument, NotFound, Unsupported
from charonia.tensors import Tensor

PROGRAM = "dali.py"
DATATYPES = (
    "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BOOL",
)  # fmt: skip
"""By DALI's numbers for them."""

_WITHOUT_A_GPU = b"\x40" + b"\xe1\xf2\xf9\xff\xff\xff\xff\xff\xff\x01"
"""Field 8 of a pipeline, its device, with DALI's number for none. The last one in a file counts."""

_TYPE_STRING = 13
"""Its number in configurations."""

_IMPORTING = threading.Lock()


class DaliBackend(Backend):
    name, api, isolation = "dali", (1, 0), "sandbox"
    formats = (Format(files=("model.dali", PROGRAM)),)
    requires = (("nvidia.dali", "charonia-dali"),)

    async def load(self, source: ModelSource) -> DaliModel:
        return await asyncio.to_thread(DaliModel, source)


class DaliModel(Model):
    """The bytes of a pipeline. Each instance makes a pipeline of its own of them."""

    def __init__(self, source: ModelSource) -> None:
        """Raises `InvalidArgument` for a configuration that is not the pipeline's, `NotFound` without a file."""
        path = _path(source)
        if path.suffix == ".py":
            source.check_native_code(f"the program '{path.name}'")
            self.content = _serialized(source, path)
        else:
            self.content = path.read_bytes()
        self._source = source
        try:
            self.inputs, self.outputs = described(self.content)
        except (AttributeError, TypeError, ValueError):
            raise InvalidArgument(f"'{path.name}' of model '{source.name}' is no DALI pipeline") from None
        _check(source, self.inputs, self.outputs)

    async def signature(self) -> GraphSignature | None:
        """What the pipeline declares; None when it leaves types or ranks open, and when tensors of a model that does
        not batch, or ragged ones, are written: they are to be complete.
        """
        config = self._source.config
        if config.max_batch_size == 0 and (config.input or config.output):
            return None
        if any(item.allow_ragged_batch for item in config.input):
            return None
        files = {item.name for item in config.input if item.data_type == _TYPE_STRING}
        inputs = [
            TensorSignature(one.name, "BYTES", (-1, 1)) if one.name in files else one.signature(one.name)
            for one in self.inputs
        ]
        names = [item.name for item in config.output] or [one.name for one in self.outputs]
        outputs = [one.signature(name) for one, name in zip(self.outputs, names, strict=True)]
        if None in inputs or None in outputs:
            return None
        return GraphSignature(tuple(filter(None, inputs)), tuple(filter(None, outputs)))

    async def create_instance(self, spec: InstanceSpec) -> DaliInstance:
        instance = DaliInstance(self.content, spec, [one.name for one in self.inputs])
        await instance.open()
        return instance


class DaliInstance:
    """A pipeline and a thread for it; a `RequestInstance`, as requests may have samples of other shapes.

    The requests of a batch run as one. When that fails, each runs by itself, so that only the bad ones fail.
    """

    def __init__(self, content: bytes, spec: InstanceSpec, inputs: Sequence[str]) -> None:
        config, source = spec.source.config, spec.source
        self._model, self._inputs = source.name, inputs
        self._batches = config.max_batch_size > 0
        self._outputs = {name: one.datatype for name, one in spec.interface.outputs.items()}
        self._split = _split_outputs(source, self._outputs)
        self._thread = ThreadPoolExecutor(1, f"dali-{spec.name}")
        self._pipeline: Any = None
        self._closed = False
        self._settings: dict[str, Any] = {
            "batch_size": max(1, config.max_batch_size),
            "prefetch_queue_depth": 1,  # every request is answered by the run that it starts
            "exec_async": False,
            "exec_pipelined": False,
        }
        threads = source.integer("num_threads")
        if threads is not None:
            self._settings["num_threads"] = max(1, threads)
        if spec.kind == "GPU":
            self._settings["device_id"] = spec.device_id
            self._content = content
        else:
            self._content = content + _WITHOUT_A_GPU

    async def open(self) -> None:
        """Make the pipeline. Raises `InternalError` with DALI's reason, for one that needs a GPU `Unsupported`."""
        await self._in_thread(self._make)

    async def execute_requests(self, requests: Sequence[ModelRequest]) -> Sequence[ModelResponse]:
        answers: list[ModelResponse] = await self._in_thread(self._execute, requests)
        return answers

    async def close_instance(self) -> None:
        if not self._closed:
            self._closed = True
            self._thread.submit(self._forget)
            self._thread.shutdown(wait=False)

    async def _in_thread(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _forget(self) -> None:
        self._pipeline = None

    def _make(self) -> None:
        with _IMPORTING:
            from nvidia.dali.pipeline import Pipeline
        try:
            pipeline = Pipeline.deserialize(self._content, **self._settings)
            pipeline.build()
        except (RuntimeError, ValueError) as error:
            if "GPU" in str(error) or "CUDA" in str(error):
                raise Unsupported(f"DALI cannot make the pipeline of model '{self._model}': {reason(error)}") from None
            raise InternalError(f"DALI cannot make the pipeline of model '{self._model}': {reason(error)}") from None
        self._pipeline = pipeline

    def _execute(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        given: list[dict[str, list[Array]] | CharoniaError] = [self._rows(request) for request in requests]
        usable = [rows for rows in given if not isinstance(rows, CharoniaError)]
        together = self._try(usable) if len(usable) > 1 else None
        answers = []
        for request, rows in zip(requests, given, strict=True):
            if isinstance(rows, CharoniaError):
                answers.append(ModelResponse(error=rows))
                continue
            try:
                found = self._run([rows])[0] if together is None else together.pop(0)
                answers.append(ModelResponse(self._answer(request, found)))
            except CharoniaError as error:
                answers.append(ModelResponse(error=error))
        return answers

    def _rows(self, request: ModelRequest) -> dict[str, list[Array]] | CharoniaError:
        """The samples of a request by input, or what is wrong with it."""
        tensors = {tensor.name: tensor for tensor in request.inputs}
        missing = [name for name in self._inputs if name not in tensors]
        if missing:
            return InvalidArgument(f"model '{self._model}' needs the inputs {', '.join(missing)}")
        rows = {}
        for name in self._inputs:
            array = tensors[name].array()
            samples = list(array) if self._batches else [array]
            if array.dtype == object:
                samples = [np.frombuffer(b"".join(np.ravel(sample)), np.uint8) for sample in samples]
            rows[name] = samples
        if len({len(samples) for samples in rows.values()}) > 1:
            return InvalidArgument(f"the inputs of a request to model '{self._model}' must have equally many rows")
        return rows

    def _try(self, given: list[dict[str, list[Array]]]) -> list[list[list[Array]]] | None:
        try:
            return self._run(given)
        except CharoniaError:
            return None

    def _run(self, given: list[dict[str, list[Array]]]) -> list[list[list[Array]]]:
        """The samples of each output, for each of the requests whose samples are given.

        Raises `InternalError` for a run that failed. The pipeline is a new one then.
        """
        if self._pipeline is None:
            self._make()
        try:
            for name in self._inputs:
                self._pipeline.feed_input(name, [sample for rows in given for sample in rows[name]])
            outputs = [_samples(output) for output in self._pipeline.run()]
        except (RuntimeError, TypeError, ValueError) as error:
            self._pipeline = None  # whatever failed, it is of no use any more
            raise InternalError(f"DALI: {reason(error)}") from None
        found, start = [], 0
        for rows in given:
            end = start + len(rows[self._inputs[0]])
            found.append([output[start:end] for output in outputs])
            start = end
        return found

    def _answer(self, request: ModelRequest, found: list[list[Array]]) -> list[Tensor]:
        """The tensors of one request. Raises `InternalError` for rows of several shapes, and for another datatype."""
        wanted = request.outputs or tuple(self._outputs)
        tensors = []
        for (name, datatype), samples in zip(self._outputs.items(), found, strict=True):
            if name not in wanted:
                continue
            if name in self._split:
                samples = [part for sample in samples for part in sample]
            shapes = sorted({sample.shape for sample in samples})
            if len(shapes) > 1:
                raise InternalError(
                    f"rows of output '{name}' of model '{self._model}' have different shapes, "
                    f"{' and '.join(map(str, shapes[:2]))}: send them as requests of their own"
                )
            tensor = Tensor.of(name, np.stack(samples) if self._batches else samples[0])
            if tensor.datatype is not datatype:
                raise InternalError(
                    f"output '{name}' of model '{self._model}' is {datatype.value} in the configuration, "
                    f"{tensor.datatype.value} from the pipeline"
                )
            tensors.append(tensor)
        return tensors


@dataclass(frozen=True)
class Described:
    """An input or output as a pipeline describes it; -1 is a type or a number of dimensions that it leaves open."""

    name: str
    datatype: int
    rank: int

    def signature(self, name: str) -> TensorSignature | None:
        if not 0 <= self.datatype < len(DATATYPES) or self.rank < 0:
            return None
        return TensorSignature(name, DATATYPES[self.datatype], (-1,) * (self.rank + 1))


def described(content: bytes) -> tuple[list[Described], list[Described]]:
    """The inputs and the outputs of a serialized pipeline, a protobuf message. Raises `ValueError` for another file.

    Fields: 5 an operator (1 its kind, 4 an argument, 5 its name), 7 an output (1 name, 5 datatype, 6 rank).
    """
    inputs, outputs = [], []
    for number, value in _fields(content):
        if number == 5:
            fields = list(_fields(value))
            kind = dict(fields).get(1, b"")
            if not kind.endswith(b"ExternalSource"):
                continue
            known = dict(_argument(argument) for key, argument in fields if key == 4)
            name = dict(fields).get(5, b"").decode()
            inputs.append(Described(name, known.get("dtype", -1), known.get("ndim", -1)))
        elif number == 7:
            output = dict(_fields(value))
            name = output.get(1, b"").decode()
            outputs.append(Described(name, _signed(output.get(5, -1)), _signed(output.get(6, -1))))
    if not outputs:
        raise ValueError("it has no outputs")
    return sorted(inputs, key=lambda one: one.name), outputs


def _argument(message: bytes) -> tuple[str, int]:
    fields = dict(_fields(message))
    return fields.get(1, b"").decode(), _signed(fields.get(4, -1))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _fields(message: Any) -> Iterator[tuple[int, Any]]:
    """Number and value of each field: an int, or the bytes of what has a length. Raises `ValueError`."""
    if not isinstance(message, bytes):
        raise ValueError("a message was expected")
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        if tag & 7 == 0:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        if tag & 7 not in (1, 2, 5):
            raise ValueError(f"there is no wire type {tag & 7}")
        size = {1: 8, 5: 4}.get(tag & 7, -1)
        if size < 0:
            size, at = _varint(message, at)
        if at + size > len(message):
            raise ValueError("it ends too early")
        yield tag >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            raise ValueError("it ends too early")
        value |= (message[at] & 0x7F) << shift
        at += 1
        if message[at - 1] < 0x80:
            return value, at
    raise ValueError("a number is too long")


def reason(error: Exception) -> str:
    """What DALI says, in a line, without the lines of the program that made the pipeline."""
    text = str(error)
    operator = re.search(r"operator `([^`]+)`", text)
    text = text.split("encountered:", 1)[-1].split("C++ context:")[0]
    text = text.replace("Current pipeline object is no longer valid.", "").removeprefix("Critical error in pipeline:")
    line = " ".join(text.split())
    return f"{operator[1]}: {line}" if operator else line


def _samples(output: Any) -> list[Array]:
    """Copies of an output's samples: the next run overwrites DALI's."""
    on_host = output.as_cpu() if hasattr(output, "as_cpu") else output
    return [np.array(on_host[index]) for index in range(len(on_host))]


def _path(source: ModelSource) -> Path:
    """The pipeline's file, or the program's where there is none."""
    root = source.version_directory.resolve()
    name = source.config.default_model_filename or "model.dali"
    for path in ((root / name).resolve(), (root / PROGRAM).resolve()):
        if not path.is_relative_to(root):
            raise InvalidArgument(f"the file of model '{source.name}' is outside the version directory: '{path}'")
        if path.is_file():
            return path
    raise NotFound(f"unable to find '{root / name}' for model '{source.name}'")


def _serialized(source: ModelSource, path: Path) -> bytes:
    """Run a program and serialize the one pipeline in it that is marked with `@autoserialize`."""
    with _IMPORTING:
        import nvidia.dali.plugin.triton  # noqa: F401  programs import it; here no two threads do so at once
    spec = importlib.util.spec_from_file_location("dali_program", path)
    assert spec is not None and spec.loader is not None  # noqa: PT018  it ends in .py
    module = importlib.util.module_from_spec(spec)
    on_gpu = any(group.kind == group.KIND_GPU for group in source.config.instance_group)
    try:
        spec.loader.exec_module(module)
        marked = [one for one in vars(module).values() if getattr(one, "_is_autoserialize", False)]
        if len(marked) == 1:
            content: bytes = (marked[0]() if on_gpu else marked[0](device_id=None)).serialize()
            return content
    except Exception as error:
        raise InternalError(f"'{path.name}' of model '{source.name}': {reason(error)}") from None
    raise InvalidArgument(
        f"'{path.name}' of model '{source.name}' must have one pipeline with @autoserialize, it has {len(marked)}"
    )


def _check(source: ModelSource, inputs: Sequence[Described], outputs: Sequence[Described]) -> None:
    """Raises `InvalidArgument` for tensors in the configuration that the pipeline does not have, and for none."""
    known = [one.name for one in inputs]
    if not known:
        raise InvalidArgument(f"the pipeline of model '{source.name}' has no input: no fn.external_source with a name")
    for item in source.config.input:
        if item.name not in known:
            raise InvalidArgument(f"the pipeline of model '{source.name}' has no input '{item.name}', it has {known}")
    if source.config.output and len(source.config.output) != len(outputs):
        raise InvalidArgument(
            f"the pipeline of model '{source.name}' has {len(outputs)} outputs, the configuration "
            f"{len(source.config.output)}"
        )


def _split_outputs(source: ModelSource, outputs: Mapping[str, DataType]) -> frozenset[str]:
    """The outputs of `split_along_outer_axis`, parted by colons. Raises `InvalidArgument` for others."""
    names = frozenset(name.strip() for name in (source.parameter("split_along_outer_axis") or "").split(":"))
    unknown = names - {""} - outputs.keys()
    if unknown:
        raise InvalidArgument(
            f"'split_along_outer_axis' of '{source.name}' names {', '.join(sorted(unknown))}, its outputs are "
            f"{', '.join(outputs)}"
        )
    return names
