"""How the end of a batch gets into the log, whatever the log says to the first try."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from memory_log.log import MemoryLog

from charonia import keys
from charonia.errors import LogUnavailable
from charonia.eventlog import port
from charonia.eventlog.local_link import LocalLink
from charonia.eventlog.payloads import BY_REFERENCE_BYTES, PayloadDirectory
from charonia.eventlog.port import Entry, Limits, Reply, Settled
from charonia.facts.events import BatchFinished, Fact, LaneOpened, RequestsRescheduled, facts_of
from charonia.facts.jobs import JobState
from charonia.facts.journal import read_facts
from charonia.inference import RECEIPT
from charonia.tensors import Tensor
from charonia.traces.contexts import TIMESTAMPS, Context
from charonia.wire import (
    FLAG_JOURNALLED,
    FLAG_REPLY_BY_REFERENCE,
    FLAG_TIMED,
    FLAG_TRACED,
    BatchHeader,
    pack_request,
    pack_response,
    records_of,
    request_meta,
    unpack_request,
    unpack_response,
)
from executors.batches.assembly import RequestPlan
from executors.batches.batch_payloads import BatchPayloads
from executors.batches.batch_results import Executed, Execution
from executors.metrics import ExecutorMetrics
from executors.running.instance_pool import LoadedVersion
from executors.running.submitted_batch import SubmittedBatch
from executors.settling.settler import JournalledStarts, Outcome, OwnerReports, Settler
from executors.settling.usage_counts import UsageCounts

REQUEST_ID = b"r" * 16


class TurnedAway(MemoryLog):
    """A log that takes no settlement at once, as that of a cluster, or loses the answer to it."""

    def __init__(self, *, loses: bool) -> None:
        super().__init__()
        self._loses = loses

    def settle_now(
        self,
        model: str,
        requests: Sequence[tuple[bytes, int]],
        statistics: tuple[bytes, Mapping[str, int]] | None,
        replies: Sequence[Reply],
        facts: Sequence[Reply],
        done: Settled,
        **_more: object,
    ) -> bool:
        if self._loses:
            done(LogUnavailable("the connection was lost"))
        return self._loses


async def settle(
    log: MemoryLog,
    directory: PayloadDirectory,
    answer: bytes,
    flags: int = 0,
    *,
    again: bool = False,
    link: LocalLink | None = None,
    done: Callable[[Outcome | None], None] = lambda _outcome: None,
) -> None:
    """As the intake does it, which hears of the end by `done`."""
    packed = pack_request(
        REQUEST_ID,
        b"gateway-1",
        b"",
        request_meta(1, "", [Tensor.of("x", np.zeros((1, 1), np.float32))], (), {RECEIPT: True}),
        [b"\0" * 4],
        rows=1,
        signature=0,
        level=0,
        accepted_ns=1,
        flags=FLAG_REPLY_BY_REFERENCE | flags,
        trace=Context(TIMESTAMPS, bytes(16), bytes(8)) if flags & FLAG_TRACED else None,
    )
    record = unpack_request(packed)
    report_to = keys.facts("m") if link is None else b""
    job = SubmittedBatch(
        [record], lambda *_: None, BatchHeader("b-1", "m", 1, "", 1, (0,), report_to), b"1-0", record.flags
    )
    executed = Executed([answer], [Execution((0,), 1, 20, 90, 1, 30, 1)], rescheduled={0} if again else set())
    incarnation = cast(LoadedVersion, SimpleNamespace(model="m", version=1, content_hash="h"))
    starts = JournalledStarts(log, "executor-1")
    reports = OwnerReports(log, link)
    usage = UsageCounts(ExecutorMetrics())
    settler = Settler(log, "executor-1", ExecutorMetrics(), BatchPayloads(log, directory), starts, reports, usage)
    outcomes: list[Outcome | None] = []
    if flags & FLAG_JOURNALLED:
        starts.watch(job)
        job.planned = [(0, cast(RequestPlan, None))]

    def heard(outcome: Outcome | None) -> None:
        outcomes.append(outcome)
        done(outcome)

    taken = settler.settle_plain(job, executed, incarnation, heard)
    while taken and not outcomes:
        await asyncio.sleep(0)
    if not taken:
        await settler.settle(job, executed, incarnation)
    elif outcomes[0] is not None:
        await settler.settle(job, executed, incarnation, outcome=outcomes[0])
    starts.close()


@pytest.mark.parametrize("what", ["plain", "turned away", "lost", "fenced"])
async def test_a_large_answer_is_put_beside_the_log_once(tmp_path: Path, what: str) -> None:
    gateway, executor = (PayloadDirectory(str(tmp_path), name) for name in ("gateway-1", "executor-1"))
    gateway.open()
    executor.open()
    log = MemoryLog() if what in ("plain", "fenced") else TurnedAway(loses=what == "lost")
    await log.accept("m", 0, 0, [(REQUEST_ID, 4)], [b"r", b""], Limits(0, 0))
    if what == "fenced":
        await log.settle("m", [(REQUEST_ID, 0)], None, [])
    data = np.zeros(BY_REFERENCE_BYTES, np.uint8)
    await settle(log, executor, pack_response(REQUEST_ID, "m", 1, [Tensor.of("y", data)], {}))
    assert await log.range(keys.replies("gateway-1"))
    beside = [file for file in (tmp_path / "gateway-1").iterdir() if file.name != "token"]
    assert len(beside) == 1
    assert await log.pending("m") == (0, 0)


@pytest.mark.parametrize("what", ["plain", "turned away", "lost", "fenced"])
async def test_the_journal_hears_of_a_short_batch_once(tmp_path: Path, what: str) -> None:
    log = MemoryLog() if what in ("plain", "fenced") else TurnedAway(loses=what == "lost")
    requests = [(REQUEST_ID, 4)]
    await log.accept("m", 0, 0, requests, [b"r", b""], Limits(0, 0), journalled=True)
    if what == "fenced":
        await log.settle("m", [(REQUEST_ID, 0)], None, [], outcomes=b"c")
    directory = PayloadDirectory(str(tmp_path), "executor-1")
    directory.open()
    await settle(log, directory, pack_response(REQUEST_ID, "m", 1, [], {}), FLAG_JOURNALLED)
    told = [fact for entry in await log.range(keys.journal("m")) for fact in read_facts(entry.fields)]
    # who comes too late has run all the same
    expected = ["accepted", "ended", "started"] if what == "fenced" else ["accepted", "started", "ended"]
    assert [fact.kind for fact in told] == expected
    assert await log.pending("m") == (0, 0)


async def test_what_goes_on_is_told_in_one_entry_with_its_batchs_end(tmp_path: Path) -> None:
    """Of two entries an owner that is replaced might read the first, and its successor only the second."""
    log = MemoryLog()
    directory = PayloadDirectory(str(tmp_path), "executor-1")
    directory.open()
    await log.accept("m", 0, 0, [(REQUEST_ID, 4)], [b"r", b""], Limits(0, 0))
    await log.delete_stream(keys.facts("m"))  # that there is a lane
    await settle(log, directory, b"", again=True)
    (entry,) = await log.range(keys.facts("m"))
    assert facts_of(entry) == [
        RequestsRescheduled("executor-1", "b-1", REQUEST_ID),
        BatchFinished("executor-1", "b-1"),
    ]
    assert await log.unsettled("m", [REQUEST_ID]) == [0]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("what", ["plain", "turned away", "lost", "fenced"])
async def test_an_owner_in_this_process_hears_of_an_end_once_and_no_stream_does(
    tmp_path: Path, what: str, again: bool
) -> None:
    log = MemoryLog() if what in ("plain", "fenced") else TurnedAway(loses=what == "lost")
    await log.accept("m", 0, 0, [(REQUEST_ID, 4)], [b"r", b""], Limits(0, 0))
    if what == "fenced":
        await log.settle("m", [(REQUEST_ID, 0)], None, [])
    directory = PayloadDirectory(str(tmp_path), "executor-1")
    directory.open()
    link, told = LocalLink("executor-1"), list[Fact]()
    link.reports["m"].follow(lambda fields: told.extend(facts_of(Entry(b"", list(fields)))))
    answer = b"" if again else pack_response(REQUEST_ID, "m", 1, [], {})
    await settle(log, directory, answer, again=again, link=link)
    assert [type(fact) for fact in told] == [RequestsRescheduled, BatchFinished] if again else [BatchFinished]
    assert [type(fact) for entry in await log.range(keys.facts("m")) for fact in facts_of(entry)] == [LaneOpened]
    assert await log.range(b"") == []


async def test_an_owner_hears_of_a_settlement_although_its_executor_fails_over_it(tmp_path: Path) -> None:
    log, heard = MemoryLog(), asyncio.Event()
    await log.accept("m", 0, 0, [(REQUEST_ID, 4)], [b"r", b""], Limits(0, 0))
    directory = PayloadDirectory(str(tmp_path), "executor-1")
    directory.open()
    link = LocalLink("executor-1")
    link.reports["m"].follow(lambda _fields: heard.set())
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: failures.append(context["exception"]))
    failure = KeyError("what is counted")

    def fail(_outcome: object) -> None:
        raise failure

    await settle(log, directory, pack_response(REQUEST_ID, "m", 1, [], {}), link=link, done=fail)
    await asyncio.wait_for(heard.wait(), 30)
    assert failures == [failure]


async def test_a_settlement_that_was_not_recorded_is_not_told_to_the_process(tmp_path: Path) -> None:
    class Lost(TurnedAway):
        async def settle(self, *_: object, **__: object) -> list[bool]:
            raise LogUnavailable("lost")

    log, told = Lost(loses=False), list[object]()
    directory = PayloadDirectory(str(tmp_path), "executor-1")
    directory.open()
    link = LocalLink("executor-1")
    link.reports["m"].follow(told.append)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await settle(log, directory, pack_response(REQUEST_ID, "m", 1, [], {}), link=link)
    assert told == []


@pytest.mark.parametrize("flags", [0, FLAG_JOURNALLED, FLAG_TIMED | FLAG_TRACED])
@pytest.mark.parametrize("what", ["plain", "turned away", "lost"])
async def test_an_answer_that_finds_no_room_and_is_too_large_for_the_log_is_a_failure_once(
    monkeypatch: pytest.MonkeyPatch, what: str, flags: int
) -> None:
    monkeypatch.setattr(port, "MAX_RECORD_BYTES", BY_REFERENCE_BYTES)
    log = MemoryLog() if what == "plain" else TurnedAway(loses=what == "lost")
    journalled = bool(flags & FLAG_JOURNALLED)
    await log.accept("m", 0, 0, [(REQUEST_ID, 4)], [b"r", b""], Limits(0, 0), journalled=journalled)
    answer = pack_response(REQUEST_ID, "m", 1, [Tensor.of("y", np.zeros(BY_REFERENCE_BYTES, np.uint8))], {})
    await settle(log, PayloadDirectory("", "executor-1"), answer, flags)

    (entry,) = await log.range(keys.replies("gateway-1"))
    (response,) = [unpack_response(record) for record in records_of(entry.fields)]
    assert response.error is not None
    assert re.match(r"the answer of model 'm' has \d+ bytes, which is more than the log takes", response.error.message)
    assert await log.pending("m") == (0, 0)
    counted = await log.statistics(keys.statistics("m", 1, "h"))
    assert (counted["fail_count"], "success_count" in counted) == (1, False)
    if flags & FLAG_TRACED:
        assert response.report is not None
        assert response.report.error == response.error.message
        assert json.loads(response.error.receipt)["failed"] is True
    told = [fact for one in await log.range(keys.journal("m")) for fact in read_facts(one.fields)]
    assert [fact.outcomes for fact in told if fact.kind == "ended"] == ([(JobState.FAILED,)] if journalled else [])
