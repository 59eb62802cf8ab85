"""Batches driven by gateways that come, go and are held up."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from memory_log.log import MemoryLog

from charonia import keys
from charonia.errors import CANCELLED, Cancelled, Unavailable
from gateway.openai.shapes.api_errors import ApiError
from gateway.openai.stored import batch_runs, stored_objects
from gateway.openai.stored.batch_facts import BatchState, Counts
from gateway.openai.stored.batch_lines import BatchLine, LineResult
from gateway.openai.stored.batch_runs import BatchRun, BatchRuns
from gateway.openai.stored.line_calls import ModelLines
from gateway.openai.stored.stored_objects import WINDOW_S, StoredBatches, StoredFiles, now_s

URL = "/v1/chat/completions"
LIMIT_S = 30


class Lines:
    """Answers lines at once, but those above `held`, which wait for `gate` or for the run to stop."""

    def __init__(self, held: int = 1 << 30) -> None:
        self.held = held
        self.gate = asyncio.Event()
        self.ran: list[int] = []
        self.most = self._now = 0
        self.unstored: tuple[str, ...] = ()
        self.asked_to_delete: list[str] = []
        self.deletes = asyncio.Event()
        self.deleted: list[str] = []
        self.cancelled: list[int] = []
        self.cancels = asyncio.Event()
        self.cancels.set()
        self.forgotten: list[int] = []

    async def run(self, run: BatchRun, line: BatchLine) -> LineResult:
        self.ran.append(line.number)
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            await asyncio.sleep(0)
            if line.number > self.held:
                run.jobs[line.number] = [f"job-{line.number}"]
                while not self.gate.is_set():
                    if run.stop:
                        raise Cancelled(CANCELLED)
                    await asyncio.sleep(0.001)
            status = 200 if line.body["model"] == "m" else 400
            return LineResult(line.number, line.custom_id, status, {}, usage=(2, 3), unstored=self.unstored)
        finally:
            self._now -= 1

    async def cancel(self, run: BatchRun, line: BatchLine) -> None:
        self.cancelled.append(line.number)
        await self.cancels.wait()

    async def delete(self, run: BatchRun, job_ids: Sequence[str]) -> None:
        self.asked_to_delete.extend(job_ids)
        if job_ids:
            await self.deletes.wait()
            self.deleted.extend(job_ids)

    async def forget(self, run: BatchRun, line: BatchLine) -> None:
        self.forgotten.append(line.number)


class ByTenant(Lines):
    """Holds the lines of some tenants. `ran` has the states of the batches."""

    def __init__(self, *held: str) -> None:
        super().__init__()
        self.tenants = held
        self.ran: list[BatchState] = []  # type: ignore[assignment]

    async def run(self, run: BatchRun, line: BatchLine) -> LineResult:
        self.ran.append(run.state)
        while run.state.tenant in self.tenants:
            if run.stop:
                raise Cancelled(CANCELLED)
            await asyncio.sleep(0.001)
        return LineResult(line.number, line.custom_id, 200, {})


class World:
    """One log, and gateways over it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(batch_runs, "_LOOK_S", 0.02)
        monkeypatch.setattr(batch_runs, "_CHECK_S", 0.01)
        self.log = MemoryLog()
        self.files, self.batches = StoredFiles(self.log), StoredBatches(self.log)
        self.cancelled: list[str] = []
        self.runs: list[BatchRuns] = []

    async def gateway(self, name: str, lines: Lines) -> BatchRuns:
        async def cancel_job(job_id: str, caller: Any) -> None:
            self.cancelled.append(job_id)

        await self.log.beat("gateway", name, 600_000)
        handler: Any = SimpleNamespace(identifies=False, jobs=SimpleNamespace(cancel=cancel_job))
        runs = BatchRuns(self.batches, self.files, lines, handler, name)
        self.runs.append(runs)
        runs.start()
        return runs

    async def batch(self, count: int, text: str = "", tenant: str = "", url: str = URL) -> str:
        writer = self.files.writer()
        for number in range(1, count + 1):
            line = {"custom_id": f"id-{number}", "method": "POST", "url": url, "body": {"model": "m"}}
            await writer.write(json.dumps(line).encode() + b"\n")
        await writer.write(text.encode())
        file = await writer.end(tenant, "in", "batch")
        fact = {
            "kind": "created",
            "time_s": now_s(),
            "tenant": tenant,
            "input_file": file.id,
            "endpoint": url,
            "metadata": None,
            "expires_s": now_s() + WINDOW_S,
            "output_ttl_s": 3600,
        }
        batch_id = stored_objects.new_id("batch_")
        await self.batches.create(batch_id, fact)
        return batch_id

    async def until(self, look: Any) -> Any:
        async with asyncio.timeout(LIMIT_S):
            while not (found := await look()):
                await asyncio.sleep(0.005)
        return found

    async def ended(self, batch_id: str) -> BatchState:
        async def look() -> BatchState | None:
            state = await self.batches.state(batch_id)
            return state if state.outcome and batch_id not in await self.batches.active() else None

        state: BatchState = await self.until(look)
        return state

    async def done(self, batch_id: str, count: int) -> None:
        async def look() -> bool:
            (counts,) = await self.batches.progress([batch_id])
            return counts is not None and counts.done >= count

        await self.until(look)

    async def lines(self, file_id: str | None, tenant: str = "") -> list[dict[str, Any]]:
        if file_id is None:
            return []
        content = b"".join([piece async for piece in self.files.content(await self.files.find(file_id, tenant))])
        return [json.loads(line) for line in content.splitlines()]


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    world = World(monkeypatch)
    yield world
    for runs in world.runs:
        await runs.close()


async def test_each_line_once_and_so_many_at_a_time(world: World) -> None:
    lines = Lines()
    await world.gateway("one", lines)
    state = await world.ended(await world.batch(200))
    assert (state.outcome, state.counts.completed, state.counts.input_tokens) == ("completed", 200, 400)
    found = await world.lines(state.output_file)
    assert Counter(line["custom_id"] for line in found) == {f"id-{number}": 1 for number in range(1, 201)}
    assert 1 < lines.most <= batch_runs.MAX_IN_FLIGHT
    assert state.error_file is None


async def test_a_wrong_file_runs_nothing(world: World) -> None:
    lines = Lines()
    await world.gateway("one", lines)
    state = await world.ended(await world.batch(3, text="{"))
    assert (state.outcome, [error["line"] for error in state.errors]) == ("failed", [4])
    assert lines.ran == []


async def test_a_file_that_is_gone(world: World) -> None:
    batch_id = await world.batch(1)
    state = await world.batches.state(batch_id)
    await world.files.delete(await world.files.find(state.input_file, ""))
    await world.gateway("one", Lines())
    state = await world.ended(batch_id)
    assert (state.outcome, state.errors[0]["code"]) == ("failed", "input_file_missing")


async def test_a_file_that_is_gone_in_the_middle_leaves_the_answers(world: World) -> None:
    lines = Lines(held=10)
    batch_id = await world.batch(60)
    await world.gateway("one", lines)
    await world.done(batch_id, 10)
    state = await world.batches.state(batch_id)
    await world.files.delete(await world.files.find(state.input_file, ""))
    runs = world.runs.pop()
    await runs.close()
    await world.gateway("two", Lines())
    state = await world.ended(batch_id)
    assert (state.outcome, state.errors[0]["code"], state.counts.completed) == ("failed", "input_file_missing", 10)
    assert "50 requests" in state.errors[0]["message"]
    found = await world.lines(state.output_file)
    assert sorted(line["custom_id"] for line in found) == sorted(f"id-{number}" for number in range(1, 11))


async def test_a_file_that_is_gone_while_it_is_read_lets_the_lines_under_way_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_objects, "CHUNK_BYTES", 1000)
    lines = Lines(held=0)
    batch_id = await world.batch(60)
    await world.gateway("one", lines)

    async def is_full() -> bool:
        return len(lines.ran) == batch_runs.MAX_IN_FLIGHT

    await world.until(is_full)
    state = await world.batches.state(batch_id)
    await world.files.delete(await world.files.find(state.input_file, ""))
    lines.gate.set()
    state = await world.ended(batch_id)
    assert (state.outcome, state.errors[0]["code"]) == ("failed", "input_file_missing")
    assert batch_runs.MAX_IN_FLIGHT <= state.counts.completed < 60
    assert len(await world.lines(state.output_file)) == state.counts.completed


async def test_a_batch_whose_lines_are_all_answered_ends_without_its_file(world: World) -> None:
    batch_id = await world.batch(2)
    await world.batches.add(batch_id, {"kind": "started", "time_s": now_s(), "total": 2, "model": "m"})
    for number in (1, 2):
        line = LineResult(number, f"id-{number}", 200, {})
        await world.batches.add_result(batch_id, number, True, line.usage, line.line(batch_id))
    state = await world.batches.state(batch_id)
    await world.files.delete(await world.files.find(state.input_file, ""))
    await world.gateway("one", Lines())
    state = await world.ended(batch_id)
    assert (state.outcome, state.counts.completed, state.errors) == ("completed", 2, [])
    assert len(await world.lines(state.output_file)) == 2


async def test_the_batches_of_a_dead_gateway_are_taken_over(world: World) -> None:
    """The dead gateway is one that is held up: it wakes later, finds that it is not the owner, and ends nothing."""
    slow, quick = Lines(held=10), Lines()
    batch_id = await world.batch(50)
    await world.gateway("one", slow)
    await world.done(batch_id, 10)
    await world.log.end_beat("gateway", "one")
    await world.gateway("two", quick)
    state = await world.ended(batch_id)
    assert (state.outcome, state.counts.completed) == ("completed", 50)
    assert not set(quick.ran) & set(range(1, 11))
    slow.gate.set()
    found = await world.lines(state.output_file)
    assert Counter(line["custom_id"] for line in found) == {f"id-{number}": 1 for number in range(1, 51)}


async def test_a_gateway_that_stops_gives_its_batches_back(world: World) -> None:
    batch_id = await world.batch(50)
    runs = await world.gateway("one", Lines(held=10))
    await world.done(batch_id, 10)
    await runs.close()
    quick = Lines()
    await world.gateway("two", quick)  # the first one's lease has not ended
    assert (await world.ended(batch_id)).counts.completed == 50
    assert not set(quick.ran) & set(range(1, 11))


@pytest.mark.parametrize("is_full", [False, True])
async def test_the_jobs_that_another_gateway_left_are_cancelled(
    world: World, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    """Those of the lines that were under way: in their order, the first ones without a result."""
    monkeypatch.setattr(batch_runs, "MAX_IN_FLIGHT", 4)
    left, next_one = Lines(held=3), Lines()
    batch_id = await world.batch(20)
    one = await world.gateway("one", left)
    await world.done(batch_id, 3)
    while len(left.ran) < 7:
        await asyncio.sleep(0.001)
    await one.close()
    if is_full:  # its tenant has no space for more results
        monkeypatch.setattr(stored_objects, "MAX_TENANT_BYTES", 1)
    else:
        await world.batches.add(batch_id, {"kind": "cancelling", "time_s": now_s()})
    await world.gateway("two", next_one)
    assert (await world.ended(batch_id)).outcome == ("completed" if is_full else "cancelled")
    assert next_one.ran == []
    assert next_one.cancelled == [4, 5, 6, 7]


@pytest.mark.parametrize("is_full", [False, True])
async def test_a_gateway_that_stalled_cancels_what_it_asked_for_after_the_end(
    world: World, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    """The owner found the jobs that were there, and ends the batch: it has not ended it yet where it is full."""
    monkeypatch.setattr(batch_runs, "MAX_IN_FLIGHT", 4)
    stalled, next_one = Lines(held=3), Lines()
    batch_id = await world.batch(20)
    one = await world.gateway("one", stalled)
    await world.done(batch_id, 3)
    while len(stalled.ran) < 7:
        await asyncio.sleep(0.001)
    owns, goes_on = world.batches.owns, asyncio.Event()

    async def owns_late(batch: str, token: int) -> bool:
        if batch in one._runs and token == one._runs[batch].token:
            await goes_on.wait()
        return await owns(batch, token)

    async def is_over() -> bool:
        return batch_id not in one._runs

    monkeypatch.setattr(world.batches, "owns", owns_late)
    await world.log.end_beat("gateway", "one")
    if is_full:
        monkeypatch.setattr(stored_objects, "MAX_TENANT_BYTES", 1)
        next_one.cancels.clear()
    else:
        await world.batches.add(batch_id, {"kind": "cancelling", "time_s": now_s()})
    await world.gateway("two", next_one)
    if is_full:
        while not next_one.cancelled:  # the owner is at it
            await asyncio.sleep(0.001)
    else:
        assert (await world.ended(batch_id)).outcome == "cancelled"
    assert stalled.cancelled == []
    goes_on.set()
    await world.until(is_over)
    assert stalled.cancelled == [4, 5, 6, 7]
    next_one.cancels.set()
    assert (await world.ended(batch_id)).outcome == ("completed" if is_full else "cancelled")
    assert (next_one.ran, next_one.cancelled) == ([], [4, 5, 6, 7])


async def test_a_gateway_that_stalled_leaves_the_jobs_of_a_batch_that_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner waits for them."""
    stalled, next_one = Lines(held=3), Lines(held=3)
    batch_id = await world.batch(20)
    one = await world.gateway("one", stalled)
    await world.done(batch_id, 3)
    await world.log.end_beat("gateway", "one")
    await world.gateway("two", next_one)

    async def is_over() -> bool:
        return batch_id not in one._runs

    await world.until(is_over)
    next_one.gate.set()
    assert (await world.ended(batch_id)).counts.completed == 20
    assert stalled.cancelled == []


async def test_a_gateway_that_stalled_does_not_end_a_batch_that_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had no space for more results; its tenant has deleted files before another gateway took the batch over."""
    monkeypatch.setattr(batch_runs, "MAX_IN_FLIGHT", 4)
    stalled, next_one = Lines(held=3), Lines(held=3)
    batch_id = await world.batch(20)
    one = await world.gateway("one", stalled)
    await world.done(batch_id, 3)
    while len(stalled.ran) < 7:
        await asyncio.sleep(0.001)
    owns, goes_on, waits = world.batches.owns, asyncio.Event(), asyncio.Semaphore(0)

    async def owns_late(batch: str, token: int) -> bool:
        if batch in one._runs and token == one._runs[batch].token:
            waits.release()
            await goes_on.wait()
        return await owns(batch, token)

    async def is_over() -> bool:
        return batch_id not in one._runs

    monkeypatch.setattr(world.batches, "owns", owns_late)
    one._runs[batch_id].is_full = True
    await world.log.end_beat("gateway", "one")
    await world.gateway("two", next_one)
    while len(next_one.ran) < 4:
        await asyncio.sleep(0.001)
    stalled.gate.set()
    async with asyncio.timeout(LIMIT_S):
        for _ in range(2):  # while it drives the batch, and at its end
            await waits.acquire()
    goes_on.set()
    await world.until(is_over)
    assert stalled.cancelled == []
    assert not (await world.batches.state(batch_id)).finalizing_s
    next_one.gate.set()
    assert (await world.ended(batch_id)).counts.completed == 20


async def test_a_gateway_that_is_paused_as_it_writes_a_fact_does_not_end_a_batch_that_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was the owner when it checked that, and writes after another gateway took the batch over."""
    monkeypatch.setattr(batch_runs, "MAX_IN_FLIGHT", 4)
    paused, next_one = Lines(held=3), Lines(held=3)
    batch_id = await world.batch(20)
    one = await world.gateway("one", paused)
    await world.done(batch_id, 3)
    while len(paused.ran) < 7:
        await asyncio.sleep(0.001)
    add, goes_on, writes = world.batches.add, asyncio.Event(), asyncio.Event()

    async def add_late(batch: str, fact: dict[str, Any], *token: int) -> None:
        if fact["kind"] == "finalizing" and not writes.is_set():
            writes.set()
            await goes_on.wait()
        await add(batch, fact, *token)

    async def is_over() -> bool:
        return batch_id not in one._runs

    monkeypatch.setattr(world.batches, "add", add_late)
    one._runs[batch_id].is_full = True
    paused.gate.set()
    await asyncio.wait_for(writes.wait(), LIMIT_S)
    await world.log.end_beat("gateway", "one")
    await world.gateway("two", next_one)
    while len(next_one.ran) < 4:
        await asyncio.sleep(0.001)
    goes_on.set()
    await world.until(is_over)
    assert paused.cancelled == []
    state = await world.batches.state(batch_id)
    assert (state.finalizing_s, state.outcome) == (0, "")
    next_one.gate.set()
    assert (await world.ended(batch_id)).counts.completed == 20


async def test_a_gateway_that_is_paused_as_it_ends_a_batch_leaves_no_files(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = await world.batch(3)
    add, goes_on, writes = world.batches.add, asyncio.Event(), asyncio.Event()

    async def add_late(batch: str, fact: dict[str, Any], *token: int) -> None:
        if fact["kind"] == "ended" and not writes.is_set():
            writes.set()
            await goes_on.wait()
        await add(batch, fact, *token)

    monkeypatch.setattr(world.batches, "add", add_late)
    one = await world.gateway("one", Lines())
    await asyncio.wait_for(writes.wait(), LIMIT_S)
    await world.log.end_beat("gateway", "one")
    await world.gateway("two", Lines())
    state = await world.ended(batch_id)
    goes_on.set()

    async def is_over() -> bool:
        return batch_id not in one._runs

    await world.until(is_over)
    assert await world.batches.state(batch_id) == state
    assert [file.id for file in await world.files.of_tenant("")] == [state.input_file, state.output_file]


async def test_a_batch_that_was_full_stays_so(world: World) -> None:
    """Another gateway may have cancelled the jobs of its last lines, because its owner asks for no more."""
    batch_id = await world.batch(5)
    await world.batches.add(batch_id, {"kind": "started", "time_s": now_s(), "total": 5, "model": "m"})
    await world.batches.add(batch_id, {"kind": "finalizing", "time_s": now_s()})
    lines = Lines()
    await world.gateway("one", lines)
    state = await world.ended(batch_id)
    assert lines.ran == []
    assert (state.outcome, state.counts.failed) == ("completed", 5)
    assert {line["error"]["code"] for line in await world.lines(state.error_file)} == {"storage_exceeded"}


async def test_the_models_that_are_asked_are_written_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class Asking(Lines):
        async def run(self, run: BatchRun, line: BatchLine) -> LineResult:
            await run.will_ask("large" if line.number == 7 else "small")
            return await super().run(run, line)

    batch_id = await world.batch(20)
    add = world.batches.add

    async def add_slowly(batch: str, fact: dict[str, Any], *token: int) -> None:
        await asyncio.sleep(0)  # the other lines ask meanwhile
        await add(batch, fact, *token)

    monkeypatch.setattr(world.batches, "add", add_slowly)
    await world.gateway("one", Asking())
    assert (await world.ended(batch_id)).asked == {"large", "small"}
    kinds = [json.loads(entry.fields[1])["kind"] for entry in await world.log.range(keys.batch_facts(batch_id))]
    assert kinds.count("asked") == 2


@pytest.mark.parametrize("outcome", ["cancelled", "expired"])
async def test_what_is_done_is_kept(world: World, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch_id = await world.batch(60)
    await world.gateway("one", Lines(held=10))
    await world.done(batch_id, 10)
    if outcome == "expired":
        monkeypatch.setattr(batch_runs, "now_s", lambda: now_s() + WINDOW_S)
    else:
        await world.batches.add(batch_id, {"kind": "cancelling", "time_s": now_s()})
    state = await world.ended(batch_id)
    assert (state.outcome, state.counts.completed, state.counts.failed) == (outcome, 10, 50)
    good, bad = await world.lines(state.output_file), await world.lines(state.error_file)
    assert sorted(line["custom_id"] for line in good) == sorted(f"id-{number}" for number in range(1, 11))
    assert sorted(line["custom_id"] for line in bad) == sorted(f"id-{number}" for number in range(11, 61))
    assert {line["error"]["code"] for line in bad} == {f"batch_{outcome}"}
    assert "job-11" in world.cancelled


async def test_no_tenant_waits_for_the_batches_of_another(world: World) -> None:
    held = [await world.batch(1, tenant="slow") for _ in range(batch_runs.MAX_DRIVEN + 2)]
    lines = ByTenant("slow")
    await world.gateway("one", lines)

    async def is_full() -> bool:
        return len(lines.ran) == batch_runs.MAX_DRIVEN

    await world.until(is_full)
    assert {state.id for state in lines.ran} == set(held[: batch_runs.MAX_DRIVEN])
    for _ in range(2):  # each one when the one before it has ended
        assert (await world.ended(await world.batch(3, tenant="other"))).counts.completed == 3
    assert (await world.ended(await world.batch(3, tenant="third"))).counts.completed == 3
    assert len([state for state in lines.ran if state.tenant == "slow"]) == batch_runs.MAX_DRIVEN


async def test_a_slot_goes_to_the_tenant_with_the_fewest(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runs, "MAX_DRIVEN", 2)
    for _ in range(3):
        await world.batch(1, tenant="a")
    await world.batch(1, tenant="b")
    lines = ByTenant("a", "b")
    await world.gateway("one", lines)

    async def is_full() -> bool:
        return len(lines.ran) == 2

    await world.until(is_full)
    assert [state.tenant for state in lines.ran] == ["a", "b"]


async def test_a_batch_that_cannot_be_read_stops_no_other(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """As one of a newer release."""
    unreadable = await world.batch(1)
    await world.log.append(keys.batch_facts(unreadable), [b"f", b"of another form"])
    await world.gateway("one", Lines())
    assert (await world.ended(await world.batch(2))).counts.completed == 2
    assert f"batch {unreadable} cannot be read" in caplog.text
    assert unreadable in await world.batches.active()


@pytest.mark.parametrize("outcome", ["cancelled", "expired"])
@pytest.mark.parametrize("knows", [True, False])
async def test_a_batch_that_waits_ends_without_a_slot(
    world: World, outcome: str, knows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when another gateway was asked to cancel it."""
    for _ in range(batch_runs.MAX_DRIVEN):
        await world.batch(1, tenant="slow")
    lines = ByTenant("slow")
    runs = await world.gateway("one", lines)

    async def is_full() -> bool:
        return len(lines.ran) == batch_runs.MAX_DRIVEN

    await world.until(is_full)
    waiting = await world.batch(2, tenant="slow")

    async def is_known() -> bool:
        return waiting in runs._waiting

    await world.until(is_known)
    if outcome == "expired":
        monkeypatch.setattr(world.batches, "state", _expired(world.batches.state, waiting))
    else:
        await world.batches.add(waiting, {"kind": "cancelling", "time_s": now_s()})
    if knows:
        runs.wake(waiting)
    state = await world.ended(waiting)
    assert (state.outcome, state.counts.failed, len(lines.ran)) == (outcome, 2, batch_runs.MAX_DRIVEN)
    assert len(await world.lines(state.error_file, "slow")) == 2


@pytest.mark.parametrize("failure", [RuntimeError("a defect that only these meet"), Unavailable("a part is away")])
@pytest.mark.parametrize("stops", [True, False])
async def test_batches_that_fail_again_and_again_let_others_have_their_turn(
    world: World, monkeypatch: pytest.MonkeyPatch, stops: bool, failure: Exception
) -> None:
    monkeypatch.setattr(batch_runs, "MAX_ENDING", 2)
    monkeypatch.setattr(batch_runs, "MAX_DRIVEN", 2)
    failing = [await world.batch(1, tenant="a") for _ in range(3)]
    good = await world.batch(2, tenant="a")
    if stops:
        for batch_id in (*failing, good):
            await world.batches.add(batch_id, {"kind": "cancelling", "time_s": now_s()})
    inputs = {(await world.batches.state(batch_id)).input_file for batch_id in failing}
    find = world.files.find

    async def find_some(file_id: str, tenant: str) -> Any:
        if file_id in inputs:
            raise failure
        return await find(file_id, tenant)

    monkeypatch.setattr(world.files, "find", find_some)
    await world.gateway("one", Lines())
    assert (await world.ended(good)).outcome == ("cancelled" if stops else "completed")
    assert set(await world.batches.active()) == set(failing)


def _expired(read: Any, batch_id: str) -> Any:
    """Reads states, that of one batch as of one whose window has ended."""

    async def state(asked: str) -> BatchState:
        found: BatchState = await read(asked)
        if asked == batch_id:
            found.expires_s = 1
        return found

    return state


@pytest.mark.parametrize("outcome", ["cancelled", "expired"])
async def test_lines_that_are_no_jobs_stop_too(world: World, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of embeddings, where the queue of their model is paused after the first of them."""

    class Paused:
        asked = ended = 0

        async def document(self, body: dict[str, Any], caller: Any, adjust: Any) -> dict[str, Any]:
            self.asked += 1
            if self.asked == 1:
                return {"usage": {"prompt_tokens": 1}}
            try:
                return await asyncio.Future()
            finally:
                self.ended += 1

    nothing: Any = None
    embeddings: Any = Paused()
    batch_id = await world.batch(40, url="/v1/embeddings")
    lines: Any = ModelLines(nothing, nothing, embeddings, nothing)
    await world.gateway("one", lines)
    await world.done(batch_id, 1)
    if outcome == "expired":
        monkeypatch.setattr(batch_runs, "now_s", lambda: now_s() + WINDOW_S)
    else:
        await world.batches.add(batch_id, {"kind": "cancelling", "time_s": now_s()})
    state = await world.ended(batch_id)
    assert (state.outcome, state.counts.completed, state.counts.failed) == (outcome, 1, 39)
    assert embeddings.ended == embeddings.asked - 1 > 0
    assert {line["error"]["code"] for line in await world.lines(state.error_file)} == {f"batch_{outcome}"}


async def test_a_result_that_was_written_twice_counts_once(world: World) -> None:
    batch_id = await world.batch(3)
    line = LineResult(2, "id-2", 200, {}, usage=(1, 1))
    for _ in range(2):
        await world.batches.add_result(batch_id, 2, True, line.usage, line.line(batch_id))
    lines = Lines()
    await world.gateway("one", lines)
    state = await world.ended(batch_id)
    assert sorted(lines.ran) == [1, 3]
    assert state.counts.completed == 3
    assert len(await world.lines(state.output_file)) == 3


async def test_a_gateway_that_ends_before_it_deletes_a_job_leaves_the_line_s_result(world: World) -> None:
    """As when it is killed: the next owner does not run the line again, and deletes its job."""
    first, second = Lines(), Lines()
    first.unstored = ("job-1",)
    second.deletes.set()
    batch_id = await world.batch(1)
    runs = await world.gateway("one", first)

    async def is_deleting() -> bool:
        return bool(first.asked_to_delete)

    await world.until(is_deleting)
    await runs.close()
    assert first.deleted == []
    await world.gateway("two", second)
    state = await world.ended(batch_id)
    assert (state.counts.completed, second.ran, second.deleted) == (1, [], ["job-1"])
    assert len(await world.lines(state.output_file)) == 1


async def test_a_gateway_that_is_not_the_owner_any_more_deletes_no_job(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner may wait for that job: it has read the results before."""
    add, waits = world.batches.add_result, asyncio.Event()
    came = asyncio.Event()

    async def add_late(*result: Any) -> None:
        came.set()
        await waits.wait()
        await add(*result)

    monkeypatch.setattr(batch_runs, "_CHECK_S", LIMIT_S)  # the first one does not notice that it was held for lost
    monkeypatch.setattr(world.batches, "add_result", add_late)
    first, second = Lines(held=1), Lines(held=0)  # the first one waits for its second line, so it ends nothing
    first.unstored = second.unstored = ("job-1",)
    first.deletes.set()
    second.deletes.set()
    batch_id = await world.batch(2)
    await world.gateway("one", first)
    await asyncio.wait_for(came.wait(), LIMIT_S)
    await world.log.end_beat("gateway", "one")
    await world.gateway("two", second)

    async def runs_again() -> bool:
        return second.ran == [1, 2]

    await world.until(runs_again)
    waits.set()

    async def is_kept() -> bool:
        return bool([number async for number, *_ in world.batches.results(batch_id)])

    await world.until(is_kept)
    second.gate.set()
    state = await world.ended(batch_id)
    assert (state.counts.completed, second.deleted) == (2, ["job-1", "job-1"])
    assert first.asked_to_delete == []


@pytest.mark.parametrize("finishes", [False, True], ids=["while it asks", "after its answer"])
@pytest.mark.parametrize("ends", [False, True], ids=["the batch goes on", "the batch has ended"])
async def test_a_gateway_that_stalled_deletes_the_jobs_that_the_owner_does_not_know(
    world: World, monkeypatch: pytest.MonkeyPatch, finishes: bool, ends: bool
) -> None:
    """It asked for a line that is not to be stored after the owner had its result and had deleted its job."""
    stalled, owner = Lines(held=0), Lines(held=1)
    stalled.unstored, owner.unstored = ("again",), ("job",)
    owner.deletes.set()
    batch_id = await world.batch(3)
    one = await world.gateway("one", stalled)
    while len(stalled.ran) < 3:
        await asyncio.sleep(0.001)
    owns, goes_on = world.batches.owns, asyncio.Event()

    async def owns_late(batch: str, token: int) -> bool:
        if batch in one._runs and token == one._runs[batch].token:
            await goes_on.wait()
        return await owns(batch, token)

    async def is_over() -> bool:
        return batch_id not in one._runs

    monkeypatch.setattr(world.batches, "owns", owns_late)
    await world.log.end_beat("gateway", "one")
    await world.gateway("two", owner)
    while owner.deleted != ["job"]:
        await asyncio.sleep(0.001)
    if ends:
        owner.gate.set()
        await world.ended(batch_id)
    if finishes:
        stalled.gate.set()
        while stalled._now:
            await asyncio.sleep(0.001)
    goes_on.set()
    await world.until(is_over)
    assert stalled.deleted == []
    # of the lines that go on the owner waits for the jobs: it finds those that there are
    assert sorted(stalled.forgotten) == ([1, 2, 3] if ends else [1])
    owner.gate.set()
    assert (await world.ended(batch_id)).counts.completed == 3


async def test_a_gateway_that_stalled_deletes_its_jobs_of_a_batch_that_ends_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results by which it knows its jobs are deleted at the end."""
    stalled, owner = Lines(held=0), Lines(held=1)
    stalled.unstored, owner.unstored = ("again",), ("job",)
    owner.deletes.set()
    batch_id = await world.batch(3)
    one = await world.gateway("one", stalled)
    while len(stalled.ran) < 3:
        await asyncio.sleep(0.001)
    owns, results, goes_on = world.batches.owns, world.batches.results, asyncio.Event()

    async def owns_late(batch: str, token: int) -> bool:
        if batch in one._runs and token == one._runs[batch].token:
            await goes_on.wait()
        return await owns(batch, token)

    async def results_late(batch: str) -> AsyncIterator[tuple[int, bool, tuple[int, int], bytes, list[str]]]:
        monkeypatch.setattr(world.batches, "results", results)
        owner.gate.set()
        await world.ended(batch)
        async for result in results(batch):
            yield result

    async def is_over() -> bool:
        return batch_id not in one._runs

    monkeypatch.setattr(world.batches, "owns", owns_late)
    await world.log.end_beat("gateway", "one")
    await world.gateway("two", owner)
    while owner.deleted != ["job"]:
        await asyncio.sleep(0.001)
    monkeypatch.setattr(world.batches, "results", results_late)
    goes_on.set()
    await world.until(is_over)
    assert sorted(stalled.forgotten) == [1, 2, 3]


# -- what a tenant may store -------------------------------------------------------------------------------------------


class Long(Lines):
    """Answers with a kilobyte, one line after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = asyncio.Lock()

    async def run(self, run: BatchRun, line: BatchLine) -> LineResult:
        async with self._turn:
            self.ran.append(line.number)
            await asyncio.sleep(0.005)
            return LineResult(line.number, line.custom_id, 200, {"text": "x" * 1000})


async def test_results_count_as_files_and_a_batch_stops_when_there_are_too_many(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps what is answered, and each line that is not asked says why. Other tenants go on."""
    monkeypatch.setattr(stored_objects, "MAX_TENANT_BYTES", 100_000)
    monkeypatch.setattr(batch_runs, "MAX_IN_FLIGHT", 4)
    lines = Long()
    batch_id, other_id = await world.batch(300, tenant="a"), await world.batch(20, tenant="b")
    runs = await world.gateway("one", lines)
    await world.done(batch_id, 10)
    assert await world.batches.result_bytes("a") >= 10_000
    state, other = await world.ended(batch_id), await world.ended(other_id)
    await runs.close()
    assert (other.outcome, other.counts.completed) == ("completed", 20)
    assert (state.outcome, state.counts.total) == ("completed", 300)
    found = await world.lines(state.output_file, "a")
    assert 40 <= len(found) == state.counts.completed < 100
    rest = await world.lines(state.error_file, "a")
    assert len(found) + len(rest) == 300
    assert {line["error"]["code"] for line in rest} == {"storage_exceeded"}
    assert await world.batches.result_bytes("a") == 0  # they are files now
    with pytest.raises(ApiError) as full:
        async with world.files.capacity("a", 1000):
            pass
    assert (full.value.status, full.value.code) == (429, "storage_exceeded")


async def test_results_that_become_files_are_not_counted_twice(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch beside, which looks at the space in that moment, does not stop."""
    written: list[int] = []
    ended = StoredBatches.ended

    async def end(batches: StoredBatches, batch_id: str) -> None:
        files = sum(record.size_bytes for record in await world.files.of_tenant("a"))
        written.append(files + await batches.result_bytes("a"))
        await ended(batches, batch_id)

    monkeypatch.setattr(StoredBatches, "ended", end)
    batch_id = await world.batch(20, tenant="a")
    before = sum(record.size_bytes for record in await world.files.of_tenant("a"))
    await world.gateway("one", Long())
    state = await world.ended(batch_id)
    output = await world.files.find(str(state.output_file), "a")
    assert output.size_bytes > 20_000
    assert written == [before + output.size_bytes]


async def test_uploads_and_batches_are_refused_while_results_take_all_the_space(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = await world.batch(3, tenant="a")
    await world.batches.report(batch_id, Counts(result_bytes=5000))
    monkeypatch.setattr(stored_objects, "MAX_TENANT_BYTES", 5000)
    with pytest.raises(ApiError) as full:
        async with world.files.capacity("a", 10, beside_bytes=await world.batches.result_bytes("a")):
            pass
    assert full.value.code == "storage_exceeded"
    assert "batches that run have results of 5000 bytes: delete files" in full.value.message
    writer = world.files.writer()
    await writer.write(b"x")
    with pytest.raises(ApiError):
        await world.files.end_upload(writer, "a", "in", "batch", beside_bytes=await world.batches.result_bytes("a"))
    with pytest.raises(ApiError, match="delete files"):
        await world.files.check_batch("a", 1, await world.batches.result_bytes("a"))
    await world.files.check_batch("b", 1, 0)


async def test_a_tenant_has_no_more_batches_than_files_for_their_output(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.batch(3, tenant="a")
    monkeypatch.setattr(stored_objects, "MAX_FILES", 5)
    await world.files.check_batch("a", 1, 0)  # 1 file, and 2 of each of two batches
    with pytest.raises(ApiError):
        await world.files.check_batch("a", 2, 0)
