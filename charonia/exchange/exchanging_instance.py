"""Stands for an instance whose model wants other memory than the host's: moves inputs there, and outputs back.

    wants    on a GPU: inputs                                            outputs, everywhere
    pinned   NumPy, joined into pinned memory or copied there            NumPy, or any array with `__dlpack__`
    device   `DeviceArray`, copied by a stream of its own                the same

The stream of a GPU's library waits for the copies, and the copies back wait for that stream, both on the GPU: no thread
waits but for the outputs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from charonia.backend import Array, BatchInstance, DeviceLost, InstanceDied, InstanceSpec, Outcome, Timings, Wants
from charonia.clock import monotonic_ns
from charonia.cuda.cuda_library import CudaError
from charonia.cuda.cuda_stream import CudaDevice, CudaDevices
from charonia.cuda.dlpack_capsules import CPU, CUDA, CUDA_HOST, CUDA_MANAGED, Described, described
from charonia.cuda.lost_contexts import is_lost
from charonia.cuda.pinned_memory import shared_pool
from charonia.errors import CharoniaError, InternalError, InvalidArgument, Unsupported
from charonia.options.table import PINNED_POOL_BYTES

from .device_link import Bytes, DeviceLink, on

if TYPE_CHECKING:
    from protos.model_config_pb2 import ModelConfig

_log = logging.getLogger(__name__)

_POOL_SIZE = "pinned-memory-pool-byte-size"
_WORDS = ("host", "pinned", "device")


async def with_wanted_memory(model: object, instance: Any, spec: InstanceSpec) -> Any:
    """The instance, or what stands for it where its model wants other memory than the host's.

    Raises `Unsupported` for an instance on a GPU whose driver cannot be used, `InternalError` for another word,
    `InvalidArgument` for a pool size that is no number. The instance is closed then.
    """
    wants: Wants = getattr(model, "wants", "host")
    if wants == "host" or not isinstance(instance, BatchInstance):
        return instance
    if hasattr(instance, "submit"):
        _log.warning(
            "instance %s runs one batch at a time: depth is for models that want their arrays on the host", spec.name
        )
    try:
        return await asyncio.to_thread(ExchangingInstance, instance, wants, spec)
    except BaseException:
        await asyncio.to_thread(instance.close)
        raise


class ExchangingInstance:
    """A `BatchInstance` over another one. Its executions run in one thread."""

    def __init__(self, instance: BatchInstance, wants: Wants, spec: InstanceSpec) -> None:
        """Raises as `with_wanted_memory`."""
        self._instance = instance
        self._model = spec.source.name
        if wants not in _WORDS:
            raise InternalError(
                f"model '{self._model}' wants '{wants}' memory: it has to be one of {', '.join(_WORDS)}"
            )
        # of the operator, never of the model: the pool is the process's
        said = spec.source.backend_config.get(_POOL_SIZE, str(PINNED_POOL_BYTES))
        if not (said.isascii() and said.isdecimal()):
            raise InvalidArgument(f"{_POOL_SIZE} must be a number of bytes, got '{said}'")
        self._pool_bytes = int(said)
        config = spec.source.config
        self._pins_inputs, self._pins_outputs = _pins(config, "input"), _pins(config, "output")
        self._places = wants == "device" and spec.kind == "GPU"
        self._links: dict[int, DeviceLink] = {}
        """By GPU: its own, and those that outputs came from."""
        self._link: DeviceLink | None = None
        if spec.kind == "GPU":
            try:
                self._link = self._link_to(spec.device_id)
            except CudaError as error:
                if self._places:
                    raise Unsupported(
                        f"model '{self._model}' wants its tensors on GPU {spec.device_id}, which NVIDIA's driver "
                        f"cannot use: {error}"
                    ) from None

    # -- what else an executor asks of an instance ---------------------------------------------------------------------

    @property
    def stateless(self) -> bool:
        return bool(getattr(self._instance, "stateless", False))

    @property
    def rows_fail_alone(self) -> bool:
        return bool(getattr(self._instance, "rows_fail_alone", False))

    @property
    def batch_sizes(self) -> Sequence[int]:
        sizes: Sequence[int] = getattr(self._instance, "batch_sizes", ())
        return sizes

    @property
    def checks_health(self) -> bool:
        return bool(getattr(self._instance, "checks_health", False))

    async def check_health(self) -> bool:
        """See `SelfCheckingInstance`."""
        instance: Any = self._instance
        return bool(await instance.check_health())

    def started(self) -> None:
        """See `BatchInstance`."""
        started = getattr(self._instance, "started", None)
        if started is not None:
            started()

    def allocate(self, size_bytes: int) -> Bytes | None:
        """Memory to join a batch in, kept as long as something refers to it; None for ordinary memory."""
        if self._link is None or not self._pins_inputs:
            return None
        with on(self._link, self._model):
            return self._link.pinned(size_bytes)

    @property
    def pins(self) -> bool:
        """Whether `pin` does anything."""
        return self._link is not None and self._pins_inputs

    def pin(self, address: int, size_bytes: int) -> None:
        """Pin memory that inputs will lie in, from a page's begin on, if the pool has capacity."""
        if self._link is not None:
            with on(self._link, self._model):
                self._link.register(address, size_bytes)

    def close(self) -> None:
        """See `BatchInstance`."""
        try:
            self._instance.close()
        finally:
            for link in self._links.values():
                link.close()
            self._links, self._link = {}, None

    # -- executing -----------------------------------------------------------------------------------------------------

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array] | Outcome:
        """Run one batch.

        Raises what the instance raises, `InternalError` for outputs that cannot be fetched, `DeviceLost` for whatever
        error says that this process can use its GPU no more.
        """
        link = self._link
        if link is None:
            begun = monotonic_ns()
            return self._outcome(self._instance.execute(inputs, outputs), outputs, begun, begun)
        begun = monotonic_ns()
        try:
            with on(link, self._model):
                staged = {
                    name: array if array.dtype == np.object_ else link.staged(array) for name, array in inputs.items()
                }
                given: dict[str, Any] = dict(staged)
                if self._places:
                    given |= link.send({name: array for name, array in staged.items() if array.dtype != np.object_})
            placed = monotonic_ns()
            outcome = self._outcome(self._instance.execute(given, outputs), outputs, begun, placed)
            if self._places:
                with on(link, self._model):
                    link.wait()  # for inputs that the instance did not read
            return outcome
        except BaseException as error:
            with suppress(CudaError), link.device.current():
                link.drain()
            if is_lost(error) and not isinstance(error, InstanceDied):
                raise DeviceLost(f"model '{self._model}' has lost GPU {link.device.device_id}: {error}") from error
            raise

    def _outcome(
        self, found: Mapping[str, Any] | Outcome, outputs: Sequence[str], begun: int, placed: int
    ) -> Mapping[str, Array] | Outcome:
        """What the instance returned, with the outputs as NumPy arrays: views of the host's, copies of GPUs'.

        `begun` and `placed` are when its inputs began to be moved, and when they were.
        """
        values: Mapping[str, Any] = found.arrays if isinstance(found, Outcome) else found
        arrays: dict[str, Array] = {}
        remote: dict[int, dict[str, Described]] = {}
        for name in outputs:
            value = values.get(name)
            if isinstance(value, np.ndarray):
                arrays[name] = value
            elif value is not None:  # the executor reports what is missing
                taken = self._taken(name, value)
                if isinstance(taken, Described):
                    remote.setdefault(taken.device[1], {})[name] = taken
                else:
                    arrays[name] = taken
        timings = self._fetch(remote, arrays, begun, placed) if remote else None
        if isinstance(found, Outcome):
            return Outcome(arrays, found.timings or timings, found.failures)
        return arrays if timings is None else Outcome(arrays, timings)

    def _fetch(
        self, remote: Mapping[int, Mapping[str, Described]], arrays: dict[str, Array], begun: int, placed: int
    ) -> Timings:
        """Copy outputs from GPUs; return what took how long."""
        for device_id in remote:
            link = self._links[device_id]
            with on(link, self._model):
                link.wait()  # for the model: what comes after is copies alone
        computed = monotonic_ns()
        for device_id, found in remote.items():
            link = self._links[device_id]
            with on(link, self._model):
                arrays |= link.fetch(found)
                link.wait()
        return Timings(placed - begun, computed - placed, monotonic_ns() - computed)

    def _taken(self, name: str, value: Any) -> Array | Described:
        """An output as an array of the host, or what is on a GPU: the stream of copies from there waits for it.

        Raises `InternalError` for what is no array, and for one that its library does not give.
        """
        where = f"output '{name}' of model '{self._model}'"
        if not hasattr(value, "__dlpack__"):
            raise InternalError(f"{where} is a {type(value).__name__}: neither a NumPy array nor one with __dlpack__")
        try:
            kind, device_id = value.__dlpack_device__()
            if kind in (CUDA, CUDA_MANAGED):
                return described(value, self._link_to(device_id).stream)
            if kind == CPU:
                with suppress(BufferError, TypeError, RuntimeError):  # it does not know all types
                    return np.from_dlpack(value)
            if kind in (CPU, CUDA_HOST):
                one = described(value)
                return one.over(one.address, one.capsule)
        except CharoniaError:
            raise
        except Exception as error:
            raise InternalError(f"{where} cannot be taken through DLPack: {error}") from None
        raise InternalError(f"{where} lies on a device that is none of NVIDIA's: DLPack's kind {int(kind)}")

    def _link_to(self, device_id: int) -> DeviceLink:
        """What copies from and to a GPU. Raises `CudaError`."""
        link = self._links.get(device_id)
        if link is None:
            device = CudaDevice(CudaDevices.shared(), device_id)
            pool = shared_pool(device.library, self._pool_bytes)
            link = self._links[device_id] = DeviceLink(
                device, pool, pins_inputs=self._pins_inputs, pins_outputs=self._pins_outputs
            )
        return link


def _pins(config: ModelConfig, side: str) -> bool:
    """Whether a configuration lets copies go through pinned memory; it does unless it says otherwise."""
    field = f"{side}_pinned_memory"
    return not config.optimization.HasField(field) or bool(getattr(config.optimization, field).enable)
