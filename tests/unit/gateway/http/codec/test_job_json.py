from __future__ import annotations

import json
from urllib.parse import unquote

import pytest

from charonia.facts.jobs import JobEvent, parse_public_id, public_id
from gateway.http.codec.job_json import location, plain, server_sent


@pytest.mark.parametrize("model", ["simple", "a b", "a%20b", "a/b", "m:1", "\u00e9", "a.b", "?x#y"])
def test_a_location_leads_to_its_job(model: str) -> None:
    job_id = public_id(model, bytes(range(16)))
    path = location(job_id)
    assert path.isascii()
    # the server unquotes a path once, and a model's name may need quoting in the id itself
    assert parse_public_id(unquote(path).removeprefix("/v2/jobs/")) == (model, bytes(range(16)))
    assert path.count("/") == 3


def test_events_keep_to_their_lines() -> None:
    text = server_sent(JobEvent(7, "out\nput", 5, {"error": "a\n\nid: 9\r\ndata: x", "n": 2**70})).decode()
    assert text.endswith("\n\n")
    first, second, third = text.removesuffix("\n\n").split("\n")
    assert (first, second) == ("id: 7", "event: output")
    data = json.loads(third.removeprefix("data: "))
    assert data == {"number": 7, "time_us": 5, "detail": {"error": "a\n\nid: 9\r\ndata: x", "n": str(2**70)}}


def test_what_json_cannot_carry_becomes_text() -> None:
    assert plain({1: b"\xff", "s": "\ud800", "t": (1, 2.5, None, True), "o": {1}}) == {
        "1": "\ufffd", "s": "?", "t": [1, 2.5, None, True], "o": "{1}",
    }  # fmt: skip
