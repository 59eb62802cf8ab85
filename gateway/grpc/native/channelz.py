"""gRPC's standard service about connections, `grpc.channelz.v1.Channelz` (G38).

It reports one server with its listening sockets and connections, and no channels. `serving.Tally` counts.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp

from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import CharoniaError
from gateway.grpc.calling import Context, Methods, Unary
from gateway.grpc.standard_services import CHANNELZ
from gateway.grpc.statuses import Refusal, Status, refusal

from .serving import Serving

SERVER_ID = 1
_DEFAULT_RESULTS = 100
_MAX_RESULTS = 1000


class Channelz:
    """`listening` returns the listening sockets' addresses; `allow(group, context)` raises for a restricted group."""

    def __init__(
        self, serving: Serving, listening: Callable[[], Sequence[Any]], allow: Callable[[str, Context], None]
    ) -> None:
        self._serving = serving
        self._listening = listening
        self._allow = allow

    def methods(self) -> Methods:
        asked = {
            "GetTopChannels": self._top_channels,
            "GetServers": self._servers,
            "GetServer": self._server,
            "GetServerSockets": self._server_sockets,
            "GetChannel": self._nothing("channel"),
            "GetSubchannel": self._nothing("subchannel"),
            "GetSocket": self._socket,
        }
        return {f"/{CHANNELZ}/{name}": Unary(self._answering(name, answer)) for name, answer in asked.items()}

    def _answering(self, name: str, answer: Callable[[Any, Any], Any]) -> Any:
        async def call(message: bytes | memoryview, context: Context) -> bytes | Refusal:
            from grpc_channelz.v1 import channelz_pb2 as pb  # most gateways are never asked

            try:
                self._allow("statistics", context)
                request = getattr(pb, f"{name}Request").FromString(bytes(message))
            except CharoniaError as error:
                return refusal(error)
            except DecodeError:
                return Status.INTERNAL, f"failed to parse the {name}Request message", ()
            if getattr(request, "max_results", 0) < 0:
                return Status.INVALID_ARGUMENT, "max_results must not be negative", ()
            found = answer(pb, request)
            return found if isinstance(found, tuple) else bytes(found.SerializeToString())

        return call

    @staticmethod
    def _nothing(what: str) -> Callable[[Any, Any], Refusal]:
        return lambda _pb, request: _not_found(what, getattr(request, f"{what}_id"))

    @staticmethod
    def _top_channels(pb: Any, _request: Any) -> Any:
        return pb.GetTopChannelsResponse(end=True)

    def _servers(self, pb: Any, request: Any) -> Any:
        return pb.GetServersResponse(
            server=[self._described(pb)] if request.start_server_id <= SERVER_ID else [], end=True
        )

    def _server(self, pb: Any, request: Any) -> Any:
        if request.server_id != SERVER_ID:
            return _not_found("server", request.server_id)
        return pb.GetServerResponse(server=self._described(pb))

    def _described(self, pb: Any) -> Any:
        total = replace(self._serving.past)
        for connection in self._serving.connections:  # there may be many: only the totals in the answer are added up
            counted = connection.calls.tally
            total.started += counted.started
            total.open += len(connection.calls.streams)
            total.refused += counted.refused
            total.reset += counted.reset
            total.last_started_ns = max(total.last_started_ns, counted.last_started_ns)
        listening = [pb.SocketRef(socket_id=number, name=_text(at)) for number, at in self._listeners()]
        data = pb.ServerData(
            calls_started=total.started,
            calls_succeeded=total.succeeded,
            calls_failed=total.refused + total.reset,
            last_call_started_timestamp=_wall(total.last_started_ns),
        )
        return pb.Server(ref=pb.ServerRef(server_id=SERVER_ID, name="charonia"), data=data, listen_socket=listening)

    def _listeners(self) -> list[tuple[int, Any]]:
        return list(enumerate(self._listening(), SERVER_ID + 1))

    def _server_sockets(self, pb: Any, request: Any) -> Any:
        if request.server_id != SERVER_ID:
            return _not_found("server", request.server_id)
        most = min(request.max_results or _DEFAULT_RESULTS, _MAX_RESULTS)
        found = sorted((c for c in self._serving.connections if c.id >= request.start_socket_id), key=lambda c: c.id)
        refs = [pb.SocketRef(socket_id=one.id, name=_text(one.extra("peername"))) for one in found[:most]]
        return pb.GetServerSocketsResponse(socket_ref=refs, end=len(found) <= most)

    def _socket(self, pb: Any, request: Any) -> Any:
        for number, at in self._listeners():
            if number == request.socket_id:
                ref = pb.SocketRef(socket_id=number, name=_text(at))
                return pb.GetSocketResponse(socket=pb.Socket(ref=ref, local=_address(pb, at)))
        connection = next((c for c in self._serving.connections if c.id == request.socket_id), None)
        if connection is None:
            return _not_found("socket", request.socket_id)
        tally, remote = connection.tally(), connection.extra("peername")
        data = pb.SocketData(
            streams_started=tally.started,
            streams_succeeded=tally.succeeded + tally.refused,
            streams_failed=tally.reset,
            messages_sent=tally.sent,
            messages_received=tally.received,
            keep_alives_sent=tally.keep_alives,
            last_remote_stream_created_timestamp=_wall(tally.last_started_ns),
            last_message_sent_timestamp=_wall(tally.last_sent_ns),
            last_message_received_timestamp=_wall(tally.last_received_ns),
            local_flow_control_window={"value": connection.window},
            remote_flow_control_window={"value": connection.out.window},
        )
        tls = connection.extra("ssl_object")
        cipher = tls.cipher() if tls is not None else None
        name = {"standard_name" if cipher[0].startswith("TLS_") else "other_name": cipher[0]} if cipher else {}
        socket = pb.Socket(
            ref=pb.SocketRef(socket_id=connection.id, name=_text(remote)),
            data=data,
            local=_address(pb, connection.extra("sockname")),
            remote=_address(pb, remote),
            security=pb.Security(tls=pb.Security.Tls(**name)) if tls is not None else None,
        )
        return pb.GetSocketResponse(socket=socket)


def _not_found(what: str, number: int) -> Refusal:
    return Status.NOT_FOUND, f"there is no {what} {number}", ()


def _text(at: Any) -> str:
    """An address as text; "" for a client of a Unix socket."""
    if isinstance(at, tuple):
        return f"[{at[0]}]:{at[1]}" if ":" in at[0] else f"{at[0]}:{at[1]}"
    return f"unix:{at}" if at else "unix"


def _address(pb: Any, at: Any) -> Any:
    if isinstance(at, tuple):
        packed = ipaddress.ip_address(at[0].partition("%")[0]).packed
        return pb.Address(tcpip_address=pb.Address.TcpIpAddress(ip_address=packed, port=at[1]))
    return pb.Address(uds_address=pb.Address.UdsAddress(filename=at or ""))


def _wall(at_ns: int) -> Timestamp | None:
    """The wall-clock time of a monotonic time, None for 0."""
    if not at_ns:
        return None
    found = Timestamp()
    found.FromNanoseconds(wall_ns() - (monotonic_ns() - at_ns))
    return found
