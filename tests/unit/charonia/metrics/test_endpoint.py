from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from charonia.errors import StartupError
from charonia.metrics.endpoint import MetricsEndpoint, scrape, unready

TEXT = b"# TYPE x counter\nx 1\n"


async def ask(endpoint: MetricsEndpoint, data: bytes, socket_path: str = "") -> tuple[str, bytes]:
    if socket_path:
        reader, writer = await asyncio.open_unix_connection(socket_path)
    else:
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    writer.write(data)
    head, _, body = (await asyncio.wait_for(reader.read(), 30)).partition(b"\r\n\r\n")
    writer.close()
    return head.decode(), body


async def test_metrics_over_tcp() -> None:
    endpoint = MetricsEndpoint(lambda: TEXT)
    await endpoint.start()
    head, body = await ask(endpoint, b"GET /metrics?x=1 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 OK\r\n")
    assert "content-type: text/plain; version=0.0.4; charset=utf-8" in head
    assert f"content-length: {len(TEXT)}" in head
    assert body == TEXT
    await endpoint.close()
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", endpoint.port)


async def test_metrics_over_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "m.sock")
    (tmp_path / "m.sock").touch()  # left behind by a killed process
    endpoint = MetricsEndpoint(lambda: TEXT, socket_path=path)
    await endpoint.start()
    _, body = await ask(endpoint, b"GET /metrics HTTP/1.0\r\n\r\n", path)
    assert body == TEXT
    await endpoint.close()
    with pytest.raises(FileNotFoundError):
        await asyncio.open_unix_connection(path)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        *(("GET /metrics/", 200), ("HEAD /metrics", 405), ("POST /metrics", 405), ("POST /metrics/", 405)),
        *(("GET /", 404), ("GET /metricsx", 404), ("GET /metrics//", 404), ("nonsense", 400)),
    ],
)
async def test_everything_else(line: str, status: int) -> None:
    endpoint = MetricsEndpoint(lambda: TEXT)
    await endpoint.start()
    head, _ = await ask(endpoint, f"{line} HTTP/1.1\r\n\r\n".encode())
    assert head.startswith(f"HTTP/1.1 {status} ")
    await endpoint.close()


async def test_a_failing_render_is_a_500_and_an_endless_head_is_let_go() -> None:
    def fail() -> bytes:
        raise RuntimeError("broken")

    endpoint = MetricsEndpoint(fail)
    await endpoint.start()
    head, body = await ask(endpoint, b"GET /metrics HTTP/1.1\r\n\r\n")
    assert head.startswith("HTTP/1.1 500 ")
    assert b"broken" not in body
    reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    writer.write(b"GET /metrics HTTP/1.1\r\na: " + b"b" * 100_000)
    try:
        assert await asyncio.wait_for(reader.read(), 30) == b""
    except ConnectionResetError:
        pass
    writer.close()
    await endpoint.close()


async def test_close_does_not_wait_for_open_connections() -> None:
    endpoint = MetricsEndpoint(lambda: TEXT)
    await endpoint.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    assert (await ask(endpoint, b"GET /metrics HTTP/1.1\r\n\r\n"))[1] == TEXT
    await asyncio.wait_for(endpoint.close(), 30)
    assert await asyncio.wait_for(reader.read(), 30) == b""
    writer.close()


async def test_a_taken_port_and_a_bad_path_are_sentences(tmp_path: Path) -> None:
    endpoint = MetricsEndpoint(lambda: TEXT)
    await endpoint.start()
    with pytest.raises(StartupError, match=r"failed to start Metrics service: Unavailable - Socket '127\.0\.0\.1:"):
        await MetricsEndpoint(lambda: TEXT, port=endpoint.port).start()
    with pytest.raises(StartupError, match="failed to start Metrics service"):
        await MetricsEndpoint(lambda: TEXT, socket_path=str(tmp_path / "no" / "m.sock")).start()
    await endpoint.close()


async def test_turned_off() -> None:
    endpoint = MetricsEndpoint(lambda: TEXT, port=-1)
    await endpoint.start()
    assert endpoint.port == 0
    await endpoint.close()


@pytest.mark.parametrize("later", [False, True], ids=["at-once", "later"])
async def test_health(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: bool) -> None:
    """It lives while it answers; it is ready when it has no reason not to be."""
    monkeypatch.setattr("charonia.metrics.endpoint._SCRAPE_TIMEOUT_S", 60.0)  # also on a machine that stalls
    reason = "its first loads are not over"

    async def in_a_moment() -> str:
        await asyncio.sleep(0)
        return reason

    path = tmp_path / "m.sock"
    endpoint = MetricsEndpoint(lambda: TEXT, socket_path=str(path), unready=in_a_moment if later else lambda: reason)
    await endpoint.start()
    head, body = await ask(endpoint, b"GET /health/ready HTTP/1.1\r\n\r\n", str(path))
    assert head.startswith("HTTP/1.1 503 Service Unavailable\r\n")
    assert json.loads(body) == {"error": reason}
    assert await unready(path) == reason
    head, body = await ask(endpoint, b"GET /health/live?x HTTP/1.1\r\n\r\n", str(path))
    assert (head.split("\r\n")[0], json.loads(body)) == ("HTTP/1.1 200 OK", {"live": True})
    reason = ""
    head, body = await ask(endpoint, b"GET /health/ready HTTP/1.1\r\n\r\n", str(path))
    assert (head.split("\r\n")[0], json.loads(body)) == ("HTTP/1.1 200 OK", {"ready": True})
    assert await unready(path) == ""
    assert await scrape(path) == TEXT.decode()
    for line, status in (("HEAD /health/ready", 405), ("POST /health/live", 405), ("GET /health", 404)):
        head, _ = await ask(endpoint, f"{line} HTTP/1.1\r\n\r\n".encode(), str(path))
        assert head.startswith(f"HTTP/1.1 {status} ")
    await endpoint.close()
    assert await unready(path) == "it does not answer"


async def test_a_process_that_does_not_say_whether_it_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("charonia.metrics.endpoint._SCRAPE_TIMEOUT_S", 60.0)
    path = tmp_path / "m.sock"
    endpoint = MetricsEndpoint(lambda: TEXT, socket_path=str(path))
    await endpoint.start()
    assert (await ask(endpoint, b"GET /health/ready HTTP/1.1\r\n\r\n", str(path)))[0].startswith("HTTP/1.1 404 ")
    assert (await ask(endpoint, b"GET /health/live HTTP/1.1\r\n\r\n", str(path)))[0].startswith("HTTP/1.1 200 ")
    await endpoint.close()

    def fail() -> str:
        raise RuntimeError("secret")

    endpoint = MetricsEndpoint(lambda: TEXT, socket_path=str(path), unready=fail)
    await endpoint.start()
    head, body = await ask(endpoint, b"GET /health/ready HTTP/1.1\r\n\r\n", str(path))
    assert head.startswith("HTTP/1.1 500 ")
    assert b"secret" not in body
    assert await unready(path) == "internal server error"
    assert "readiness could not be told" in caplog.text
    await endpoint.close()
