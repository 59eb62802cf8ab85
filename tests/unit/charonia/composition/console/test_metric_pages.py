"""Where a console of its own finds the metrics."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from charonia.composition.console.metric_pages import addresses, metrics_reader, metrics_urls
from charonia.errors import StartupError
from charonia.options.values import CONSOLE, parse


def test_metrics_are_where_the_options_or_the_server_say() -> None:
    none = parse(CONSOLE, [], {}, {})
    assert metrics_urls(none, {}) == ()
    assert metrics_urls(none, {"metrics": "127.0.0.1:8002"}) == ("http://127.0.0.1:8002/metrics",)
    assert metrics_urls(none, {"metrics": "::1:8002"}) == ("http://[::1]:8002/metrics",)
    given = parse(CONSOLE, ["--metrics-url=https://a/metrics", "--metrics-url=unix:/m"], {}, {})
    assert metrics_urls(given, {"metrics": "b:1"}) == ("https://a/metrics", "unix:/m")
    for wrong in ("a:1", "dns+https://a/metrics"):
        with pytest.raises(StartupError, match="must begin with"):
            metrics_urls(parse(CONSOLE, [f"--metrics-url={wrong}"], {}, {}), {})
    with pytest.raises(StartupError, match=r"got 'ftp://\*\*\*@host'"):
        metrics_urls(parse(CONSOLE, ["--metrics-url=ftp://me:secret@host"], {}, {}), {})
    for wrong in ("http://host:port/metrics", "dns+http://me:s/cret@host/metrics", "https://[::1/metrics"):
        with pytest.raises(StartupError, match="cannot be read: its port is no number") as refused:
            metrics_urls(parse(CONSOLE, [f"--metrics-url={wrong}"], {}, {}), {})
        assert "cret" not in str(refused.value)
    for right in ("http://[::1]:8002/metrics", "dns+http://me:s%2Fcret@host/metrics", "unix:/run/a:b@[c.sock"):
        assert metrics_urls(parse(CONSOLE, [f"--metrics-url={right}"], {}, {}), {}) == (right,)
    lines = "dns+http://gateway:8002/metrics\ndns+http://executor:8002/metrics"
    of_environment = parse(CONSOLE, [], {"CHARONIA_METRICS_URL": lines}, {})
    assert metrics_urls(of_environment, {}) == tuple(lines.split())


async def test_all_that_have_a_name_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each address once, and none twice because it has one of each family."""
    loop = asyncio.get_running_loop()
    known = {
        "both": [("::2", socket.AF_INET6), ("10.0.0.2", socket.AF_INET), ("10.0.0.1", socket.AF_INET)] * 2,
        "new": [("fd00::1", socket.AF_INET6)],
    }

    async def looked_up(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        if host not in known:
            raise socket.gaierror("unknown")
        return [(family, 1, 6, "", (address, port)) for address, family in known[host]]

    monkeypatch.setattr(loop, "getaddrinfo", looked_up)
    assert await addresses("http://both:8002/metrics") == [
        "http://10.0.0.1:8002/metrics",
        "http://10.0.0.2:8002/metrics",
    ]
    assert await addresses("http://new/metrics") == ["http://[fd00::1]:80/metrics"]
    assert await addresses("http://gone/metrics") == []
    assert await metrics_reader(["dns+http://gone/metrics"])() == ""
