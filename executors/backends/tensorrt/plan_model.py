"""The backend `tensorrt`, and one loaded version of a plan: an engine for each GPU, shared by the instances there."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar
from weakref import WeakSet

from charonia.backend import Backend, Feature, Format, InstanceSpec, Isolation, MemoryUse, Model, ModelSource, Wants
from charonia.cuda.cuda_library import CudaError
from charonia.cuda.cuda_stream import CudaDevice
from charonia.errors import InternalError, InvalidArgument, Unsupported
from executors.backends.model_files import model_path
from protos.model_config_pb2 import ModelConfig

from .engine_tensors import check_config, completed, profile_indices, read_tensors
from .plan_instance import Engine, PlanInstance
from .trt_library import TrtLibrary, model_file, needed_modules

DEFAULT_FILENAME = "model.plan"
_STRATEGY = "execution_context_allocation_strategy"
_STRATEGIES = ("STATIC", "ON_PROFILE_CHANGE")


class TensorRtBackend(Backend):
    """The backend `tensorrt` (entry-point group `charonia.backends`); platform `tensorrt_plan`."""

    name = "tensorrt"
    api = (1, 0)
    formats = (Format("tensorrt_plan", (DEFAULT_FILENAME,)),)
    supports: ClassVar[frozenset[Feature]] = frozenset(
        ("cc_model_filenames", "non_linear_formats", "profiles", "shape_tensors")
    )
    requires = needed_modules()
    isolation: ClassVar[Isolation] = "process"
    """An error on a GPU ends the use of that GPU by its process."""

    def __init__(self) -> None:
        self._library: TrtLibrary | None = None
        self._lock = threading.Lock()

    def prefers_gpu(self) -> bool:
        """Yes: it runs nowhere else (C8)."""
        return True

    async def load(self, source: ModelSource) -> PlanModel:
        """Return the model; its plan is read when something asks for it."""
        return PlanModel(source, self)

    def library(self, source: ModelSource) -> TrtLibrary:
        """The module and the driver. Raises what `TrtLibrary` raises."""
        with self._lock:
            if self._library is None:
                self._library = TrtLibrary(source.backend_config, source.name)
            return self._library


class PlanModel(Model):
    """One load of a version: its engine on each GPU that has instances."""

    wants: Wants = "pinned"

    def __init__(self, source: ModelSource, backend: TensorRtBackend) -> None:
        self._source = source
        self._backend = backend
        self._engines: dict[int, Engine] = {}
        self._instances: WeakSet[PlanInstance] = WeakSet()
        self._lock = threading.Lock()

    async def signature(self) -> ModelConfig:
        """Return the configuration with what the plan says (C71): tensors, and the largest batch of its profiles."""
        return await asyncio.to_thread(self._completed)

    async def create_instance(self, spec: InstanceSpec) -> PlanInstance:
        """Make an instance with a context for each profile of its group.

        Raises `InvalidArgument` when the configuration does not fit the plan, `Unsupported` for one that is not on a
        GPU.
        """
        return await asyncio.to_thread(self._create, spec)

    def memory(self) -> list[MemoryUse]:
        """Weights of the engines, and what instances hold: buffers, contexts and pinned memory."""
        with self._lock:
            found = [MemoryUse("GPU", device, engine.weight_bytes()) for device, engine in self._engines.items()]
            for instance in self._instances:
                found += instance.memory()
        return [use for use in found if use.size_bytes]

    async def close(self) -> None:
        """Release the engines. No instance uses one any more."""
        with self._lock:
            for engine in self._engines.values():
                engine.close()
            self._engines.clear()

    def _completed(self) -> ModelConfig:
        config = self._source.config
        devices = [gpu for group in config.instance_group for gpu in group.gpus]
        return completed(config, self._engine(self._source, devices[0] if devices else 0).tensors)

    def _create(self, spec: InstanceSpec) -> PlanInstance:
        source = spec.source
        if spec.kind != "GPU":
            raise InvalidArgument(f"unable to load model '{source.name}', TensorRT backend supports only GPU device")
        if source.parameter("enable_multi_device") is not None and source.flag("enable_multi_device"):
            raise Unsupported(f"model '{source.name}': 'enable_multi_device' is not supported: a plan runs on one GPU")
        strategy = source.parameter(_STRATEGY) or "STATIC"
        if strategy not in _STRATEGIES:
            raise InvalidArgument(
                f"Invalid value for '{_STRATEGY}': '{strategy}' for model instance '{source.name}'. Supported values "
                "are 'STATIC' and 'ON_PROFILE_CHANGE'."
            )
        engine = self._engine(source, spec.device_id)
        check_config(source.config, engine.tensors)
        profiles = profile_indices(_profiles_of(spec), len(engine.tensors.profiles), source.name)
        with _on(engine.device, source.name):
            made = PlanInstance(spec, engine, [engine.tensors.profiles[at] for at in profiles], strategy)
        with self._lock:
            self._instances.add(made)
        return made

    def _engine(self, source: ModelSource, device_id: int) -> Engine:
        """The engine of a GPU, read once."""
        library = self._backend.library(source)
        with self._lock:
            found = self._engines.get(device_id)
            if found is None:
                device = CudaDevice(library.devices, device_id)
                with _on(device, source.name):
                    path = model_path(_with_file(source, model_file(source, device.capability())), DEFAULT_FILENAME)
                    engine = library.engine(path, device_id, source)
                    tensors = read_tensors(library.trt, engine, source.name)
                found = self._engines[device_id] = Engine(library, device, engine, tensors)
            return found


def _profiles_of(spec: InstanceSpec) -> tuple[str, ...]:
    """The profiles of the group that an instance is of: its name is the group's with a number."""
    group_name = spec.name.rpartition("_")[0]
    return next((group.profile for group in spec.interface.instance_groups if group.name == group_name), ())


def _with_file(source: ModelSource, name: str) -> ModelSource:
    if not name:
        return source
    config = ModelConfig()
    config.CopyFrom(source.config)
    config.default_model_filename = name
    return replace(source, config=config)


@contextlib.contextmanager
def _on(device: CudaDevice, model: str) -> Iterator[None]:
    """With the device's context. Raises `InternalError` for what the driver refuses."""
    try:
        with device.current():
            yield
    except CudaError as error:
        raise InternalError(f"model '{model}' on GPU {device.device_id}: {error}") from None
