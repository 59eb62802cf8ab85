"""One page of several parts: sums, and counters that do not go back when a part ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from charonia.composition.metrics_page import MetricsUnion, first_unready
from charonia.metrics.endpoint import MetricsEndpoint
from charonia.metrics.host_metrics import HostMetrics
from charonia.options.settings import MetricsSettings

PAGE = """# HELP requests Requests
# TYPE requests counter
requests {}
# HELP pending Waiting
# TYPE pending gauge
pending {}
# HELP nv_inference_count Inferences
# TYPE nv_inference_count counter
{}# HELP counter_restarts Restarts
# TYPE counter_restarts gauge
{}"""
MODEL, OTHER, SPACED = 'model="m",version="1"', 'model="n",version="1"', 'model="m",namespace="s",version="1"'


class Part:
    """The metrics of one process on its unix socket."""

    def __init__(self, directory: Path, name: str) -> None:
        self.path = directory / f"{name}.metrics"
        self.requests = self.pending = 0
        self.versions: dict[str, tuple[int, int]] = {}
        """By labels: inferences, and how often they began again at 0."""
        self.answers = asyncio.Event()
        self.answers.set()
        self.reason = ""
        self._endpoint = self._make()

    def _make(self) -> MetricsEndpoint:
        return MetricsEndpoint(self._render, socket_path=str(self.path), unready=lambda: self.reason)

    async def _render(self) -> bytes:
        await self.answers.wait()
        counts = [f'nv_inference_count{{_tag="model=",{k}}} {count}\n' for k, (count, _) in self.versions.items()]
        restarts = [f"counter_restarts{{{k}}} {number}\n" for k, (_, number) in self.versions.items() if number]
        return PAGE.format(self.requests, self.pending, "".join(counts), "".join(restarts)).encode()

    async def start(self) -> None:
        await self._endpoint.start()

    async def restart(self) -> None:
        """As another process on the same socket, which has counted nothing."""
        await self._endpoint.close()
        self.requests = self.pending = 0
        self._endpoint = self._make()
        await self._endpoint.start()

    async def close(self) -> None:
        await self._endpoint.close()


def union_of(directory: Path) -> MetricsUnion:
    return MetricsUnion(directory, HostMetrics(MetricsSettings(cpu=False)))


async def figures(union: MetricsUnion) -> tuple[float, float] | None:
    """The sums of requests and of what is pending; None when no part has answered in time."""
    page = (await union.render()).decode()
    if "# TYPE requests " not in page:
        return None
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert page.count("# TYPE requests ") == page.count("# TYPE pending ") == 1
    (requests,), (pending,) = families["requests"].samples, families["pending"].samples
    return requests.value, pending.value


@pytest.fixture
async def parts(tmp_path: Path) -> AsyncIterator[list[Part]]:
    made = [Part(tmp_path, f"gateway-{number}") for number in range(2)]
    for part in made:
        await part.start()
    yield made
    for part in made:
        await part.close()
    await asyncio.sleep(0)  # closed connections let go of their sockets in the next turn of the loop


async def test_equal_series_are_added(parts: list[Part], tmp_path: Path) -> None:
    parts[0].requests, parts[0].pending = 5, 2
    parts[1].requests, parts[1].pending = 7, 1
    assert await figures(union_of(tmp_path)) == (12, 3)


async def test_counters_go_on_when_a_part_is_started_again(parts: list[Part], tmp_path: Path) -> None:
    union = union_of(tmp_path)
    one, other = parts
    one.requests, one.pending, other.requests = 100, 4, 900
    assert await figures(union) == (1000, 4)
    await one.close()
    union.ended(one.path)
    assert await figures(union) == (1000, 0)
    await one.restart()
    one.requests, one.pending = 1, 1
    assert await figures(union) == (1001, 1)
    union.ended(one.path)  # once more, after a scrape of the second process
    await one.restart()
    assert await figures(union) == (1001, 0)


async def test_an_end_during_a_scrape_counts_nothing_twice(parts: list[Part], tmp_path: Path) -> None:
    union = union_of(tmp_path)
    one, other = parts
    one.requests, other.requests = 100, 900
    await union.render()
    one.requests = 110
    other.answers.clear()
    scrape = asyncio.create_task(figures(union))
    while union._pages[one.path].count("requests 110") == 0:
        await asyncio.sleep(0)
    union.ended(one.path)
    other.answers.set()
    assert await scrape == (1010, 0)


async def test_a_part_that_does_not_answer_keeps_its_counters(
    parts: list[Part], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience = "charonia.metrics.endpoint._SCRAPE_TIMEOUT_S"
    monkeypatch.setattr(patience, 30.0)
    union = union_of(tmp_path)
    one, other = parts
    one.requests, one.pending, other.requests = 100, 4, 900
    await figures(union)
    one.answers.clear()
    other.requests = 950
    monkeypatch.setattr(patience, 0.1)
    async with asyncio.timeout(30):
        while await figures(union) != (1050, 0):  # as long as a busy machine keeps the other from answering, too
            pass
    monkeypatch.setattr(patience, 30.0)
    one.answers.set()
    one.requests = 150
    assert await figures(union) == (1100, 4)


async def test_counters_of_a_version_begin_at_0_when_a_part_has_begun_them_again(
    parts: list[Part], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between two scrapes. What parts that are gone had counted must not be added again, nor what a part had
    counted that does not answer; other models' counters go on.
    """
    monkeypatch.setattr("charonia.metrics.endpoint._SCRAPE_TIMEOUT_S", 30.0)
    union = union_of(tmp_path)
    one, other = parts

    async def counts() -> dict[tuple[str, str], float]:
        page = (await union.render()).decode()
        assert "restarts" not in page, "it is of the parts alone"
        return {
            (sample.labels["model"], sample.labels.get("namespace", "")): sample.value
            for family in text_string_to_metric_families(page)
            if family.name == "nv_inference_count"
            for sample in family.samples
        }

    one.versions = {MODEL: (10, 0), OTHER: (1, 0), SPACED: (5, 0)}
    other.versions = {MODEL: (20, 0), OTHER: (2, 0), SPACED: (6, 0)}
    assert await counts() == {("m", ""): 30, ("n", ""): 3, ("m", "s"): 11}
    union.ended(one.path)
    await one.restart()
    one.versions = {MODEL: (0, 0), OTHER: (0, 0), SPACED: (0, 0)}
    assert await counts() == {("m", ""): 30, ("n", ""): 3, ("m", "s"): 11}
    one.versions[MODEL] = (1, 1)
    other.versions[MODEL] = (2, 1)
    assert await counts() == {("m", ""): 3, ("n", ""): 3, ("m", "s"): 11}
    one.versions[MODEL] = (4, 1)
    assert await counts() == {("m", ""): 6, ("n", ""): 3, ("m", "s"): 11}
    union.ended(one.path)  # it is unloaded while this part is started again, which hears of it before its first scrape
    await one.restart()
    one.versions = {MODEL: (3, 1), OTHER: (0, 0), SPACED: (0, 0)}
    other.versions[MODEL] = (1, 2)
    assert await counts() == {("m", ""): 4, ("n", ""): 3, ("m", "s"): 11}
    other.answers.clear()
    one.versions[MODEL] = (1, 2)
    monkeypatch.setattr("charonia.metrics.endpoint._SCRAPE_TIMEOUT_S", 0.1)
    async with asyncio.timeout(30):
        while await counts() != {("m", ""): 1, ("n", ""): 3, ("m", "s"): 11}:
            pass  # as long as a busy machine keeps the first one from answering, too


async def test_parts_are_ready_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia.metrics.endpoint._SCRAPE_TIMEOUT_S", 60.0)  # also on a machine that stalls
    parts = [Part(tmp_path, f"executor-{number}") for number in range(2)]
    for part in parts:
        await part.start()
    paths = [part.path for part in parts]
    assert await first_unready(paths) == ""
    parts[1].reason = "its first loads are not over"
    assert await first_unready(paths) == "executor-1: its first loads are not over"
    await parts[0].close()
    assert await first_unready([*paths, *paths]) == "executor-0: it does not answer"
    await parts[1].close()
