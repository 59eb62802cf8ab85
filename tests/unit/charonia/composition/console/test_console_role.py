"""Where a console of its own finds the metrics."""

from __future__ import annotations

import pytest

from charonia.composition.console.console_role import metrics_urls
from charonia.errors import StartupError
from charonia.options.values import CONSOLE, parse


def test_metrics_are_where_the_options_or_the_server_say() -> None:
    none = parse(CONSOLE, [], {}, {})
    assert metrics_urls(none, {}) == ()
    assert metrics_urls(none, {"metrics": "127.0.0.1:8002"}) == ("http://127.0.0.1:8002/metrics",)
    assert metrics_urls(none, {"metrics": "::1:8002"}) == ("http://[::1]:8002/metrics",)
    given = parse(CONSOLE, ["--metrics-url=https://a/metrics", "--metrics-url=unix:/m"], {}, {})
    assert metrics_urls(given, {"metrics": "b:1"}) == ("https://a/metrics", "unix:/m")
    with pytest.raises(StartupError, match="must begin with"):
        metrics_urls(parse(CONSOLE, ["--metrics-url=a:1"], {}, {}), {})
