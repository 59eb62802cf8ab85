"""The backends `openvino` and `tensorflow`: OpenVINO's own IR, ONNX, Paddle's, TensorFlow's and TensorFlow Lite files.

Models run on CPUs. Names of parameters follow Triton's openvino backend, so that a repository works unchanged.

Threads: a compiled model has a stream for each CPU instance. The streams share the machine's cores; `NUM_STREAMS` and
`INFERENCE_NUM_THREADS` override both. Instances share the compiled model and have an infer request each. Groups whose
host policies name different cores have a compiled model each.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from charonia.backend import Array, Backend, Format, GraphSignature, InstanceSpec, Interrupted, MemoryUse, ModelSource
from charonia.datatypes import DataType
from charonia.errors import InternalError, InvalidArgument, Unsupported
from charonia.models.interface import ModelInterface
from executors.configuration.autofill import check_against_graph
from executors.host.host_policy import thread_on

from .compile_properties import compile_properties, is_virtual, target_device
from .model_reading import read, reason
from .tensorflow_files import INSTALL

_CANCELLED = "Infer Request was canceled"
"""OpenVINO's message when an inference was interrupted: nothing else cancels one."""


@dataclass(slots=True)
class _Compiled:
    """A compiled model, its tensors and the bytes of its constants. `reader` has to live as long."""

    model: Any
    signature: GraphSignature
    reader: Any
    weight_bytes: int


class OpenVinoBackend(Backend):
    """The backend `openvino`."""

    name = "openvino"
    api = (1, 0)
    formats: ClassVar[tuple[Format, ...]] = (Format(files=("model.xml",)),)
    requires = (("openvino", "charonia[openvino]"),)

    async def load(self, source: ModelSource) -> OpenVinoModel:
        """Return the model; its file is read when something asks for it."""
        return OpenVinoModel(source)


class TensorFlowBackend(OpenVinoBackend):
    """The backend `tensorflow`, without TensorFlow."""

    name = "tensorflow"
    formats = (
        Format("tensorflow_savedmodel", ("model.savedmodel",), cpu_instances=2),
        Format("tensorflow_graphdef", ("model.graphdef",), cpu_instances=2),
    )

    async def load(self, source: ModelSource) -> OpenVinoModel:
        """Return the model. Raises `Unsupported` for what only TensorFlow itself does."""
        if source.parameter("TF_INIT_OPS_FILE") is not None:
            raise Unsupported(
                f"model '{source.name}': 'TF_INIT_OPS_FILE' names operations that initialise a graph, which OpenVINO "
                f"does not run; freeze the graph, or {INSTALL}"
            )
        return OpenVinoModel(source)


class OpenVinoModel:
    """One load of a model's version: its compiled models, one for each set of cores."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self._compiled: dict[frozenset[int], _Compiled] = {}
        self._lock = threading.Lock()

    async def signature(self) -> GraphSignature:
        """Return names, types and dims of the model. Raises `CharoniaError` for a file that cannot be read."""
        return (await asyncio.to_thread(read, self._source)).signature

    async def create_instance(self, spec: InstanceSpec) -> OpenVinoInstance:
        """Make an instance over the compiled model of its cores.

        Raises `InvalidArgument` when the configuration does not fit the model, `Unsupported` for one on a GPU.
        """
        return await asyncio.to_thread(self._create, spec)

    def memory(self) -> list[MemoryUse]:
        """The constants of the model as it was read, once for each compiled model; not what inferences take."""
        with self._lock:
            return [MemoryUse("CPU", 0, compiled.weight_bytes) for compiled in self._compiled.values()]

    async def close(self) -> None:
        """Release the compiled models. Their memory is freed when the last instance that uses one is closed."""
        with self._lock:
            self._compiled.clear()

    def _create(self, spec: InstanceSpec) -> OpenVinoInstance:
        source, interface = spec.source, spec.interface
        if spec.kind == "GPU":
            raise Unsupported(f"model '{source.name}' asks for a GPU instance, but OpenVINO runs it on CPUs")
        streams = sum(group.count for group in interface.instance_groups if group.kind == "KIND_CPU")
        with self._lock, thread_on(spec.cores):  # the library's threads inherit the cores of this one
            compiled = self._compiled.get(spec.cores)
            if compiled is None:
                compiled = self._compiled[spec.cores] = _compile(source, max(1, streams), len(spec.cores))
        check_against_graph(source.config, compiled.signature)
        pads = interface.max_batch_size if source.flag("ENABLE_BATCH_PADDING") else 0
        if pads and any(item.allow_ragged_batch for item in source.config.input):
            raise InvalidArgument(f"model '{source.name}': 'ENABLE_BATCH_PADDING' does not go with ragged inputs")
        return OpenVinoInstance(interface, compiled, pads)


class OpenVinoInstance:
    """An `InterruptibleInstance` with an infer request of its own. With `rows` every batch is padded to so many."""

    stateless = True

    def __init__(self, interface: ModelInterface, compiled: _Compiled, rows: int = 0) -> None:
        self._request: Any = compiled.model.create_infer_request()
        self._name = interface.name
        self._rows = rows
        signature = compiled.signature
        self._inputs = {tensor.name: index for index, tensor in enumerate(signature.inputs)}
        self._outputs = {tensor.name: (at, DataType(tensor.datatype)) for at, tensor in enumerate(signature.outputs)}

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        """Infer. Raises `Interrupted` after `interrupt`, `InternalError` with OpenVINO's message otherwise."""
        if len(inputs) < len(self._inputs):  # the library would take those of the execution before
            missing = ", ".join(f"'{name}'" for name in self._inputs if name not in inputs)
            raise InvalidArgument(f"model '{self._name}' needs the input {missing} in every request")
        given = len(next(iter(inputs.values()))) if self._rows else 0
        try:
            # the results are copies: the request's own memory is written again by the next inference
            self._request.infer({self._inputs[name]: self._tensor(a) for name, a in inputs.items()}, share_inputs=True)
            found = {name: self._array(*self._outputs[name]) for name in outputs}
        except KeyError as error:
            raise InvalidArgument(f"model '{self._name}' has no output {error}") from None
        except Exception as error:
            if _CANCELLED in str(error):
                raise Interrupted(f"an execution of model '{self._name}' was interrupted", blameless=True) from None
            raise InternalError(f"openvino error: {reason(error)}") from None
        return {name: array[:given] for name, array in found.items()} if self._rows else found

    def interrupt(self) -> None:
        """End the running inference."""
        request = self._request
        if request is not None:
            request.cancel()

    def close(self) -> None:
        """Release the request."""
        self._request = None

    def _tensor(self, array: Array) -> Any:
        missing = self._rows - len(array) if self._rows else 0
        if missing > 0:
            array = np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)])
        array = np.ascontiguousarray(array)
        if array.dtype != DataType.BF16.numpy:
            return array
        import openvino

        return openvino.Tensor(array.view(np.uint16), list(array.shape), openvino.Type.bf16)

    def _array(self, index: int, datatype: DataType) -> Array:
        array: Array = self._request.get_output_tensor(index).data.copy()
        return array if datatype is not DataType.BF16 else array.view(datatype.numpy)


def _compile(source: ModelSource, streams: int, cores: int) -> _Compiled:
    device = target_device(source)
    properties = compile_properties(source, device, streams, cores or len(os.sched_getaffinity(0)))
    found = read(source)
    if not is_virtual(device) and device not in found.core.available_devices:
        raise Unsupported(
            f"model '{source.name}' asks for the device '{device}', OpenVINO has "
            f"{', '.join(found.core.available_devices)}"
        )
    # a compiled model does not list them any more
    weight_bytes = sum(node.get_byte_size() for node in found.model.get_ops() if node.get_type_name() == "Constant")
    try:
        compiled = found.core.compile_model(found.model, device, properties)
        return _Compiled(compiled, found.signature, found.reader, weight_bytes)
    except RuntimeError as error:
        raise InternalError(f"openvino error: {reason(error)}") from None
