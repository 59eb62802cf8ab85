"""TLS of both fronts: calls, clients' certificates, and certificates that change while the front serves."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import echo_handler as echo
import pytest
from certificates import HAS_OPENSSL, authority, certificate, encrypt
from grpc_fronts import FRONTS
from http_calls import read_reply, request

from charonia.errors import StartupError
from charonia.options.settings import GatewaySettings, TlsSettings
from gateway import tls
from gateway.app import Front
from gateway.http.server import HttpFront

pytestmark = pytest.mark.skipif(not HAS_OPENSSL, reason="no openssl on PATH to make certificates with")

SETTINGS = GatewaySettings(
    incarnation="test", http_address="127.0.0.1", http_port=0, grpc_address="127.0.0.1", grpc_port=0
)
FILES = {"server-cert": "server.crt", "server-key": "server.key", "root-cert": "root.crt"}
MAKE: dict[str, Callable[[GatewaySettings, Any], Any]] = {"http": HttpFront, **FRONTS}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities; servers `old` and `new` of the first, clients of each."""
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("ours", "other"):
        authority(folder, name)
    for name, signer in (("old", "ours"), ("new", "ours"), ("client", "ours"), ("stranger", "other")):
        certificate(folder, name, signer)
    return folder


@pytest.fixture
def served(made: Path, tmp_path: Path) -> Path:
    """The files that a front is given: those of `old`."""
    put(made, tmp_path, "old")
    shutil.copy(made / "ours.crt", tmp_path / "root.crt")
    return tmp_path


def put(made: Path, where: Path, name: str, *kinds: str) -> None:
    """Put files of a server in the place of those that are there, as a certificate manager does."""
    for kind in kinds or ("crt", "key"):
        shutil.copy(made / f"{name}.{kind}", where / f"new.{kind}")
        os.replace(where / f"new.{kind}", where / f"server.{kind}")


def settings(name: str, served: Path, *, is_mutual: bool = False) -> GatewaySettings:
    front = "http" if name == "http" else "grpc"
    files = [str(served / file) for file in ("server.crt", "server.key", "root.crt")]
    return replace(SETTINGS, **{f"{front}_tls": TlsSettings(front, *files, is_mutual)})  # type: ignore[arg-type]


async def started(name: str, given: GatewaySettings) -> Front:
    front: Front = MAKE[name](given, echo.EchoHandler())
    await front.start()
    return front


async def connect(front: Front, made: Path, client: str = "") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = ssl.create_default_context(cafile=str(made / "ours.crt"))
    context.set_alpn_protocols(["h2", "http/1.1"])
    if client:
        context.load_cert_chain(made / f"{client}.crt", made / f"{client}.key")
    return await asyncio.open_connection("127.0.0.1", front.port, ssl=context, server_hostname="localhost")


def shown(writer: asyncio.StreamWriter) -> str:
    """The name in the certificate that the server has shown."""
    found = writer.get_extra_info("peercert")["subject"]
    return str(dict(pair for part in found for pair in part)["commonName"])


async def name_of_server(front: Front, made: Path) -> str:
    _, writer = await connect(front, made)
    name = shown(writer)
    writer.close()
    return name


async def refused(front: Front, made: Path, client: str) -> None:
    """A server of TLS 1.3 refuses after the handshake."""
    reader, writer = await connect(front, made, client)
    try:
        await asyncio.wait_for(reader.readexactly(1_000_000), 30)
    finally:
        writer.close()


async def test_calls_over_http_small_and_large(served: Path, made: Path) -> None:
    front = await started("http", settings("http", served))
    reader, writer = await connect(front, made)
    assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
    for size in (64, 64, 64, 1_600_000):
        writer.write(request(size=size))
        status, _, answer = await read_reply(reader)
        assert status == 200, answer[:200]
    writer.close()
    _, plain = await asyncio.open_connection("127.0.0.1", front.port)
    plain.write(request(b"{}"))
    plain.close()
    await front.close(1.0)


@pytest.mark.parametrize("name", MAKE)
async def test_only_clients_whose_certificate_we_signed(served: Path, made: Path, name: str) -> None:
    front = await started(name, settings(name, served, is_mutual=True))
    _, writer = await connect(front, made, "client")
    assert shown(writer) == "old"
    writer.close()
    for client in ("", "stranger"):
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
            await refused(front, made, client)
    await front.close(0.0)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_no_session_outlives_the_authority_that_let_its_client_in(
    served: Path, made: Path, version: ssl.TLSVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "_CHECK_INTERVAL_NS", 0)
    front = await started("http", settings("http", served, is_mutual=True))
    context = ssl.create_default_context(cafile=str(made / "ours.crt"))
    context.minimum_version = context.maximum_version = version
    context.load_cert_chain(made / "client.crt", made / "client.key")

    def ask(session: ssl.SSLSession | None) -> tuple[bytes, ssl.SSLSession | None]:
        with (
            socket.create_connection(("127.0.0.1", front.port), 60) as plain,
            context.wrap_socket(plain, server_hostname="localhost", session=session) as encrypted,
        ):
            encrypted.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            answer, session = encrypted.recv(65_536), encrypted.session
            encrypted.unwrap()
            return answer, session

    answer, session = await asyncio.to_thread(ask, None)
    assert answer.startswith(b"HTTP/1.1 200")
    shutil.copy(made / "other.crt", served / "new.crt")
    os.replace(served / "new.crt", served / "root.crt")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.to_thread(ask, session)
    await front.close(0.0)


@pytest.mark.parametrize("name", MAKE)
async def test_a_new_certificate_is_shown_without_a_restart(
    served: Path, made: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "_CHECK_INTERVAL_NS", 0)
    front = await started(name, settings(name, served))
    assert await name_of_server(front, made) == "old"
    put(made, served, "new")
    assert await name_of_server(front, made) == "new"
    await front.close(0.0)


async def test_files_that_do_not_fit_together_yet_change_nothing(
    served: Path, made: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "_CHECK_INTERVAL_NS", 0)
    front = await started("native", settings("native", served))
    put(made, served, "new", "crt")
    assert await name_of_server(front, made) == "old"
    assert "cannot be used yet" in caplog.text
    put(made, served, "new", "key")
    assert await name_of_server(front, made) == "new"
    await front.close(0.0)


async def test_an_open_connection_goes_on_when_certificates_change(
    served: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "_CHECK_INTERVAL_NS", 0)
    front = await started("http", settings("http", served))
    reader, writer = await connect(front, made)
    put(made, served, "new")
    assert await name_of_server(front, made) == "new"
    writer.write(b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n")
    assert (await read_reply(reader))[0] == 200
    writer.close()
    await front.close(1.0)


async def test_files_are_looked_at_once_a_second_at_most(served: Path, made: Path) -> None:
    files = tls.ChangingFiles(TlsSettings("http", str(served / "server.crt"), str(served / "server.key")))
    put(made, served, "new")
    hour_ns = 3_600_000_000_000  # a busy machine takes its time
    files._looked_ns += hour_ns
    assert not files.changed()
    files._looked_ns -= hour_ns + 1_000_000_000
    assert files.changed()
    files._looked_ns -= 1_000_000_000
    assert not files.changed()
    (served / "server.key").unlink()
    files._looked_ns -= 1_000_000_000
    assert not files.changed(), "it is being replaced"


@pytest.mark.parametrize("name", MAKE)
async def test_files_that_are_missing_or_wrong_end_the_start(served: Path, name: str) -> None:
    front = "http" if name == "http" else "grpc"
    with pytest.raises(StartupError, match=f"--{front}-use-ssl needs --{front}-server-key"):
        await started(name, replace(SETTINGS, **{f"{front}_tls": TlsSettings(front)}))  # type: ignore[arg-type]
    if name != "grpcio":  # which says nothing of it until a client comes
        (served / "server.crt").write_text("no certificate")
        with pytest.raises(StartupError, match=f"--{front}-server-cert"):
            await started(name, settings(name, served))


@pytest.mark.parametrize("front", ["http", "grpc"])
@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("server.crt", None, "--{front}-server-cert: '{path}' cannot be read: No such file or directory"),
        ("server.key", "client.key", "--{front}-server-cert, --{front}-server-key or --{front}-root-cert: "),
        ("root.crt", "client.key", "--{front}-server-cert, --{front}-server-key or --{front}-root-cert: "),
    ],
)
def test_serve_tries_the_files_before_it_starts_anything(
    served: Path, made: Path, front: str, file: str, content: str | None, said: str
) -> None:
    if content is None:
        (served / file).unlink()
    else:
        shutil.copy(made / content, served / file)
    said = said.format(front=front, path=served / file)
    assert said in serve_fails(served, front)


@pytest.mark.parametrize("front", ["http", "grpc"])
def test_serve_asks_for_no_passphrase(served: Path, front: str) -> None:
    encrypt(served / "server.key")
    assert "the key has a passphrase, which is not asked for" in serve_fails(served, front)


def serve_fails(served: Path, front: str) -> str:
    """The line with which serve ends that is given the files, and an input that does not end."""
    (served / "models").mkdir()
    words = [f"--model-repository={served}/models", f"--state-dir={served}/state", f"--{front}-use-ssl=true"]
    words += [f"--{front}-{option}={served}/{name}" for option, name in FILES.items()]
    command = [sys.executable, "-m", "charonia.cli", "serve", "--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    reader, writer = os.pipe()
    try:
        # in a session of its own it has no terminal to ask at
        done = subprocess.run(
            [*command, *words],
            stdin=reader, capture_output=True, text=True, timeout=300, check=False, start_new_session=True,
        )  # fmt: skip
    finally:
        os.close(reader)
        os.close(writer)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, "nothing else was started"
    return done.stderr
