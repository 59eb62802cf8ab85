"""A bare grpc.aio echo of the v2 service: the floor that the gRPC front is compared with.

It parses each ModelInferRequest and builds a ModelInferResponse, for one identity model ([-1,16] FP32), and no more.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc  # type: ignore[import-untyped]


class Echo(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Metadata, readiness and inference."""

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerReadyResponse(ready=True)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        tensor = service_pb2.ModelMetadataResponse.TensorMetadata
        return service_pb2.ModelMetadataResponse(
            name=request.name,
            versions=["1"],
            platform="echo",
            inputs=[tensor(name="INPUT0", datatype="FP32", shape=[-1, 16])],
            outputs=[tensor(name="OUTPUT0", datatype="FP32", shape=[-1, 16])],
        )

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        answer = service_pb2.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
        for tensor in request.inputs:
            answer.outputs.add(
                name=tensor.name.replace("INPUT", "OUTPUT"), datatype=tensor.datatype, shape=tensor.shape
            )
        answer.raw_output_contents.extend(request.raw_input_contents)
        return answer


async def serve(port: int) -> None:
    """Serves on loopback until a signal and prints "listening HOST:PORT"."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Echo(), server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await server.start()
    print(f"listening 127.0.0.1:{bound}", flush=True)
    await stopped.wait()
    await server.stop(None)


def main() -> None:
    parser = argparse.ArgumentParser(prog="echo_grpc")
    parser.add_argument("--port", type=int, default=0)
    asyncio.run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
