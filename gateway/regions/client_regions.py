"""Shared memory of clients: registers regions, and copies the tensors of requests that lie in them (H46-H51).

A request's inputs are copied from their regions before admission, and its outputs to theirs after the answer; in
between it is an ordinary request. `region_store` keeps registrations, `region_memory` copies bytes.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from weakref import WeakValueDictionary

from charonia.errors import AlreadyExists, CharoniaError, InternalError, InvalidArgument, NotFound, Unsupported, shed
from charonia.eventlog.payloads import BY_REFERENCE_BYTES
from charonia.inference import InferenceRequest, RegionPart
from charonia.tensors import Buffer, Tensor
from charonia.wire import ResponseRecord

from .cuda_memory import CudaMemory, CudaRegions
from .region_memory import RegionMemory
from .region_store import Region, RegionKind, RegionStore, Stamp, open_object

DISABLED = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
"""Refuses changes of registrations, unless the server allows them (H51)."""

MAX_NAME_BYTES = 1024
MAX_KEY_BYTES = 255
"""The max length of a file name, and so of a shared memory object's."""
_MAX_SIZE = 2**64 - 1
"""Sizes are unsigned 64-bit numbers, as error texts say."""
_RESERVED = ("triton_python_backend_shm_region_", "charonia-")
"""Names that Triton reserves for its python backend, and those of this server's own tensors."""
_IN_LOOP_BYTES = 256 * 1024
"""Copying this much takes less time than passing it to a thread."""
_IN_LOOP_CALLS = 64
"""Each copy is a system call."""
MAX_REGIONS_AT_ONCE = 1024
"""Max regions of one request: the event loop opens each."""

AllocateBody = Callable[[int, int], memoryview | None]
Memory = RegionMemory | CudaMemory


class DeliveredInRegions:
    """The regions that one request reads from and writes to, open until this object is dropped."""

    __slots__ = ("_cuda", "_inputs", "_outputs")

    def __init__(
        self,
        inputs: list[tuple[int, Memory, RegionPart]],
        outputs: dict[str, tuple[Memory, RegionPart]],
        cuda: CudaRegions,
    ) -> None:
        self._inputs = inputs
        self._outputs = outputs
        self._cuda = cuda

    @property
    def input_bytes(self) -> int:
        return sum(part.size_bytes for _, _, part in self._inputs)

    async def read(self, request: InferenceRequest, allocate: AllocateBody) -> None:
        """Read the inputs. Raises `InvalidArgument` for a region that has become smaller."""
        wanted: list[tuple[int, Memory, RegionPart, Buffer]] = []
        for position, memory, part in self._inputs:
            size = part.size_bytes
            # executors of this machine read a tensor in a slot without another copy
            view = allocate(size, 0) if size >= BY_REFERENCE_BYTES else None
            wanted.append((position, memory, part, bytearray(size) if view is None else view))

        def copy() -> None:
            for _, memory, part, data in wanted:
                memory.read(part.offset, memoryview(data))

        await self._copied(copy, [memory for _, memory, _ in self._inputs], self.input_bytes)
        for position, _, _, data in wanted:
            tensor = request.inputs[position]
            request.inputs[position] = Tensor(tensor.name, tensor.datatype, tensor.shape, data)

    async def write(self, record: ResponseRecord) -> ResponseRecord:
        """The answer for the client: outputs that were written to regions have no bytes.

        If writing fails, the record of that failure.
        """
        if record.error is not None or not self._outputs:
            return record
        outputs: list[Tensor] = []
        writes: list[tuple[Memory, RegionPart, Buffer]] = []
        try:
            for tensor in record.outputs:
                found = self._outputs.get(tensor.name)
                if found is not None:
                    memory, part = found
                    if len(tensor.data) > part.size_bytes:
                        raise InternalError(
                            f"shared memory size specified with the request for output '{tensor.name}' "
                            f"({part.size_bytes} bytes) should be at least {len(tensor.data)} bytes to hold the results"
                        )
                    writes.append((memory, part, tensor.data))
                    tensor = Tensor(tensor.name, tensor.datatype, tensor.shape, b"")
                outputs.append(tensor)

            def copy() -> None:
                for memory, part, data in writes:
                    memory.write(part.offset, data)

            await self._copied(copy, [memory for memory, _, _ in writes], sum(len(data) for _, _, data in writes))
        except CharoniaError as error:
            return replace(record, outputs=[], parameters={}, error=shed(error))
        return replace(record, outputs=outputs)

    async def _copied(self, copy: Callable[[], None], memories: list[Memory], size_bytes: int) -> None:
        if any(isinstance(memory, CudaMemory) for memory in memories):
            await self._cuda.run(copy)
        elif size_bytes <= _IN_LOOP_BYTES and len(memories) <= _IN_LOOP_CALLS:
            copy()
        else:
            await asyncio.to_thread(copy)

    async def each(self, records: AsyncGenerator[ResponseRecord]) -> AsyncGenerator[ResponseRecord]:
        """As `write`, for each response of a stream."""
        try:
            async for record in records:
                yield await self.write(record)
                del record  # free its memory while waiting for the next one
        finally:
            await records.aclose()


class ClientRegions:
    """The regions of one gateway; gateways of one machine with the same `directory` share them.

    `allocate` returns memory for large tensors. Each tenant has its own names.
    """

    def __init__(
        self, *, allowed: bool = False, directory: str = "", allocate: AllocateBody = lambda _size_bytes, _skew: None
    ) -> None:
        self._allowed = allowed
        self._allocate = allocate
        self._store = RegionStore(directory)
        self._cuda = CudaRegions()
        self._open: WeakValueDictionary[tuple[str, str, Stamp], Memory] = WeakValueDictionary()
        """Open regions of running requests; weak, so that an unregistered region is closed after them."""

    def close(self) -> None:
        self._cuda.close()
        self._store.close()

    # -- registering --------------------------------------------------------------------------------------------------

    def register_system(self, name: str, key: str, offset: int, size_bytes: int, tenant: str = "") -> None:
        """Register a part of a shared memory object (H47)."""
        self.check_name(name, "system")
        _check_key(name, key)
        if self._store.find(tenant, name) is not None:
            raise _already(name)
        descriptor = open_object(key)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise InternalError(f"Unable to open shared memory region: '{key}'")
            if offset + size_bytes > status.st_size:
                raise InvalidArgument(f"failed to register shared memory region '{name}': invalid args")
            if not size_bytes:
                raise InvalidArgument(
                    f"failed to register shared memory region '{name}': unable to process address spaceInvalid argument"
                )
            region = Region(name, "system", size_bytes, key, offset, status.st_dev, status.st_ino)
            self._store.add(tenant, region, descriptor)
        finally:
            os.close(descriptor)

    async def check_cuda(self, name: str) -> None:
        """Raises errors about GPU memory that follow from the name alone, or from the lack of a GPU (H50)."""
        self.check_name(name, "cuda")
        await self._cuda.check_driver(name)

    async def register_cuda(self, name: str, handle: bytes, device_id: int, size_bytes: int, tenant: str = "") -> None:
        """Register memory of a GPU; `handle` is its owner's handle for other processes (H50)."""
        await self.check_cuda(name)
        if self._store.find(tenant, name) is not None:
            raise _already(name)
        self._store.add(tenant, await self._cuda.run(lambda: self._cuda.checked(name, handle, device_id, size_bytes)))

    async def unregister(self, kind: RegionKind, name: str, tenant: str = "") -> None:
        """Forget a region, or all of a kind for "" (H48). Running requests still use it."""
        self._check_allowed()
        if not name:
            await asyncio.to_thread(self._unregister_all, kind, tenant)
        elif (found := self._store.find(tenant, name)) is not None and found[1].kind == kind:
            self._store.remove(tenant, name)
        if kind == "cuda":  # its owner may free it now: wait until memory of earlier requests is closed
            await self._cuda.run(lambda: None)

    def _unregister_all(self, kind: RegionKind, tenant: str) -> None:
        for region in self._store.all(tenant, kind):
            self._store.remove(tenant, region.name)

    async def status(self, kind: RegionKind, name: str = "", tenant: str = "") -> list[Region]:
        """A region, or all of a kind for "" (H46). Raises `NotFound`."""
        if not name:
            return await asyncio.to_thread(self._store.all, tenant, kind)
        found = self._store.find(tenant, name)
        if found is None:
            raise NotFound(f"Unable to find {kind} shared memory region: '{name}'")
        if found[1].kind != kind:
            other = {"system": "system", "cuda": "CUDA"}
            raise NotFound(
                f"The region named '{name}' is registered as {other[found[1].kind]} shared memory, not {other[kind]} "
                "shared memory"
            )
        return [found[1]]

    def _check_allowed(self) -> None:
        if not self._allowed:
            raise Unsupported(DISABLED)

    def check_name(self, name: str, kind: RegionKind) -> None:
        """Raises errors about a registration that follow from its name alone."""
        self._check_allowed()
        if not name:
            raise InvalidArgument(f"'region name' is necessary to register {kind} shared memory region")
        if len(name.encode(errors="surrogatepass")) > MAX_NAME_BYTES:
            raise InvalidArgument(f"shared memory region names are at most {MAX_NAME_BYTES} bytes long")

    # -- use ----------------------------------------------------------------------------------------------------------

    async def read(
        self, request: InferenceRequest, tenant: str, hold: Callable[[int], None], release: Callable[[int], None]
    ) -> DeliveredInRegions | None:
        """Copy a request's inputs from their regions; returns the open regions for its outputs, None if it uses none.

        `hold` counts the bytes while they are copied, and refuses too many. Raises H49's errors.
        """
        use = request.regions
        if use is None:
            return None
        known: dict[str, tuple[Region, Memory]] = {}
        delivered = DeliveredInRegions(
            [(position, self._opened(tenant, part, known), part) for position, part in use.inputs.items()],
            {name: (self._opened(tenant, part, known), part) for name, part in use.outputs.items()},
            self._cuda,
        )
        size = delivered.input_bytes
        if not size:
            return delivered
        hold(size)
        try:
            await delivered.read(request, self._allocate)
        finally:
            release(size)
        return delivered

    def _opened(self, tenant: str, part: RegionPart, known: dict[str, tuple[Region, Memory]]) -> Memory:
        """The open region that contains a part; `known` are the request's regions. Raises H49's errors."""
        name = part.region
        if name not in known and len(known) >= MAX_REGIONS_AT_ONCE:
            raise InvalidArgument(f"request uses more than {MAX_REGIONS_AT_ONCE} shared memory regions")
        region, memory = known[name] if name in known else known.setdefault(name, self._find(tenant, name))
        if part.offset >= region.size_bytes:
            raise InvalidArgument(f"Invalid offset for shared memory region: '{name}'")
        if part.size_bytes > _MAX_SIZE - part.offset:
            raise InvalidArgument(
                f"Integer overflow detected: byte_size ({part.size_bytes}) + offset ({part.offset}) exceeds maximum "
                f"value ({_MAX_SIZE}) for region '{name}'"
            )
        if part.offset + part.size_bytes > region.size_bytes:
            raise InvalidArgument(f"Invalid offset + byte size for shared memory region: '{name}'")
        return memory

    def _find(self, tenant: str, name: str) -> tuple[Region, Memory]:
        """A registered region, opened. Raises `NotFound` and `InternalError`."""
        found = self._store.find(tenant, name) if self._allowed and len(name) <= MAX_NAME_BYTES else None
        if found is None:
            raise NotFound(f"Unable to find shared memory region: '{name[:MAX_NAME_BYTES]}'")
        stamp, region = found
        memory = self._open.get((tenant, name, stamp))
        if memory is None:
            if region.kind == "cuda":
                memory = CudaMemory(region, self._cuda)
            else:
                memory = RegionMemory(region, self._store.open(tenant, region))
            self._open[tenant, name, stamp] = memory
        return region, memory


def _already(name: str) -> CharoniaError:
    return AlreadyExists(f"shared memory region '{name}' already in manager")


def _check_key(name: str, key: str) -> None:
    """Raises `InvalidArgument` for an empty key, or one of an object that is not a client's."""
    bare = key.lstrip("/")
    if not bare:
        raise InvalidArgument(
            f"cannot register shared memory region '{name}' - invalid shm key '{key[:MAX_KEY_BYTES]}'"
        )
    for prefix in _RESERVED:
        if bare.startswith(prefix):
            raise InvalidArgument(
                f"cannot register shared memory region '{name}' with key '{key[:MAX_KEY_BYTES]}' as the key contains "
                f"the reserved prefix '{prefix}'"
            )
    if len(bare.encode(errors="surrogatepass")) > MAX_KEY_BYTES:
        raise InternalError(f"Unable to open shared memory region: '{key[:MAX_KEY_BYTES]}'")
