"""The calls about clients' shared memory (G13, G14): their messages, over `gateway.regions`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from gateway.handler import Handler
from protos import grpc_service_pb2 as pb

RegionCall = Callable[[Any, str], Awaitable[Any]]
"""Called with a message and the caller's tenant."""


class RegionCalls:
    """The shared memory calls of one front. Each raises what `ClientRegions` raises."""

    def __init__(self, handler: Handler) -> None:
        self._regions = handler.regions

    def calls(self) -> dict[str, RegionCall]:
        """Calls by method name."""
        return {
            "SystemSharedMemoryStatus": self._system_status,
            "SystemSharedMemoryRegister": self._register_system,
            "SystemSharedMemoryUnregister": self._unregister_system,
            "CudaSharedMemoryStatus": self._cuda_status,
            "CudaSharedMemoryRegister": self._register_cuda,
            "CudaSharedMemoryUnregister": self._unregister_cuda,
        }

    async def _system_status(self, message: pb.SystemSharedMemoryStatusRequest, tenant: str) -> Any:
        answer = pb.SystemSharedMemoryStatusResponse()
        for region in await self._regions.status("system", message.name, tenant):
            target = answer.regions[region.name]
            target.name, target.key = region.name, region.key
            target.offset, target.byte_size = region.offset, region.size_bytes
        return answer

    async def _cuda_status(self, message: pb.CudaSharedMemoryStatusRequest, tenant: str) -> Any:
        answer = pb.CudaSharedMemoryStatusResponse()
        for region in await self._regions.status("cuda", message.name, tenant):
            target = answer.regions[region.name]
            target.name, target.device_id, target.byte_size = region.name, region.device_id, region.size_bytes
        return answer

    async def _register_system(self, message: pb.SystemSharedMemoryRegisterRequest, tenant: str) -> Any:
        self._regions.register_system(message.name, message.key, message.offset, message.byte_size, tenant)
        return pb.SystemSharedMemoryRegisterResponse()

    async def _register_cuda(self, message: pb.CudaSharedMemoryRegisterRequest, tenant: str) -> Any:
        await self._regions.register_cuda(
            message.name, message.raw_handle, message.device_id, message.byte_size, tenant
        )
        return pb.CudaSharedMemoryRegisterResponse()

    async def _unregister_system(self, message: pb.SystemSharedMemoryUnregisterRequest, tenant: str) -> Any:
        await self._regions.unregister("system", message.name, tenant)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def _unregister_cuda(self, message: pb.CudaSharedMemoryUnregisterRequest, tenant: str) -> Any:
        await self._regions.unregister("cuda", message.name, tenant)
        return pb.CudaSharedMemoryUnregisterResponse()
