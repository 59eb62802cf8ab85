"""`charonia audit` on a log in memory: the journal against the rest of the log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from charonia import keys
from charonia.eventlog.port import ProgressPart
from charonia.facts.jobs import JobState

Ids = Callable[[int], bytes]


async def rules(yard: Any, *words: str) -> list[str]:
    document, clean, _ = await yard.run("audit", *words)
    assert clean == (not document["findings"])
    assert clean == document["clean"]
    return [finding["rule"] for finding in document["findings"]]


async def test_a_log_in_order_is_clean(yard: Any, ids: Ids) -> None:
    await yard.job(ids(1))
    await yard.job(ids(2))
    await yard.requests(ids(3), ids(4), journalled=True)
    await yard.requests(ids(5))
    await yard.begin(ids(1), ids(3))
    await yard.begin(ids(1), attempt=2)
    await yard.end(ids(1), attempt=2)
    await yard.end(ids(4), JobState.EXPIRED)

    document, clean, shown = await yard.run("audit", "--model", "m")

    assert clean
    (model,) = document["models"]
    assert (model["complete"], model["accepted"], model["unfinished"]) == (True, 4, 2)
    assert (model["ended"], model["retried"]) == ({"succeeded": 1, "expired": 1}, 1)
    assert [row["id"] for row in model["oldest_unfinished"]] == [ids(2).hex(), ids(3).hex()]
    assert shown.endswith("clean\n")
    assert [row["model"] for row in (await yard.run("audit"))[0]["models"]] == ["idle", "m"]


async def test_an_end_that_the_journal_does_not_have_is_found(yard: Any, ids: Ids) -> None:
    await yard.job(ids(1))
    await yard.log.settle("m", [(ids(1), 0)], None, [])
    assert await rules(yard, "--journal-only") == []
    # the settlement said nothing of the job either: it is listed as active and is settled
    assert await rules(yard) == ["end_unrecorded"]


async def test_an_unfinished_request_that_the_journal_lost_is_found(yard: Any, ids: Ids) -> None:
    await yard.job(ids(1), age_s=100)
    await yard.job(ids(2), age_s=10)
    entries = await yard.log.range(keys.journal("m"))
    await yard.log.delete_entries(keys.journal("m"), [entries[0].id])
    document, _, shown = await yard.run("audit")
    assert [(row["rule"], row["request"]) for row in document["findings"]] == [("trimmed_unfinished", ids(1).hex())]
    assert "1 findings" in shown
    assert document["models"][1]["findings"] == {"trimmed_unfinished": 1}


async def test_a_job_that_nothing_carries_is_found(yard: Any, ids: Ids) -> None:
    await yard.job(ids(1))
    await yard.log.delete_stream(keys.queue("m", 0))
    assert await rules(yard) == ["uncarried"]


async def test_progress_of_an_ended_request_is_found(yard: Any, ids: Ids, monkeypatch: pytest.MonkeyPatch) -> None:
    await yard.job(ids(1))
    await yard.log.append_progress("m", [ProgressPart(ids(1), 1, 0, [b"a"])])
    assert await rules(yard) == []
    read = yard.log.progress_ids

    async def one_more(model: str) -> list[bytes]:
        return [*await read(model), *([ids(2)] if model == "m" else [])]

    monkeypatch.setattr(yard.log, "progress_ids", one_more)
    document, _, _ = await yard.run("audit")
    assert [(row["rule"], row["request"]) for row in document["findings"]] == [("progress_left", ids(2).hex())]


async def test_progress_of_a_request_that_ends_during_the_audit_is_no_finding(
    yard: Any, ids: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    await yard.job(ids(1))
    await yard.log.append_progress("m", [ProgressPart(ids(1), 1, 0, [b"a"])])
    read = yard.log.progress_ids

    async def then_it_ends(model: str) -> list[bytes]:
        found: list[bytes] = await read(model)
        if found:
            await yard.end(ids(1))
        return found

    monkeypatch.setattr(yard.log, "progress_ids", then_it_ends)
    assert await rules(yard) == []


async def test_after_a_trim_older_requests_are_no_findings(yard: Any, ids: Ids) -> None:
    await yard.job(ids(1))
    await yard.begin(ids(1))
    await yard.end(ids(1))
    await yard.job(ids(2))
    await yard.log.set_retention("m", size_bytes=0, journal_s=0, journal_size_bytes=1)
    entries = await yard.log.range(keys.journal("m"))
    assert await yard.log.trim_journal("m", entries[2].id) == 2

    document, clean, _ = await yard.run("audit")

    assert clean
    assert (document["models"][1]["complete"], document["models"][1]["earlier"]) == (False, 1)


async def test_since_begins_later(yard: Any, ids: Ids) -> None:
    await yard.job(ids(1), age_s=3600)
    assert await rules(yard, "--since", "2099-01-01T00:00") == []
    document, clean, _ = await yard.run("audit", "--since", "2099-01-01T00:00", "--model", "m")
    assert clean
    assert document["models"][0]["entries"] == 0


async def test_findings_are_cut_and_counted(yard: Any, ids: Ids) -> None:
    for _ in range(5):
        await yard.log.append(keys.journal("m"), [b"k", b"nonsense-without-ids"])
        await yard.log.append(keys.journal("m"), [b"k", b"ended"])
    document, clean, shown = await yard.run("audit", "--model", "m", "--max-findings", "2")
    assert not clean
    assert len(document["findings"]) == 2
    assert document["models"][0]["findings"] == {"unreadable": 5}
    assert "3 more findings were not printed" in shown
