"""The pages of slow requests name what made them slow: on a server where each cause was provoked (`console_world`)."""

from __future__ import annotations

import html
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

pytest.importorskip("jinja2")

from console_world import World, held, submit, world
from e2e_asking import until

CAUSES = {
    "queued": "accepted before it were served first",
    "cold": "(cold load)",
    "poison": "Poison: each attempt",
    "innocent": "it was tried again",
}
"""Words of a verdict by the story that has it, and no other story."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("world")


@pytest.fixture(scope="module")
def seen(directory: Path) -> Iterator[World]:
    with world(directory) as made:
        yield made


def story(page: str) -> str:
    """The sentence at the head of a request's page."""
    (verdict,) = re.findall(r'<blockquote class="verdict">(.*?)</blockquote>', page, re.DOTALL)
    return html.unescape(verdict)


def address(job: str) -> str:
    digits, _, model = job.partition(".")
    return f"/requests/{model}/{digits}"


def until_delivered(seen: World, job: str) -> str:
    """Who gave the outcome to a caller, as its page says once that is noted."""

    def look() -> str:
        found = re.findall(r">delivered</th><td class=.text.>(\S+) gave it to a caller<", seen.page(address(job)))
        return found[0] if found else ""

    return until("its delivery is noted", look)


def test_each_page_names_the_cause_of_its_request(seen: World) -> None:
    jobs = {"queued": seen.queued, "cold": seen.cold, "poison": seen.poison, "innocent": seen.innocent}
    pages = {name: seen.page(address(job)) for name, job in jobs.items()}
    for name, page in pages.items():
        told = story(page)
        assert [cause for cause, words in CAUSES.items() if words in told] == [name], told
        assert "no caller is known to have asked for it" in page
        assert 'data-asked="page=request' not in page  # it has ended: nothing of it is live
        assert seen.server.get(f"/v2/jobs/{jobs[name]}/result")[0] == (500 if name == "poison" else 200)
        assert until_delivered(seen, jobs[name]).startswith("gateway-")
    assert "in the queue" in story(pages["queued"])
    assert "executor-" in story(pages["cold"])
    ended = {name: set(re.findall(r'<th scope="row">(\w+)</th>', page)) for name, page in pages.items()}
    assert {"accepted", "batched", "executed", "succeeded"} <= ended["queued"] & ended["cold"]
    assert "returned" in ended["poison"] & ended["innocent"]
    assert f"/console/dead-letters/moody/{seen.poison[:32]}" in pages["poison"]
    assert seen.poison[:32] in pages["innocent"]  # with whom it was in a batch
    letter = seen.page(f"/dead-letters/moody/{seen.poison[:32]}")
    assert "<td><code" in letter
    assert "666" in letter


def test_the_page_of_a_waiting_request_follows_it_to_its_end(seen: World, directory: Path) -> None:
    with held(seen.server, directory):
        job = submit(seen.server, "moody", 1)
        path = address(job)
        assert 'data-asked="page=request&amp;model=moody&amp;id=' in seen.page(path)
        asked = urlencode({"page": "request", "model": "moody", "id": job[:32]})
        live = urllib.request.urlopen(seen.console(f"/live?{asked}"), timeout=60)
        kind, document = "", {}
        while kind != "update":
            kind, document = event(live)
        assert re.search("state-(queued|running)", document["regions"]["request_state"])
    with live:
        while kind != "ended":
            kind, document = event(live)
    assert "state-succeeded" in document["regions"]["request_state"]
    assert "succeeded" in document["regions"]["request_events"]
    assert "Cancel it" not in document["regions"]["request_orders"]


def event(live: Any) -> tuple[str, Any]:
    """The next event of an open page: its name and its document."""
    lines = [live.readline().decode().strip() for _ in range(3)]
    return lines[0].removeprefix("event: "), json.loads(lines[1].removeprefix("data: "))
