"""gRPC over grpcio, blocking and for asyncio: channels, times, streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from charonia.errors import CharoniaError, InvalidArgument

from .grpc_form import GrpcCall, error_of
from .results import Tls

_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A gateway that died is back within seconds: grpcio's own back-off would outlast the retries.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


def _credentials(tls: Tls | None) -> grpc.ChannelCredentials:
    files = tls or Tls()
    return grpc.ssl_channel_credentials(_read(files.ca_file), _read(files.key_file), _read(files.certificate_file))


def _read(path: str) -> bytes | None:
    try:
        return Path(path).read_bytes() if path else None
    except OSError as error:
        raise InvalidArgument(f"'{path}' cannot be read: {error.strerror}") from None


def _failure(error: Any) -> CharoniaError:
    trailers = {name: value for name, value in error.trailing_metadata() or () if isinstance(value, str)}
    details = error.details() or ""
    if details.startswith("Received http2 header with status: 4"):  # 5xx are of proxies that do not reach the server
        details += ": is this the server's HTTP port?"
    return error_of(error.code().value[0], details, trailers)


def _metadata(call: GrpcCall, fixed: Mapping[str, str], headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return (*call.metadata, *((name.lower(), value) for part in (fixed, headers) for name, value in part.items()))


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


class GrpcTransport:
    """Blocking; may be used from several threads, whose calls share one connection."""

    def __init__(self, target: str, secure: bool, headers: Mapping[str, str], tls: Tls | None) -> None:
        self._headers = headers
        self._channel = (
            grpc.secure_channel(target, _credentials(tls), _OPTIONS)
            if secure
            else grpc.insecure_channel(target, _OPTIONS)
        )

    def exchange(self, call: GrpcCall, timeout_s: float | None, headers: Mapping[str, str]) -> Any:
        method = self._channel.unary_unary(call.method, _serialize, call.answer.FromString)
        try:
            return method(call.message, timeout_s, _metadata(call, self._headers, headers))
        except grpc.RpcError as error:
            raise _failure(error) from error

    def stream(
        self, call: GrpcCall, timeout_s: float | None, left_s: float | None, headers: Mapping[str, str]
    ) -> Iterator[Any]:
        """The timeout of gRPC is one of the whole stream."""
        method = self._channel.stream_stream(call.method, _serialize, call.answer.FromString)
        answers: Any = method(iter((call.message,)), timeout_s, _metadata(call, self._headers, headers))
        try:
            yield from answers
        except grpc.RpcError as error:
            raise _failure(error) from error
        finally:
            answers.cancel()

    def close(self) -> None:
        self._channel.close()


class AsyncGrpcTransport:
    """For one event loop, in which it is made."""

    def __init__(self, target: str, secure: bool, headers: Mapping[str, str], tls: Tls | None) -> None:
        self._headers = headers
        self._channel = (
            grpc.aio.secure_channel(target, _credentials(tls), _OPTIONS)
            if secure
            else grpc.aio.insecure_channel(target, _OPTIONS)
        )

    async def exchange(self, call: GrpcCall, timeout_s: float | None, headers: Mapping[str, str]) -> Any:
        method = self._channel.unary_unary(call.method, _serialize, call.answer.FromString)
        try:
            return await method(call.message, timeout=timeout_s, metadata=_metadata(call, self._headers, headers))
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from error

    async def stream(
        self, call: GrpcCall, timeout_s: float | None, left_s: float | None, headers: Mapping[str, str]
    ) -> AsyncIterator[Any]:
        method = self._channel.stream_stream(call.method, _serialize, call.answer.FromString)
        answers = method(iter((call.message,)), timeout=timeout_s, metadata=_metadata(call, self._headers, headers))
        try:
            async for answer in answers:
                yield answer
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from error
        finally:
            answers.cancel()

    async def close(self) -> None:
        await self._channel.close(None)
