"""Posting to real sockets: which address is connected to, and how little an endpoint can do to the sender."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import webhook_receiver as parts

from gateway.webhooks.addresses import Allowed, parse_url
from gateway.webhooks.posting import AddressRefused, Answer, Poster

HERE = Allowed.parse(["127.0.0.1/32"])
HEADERS = [("content-type", "application/json")]


@pytest.fixture
async def receiver() -> AsyncIterator[parts.Receiver]:
    receiver = parts.Receiver()
    await receiver.start()
    yield receiver
    await receiver.close()


class Names:
    """A name server whose answers change from one question to the next."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, int]] = []

    def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append((host, port))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


async def post(poster: Poster, url: str, tenant: bytes = b"") -> Answer:
    return await poster.post(parse_url(url), HEADERS, b"{}", tenant)


async def test_a_name_is_connected_to_at_the_address_that_was_checked(receiver: parts.Receiver) -> None:
    names = Names(["127.0.0.1"], ["10.0.0.1"])
    poster = Poster(HERE, resolve=names)
    assert await post(poster, receiver.url("/a?b=c", "hooks.example.org")) == Answer(204)
    assert names.asked == [("hooks.example.org", receiver.port)]  # once: nothing is left to change its mind
    (received,) = receiver.received
    assert received.path == "/a?b=c"
    assert received.headers["host"] == f"hooks.example.org:{receiver.port}"
    assert received.headers["content-type"] == "application/json"
    with pytest.raises(AddressRefused):
        await post(poster, receiver.url("/", "hooks.example.org"))
    assert len(receiver.received) == 1


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["::1"], ["169.254.169.254", "10.0.0.1"], ["::ffff:8.8.8.8"], []])
async def test_a_name_with_inner_addresses_only_is_refused(receiver: parts.Receiver, addresses: list[str]) -> None:
    poster = Poster(Allowed(), resolve=Names(addresses))
    with pytest.raises(AddressRefused):
        await post(poster, receiver.url("/", "rebind.example.org"))
    with pytest.raises(AddressRefused):
        await post(Poster(Allowed()), receiver.url("/"))
    assert not receiver.received


async def test_an_address_that_takes_no_connection_leaves_time_for_the_next(receiver: parts.Receiver) -> None:
    with socket.socket() as deaf, contextlib.ExitStack() as waiting:
        deaf.bind(("127.0.0.2", receiver.port))
        deaf.listen(0)  # the kernel drops what asks for a connection once its queue is full
        for _ in range(4):
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(deaf.getsockname())
        allowed = Allowed.parse(["127.0.0.1/32", "127.0.0.2/32"])
        poster = Poster(allowed, resolve=Names(["127.0.0.2", "127.0.0.1"]), timeout_s=6.0)
        assert await post(poster, receiver.url("/", "hooks.example.org")) == Answer(204)


async def test_the_allowed_one_of_several_addresses_is_used(receiver: parts.Receiver) -> None:
    poster = Poster(HERE, resolve=Names(["10.0.0.1", "127.0.0.1"]))
    assert await post(poster, receiver.url("/", "both.example.org")) == Answer(204)


async def test_a_redirect_is_an_answer_and_not_followed(receiver: parts.Receiver) -> None:
    receiver.answers["/from"] = [parts.status(302, f"location: {receiver.url('/to')}")]
    assert await post(Poster(HERE), receiver.url("/from")) == Answer(302)
    assert not receiver.at("/to")


async def test_interim_answers_are_passed_over_and_a_wish_to_wait_is_heard(receiver: parts.Receiver) -> None:
    receiver.answers["/"] = [b"HTTP/1.1 103 Early Hints\r\n\r\n" + parts.status(429, "retry-after: 17")]
    assert await post(Poster(HERE), receiver.url("/")) == Answer(429, retry_after_s=17)


async def test_an_answer_without_end_is_not_read(receiver: parts.Receiver) -> None:
    ended = asyncio.Event()

    async def endless(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
        except ConnectionError:
            ended.set()
        finally:
            writer.close()

    async with await asyncio.start_server(endless, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await post(Poster(HERE), f"http://127.0.0.1:{port}/") == Answer(200)
        async with asyncio.timeout(parts.PATIENCE_S):
            await ended.wait()


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"SSH-2.0-x\r\n\r\n", "not an HTTP answer"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 20_000 + b"\r\n\r\n", "not an HTTP answer"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 2000, "not an HTTP answer: no end of interim answers"),
        (b"", "connection failed: closed without an answer"),
    ],
)
async def test_what_is_no_answer_is_an_error(receiver: parts.Receiver, raw: bytes, error: str) -> None:
    receiver.answers["/"] = [raw]
    answer = await post(Poster(HERE), receiver.url("/"))
    assert answer.status == 0
    assert answer.error.startswith(error)


async def test_a_dripping_endpoint_is_left_when_its_time_is_up(receiver: parts.Receiver) -> None:
    async def never(_received: object) -> bytes:
        await asyncio.Event().wait()
        return b""

    receiver.answers["/"] = never
    answer = await post(Poster(HERE, timeout_s=0.05), receiver.url("/"))
    assert answer == Answer(0, "no answer within 0.05 s")


async def test_nobody_there_and_no_such_name_are_errors(receiver: parts.Receiver) -> None:
    await receiver.close()
    assert (await post(Poster(HERE), receiver.url("/"))).error.startswith("connection failed")

    def unknown(_host: str, _port: int) -> list[str]:
        raise OSError("no such name")

    assert (await post(Poster(HERE, resolve=unknown), "http://a.example.org/")).error.endswith("no such name")


async def test_a_silent_name_server_keeps_only_its_own_names_waiting(receiver: parts.Receiver) -> None:
    import threading

    release = threading.Event()
    asked: list[str] = []

    def names(host: str, _port: int) -> list[str]:
        asked.append(host)
        if host == "silent.example.org":
            release.wait(parts.PATIENCE_S)
        return ["127.0.0.1"]

    poster = Poster(HERE, timeout_s=3.0, resolve=names)
    silent = [asyncio.create_task(post(poster, receiver.url("/", "silent.example.org"))) for _ in range(40)]
    assert await post(poster, receiver.url("/", "quick.example.org")) == Answer(204)
    assert {answer.error for answer in await asyncio.gather(*silent)} == {"no answer within 3 s"}
    assert asked.count("silent.example.org") == 1
    release.set()
    poster.close()


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """(certificate, key) of hooks.example.org, signed by itself."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is needed to make a certificate")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = (
        f"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=x -keyout {key} -out {cert}"
    )
    names = ["-addext", "subjectAltName=DNS:hooks.example.org"]
    subprocess.run([openssl, *command.split(), *names], check=True, capture_output=True)
    return cert, key


async def test_the_certificate_is_that_of_the_name_though_the_address_is_dialled(
    certificate: tuple[Path, Path],
) -> None:
    cert, key = certificate
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(cert, key)
    receiver = parts.Receiver()
    serving.sni_callback = lambda _socket, name, _context: receiver.names.append(name)
    await receiver.start(serving)
    trusting = ssl.create_default_context(cafile=str(cert))
    names = Names(["127.0.0.1"])
    url = f"https://hooks.example.org:{receiver.port}/"
    assert await post(Poster(HERE, resolve=names, tls=trusting), url) == Answer(204)
    assert receiver.names == ["hooks.example.org"]
    other = f"https://other.example.org:{receiver.port}/"
    assert "certificate not accepted" in (await post(Poster(HERE, resolve=names, tls=trusting), other)).error
    assert "certificate not accepted" in (await post(Poster(HERE, resolve=names), url)).error
    assert len(receiver.received) == 1
    await receiver.close()


async def test_names_that_no_server_resolves_keep_no_other_tenant_waiting(receiver: parts.Receiver) -> None:
    """More of them than threads that resolve, and each longer than a call."""
    release = threading.Event()
    asked: list[str] = []

    def resolve(host: str, _port: int) -> list[str]:
        asked.append(host)
        if host.startswith("slow"):
            release.wait()
        return ["127.0.0.1"]

    poster = Poster(HERE, resolve=resolve, timeout_s=600.0)
    url = receiver.url("/", "slow{}.example.org")
    slow = [asyncio.create_task(post(poster, url.format(n), b"slow")) for n in range(40)]
    try:
        while len(asked) < 12:
            await asyncio.sleep(0.001)
        assert await post(poster, receiver.url("/", "quick.example.org"), b"quick") == Answer(204)
        assert len(asked) == 13
    finally:
        release.set()
        await asyncio.gather(*slow)
    assert len(receiver.received) == 41
