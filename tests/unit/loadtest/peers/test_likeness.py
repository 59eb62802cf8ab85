"""Bodies are read without their encoding, answers compared, and differences explained by the names of calls."""

from __future__ import annotations

import gzip
import re
from typing import Any

import pytest

from loadtest.bench.servers import Endpoints
from loadtest.peers import likeness
from loadtest.peers.compared_calls import HttpCall, calls


@pytest.mark.parametrize(
    ("data", "headers", "found"),
    [
        (b'{"b":1}', {}, {"b": 1}),
        (gzip.compress(b"[1]", mtime=0), {"content-encoding": "gzip"}, [1]),
        (b'{"a":1}\x00\xff', {"inference-header-content-length": "7"}, [{"a": 1}, "00ff"]),
        (b'data: {"a":1}\n\ndata: {"a":2}\n\n', {}, [{"a": 1}, {"a": 2}]),
        (b"", {}, ""),
    ],
)
def test_bodies(data: bytes, headers: dict[str, str], found: Any) -> None:
    assert likeness.read_body(data, headers) == found


def test_every_reason_is_of_some_call() -> None:
    names = [call.name for call in calls()]
    assert [pattern for pattern, _ in likeness.ACCEPTED if not any(re.fullmatch(pattern, n) for n in names)] == []


def test_what_is_answered_otherwise_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"a": ["1", "2", "3"], "b": ["1", "x", "y"]}
    monkeypatch.setattr(likeness, "answers", lambda endpoints, _: iter(told[endpoints.http]))
    asked = [HttpCall(name, "/", b"") for name in ("same", "other", "generate chain: raise error")]
    found = likeness.differences(Endpoints("a"), Endpoints("b"), asked)
    assert [(one.name, one.triton, one.charonia, bool(one.reason)) for one in found] == [
        ("other", "2", "x", False),
        ("generate chain: raise error", "3", "y", True),
    ]
