"""`charonia jobs` on a log in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from charonia import keys
from charonia.clock import wall_ns
from charonia.errors import InternalError, NotFound
from charonia.facts.jobs import JobEnd, JobState
from charonia.operations.job_commands import Filter, list_jobs, place_of, read_jobs
from charonia.tensors import Tensor
from charonia.wire import pack_failure, pack_response

Ids = Callable[[int], bytes]


def public(job_id: bytes) -> str:
    return f"{job_id.hex()}.m"


async def listed(yard: Any, *words: str) -> list[str]:
    document, _, _ = await yard.run("jobs", "ls", *words)
    return [job["id"] for job in document["jobs"]]


async def test_ls_lists_active_jobs_before_ended_ones(yard: Any, ids: Ids) -> None:
    for number, age_s in ((1, 50), (2, 40), (3, 30), (4, 20)):
        await yard.job(ids(number), age_s=age_s)
    await yard.end(ids(1))
    await yard.end(ids(3), JobState.FAILED)

    assert await listed(yard) == [public(ids(number)) for number in (2, 4, 3, 1)]
    _, _, shown = await yard.run("jobs", "ls")
    assert shown.splitlines()[0].split() == [
        "ID",
        "STATE",
        "TENANT",
        "ATTEMPTS",
        "ACCEPTED",
        "ENDED",
        "BYTES",
        "RESULT",
    ]


async def test_ls_goes_on_after_a_job_until_all_are_seen(yard: Any, ids: Ids) -> None:
    for number in range(1, 8):
        await yard.job(ids(number), age_s=100 - number)
    for number in (2, 5, 6):
        await yard.end(ids(number))
    whole = await listed(yard)
    assert len(whole) == 7
    for limit in (1, 2, 3, 7):
        seen: list[str] = []
        after: list[str] = []
        while True:
            document, _, _ = await yard.run("jobs", "ls", "--limit", str(limit), *after)
            seen += [job["id"] for job in document["jobs"]]
            if not document["next"]:
                break
            after = ["--after", document["next"]]
        assert seen == whole


async def test_a_listing_that_may_read_only_so_much_says_where_to_go_on(yard: Any, ids: Ids) -> None:
    for number in range(1, 6):
        await yard.job(ids(number), age_s=60 - number)
    wanted, found, listings = Filter(tenant="nobody"), list[dict[str, Any]](), 0
    while True:
        listed = await list_jobs(yard.log, wanted, wall_ns() // 1000, 10, 2)
        found += listed["jobs"]
        listings += 1
        if listed["next"] is None:
            break
        wanted = replace(wanted, after=listed["next"])
    assert (found, listings) == ([], 3)


async def test_a_listing_goes_on_from_a_place_when_its_job_is_gone(yard: Any, ids: Ids) -> None:
    for number in range(1, 5):
        await yard.job(ids(number), age_s=60 - number)
    await yard.end(ids(1))
    now_us = 2**62
    seen: list[bytes] = []
    wanted = Filter()
    for _ in range(4):
        found, last = await read_jobs(yard.log, wanted, now_us, 10, 1)
        seen += [job.id for job in found]
        if last is not None:
            wanted = replace(wanted, after=place_of(last))
    assert seen == [ids(number) for number in (2, 3, 4, 1)]
    elsewhere = place_of(found[0])._replace(id=ids(9))  # no such job
    assert await read_jobs(yard.log, Filter(after=elsewhere), now_us, 10) == (found, None)


async def test_ls_filters_by_state_tenant_and_age(yard: Any, ids: Ids) -> None:
    await yard.job(ids(1), tenant="acme", age_s=100)
    await yard.job(ids(2), tenant="acme", age_s=10)
    await yard.job(ids(3), age_s=100)
    await yard.begin(ids(2))
    await yard.end(ids(3), JobState.EXPIRED)

    assert await listed(yard, "--state", "running") == [public(ids(2))]
    assert await listed(yard, "--state", "queued", "--state", "expired") == [public(ids(1)), public(ids(3))]
    assert await listed(yard, "--tenant", "acme", "--older-than", "1m") == [public(ids(1))]
    assert await listed(yard, "--tenant", "") == [public(ids(3))]
    assert await listed(yard, "--model", "idle") == []


async def test_show_and_timeline_tell_a_jobs_life(yard: Any, ids: Ids) -> None:
    await yard.job(ids(1), webhook={"url": "http://hooks"}, digest=b"\xff")
    await yard.job(ids(2))
    document, _, shown = await yard.run("jobs", "show", public(ids(2)))
    assert (document["state"], document["position"], document["queue_length"]) == ("queued", 2, 2)
    assert "position 2 of 2" in shown

    await yard.begin(ids(1))
    await yard.end(ids(1), batch_rows=4)
    document, _, _ = await yard.run("jobs", "show", public(ids(1)))
    assert (document["state"], document["position"]) == ("succeeded", 0)
    assert document["about"] == {"webhook": {"url": "http://hooks"}, "digest": "ff"}
    document, _, shown = await yard.run("jobs", "timeline", public(ids(1)))
    assert [event["event"] for event in document["events"]] == ["accepted", "batched", "succeeded"]
    assert document["events"][1]["detail"] == {"executor": "executor-1", "batch_id": "b1"}
    assert "batch_rows=4" in shown
    json.dumps(document)


@pytest.mark.parametrize("text", ["nonsense", "00" * 16, "00" * 16 + ".m"])
async def test_an_unknown_job_is_said_to_be_unknown(yard: Any, text: str) -> None:
    for action in ("show", "timeline", "result", "wait"):
        with pytest.raises(NotFound, match="is unknown to this log"):
            await yard.run("jobs", action, text)


async def test_the_result_of_a_job_is_its_outputs(yard: Any, ids: Ids, tmp_path: Path) -> None:
    await yard.job(ids(1))
    document, well, shown = await yard.run("jobs", "result", public(ids(1)))
    assert not well
    assert "the job has not ended" in shown

    await yard.end(ids(1))
    document, well, _ = await yard.run("jobs", "result", public(ids(1)))
    assert well
    values = [float(number) for number in range(12)]
    assert document["outputs"] == [{"name": "Y", "datatype": "FP32", "shape": [1, 12], "data": values}]
    document, _, _ = await yard.run("jobs", "result", public(ids(1)), "--out", str(tmp_path / "new"))
    assert np.load(document["files"][0]).tolist() == [values]


async def test_the_result_of_a_job_with_several_responses(yard: Any, ids: Ids, tmp_path: Path) -> None:
    await yard.job(ids(1))
    await yard.begin(ids(1))

    def packed(index: int, final: bool) -> bytes:
        outputs = [] if final else [Tensor.of("Y", np.array([index], np.int32))]
        return pack_response(ids(1), "m", 1, outputs, {}, final=final, place=(1, index))

    failed = pack_failure(ids(1), "m", 1, InternalError("this one"), final=False, place=(1, 1))
    assert await yard.log.add_job_responses("m", ids(1), 1, 0, [packed(0, False), failed])
    end = JobEnd(JobState.SUCCEEDED, packed(2, True))
    await yard.log.settle("m", [(ids(1), 1)], None, [], ends={ids(1): end})
    document, well, shown = await yard.run("jobs", "result", public(ids(1)))
    assert well
    assert document["responses"] == [
        {"attempt": 1, "index": 0, "outputs": [{"name": "Y", "datatype": "INT32", "shape": [1], "data": [0]}]},
        {"attempt": 1, "index": 1, "error": "this one", "code": "INTERNAL"},
        {"attempt": 1, "index": 2, "outputs": []},
    ]
    assert "this one" in shown
    document, _, _ = await yard.run("jobs", "result", public(ids(1)), "--out", str(tmp_path / "new"))
    assert np.load(document["responses"][0]["files"][0]).tolist() == [0]


async def test_a_job_that_failed_says_why(yard: Any, ids: Ids) -> None:
    await yard.job(ids(1))
    await yard.end(ids(1), JobState.FAILED, error="the instance died")
    document, well, _ = await yard.run("jobs", "result", public(ids(1)))
    assert (well, document["error"]) == (False, "the instance died")
    document, well, shown = await yard.run("jobs", "wait", public(ids(1)))
    assert (well, document["state"]) == (False, "failed")
    assert "the instance died" in shown


async def test_cancel_by_id_says_what_became_of_each(yard: Any, ids: Ids) -> None:
    await yard.job(ids(1))
    await yard.job(ids(2))
    await yard.end(ids(2))
    words = [public(ids(number)) for number in (1, 2, 3)]

    document, well, _ = await yard.run("jobs", "cancel", *words)

    assert not well
    assert document["cancelled"] == words[:1]
    assert document["ended"] == [{"id": words[1], "state": "succeeded"}]
    assert document["missing"] == words[2:]
    assert (await yard.log.job("m", ids(1))).state is JobState.CANCELLED
    document, well, _ = await yard.run("jobs", "result", words[0])
    assert (well, document["error"]) == (False, "the job was cancelled by an operator")


async def test_cancel_all_takes_active_jobs_that_match_and_no_requests(yard: Any, ids: Ids) -> None:
    await yard.job(ids(1), tenant="acme")
    await yard.job(ids(2), tenant="other")
    await yard.job(ids(3), tenant="acme", level=3)
    await yard.begin(ids(3))
    await yard.requests(ids(4))
    document, _, _ = await yard.run("jobs", "cancel", "--all", "--tenant", "acme")
    assert sorted(document["cancelled"]) == [public(ids(1)), public(ids(3))]
    assert await yard.log.unsettled("m", [ids(2), ids(4)]) == [0, 0]


async def test_wait_returns_when_the_job_ends(yard: Any, ids: Ids) -> None:
    await yard.job(ids(1))
    waiting = asyncio.create_task(yard.run("jobs", "wait", public(ids(1))))
    await asyncio.sleep(0)
    assert not waiting.done()
    await yard.end(ids(1))
    document, well, _ = await asyncio.wait_for(waiting, 30)
    assert (well, document["state"]) == (True, "succeeded")


async def test_wait_ends_with_its_time(yard: Any, ids: Ids) -> None:
    await yard.job(ids(1))
    document, well, _ = await yard.run("jobs", "wait", public(ids(1)), "--timeout", "10ms")
    assert (well, document["state"]) == (False, "queued")


async def test_a_cancelled_job_whose_carrier_is_elsewhere_in_time_is_found(yard: Any, ids: Ids) -> None:
    """Entry ids are the log's clock, acceptance the gateway's: they may differ by any amount."""
    await yard.job(ids(1), age_s=-1e6)
    assert await yard.log.range(keys.queue("m", 0))
    document, well, _ = await yard.run("jobs", "cancel", public(ids(1)))
    assert well
    assert document["cancelled"]
