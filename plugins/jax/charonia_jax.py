"""Functions that `jax.export` has written (`backend: "jax"`, file model.jax), compiled by XLA for CPUs or CUDA devices.

A file is data, but may name any function that jaxlib registers, some of which take addresses: those are refused before
anything is compiled. XLA checks little of what it reads, so models run in a sandbox.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import resource
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from charonia.backend import Array, Backend, Format, GraphSignature, InstanceSpec, Model, ModelSource, TensorSignature
from charonia.cuda.visible_devices import see_one_device
from charonia.datatypes import DataType
from charonia.errors import CharoniaError, InternalError, InvalidArgument, NotFound, Unsupported

PROGRAMS = 32
"""How many compiled programs a model keeps: one for each combination of shapes."""

GPUS = "cuda"
"""JAX's word for what an instance of kind GPU runs on."""

CLOSES = 16
"""After so many models are closed, the library forgets what it has traced for them."""

_CALLS = re.compile(
    r"lapack_[a-z]+_ffi|stablehlo\.dynamic_\w+|shape_assertion|Sharding|SPMD\w+|ApproxTopK|AllocateBuffer"
)
"""What a file may call besides the operations of StableHLO: XLA itself and LAPACK, which check what they are given."""

Shapes = tuple[tuple[int, ...], ...]


class JaxBackend(Backend):
    name, api, isolation = "jax", (1, 0), "sandbox"
    formats = (Format(files=("model.jax",)),)
    requires = (("jax", "charonia-jax"), ("flatbuffers", "charonia-jax"))

    async def load(self, source: ModelSource) -> JaxModel:
        return await asyncio.to_thread(JaxModel, source)


class JaxModel(Model):
    """The export, and its programs, which all instances share: running one changes nothing in it."""

    def __init__(self, source: ModelSource) -> None:
        _limit(source)
        self._exported: Any = _opened(source)
        self._inputs = _tensors(self._exported.in_tree, self._exported.in_avals, "INPUT", source)
        self._outputs = _tensors(self._exported.out_tree, self._exported.out_avals, "OUTPUT", source)
        for written, known in ((source.config.input, self._inputs), (source.config.output, self._outputs)):
            for item in written:
                if item.name not in [tensor.name for tensor in known]:
                    names = [tensor.name for tensor in known]
                    raise InvalidArgument(f"model '{source.name}' has no tensor '{item.name}', it has {names}")
        self._programs: OrderedDict[tuple[Any, Shapes], Any] = OrderedDict()
        self._most = max(1, source.integer("XLA_PROGRAMS") or PROGRAMS)
        self._lock = threading.Lock()

    async def signature(self) -> GraphSignature | None:
        return GraphSignature(self._inputs, self._outputs)

    async def create_instance(self, spec: InstanceSpec) -> JaxInstance:
        return await asyncio.to_thread(self._create, spec)

    def _create(self, spec: InstanceSpec) -> JaxInstance:
        device = _device(spec, self._exported.platforms)
        instance = JaxInstance(self, device, self._inputs, self._outputs, spec.interface.max_batch_size)
        self._prepare(spec, device, instance.batch_sizes)
        return instance

    def _prepare(self, spec: InstanceSpec, device: Any, sizes: Sequence[int]) -> None:
        """Compile for every number of rows now, where all other dimensions are known, so that no request waits."""
        known = spec.interface.inputs
        if all(tensor.name in known for tensor in self._inputs):
            shapes = [spec.interface.backend_shape(known[tensor.name]) for tensor in self._inputs]
            if not any(-1 in (shape[1:] if sizes else shape) for shape in shapes):
                for rows in sizes[-self._most :] or (0,):
                    self.program(device, tuple((rows, *shape[1:]) if sizes else shape for shape in shapes))

    def program(self, device: Any, shapes: Shapes) -> Any:
        """The program for inputs of these shapes, compiled if there is none. Raises `InvalidArgument`."""
        with self._lock:
            found = self._programs.pop((device, shapes), None)
            if found is None:
                found = _compiled(self._exported, device, shapes)
            self._programs[device, shapes] = found
            while len(self._programs) > self._most:
                self._programs.popitem(last=False)
        return found

    async def close(self) -> None:
        self._programs.clear()
        _forget_now_and_then()


class JaxInstance:
    stateless = True

    def __init__(
        self,
        model: JaxModel,
        device: Any,
        inputs: Sequence[TensorSignature],
        outputs: Sequence[TensorSignature],
        most: int,
    ) -> None:
        self._model: JaxModel | None = model
        self._device = device
        self._inputs = inputs
        self._position = {tensor.name: index for index, tensor in enumerate(outputs)}
        # a program for each number of rows would be too many: the executor adds rows up to the next of these
        powers = [1 << bits for bits in range(most.bit_length())]
        self.batch_sizes = tuple(sorted({*powers, most})) if most else ()

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        import jax

        if self._model is None:
            raise InternalError("the model is closed")
        unknown = [name for name in outputs if name not in self._position]
        if unknown:
            raise InvalidArgument(f"there is no output '{unknown[0]}', there are {list(self._position)}")
        arrays = []
        for tensor in self._inputs:
            array, wanted = inputs[tensor.name], DataType.of(tensor.datatype).numpy
            fits = len(array.shape) == len(tensor.dims) and all(
                dim in (-1, size) for dim, size in zip(tensor.dims, array.shape, strict=True)
            )
            if not fits or array.dtype != wanted:
                raise InvalidArgument(
                    f"input '{tensor.name}' is {array.dtype} of shape {list(array.shape)}, the export takes {wanted} "
                    f"of shape {list(tensor.dims)}"
                )
            arrays.append(array)
        program = self._model.program(self._device, tuple(array.shape for array in arrays))
        try:
            # all of them: nothing may read the inputs when this returns. The program copies them to its device
            results = jax.block_until_ready(program(*arrays))
        except Exception as error:
            raise InternalError(f"jax: {_reason(error)}") from None
        return {name: np.asarray(results[self._position[name]]) for name in outputs}

    def close(self) -> None:
        self._model = None


_closed = itertools.count(1)


def _forget_now_and_then() -> None:
    """Have the library forget what it has traced: it keeps 10 to 40 KB of every load for as long as it runs.

    Other models keep their programs, which are compiled. It forgets its own functions too, which makes the next loads
    many times slower: so not at each close.
    """
    import jax

    if next(_closed) % CLOSES == 0:
        jax.clear_caches()


def _limit(source: ModelSource) -> None:
    """Bound the threads and the memory of this process, which has no other model, before the library starts."""
    # JAX would take three quarters of each GPU for itself, and other models have theirs there
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    threads, limit = source.integer("XLA_THREADS"), source.integer("MEMORY_LIMIT_BYTES")
    if (threads or limit) and source.isolation == "none":
        raise InvalidArgument(
            f"'XLA_THREADS' and 'MEMORY_LIMIT_BYTES' of model '{source.name}' need a process of its own, "
            'not charonia.isolation "none"'
        )
    if threads:
        os.environ["PJRT_NPROC"] = str(threads)
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _opened(source: ModelSource) -> Any:
    path = source.version_directory / (source.config.default_model_filename or "model.jax")
    if not path.resolve().is_relative_to(source.version_directory.resolve()):
        raise InvalidArgument(f"the file of model '{source.name}' is outside the version directory: '{path}'")
    if not path.is_file():
        raise NotFound(f"unable to find '{path}' for model '{source.name}'")
    try:
        return _checked(source, path.read_bytes())
    except CharoniaError:
        raise
    except Exception as error:  # no check of the library comes before its reader
        raise InternalError(f"model '{source.name}' is no export of jax, or a broken one: {_reason(error)}") from None


def _checked(source: ModelSource, content: bytes) -> Any:
    """The export in a file, after a look at what it says. Raises `InvalidArgument`, and whatever the reader does."""
    import jax
    from jax import export
    from jax.interpreters import mlir

    # an export has its own datatypes, 64 bits included
    jax.config.update("jax_enable_x64", True)
    on_cpus = not any(group.kind == group.KIND_GPU or group.gpus for group in source.config.instance_group)
    if on_cpus and source.isolation != "none":  # the process is this model's
        jax.config.update("jax_platforms", "cpu")  # a JAX that knows GPUs would make a context on each
    exported = export.deserialize(bytearray(content))
    oldest, newest = (
        export.minimum_supported_calling_convention_version,
        export.maximum_supported_calling_convention_version,
    )
    version = exported.calling_convention_version
    if not oldest <= version <= newest:
        raise InvalidArgument(
            f"model '{source.name}' was written with version {version} of the calling convention, "
            f"jax {jax.__version__} reads {oldest} to {newest}: export it again"
        )
    if exported.nr_devices != 1:
        raise InvalidArgument(
            f"model '{source.name}' was exported for {exported.nr_devices} devices: an instance runs on one"
        )
    with mlir.make_ir_context():
        module = exported.mlir_module(serialized=False)
        foreign = sorted({name for name in _called(module.operation) if not _CALLS.fullmatch(name)})
    if foreign:
        raise InvalidArgument(f"model '{source.name}' calls what no export may: {', '.join(foreign)}")
    return exported


def _called(operation: Any) -> Iterator[str]:
    """The names that the operations of a module call outside of it."""
    if operation.name.endswith("custom_call"):
        yield operation.attributes["call_target_name"].value
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield from _called(inner.operation)


def _device(spec: InstanceSpec, platforms: Sequence[str]) -> Any:
    """The device of an instance. Raises `InvalidArgument` where the export is for others, `Unsupported` for none."""
    import jax

    platform = GPUS if spec.kind == "GPU" else "cpu"
    if platform not in platforms:
        raise InvalidArgument(
            f"model '{spec.source.name}' was exported for {', '.join(platforms)}, but has an instance of kind "
            f"{spec.kind}: export with platforms=['{platform}', ...]"
        )
    wanted = spec.device_id if spec.kind == "GPU" else None
    if wanted is not None and spec.source.isolation != "none":
        # the process is this device's alone. JAX, which has not looked for devices yet, makes a context on each it sees
        see_one_device(wanted)
        wanted = 0
    try:
        devices = {device.id: device for device in jax.local_devices(backend=platform)}
    except RuntimeError:  # the library knows no such platform, or it was told not to use it
        devices = {}
    if wanted is None:
        wanted = min(devices, default=0)
    if wanted not in devices:
        number = spec.device_id if spec.kind == "GPU" else wanted
        raise Unsupported(
            f"model '{spec.source.name}' asks for an instance on {spec.kind} {number}, but JAX has "
            f"{', '.join(map(str, devices)) or 'none'} where it runs"
        )
    return devices[wanted]


def _compiled(exported: Any, device: Any, shapes: Shapes) -> Any:
    import jax
    from jax import tree_util

    on_device = jax.sharding.SingleDeviceSharding(device)

    def run(*arrays: Any) -> list[Any]:
        arguments, words = tree_util.tree_unflatten(exported.in_tree, arrays)
        return tree_util.tree_leaves(exported.call(*arguments, **words))

    given = [
        jax.ShapeDtypeStruct(shape, aval.dtype, sharding=on_device)
        for shape, aval in zip(shapes, exported.in_avals, strict=True)
    ]
    try:
        return jax.jit(run).lower(*given).compile()
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"the export does not take shapes {list(map(list, shapes))}: {_reason(error)}") from None
    except Exception as error:
        raise InternalError(f"XLA cannot compile for shapes {list(map(list, shapes))}: {_reason(error)}") from None


def _tensors(tree: Any, avals: Sequence[Any], word: str, source: ModelSource) -> tuple[TensorSignature, ...]:
    """Inputs or outputs: named by keywords and keys, else by position, as the tensors of `pytorch` are."""
    from jax import tree_util

    paths = [path for path, _ in tree_util.tree_flatten_with_path(tree_util.tree_unflatten(tree, range(len(avals))))[0]]
    names = [".".join(str(key.key) for key in path if isinstance(key, tree_util.DictKey)) for path in paths]
    found = []
    for index, (name, aval) in enumerate(zip(names, avals, strict=True)):
        if name == "" or names.count(name) > 1:
            name = f"{word}__{index}"
        try:
            datatype = DataType.of_numpy(np.dtype(aval.dtype)).value
        except (TypeError, CharoniaError):
            raise Unsupported(
                f"tensor '{name}' of model '{source.name}' is {aval.dtype}, which has no datatype"
            ) from None
        found.append(TensorSignature(name, datatype, tuple(d if isinstance(d, int) else -1 for d in aval.shape)))
    return tuple(found)


def _reason(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
