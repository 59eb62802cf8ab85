"""The servers of gRPC there are, by their names in `--grpc-front`: what holds for one holds for the other."""

from __future__ import annotations

from collections.abc import Callable

from charonia.options.settings import GatewaySettings
from gateway.app import Front
from gateway.grpc.grpcio_server import GrpcFront
from gateway.grpc.native.native_server import NativeGrpcFront
from gateway.handler import Handler

MakeFront = Callable[[GatewaySettings, Handler], Front]

FRONTS: dict[str, MakeFront] = {"native": NativeGrpcFront, "grpcio": GrpcFront}
