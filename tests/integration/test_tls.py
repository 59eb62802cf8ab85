"""Every role over TLS: a server with a certificate of its own authority, clients with certificates, nothing in clear.

Needs a server that is built with TLS: `CHARONIA_TEST_TLS_SERVER`, else one on PATH (Debian's redis-server is; the wheel
of the `embedded` extra is not).
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import log_servers as servers
import pytest
import redis
import role_processes as roles
from certificates import HAS_OPENSSL, authority, certificate
from free_ports import free_port

from charonia.errors import StartupError
from charonia.eventlog.redis import RedisLog, open_log
from charonia.eventlog.redis.server.security import check_secure

BINARY = servers.server_with_tls()
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not BINARY, reason="no server with TLS: set CHARONIA_TEST_TLS_SERVER or install redis-server"),
    pytest.mark.skipif(not HAS_OPENSSL, reason="openssl makes the certificates"),
]


class TlsServer(servers.LogServer):
    """Takes TLS connections with a certificate of the authority `ours`, and a password; no others."""

    def __init__(self, certificates: Path) -> None:
        super().__init__()
        self.certificates = certificates
        self.options |= {
            "tls-port": str(self.port),
            "tls-cert-file": str(certificates / "server.crt"),
            "tls-key-file": str(certificates / "server.key"),
            "tls-ca-cert-file": str(certificates / "ours.crt"),
            "requirepass": "secret",
        }

    def start(self) -> TlsServer:
        words = [word for name, value in self.options.items() for word in (f"--{name}", value)]
        with (self.directory / "output").open("ab") as output:
            self.process = subprocess.Popen(
                [BINARY, "--port", "0", "--bind", "127.0.0.1", "127.0.0.2", "--dir", str(self.directory), *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        with self.client() as client:
            servers.wait_until(lambda: servers._pings(client))
        return self

    def client(self) -> redis.Redis:
        return redis.Redis(
            "127.0.0.1",
            self.port,
            password="secret",
            ssl=True,
            ssl_ca_certs=str(self.certificates / "ours.crt"),
            ssl_certfile=str(self.certificates / "client.crt"),
            ssl_keyfile=str(self.certificates / "client.key"),
            retry=servers.at_once(),
        )

    def url_of(
        self, host: str = "localhost", authority: str = "ours", client: str = "client", password: str = ""
    ) -> str:
        query = {"ssl_ca_certs": str(self.certificates / f"{authority}.crt")}
        if client:
            query |= {
                "ssl_certfile": str(self.certificates / f"{client}.crt"),
                "ssl_keyfile": str(self.certificates / f"{client}.key"),
            }
        credentials = f"default:{password}@" if password else "default@"
        return f"rediss://{credentials}{host}:{self.port}/0?{urlencode(query)}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    directory = tmp_path_factory.mktemp("certificates")
    for name in ("ours", "theirs"):
        authority(directory, name)
    certificate(directory, "server", "ours")
    certificate(directory, "client", "ours")
    certificate(directory, "stranger", "theirs")
    (directory / "password").write_text("secret\n")
    server = TlsServer(directory)
    try:
        yield server.start()
    finally:
        server.stop()


def test_every_role_works_over_tls_and_comes_back(server: TlsServer, tmp_path: Path) -> None:
    models = roles.held_model(tmp_path / "models")
    secrets = tmp_path / "webhook-secrets.toml"
    secrets.write_text('default = ["whsec_QUJDQUJDQUJDQUJDQUJDQUJDQUJDQUJD"]\n')
    url = (f"--log-url={server.url_of()}", f"--log-password-file={server.certificates / 'password'}")
    with ExitStack() as stack:

        def start(role: str, *flags: str) -> Any:
            process = roles.Role(role, tmp_path, *url, *flags)
            stack.callback(lambda: process.process.poll() is None and process.kill())
            return process

        parts = SimpleNamespace(
            gateway=start("gateway"),
            batcher=start("batcher"),
            executor=start("executor", f"--model-repository={models}"),
            webhooks=start("webhooks", f"--webhook-secrets={secrets}"),
        )
        for part in vars(parts).values():
            part.until_up()
        gateway = parts.gateway
        gateway.until_serves("held")
        status, answer = gateway.ask("POST", "/v2/models/held/infer", roles.request([1.0]))
        assert (status, answer["outputs"][0]["data"]) == (200, [1.0])
        # many TLS records, beside the log and back
        large = [float(n) for n in range(100_000)]
        status, answer = gateway.ask("POST", "/v2/models/held/infer", roles.request(large))
        assert (status, answer["outputs"][0]["data"]) == (200, large)

        before = gateway.submit(roles.request([2.0]))
        gateway.until_state(before, "succeeded")
        server.kill(signal.SIGKILL)
        server.start()
        gateway.until_state(before, "succeeded")

        def serves() -> bool:
            return bool(gateway.ask("POST", "/v2/models/held/infer", roles.request([3.0]))[0] == 200)

        roles.until("it serves again", serves)
        for part in vars(parts).values():
            assert part.stop() == 0, part.log()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"authority": "theirs"}, "certificate verify failed"),
        ({"client": ""}, "certificate required|cannot be reached"),
        ({"client": "stranger"}, "unknown ca|decrypt error|cannot be reached"),
        ({"password": "wrong"}, "refused the user name or password"),
    ],
)
async def test_whoever_cannot_prove_who_it_is_does_not_start(
    server: TlsServer, wrong: dict[str, str], sentence: str
) -> None:
    with pytest.raises(StartupError, match=sentence):
        await RedisLog(server.url_of(**({"password": "secret"} | wrong))).open()


async def test_a_name_that_the_certificate_does_not_hold_is_not_the_server(server: TlsServer) -> None:
    with pytest.raises(StartupError, match=r"doesn't match|not valid for|verify failed"):
        await RedisLog(server.url_of(host="127.0.0.2", password="secret")).open()


async def test_a_clear_connection_gets_nothing(server: TlsServer) -> None:
    with pytest.raises(StartupError):
        await RedisLog(f"redis://default:secret@127.0.0.1:{server.port}").open()


@pytest.mark.parametrize("file", ["ssl_ca_certs", "ssl_certfile"])
def test_a_certificate_that_is_not_there_is_one_sentence(file: str) -> None:
    with pytest.raises(StartupError, match="a certificate of the event log URL cannot be loaded"):
        RedisLog(f"rediss://localhost/0?{file}=/nowhere.crt")


def _sentinel_over_tls(server: TlsServer, tls: dict[str, str]) -> TlsServer:
    """Watches the server as `mylog`; itself without a password."""
    sentinel = TlsServer(server.certificates)
    configuration = [
        "port 0",
        f"tls-port {sentinel.port}",
        "bind 127.0.0.1",
        f"dir {sentinel.directory}",
        *(f"{name} {value}" for name, value in tls.items()),
        f"sentinel monitor mylog 127.0.0.1 {server.port} 1",
        "sentinel auth-pass mylog secret",
    ]
    path = sentinel.directory / "sentinel.conf"
    path.write_text("\n".join(configuration))
    sentinel.process = subprocess.Popen(
        [BINARY, str(path), "--sentinel"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    with sentinel.client() as client:
        client.connection_pool.connection_kwargs.pop("password")
        servers.wait_until(lambda: servers._pings(client))
    return sentinel


async def test_sentinels_and_clusters_are_reached_over_tls(server: TlsServer) -> None:
    """A sentinel that watches the server, and a cluster of one: discovery and data both over TLS."""
    certificates = server.certificates
    tls = {
        "tls-cert-file": str(certificates / "server.crt"),
        "tls-key-file": str(certificates / "server.key"),
        "tls-ca-cert-file": str(certificates / "ours.crt"),
        "tls-replication": "yes",
    }
    with ExitStack() as stack:
        sentinel = _sentinel_over_tls(server, tls)
        stack.callback(sentinel.stop)
        member = TlsServer(certificates)
        stack.callback(member.stop)
        bus = {"cluster-enabled": "yes", "tls-cluster": "yes", "cluster-port": str(free_port())}
        member.options |= {**tls, **bus}
        member.start()
        with member.client() as asking:
            asking.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            servers.wait_until(lambda: b"cluster_state:ok" in _info(asking))

        query = server.url_of().partition("?")[2]
        # sentinels name addresses, which the certificate holds
        for url in (
            f"rediss+sentinel://default:secret@127.0.0.1:{sentinel.port}/mylog?{query}",
            f"rediss+cluster://default:secret@127.0.0.1:{member.port}?{query}",
        ):
            log = open_log(url)
            await log.open()
            assert await log.epoch()
            await log.append(b"x:tls", [b"a", url.encode()])
            assert (await log.range(b"x:tls"))[-1].fields[1] == url.encode()
            await log.delete_stream(b"x:tls")
            await log.close()
            stranger = open_log(url.replace("client.crt", "stranger.crt").replace("client.key", "stranger.key"))
            with pytest.raises(StartupError):
                await stranger.open()


async def test_a_log_that_is_not_safe_is_refused_where_that_is_asked_for(server: TlsServer, tmp_path: Path) -> None:
    safe = server.url_of().replace("default@", "part:word@")
    with server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "part", "reset", "on", ">word", "~*", "&*", "+@all")
        try:
            await check_secure(safe)
            for url, said in (
                (safe.replace("rediss:", "redis:"), "the connection is not encrypted"),
                (safe + "&ssl_cert_reqs=none", "its certificate is not verified"),
                (server.url_of(password="secret"), "the URL names no user, or 'default'"),
                (safe.replace("part:word@", ""), "the URL names no user, or 'default'"),
            ):
                with pytest.raises(StartupError, match=said) as refused:
                    await check_secure(url)
                assert "word" not in str(refused.value)
            admin.execute_command("ACL", "SETUSER", "default", "on", "nopass")
            with pytest.raises(StartupError, match="answers callers who have not signed in"):
                await check_secure(safe)
            await check_secure(safe.replace(f":{server.port}/", ":1/"))  # who needs it says that it is away
            sentinels = safe.replace("rediss:", "rediss+sentinel:").replace("/0?", "/mylog?")
            with pytest.raises(StartupError, match=f"localhost:{server.port} answers callers"):
                await check_secure(sentinels)
            part = roles.Role("gateway", tmp_path, f"--log-url={safe}", "--require-secure-log=true")
            assert await asyncio.to_thread(part.process.wait, 60) == 1
            assert "--require-secure-log: the event log at rediss://localhost" in part.log()
            assert "Traceback" not in part.log()
        finally:
            admin.execute_command("ACL", "SETUSER", "default", "on", "resetpass", ">secret")
        part = roles.Role("batcher", tmp_path, f"--log-url={safe}", "--require-secure-log=true")
        try:
            await asyncio.to_thread(part.until_up)
        finally:
            part.process.terminate()
            await asyncio.to_thread(part.process.wait, 60)


def _info(client: redis.Redis) -> bytes:
    said = client.execute_command("CLUSTER", "INFO")  # type: ignore[no-untyped-call]
    return said if isinstance(said, bytes) else repr(said).replace("': '", ":").encode()
