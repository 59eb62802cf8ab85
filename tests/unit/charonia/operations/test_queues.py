"""`charonia queue` on a log in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from batcher.housekeeping.adaptive_report import AdaptiveReport
from batcher.scheduling.queues.adaptive_batching import AdaptiveBatching, Choice
from batcher.scheduling.queues.dynamic_batching import BatchRules
from batcher.scheduling.stateless.scheduler import ModelScheduler
from charonia import keys
from charonia.errors import Cancelled, NotFound
from charonia.facts.events import QueueCommanded, RequestsEnded, facts_of
from charonia.facts.jobs import JobState
from charonia.wire import records_of, unpack_response

Ids = Callable[[int], bytes]


async def test_ls_counts_what_is_unsettled_in_each_lane(yard: Any, ids: Ids) -> None:
    await yard.requests(ids(1), ids(2), age_s=90)
    await yard.job(ids(3), level=2, lane=5, tenant="acme", age_s=30)
    await yard.job(ids(4), level=2, lane=5, tenant="acme")
    await yard.begin(ids(3))
    await yard.log.settle("m", [(ids(2), 0)], None, [])

    document, well, shown = await yard.run("queue", "ls")

    assert well
    totals = {row["model"]: row for row in document["models"]}
    assert (totals["m"]["requests"], totals["idle"]["requests"]) == (3, 0)
    assert totals["m"]["tenants"]["acme"]["requests"] == 2
    assert (totals["m"]["owner"], totals["m"]["paused"]) == ("batcher-1", False)
    lanes = [
        (row["level"], row["lane"], row["requests"], row["begun"], row["oldest_age_s"]) for row in document["queues"]
    ]
    assert lanes == [(0, 0, 1, 0, 90.0), (2, 5, 2, 1, 30.0)]
    assert "1m30s" in shown
    assert "acme=2" in shown


async def test_calls_that_are_no_jobs_have_tenants_too(yard: Any, ids: Ids) -> None:
    await yard.requests(ids(1), ids(2), tenant="acme")
    await yard.job(ids(3), tenant="acme")
    await yard.requests(ids(4), tenant="umbrella")
    await yard.requests(ids(5))

    document, _, shown = await yard.run("queue", "ls", "--model", "m")
    tenants = document["models"][0]["tenants"]
    assert {name: counts["requests"] for name, counts in tenants.items()} == {"acme": 3, "umbrella": 1}
    assert "acme=3" in shown

    document, _, _ = await yard.run("queue", "inspect", "m")
    assert [row["tenant"] for row in document["queue"]] == ["acme", "acme", "acme", "umbrella", ""]


async def test_ls_of_one_model_leaves_the_others_out(yard: Any) -> None:
    document, _, _ = await yard.run("queue", "ls", "--model", "idle")
    assert [row["model"] for row in document["models"]] == ["idle"]


async def test_inspect_shows_requests_in_order(yard: Any, ids: Ids) -> None:
    await yard.job(ids(3), level=1, tenant="acme", age_s=7)
    await yard.requests(ids(1), ids(2))
    await yard.begin(ids(3), attempt=2)

    document, _, shown = await yard.run("queue", "inspect", "m", "--limit", "2")

    assert [row["id"] for row in document["queue"]] == [ids(1).hex(), ids(2).hex()]
    document, _, _ = await yard.run("queue", "inspect", "m")
    row = document["queue"][2]
    assert row["job"] == f"{ids(3).hex()}.m"
    assert (row["tenant"], row["level"], row["attempt"], row["age_s"], row["deadline_s"]) == ("acme", 1, 2, 7.0, 5.0)
    assert row["client_id"] == "caller's id"
    assert "m: 3 requests" in shown


async def test_what_adaptive_batching_chose_is_shown(yard: Any) -> None:
    document, _, _ = await yard.run("queue", "inspect", "m")
    assert document["adaptive"] == {}
    batching = AdaptiveBatching(BatchRules(True, 8, frozenset((8,)), 8, 0, False, 40_000_000))
    scheduler = ModelScheduler("p")
    scheduler.adaptive = lambda: {3: batching}  # type: ignore[method-assign]
    report = AdaptiveReport(yard.log, "m")
    await report.look(scheduler)
    batching.choice = Choice("in reach", 4, 12_345_678, 8)
    await report.look(scheduler)
    document, _, shown = await yard.run("queue", "inspect", "m")
    assert document["adaptive"] == {
        "3": {"state": "in reach", "size": 4, "delay_us": 12345, "rows_per_s": 0.0, "target_ms": 40.0}
    }
    assert (
        "version 3: batches from 4 rows on, after 12.3 ms at the latest, at 0 rows/s: the target of 40 ms is in reach"
    ) in shown


async def test_an_unknown_model_is_said_to_be_unknown(yard: Any) -> None:
    for line in (
        "queue ls --model none",
        "queue inspect none",
        "queue pause none",
        "queue cancel none --all",
        "audit --model m --model none",
    ):
        with pytest.raises(NotFound, match="model 'none' is unknown to this log"):
            await yard.run(*line.split())


async def test_pause_and_resume_are_remembered_and_told_to_the_owner(yard: Any) -> None:
    document, _, shown = await yard.run("queue", "pause", "m")
    assert document == {"model": "m", "paused": True, "was_paused": False, "owner": ""}
    assert shown == "m is paused; no batcher owns it now\n"
    assert await yard.log.paused("m")
    await yard.run("queue", "resume", "m")
    assert not await yard.log.paused("m")
    facts = [fact for entry in await yard.log.range(keys.facts("m")) for fact in facts_of(entry)]
    assert facts == [QueueCommanded("pause"), QueueCommanded("resume")]


async def test_cancel_settles_tells_the_owner_and_answers_who_waits(yard: Any, ids: Ids) -> None:
    await yard.requests(ids(1), ids(2), journalled=True)
    await yard.job(ids(3))
    await yard.begin(ids(3), attempt=4)

    document, well, _ = await yard.run("queue", "cancel", "m", "--id", ids(1).hex(), "--id", f"{ids(3).hex()}.m")

    assert well
    assert sorted(document["cancelled"]) == [ids(1).hex(), ids(3).hex()]
    assert await yard.log.unsettled("m", [ids(1), ids(2), ids(3)]) == [-1, 0, -1]
    job = await yard.log.job("m", ids(3))
    assert job.state is JobState.CANCELLED
    assert job.events[-1].detail["by"] == "operator"
    facts = [f for e in await yard.log.range(keys.facts("m")) for f in facts_of(e) if isinstance(f, RequestsEnded)]
    assert sorted(b"".join(fact.ids for fact in facts)) == sorted(ids(1) + ids(3))
    replies = await yard.log.range(keys.replies("gateway-1"))
    answers = [unpack_response(record) for entry in replies for record in records_of(entry.fields)]
    assert {answer.id for answer in answers} == {ids(1), ids(3)}
    assert all(isinstance(answer.error, Cancelled) for answer in answers)
    audit, clean, _ = await yard.run("audit")
    assert clean, audit


async def test_cancel_takes_what_is_old_enough_and_of_the_level(yard: Any, ids: Ids) -> None:
    await yard.requests(ids(1), age_s=100)
    await yard.requests(ids(2), age_s=5)
    await yard.requests(ids(3), level=1, age_s=100)
    document, _, shown = await yard.run("queue", "cancel", "m", "--all", "--older-than", "1m", "--level", "0")
    assert document["cancelled"] == [ids(1).hex()]
    assert shown == "1 cancelled\n"


async def test_cancel_of_what_is_not_there_fails(yard: Any, ids: Ids) -> None:
    document, well, _ = await yard.run("queue", "cancel", "m", "--id", ids(9).hex())
    assert not well
    assert document["missing"] == [ids(9).hex()]
