"""The client against a v2 server that is not Charonia: what it sends, what it repeats, what it says is not there."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from certificates import HAS_OPENSSL, authority, certificate
from opentelemetry import context as otel_context
from opentelemetry import trace
from plain_v2_server import PlainServer, plain_server

from charonia.client import (
    AsyncClient,
    Client,
    ConnectionLost,
    JobNotEnded,
    NotConnected,
    OnlyCharonia,
    Refused,
    RetryPolicy,
    Tls,
)
from charonia.client.results import Incomprehensible
from charonia.errors import (
    CharoniaError,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
    Unsupported,
)
from protos import grpc_service_pb2 as pb

INPUTS = {"X": np.array([1, 2], np.int32)}
IN_TIME_S = 30
"""Of calls with less than a second; without their deadline they would take an hour."""
QUICK = RetryPolicy(attempts=3, first_pause_s=0.001)


@pytest.fixture
def server() -> Iterator[PlainServer]:
    with plain_server() as running:
        yield running


@pytest.fixture
def client(server: PlainServer) -> Iterator[Client]:
    with Client(server.url, retry=QUICK, headers={"Authorization": "Bearer x"}) as made:
        yield made


def test_a_server_without_binary_tensors_gets_json(server: PlainServer, client: Client) -> None:
    result = client.infer("double", INPUTS)
    assert result["Y"].tolist() == [2, 4]
    assert result["Y"].dtype == np.int32
    (headers,) = server.inferences
    assert headers["content-type"] == "application/json"
    assert headers["authorization"] == "Bearer x"
    assert headers["accept-encoding"] == "identity", "compressing tensors takes long and gains little"
    assert "traceparent" not in headers


def test_the_user_of_a_url_is_sent_and_not_logged(server: PlainServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with Client(server.url.replace("://", "://me:s%40cret@")) as client:
        assert client.infer("double", INPUTS)["Y"].tolist() == [2, 4]
    (headers,) = server.inferences
    assert headers["authorization"] == f"Basic {b64encode(b'me:s@cret').decode()}"
    assert server.url in caplog.text
    assert "cret" not in caplog.text


async def test_the_same_for_asyncio(server: PlainServer) -> None:
    async with AsyncClient(server.url, retry=QUICK) as client:
        assert (await client.infer("double", INPUTS))["Y"].tolist() == [2, 4]
        server.refusals = [(503, {"retry_after": "0"})]
        assert (await client.infer("double", INPUTS))["Y"].tolist() == [2, 4]
        with pytest.raises(OnlyCharonia):
            await client.submit("double", INPUTS)
        server.refusals = [(0, {})]
        with pytest.raises(ConnectionLost):
            await client.infer("double", INPUTS)
        server.drips.set()
        with pytest.raises(DeadlineExceeded):
            await client.infer("double", INPUTS, timeout_s=0.3)


def test_what_only_charonia_has_is_refused_before_anything_is_executed(server: PlainServer, client: Client) -> None:
    for ask in (
        lambda: client.submit("double", INPUTS),
        lambda: client.infer("double", INPUTS, idempotency_key="k"),
        lambda: client.job("x").result(),
        lambda: list(client.stream("double", INPUTS, resume=True)),
    ):
        with pytest.raises(OnlyCharonia, match=r"^only Charonia has jobs, and .*: it cannot serve an? "):
            ask()
    with pytest.raises(Unsupported, match="grpc://"):
        list(client.stream("double", INPUTS))
    assert server.inferences == []
    assert not issubclass(OnlyCharonia, JobNotEnded)


def test_a_refusal_that_says_when_is_repeated(server: PlainServer, client: Client) -> None:
    server.refusals = [(503, {"retry_after": "0"}), (429, {"retry_after": "1"})]
    assert client.infer("double", INPUTS)["Y"].tolist() == [2, 4]
    assert len(server.inferences) == 3
    server.refusals = [(503, {"retry_after": "0"})] * 3
    with pytest.raises(Refused, match="not now"):
        client.infer("double", INPUTS)


@pytest.mark.parametrize("refusal", [(0, {}), (503, {}), (500, {})])
def test_what_may_have_been_executed_is_not(
    refusal: tuple[int, dict[str, str]], server: PlainServer, client: Client
) -> None:
    server.refusals = [refusal]
    with pytest.raises(Unavailable if refusal[0] in (0, 503) else Exception):
        client.infer("double", INPUTS)
    assert len(server.inferences) == 1


def test_a_body_that_comes_in_drops_ends_with_the_deadline(server: PlainServer, client: Client) -> None:
    client.infer("double", INPUTS)
    server.drips.set()
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        client.infer("double", INPUTS, timeout_s=0.3)
    assert time.monotonic() - began < IN_TIME_S


@contextlib.contextmanager
def hostile_server(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Says that it is a v2 server, and answers everything else by `answer`."""
    about = b'{"name":"x","version":"1","extensions":["binary_tensor_data"]}'

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                if not (data := connection.recv(65536)):
                    return
                head += data
            if head.startswith(b"GET /v2 "):
                length = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(about)
                connection.sendall(b"HTTP/1.1 200 OK\r\n" + length + about)
            elif b"/infer" in head or b"/events" in head:
                answer(connection)
            else:
                connection.sendall(b"HTTP/1.1 404 -\r\ncontent-length: 25\r\nconnection: close\r\n\r\n")
                connection.sendall(b'{"error":"job not found"}')

    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(8) as pool:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    pool.submit(serve, listening.accept()[0])

        pool.submit(accept)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)


def drips(begin: bytes, drop: bytes) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        connection.sendall(begin)
        while True:
            connection.sendall(drop)
            time.sleep(0.05)

    return answer


DRIPS = {
    "a head": drips(b"HTTP/1.1 200 OK\r\n", b"X"),
    "informational answers": drips(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "a body": drips(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n", b" "),
}


@pytest.mark.parametrize("what", DRIPS)
async def test_a_deadline_is_kept_whatever_comes_in_drops(what: str) -> None:
    with hostile_server(DRIPS[what]) as url, Client(url, retry=QUICK) as client:
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            client.infer("double", INPUTS, timeout_s=0.5)
        async with AsyncClient(url, retry=QUICK) as other:
            with pytest.raises(DeadlineExceeded):
                await other.infer("double", INPUTS, timeout_s=0.5)
        assert time.monotonic() - began < IN_TIME_S


async def test_the_deadline_of_a_stream_is_kept_while_its_server_beats() -> None:
    """Charonia writes a comment every 15 s into a stream in which nothing happens."""
    beats = drips(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n", b": still there\n\n")
    with hostile_server(beats) as url, Client(url, retry=QUICK) as client:
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            list(client.job("j").events(timeout_s=0.5))
        async with AsyncClient(url, retry=QUICK) as other:
            with pytest.raises(DeadlineExceeded):
                [event async for event in other.job("j").events(timeout_s=0.5)]
        assert time.monotonic() - began < IN_TIME_S


def answered(body: bytes, *headers: bytes, status: bytes = b"200") -> Callable[[socket.socket], None]:
    head = b"".join(header + b"\r\n" for header in headers) + b"content-length: %d\r\n\r\n" % len(body)
    return lambda connection: connection.sendall(b"HTTP/1.1 " + status + b" -\r\n" + head + body)


NONSENSE: dict[str, tuple[type[CharoniaError], Callable[[socket.socket], None]]] = {
    "a length in other digits": (Incomprehensible, answered(b"{}", b"inference-header-content-length: \xb2")),
    "a length of many digits": (
        Incomprehensible,
        answered(b"{}", b"inference-header-content-length: " + b"9" * 5000),
    ),
    "a pause in other digits": (Refused, answered(b"{}", b"retry-after: \xb2", status=b"503")),
    "a pause without end": (ResourceExhausted, answered(b"{}", b"retry-after: " + b"9" * 400, status=b"429")),
    "a deep error": (InternalError, answered(b"[" * 100_000, status=b"500")),
    "many dimensions": (
        Incomprehensible,
        answered(
            b'{"outputs":[{"name":"o","datatype":"INT32","shape":[%s],"data":[1]}]}' % b",".join([b"1"] * 70),
        ),
    ),
    "strings that are lists": (
        Incomprehensible,
        answered(b'{"outputs":[{"name":"o","datatype":"BYTES","shape":[2],"data":[["a"],["b","c"]]}]}'),
    ),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_is_a_typed_error(what: str) -> None:
    kind, answer = NONSENSE[what]
    with hostile_server(answer) as url, Client(url, retry=RetryPolicy(attempts=1)) as client, pytest.raises(kind):
        client.infer("double", INPUTS, timeout_s=60)


def test_the_current_span_is_passed_on(server: PlainServer, client: Client) -> None:
    span = trace.SpanContext(trace_id=0xABC, span_id=0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1))
    token = otel_context.attach(trace.set_span_in_context(trace.NonRecordingSpan(span)))
    try:
        client.infer("double", INPUTS)
    finally:
        otel_context.detach(token)
    assert server.inferences[0]["traceparent"] == f"00-{0xABC:032x}-{0xDEF:016x}-01"


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_no_server_is_not_connected_after_every_attempt(scheme: str) -> None:
    """A port that nothing listens on; gRPC's own words for it are what the client knows it by."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with (
            Client(f"{scheme}://127.0.0.1:{bound.getsockname()[1]}", retry=QUICK) as client,
            pytest.raises(NotConnected),
        ):
            client.infer("double", INPUTS)


# -- TLS ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not HAS_OPENSSL:
        pytest.skip("no openssl on PATH to make a certificate with")
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("ours", "theirs"):
        authority(folder, name)
    for name in ("server", "client"):
        certificate(folder, name, "ours")
    return folder


@contextlib.contextmanager
def over_http(folder: Path) -> Iterator[str]:
    """A server that wants certificates of its clients."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    context.load_verify_locations(folder / "ours.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    with plain_server(context) as running:
        yield running.url


@contextlib.contextmanager
def over_grpc(folder: Path) -> Iterator[str]:
    """The same of gRPC: it says that it lives."""
    answer = grpc.unary_unary_rpc_method_handler(lambda *_: pb.ServerLiveResponse(live=True).SerializeToString())
    methods = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ServerLive": answer})
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, (methods,))
        pair = ((folder / "server.key").read_bytes(), (folder / "server.crt").read_bytes())
        wanted = grpc.ssl_server_credentials((pair,), (folder / "ours.crt").read_bytes(), True)
        port = server.add_secure_port("127.0.0.1:0", wanted)
        server.start()
        try:
            yield f"grpcs://127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


@pytest.mark.parametrize("serve", [over_http, over_grpc])
def test_tls_both_ways(serve: Callable[[Path], Any], certificates: Path) -> None:
    trusted, own = str(certificates / "ours.crt"), (str(certificates / "client.crt"), str(certificates / "client.key"))

    def ask(tls: Tls) -> Any:
        with Client(url, retry=RetryPolicy(attempts=1), tls=tls) as client:
            return client.infer("double", INPUTS)["Y"].tolist() if client.url.startswith("https") else client.live()

    with serve(certificates) as url:
        assert ask(Tls(trusted, *own)) in ([2, 4], True)
        for tls in (Tls(trusted), Tls(str(certificates / "theirs.crt"), *own), Tls()):
            with pytest.raises(Unavailable):
                ask(tls)
        for tls in (Tls("/nowhere"), Tls(trusted, own[0], "/nowhere")):
            with pytest.raises(InvalidArgument, match="/nowhere"):
                ask(tls)
