"""One instance of a plan: a context for each of its profiles, buffers on its GPU, a stream, and CUDA graphs.

A batch comes in pinned memory, runs in the context of the profile that fits its shapes best, and goes back through
pinned memory. Buffers have the largest size that the profiles and the configuration allow, so that graphs keep their
addresses.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from charonia.backend import Array, DeviceLost, InstanceSpec, MemoryUse
from charonia.cuda.cuda_library import CudaError
from charonia.cuda.cuda_stream import CapturedGraph, CudaDevice, CudaStream, DeviceMemory
from charonia.cuda.lost_contexts import is_lost
from charonia.cuda.pinned_memory import PinnedMemory
from charonia.errors import InternalError, InvalidArgument
from charonia.models.interface import ModelInterface
from executors.backends.graph_specs import GraphShapes, TakenShapes, closest_graph, graph_shapes

from .engine_tensors import EngineTensor, EngineTensors, Profile, Shape, closest_profile
from .trt_library import TrtLibrary

_log = logging.getLogger(__name__)

_PRIORITIES = {0: 0, 1: 1, 2: -1}
"""By `ModelPriority`: before other streams, or after them."""


class Engine:
    """A plan on one GPU, shared by its instances."""

    def __init__(self, library: TrtLibrary, device: CudaDevice, engine: Any, tensors: EngineTensors) -> None:
        self.library = library
        self.device = device
        self.engine = engine
        self.tensors = tensors
        self._launching = threading.Lock() if library.device_blocking else None

    def launching(self) -> AbstractContextManager[Any]:
        """Held while kernels are launched: with the policy DEVICE_BLOCKING one instance at a time does that."""
        return self._launching or contextlib.nullcontext()

    def weight_bytes(self) -> int:
        """The plan's weights; 0 where the library is too old to say it."""
        stat = getattr(self.library.trt, "EngineStat", None)
        return max(0, self.engine.get_engine_stat(stat.TOTAL_WEIGHTS_SIZE)) if stat is not None else 0

    def context_bytes(self, profile: Profile, strategy: str) -> int:
        """What TensorRT takes of the GPU for a context; 0 where the library is too old to say it."""
        if strategy == "STATIC" or not hasattr(self.engine, "get_device_memory_size_for_profile_v2"):
            return int(getattr(self.engine, "device_memory_size_v2", 0))
        return int(self.engine.get_device_memory_size_for_profile_v2(profile.index))

    def close(self) -> None:
        """Release the plan's memory on its GPU. A second call does nothing."""
        with contextlib.suppress(CudaError), self.device.current():
            self.engine = None


@dataclass(slots=True)
class _Context:
    """TensorRT's context of a profile, and its graphs."""

    profile: Profile
    context: Any
    graphs: dict[int, CapturedGraph] = field(default_factory=dict)
    """By the position in `shapes`."""
    shapes: list[GraphShapes] = field(default_factory=list)


class PlanInstance:
    """A `BatchInstance` on one GPU."""

    stateless = True

    def __init__(self, spec: InstanceSpec, engine: Engine, profiles: Sequence[Profile], strategy: str) -> None:
        """The device's context is current. Raises `InternalError` with the message of TensorRT or the driver."""
        config = spec.source.config
        self.name = spec.name
        self._model = spec.source.name
        self._engine = engine
        self._trt = engine.library.trt
        self._batching = spec.interface.batching
        self._stream = CudaStream(
            engine.device,
            priority=_PRIORITIES.get(config.optimization.priority, 0),
            busy=config.optimization.cuda.busy_wait_events,
        )
        self._pins_outputs = config.optimization.output_pinned_memory.enable
        self._memory: dict[str, DeviceMemory] = {}
        self._pinned: dict[str, PinnedMemory] = {}
        self._host: dict[str, Array] = {}
        """Values of shape tensors, whose addresses the contexts have."""
        self._growing: dict[str, Any] = {}
        """By name: allocators of outputs whose shape depends on values."""
        self._contexts: list[_Context] = []
        self._strategy = strategy
        try:
            for profile in profiles:
                self._contexts.append(self._context(profile, strategy))
            self._allocate(spec.interface)
            if config.optimization.cuda.graphs:
                self._capture(spec)
        except BaseException:
            self._release()
            raise

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        """Run one batch.

        Raises `InvalidArgument` for shapes that no profile takes, `InternalError` for what TensorRT or the driver
        refuses, `DeviceLost` for what says that this process has lost the GPU.
        """
        tensors = self._engine.tensors.tensors
        for name in outputs:
            if name not in tensors or tensors[name].is_input:
                raise InvalidArgument(f"model '{self._model}' has no output '{name}'")
        arrays = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
        for tensor in self._engine.tensors.inputs:
            if tensor.name not in arrays:
                raise InvalidArgument(f"model '{self._model}' needs the input '{tensor.name}'")
        dims = {name: array.shape for name, array in arrays.items()}
        values = {
            t.name: tuple(int(n) for n in arrays[t.name].reshape(-1)) for t in self._engine.tensors.inputs if t.is_shape
        }
        profile = closest_profile([context.profile for context in self._contexts], dims, values)
        context = next(context for context in self._contexts if context.profile is profile)
        try:
            with self._engine.device.current():
                try:
                    return self._run(context, arrays, outputs)
                except BaseException:
                    self._stream.drain()  # copies may still be reading the arrays
                    raise
        except CudaError as error:
            device_id = self._engine.device.device_id
            if is_lost(error):
                raise DeviceLost(f"model '{self._model}' has lost GPU {device_id}: {error}") from None
            raise InternalError(f"model '{self._model}' on GPU {device_id}: {error}") from None

    def memory(self) -> list[MemoryUse]:
        """Buffers and what TensorRT takes for contexts, on the GPU; pinned memory that batches were copied through."""
        device_id = self._engine.device.device_id
        contexts = sum(self._engine.context_bytes(each.profile, self._strategy) for each in self._contexts)
        blocks = sum(block.size_bytes for block in self._memory.values())
        pinned = sum(block.array.nbytes for block in self._pinned.values())
        return [MemoryUse("GPU", device_id, contexts + blocks), MemoryUse("CPU_PINNED", device_id, pinned)]

    def close(self) -> None:
        """Release contexts and memory. A second call does nothing."""
        with contextlib.suppress(CudaError), self._engine.device.current():
            self._release()

    def _run(self, context: _Context, arrays: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        rows = len(next(iter(arrays.values()))) if self._batching and arrays else 0
        shapes = closest_graph(context.shapes, {name: array.shape for name, array in arrays.items()})
        if shapes is not None:
            arrays = {name: _padded(array, shapes.dims[name]) for name, array in arrays.items()}
        for name, array in arrays.items():
            self._send(context.context, self._engine.tensors.tensors[name], array)
        graph = None if shapes is None else context.graphs[context.shapes.index(shapes)]
        missing = context.context.infer_shapes()
        if missing:
            raise InternalError(f"model '{self._model}': the shapes of {', '.join(missing)} are not known")
        with self._engine.launching():
            if graph is not None:
                self._stream.launch(graph)
            else:
                self._enqueue(context.context)
        found = self._receive(context.context, outputs)
        return {name: array[:rows] for name, array in found.items()} if rows else found

    def _send(self, context: Any, tensor: EngineTensor, array: Array) -> None:
        """Give a context the shape and the bytes of an input."""
        if not context.set_input_shape(tensor.name, array.shape):
            raise InternalError(
                f"model '{self._model}': TensorRT refused shape {list(array.shape)} of input '{tensor.name}': "
                f"{self._engine.library.messages()}"
            )
        if tensor.is_on_host:
            self._host[tensor.name][: array.size] = array.reshape(-1)
            return
        raw = array.reshape(-1).view(np.uint8)
        memory = self._memory[tensor.name]
        if raw.nbytes > memory.size_bytes:
            raise InternalError(f"model '{self._model}': input '{tensor.name}' has more bytes than its buffer")
        self._stream.to_device(memory.address, raw)

    def _receive(self, context: Any, outputs: Sequence[str]) -> dict[str, Array]:
        """Copy outputs to arrays of their own."""
        if self._growing:
            self._stream.wait()  # TensorRT reports these shapes while it runs
        found: dict[str, Array] = {}
        staged: dict[str, Array] = {}
        for name in outputs:
            tensor = self._engine.tensors.tensors[name]
            growing = self._growing.get(name)
            shape = tuple(context.get_tensor_shape(name)) if growing is None else growing.shape
            if any(dim < 0 for dim in shape):
                raise InternalError(f"model '{self._model}': the shape {list(shape)} of output '{name}' is not known")
            array = found[name] = np.empty(shape, tensor.datatype.numpy)
            raw = array.reshape(-1).view(np.uint8)
            if tensor.is_on_host or not raw.nbytes:
                continue
            if self._pins_outputs and (pinned := self._staging(name, raw.nbytes)) is not None:
                raw = staged[name] = pinned
            self._stream.to_host(raw, self._memory[name].address if growing is None else growing.address)
        self._stream.wait()
        for name, raw in staged.items():
            found[name].reshape(-1).view(np.uint8)[:] = raw
        for name in outputs:
            if self._engine.tensors.tensors[name].is_on_host:
                found[name].reshape(-1)[:] = self._host[name][: found[name].size]
        return found

    def _enqueue(self, context: Any) -> None:
        if not context.execute_async_v3(self._stream.handle):
            raise InternalError(
                f"failed to run TRT inference of model '{self._model}': {self._engine.library.messages()}"
            )

    def _staging(self, name: str, size_bytes: int) -> Array | None:
        """Pinned memory of so many bytes, kept for the next batch; None when the pool is used up."""
        held = self._pinned.get(name)
        if held is None or held.size_bytes < size_bytes:
            if held is not None:
                self._pinned.pop(name).free()
            held = self._engine.library.pinned.allocate(self._engine.device, size_bytes)
            if held is None:
                return None
            self._pinned[name] = held
        return held.array[:size_bytes]

    def _context(self, profile: Profile, strategy: str) -> _Context:
        engine = self._engine.engine
        context = engine.create_execution_context(getattr(self._trt.ExecutionContextAllocationStrategy, strategy))
        if context is None:
            raise InternalError(
                f"unable to create TensorRT context of model '{self._model}': {self._engine.library.messages()}"
            )
        if not context.set_optimization_profile_async(profile.index, self._stream.handle):
            raise InternalError(
                f"Can not set the specified optimization profile {profile.index} for model '{self._model}': "
                f"{self._engine.library.messages()}"
            )
        self._stream.wait()
        return _Context(profile, context)

    def _allocate(self, interface: ModelInterface) -> None:
        """Make the buffers of all tensors, and give the contexts their addresses."""
        tensors = self._engine.tensors
        for tensor in tensors.inputs:
            most = max(prod(self._largest(c.profile, tensor, interface)) for c in self._contexts)
            if tensor.is_on_host:
                self._host[tensor.name] = np.zeros(max(1, most), tensor.datatype.numpy)
            else:
                self._memory[tensor.name] = DeviceMemory(self._engine.device, most * tensor.datatype.numpy.itemsize)
        for context in self._contexts:
            for tensor in tensors.inputs:
                self._set_address(context.context, tensor.name)
                if tensor.is_on_host and tensor.name in context.profile.values:
                    values = context.profile.values[tensor.name].largest
                    self._host[tensor.name][: len(values)] = values
                context.context.set_input_shape(tensor.name, self._largest(context.profile, tensor, interface))
        for tensor in tensors.outputs:
            self._allocate_output(tensor)

    def _allocate_output(self, tensor: EngineTensor) -> None:
        if tensor.is_on_host:
            self._host[tensor.name] = np.zeros(max(1, prod(tensor.dims)), tensor.datatype.numpy)
        else:
            shapes = [tuple(context.context.get_tensor_shape(tensor.name)) for context in self._contexts]
            if any(dim < 0 for shape in shapes for dim in shape):
                self._growing[tensor.name] = allocator = _output_allocator(self._trt, self._engine.device)
                for context in self._contexts:
                    context.context.set_output_allocator(tensor.name, allocator)
                return
            most = max(context.context.get_max_output_size(tensor.name) for context in self._contexts)
            if most < 0:
                raise InternalError(f"model '{self._model}': the size of output '{tensor.name}' is not known")
            self._memory[tensor.name] = DeviceMemory(self._engine.device, most)
        for context in self._contexts:
            self._set_address(context.context, tensor.name)

    def _set_address(self, context: Any, name: str) -> None:
        address = self._memory[name].address if name in self._memory else self._host[name].ctypes.data
        if not context.set_tensor_address(name, address):
            raise InternalError(f"model '{self._model}': TensorRT refused the memory of tensor '{name}'")

    def _largest(self, profile: Profile, tensor: EngineTensor, interface: ModelInterface) -> Shape:
        """The largest dims of an input: the profile's, made smaller by what the configuration says."""
        largest = profile.dims[tensor.name].largest
        spec = interface.inputs.get(tensor.name)
        if spec is None or tensor.is_shape or spec.allow_ragged_batch:
            return largest
        written = interface.backend_shape(spec)
        if self._batching:
            written = (interface.max_batch_size, *written[1:])
        return tuple(min(most, one) if one > 0 else most for most, one in zip(largest, written, strict=True))

    def _capture(self, spec: InstanceSpec) -> None:
        """Record the graphs that the configuration wants."""
        if self._growing or self._engine.tensors.has_shape_tensors:
            _log.warning(
                "model %s: no CUDA graph is captured, as shapes of it depend on values of tensors", self._model
            )
            return
        for context in self._contexts:
            for shapes in graph_shapes(spec.source.config, _taken(context.profile)):
                for name, dims in shapes.dims.items():
                    context.context.set_input_shape(name, dims)
                self._enqueue(context.context)  # the first run of a shape sets things up that cannot be recorded
                self._stream.wait()
                with self._stream.capture() as graph:
                    self._enqueue(context.context)
                context.graphs[len(context.shapes)] = graph
                context.shapes.append(shapes)

    def _release(self) -> None:
        self._stream.close()
        for context in self._contexts:
            for graph in context.graphs.values():
                graph.free()
        self._contexts = []
        for pinned in self._pinned.values():
            pinned.free()
        for block in (*self._memory.values(), *self._growing.values()):
            block.free()
        self._memory, self._pinned, self._growing = {}, {}, {}


def _taken(profile: Profile) -> TakenShapes:
    usual = {name: dims.usual for name, dims in profile.dims.items()}
    return TakenShapes(usual, lambda dims: profile.refusal(dims, {}), f"profile {profile.index}")


def _padded(array: Array, shape: Shape) -> Array:
    """The array in the corner of a larger one of zeros."""
    if array.shape == shape:
        return array
    larger = np.zeros(shape, array.dtype)
    larger[tuple(slice(size) for size in array.shape)] = array
    return larger


def _output_allocator(trt: Any, device: CudaDevice) -> Any:
    """TensorRT's interface for an output whose size it learns while it runs."""

    class OutputAllocator(trt.IOutputAllocator):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.shape: Shape = ()
            self._memory = DeviceMemory(device, 0)

        @property
        def address(self) -> int:
            return self._memory.address

        def reallocate_output(self, _name: str, _memory: int, size: int, _alignment: int) -> int:
            if size > self._memory.size_bytes:
                self._memory.free()
                try:
                    self._memory = DeviceMemory(device, size)
                except CudaError as error:  # 0 says that there is no memory: TensorRT fails the execution
                    _log.error("output of %d bytes: %s", size, error)
                    return 0
            return self._memory.address

        def reallocate_output_async(self, name: str, memory: int, size: int, alignment: int, _stream: int) -> int:
            return self.reallocate_output(name, memory, size, alignment)

        def notify_shape(self, _name: str, shape: Any) -> None:
            self.shape = tuple(shape)

        def free(self) -> None:
            self._memory.free()

    return OutputAllocator()
