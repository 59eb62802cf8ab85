"""The story of a request from records of every kind: what happened, with whom, and why it waited."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from charonia.console.stories.answer_delivery import WebhookCall
from charonia.console.stories.request_story import History, Story, explain
from charonia.facts.events import ProcessLeft, VersionHeld, VersionLoaded
from charonia.facts.jobs import DeliveryNote, JobEvent, JobState
from charonia.facts.journal import JournalFact

ME = bytes(16)
START_US = 1_000_000_000
MS = 1_000


def other(number: int) -> bytes:
    return bytes([number]) * 16


def events(*happened: tuple[str, int, Mapping[str, Any]]) -> list[JobEvent]:
    return [JobEvent(at + 1, kind, START_US + ms * MS, detail) for at, (kind, ms, detail) in enumerate(happened)]


def batched(ms: int, batch: str = "b1") -> tuple[str, int, Mapping[str, Any]]:
    return "batched", ms, {"executor": "e1", "batch_id": batch}


def succeeded(ms: int, start_ms: int) -> tuple[str, int, Mapping[str, Any]]:
    detail = {"start_us": START_US + start_ms * MS, "infer_us": (ms - start_ms) * MS, "batch_rows": 2}
    return "succeeded", ms, detail


def story(**known: Any) -> Story:
    return explain(History(ME, START_US, START_US + 60_000 * MS, "m", **known))


def queue_reasons(told: Story) -> list[str]:
    return [reason for one in told.stretches if one.kind == "queue" for reason in one.reasons]


def test_the_time_of_a_job_is_divided_into_queue_executor_and_run() -> None:
    told = story(events=events(("accepted", 0, {}), batched(30), succeeded(100, 40)))
    assert [(one.kind, one.lasted_us // MS) for one in told.stretches] == [("queue", 30), ("executor", 10), ("run", 60)]
    assert (told.state, told.total_us) == ("succeeded", 100 * MS)
    assert [one.kind for one in told.moments] == ["accepted", "batched", "executed", "succeeded"]
    assert told.delivery.endswith("no caller is known to have asked for it.")
    assert told.verdict.startswith("Most of the time, 60 ms of 100 ms, was spent in the model")


def test_a_wait_behind_other_requests_counts_those_that_were_served_meanwhile() -> None:
    journal = [
        (START_US - 90 * MS, JournalFact("accepted", (other(1), other(2), other(3)))),
        (START_US - 50 * MS, JournalFact("ended", (other(3),), (1,), (JobState.SUCCEEDED,))),
        (START_US, JournalFact("accepted", (ME,))),
        (START_US + 5 * MS, JournalFact("accepted", (other(4),))),
        (START_US + 20 * MS, JournalFact("ended", (other(1), other(2)), (1, 1), (JobState.SUCCEEDED,) * 2)),
        (START_US + 25 * MS, JournalFact("ended", (other(4),), (1,), (JobState.SUCCEEDED,))),
    ]
    told = story(events=events(("accepted", 0, {}), batched(300), succeeded(310, 301)), journal=journal)
    assert queue_reasons(told) == ["2 requests accepted before it were served first"]
    assert "in the queue: 2 requests" in told.verdict
    cut = story(events=events(("accepted", 0, {}), batched(300)), journal=journal, journal_cut=True)
    assert queue_reasons(cut)[0].startswith("at least 2 requests")


def test_a_cold_load_explains_a_wait_only_if_no_executor_had_the_model() -> None:
    load = VersionHeld("e1", "m", 1, slots=1, load_ns=1_500_000_000)
    waited = events(("accepted", 0, {}), batched(1600), succeeded(1650, 1610))
    told = story(events=waited, control=[(START_US + 1590 * MS, load)])
    assert queue_reasons(told) == ["version 1 was not loaded: executor e1 loaded it in 1.5 s (cold load)"]
    assert "cold load" in told.verdict

    elsewhere = VersionLoaded("e2", "m", 1, "hash", 1, b"")
    warm = story(events=waited, control=[(START_US - 1, elsewhere), (START_US + 1590 * MS, load)])
    assert not any("cold" in reason for reason in queue_reasons(warm))

    left = [(START_US - 1, elsewhere), (START_US + 10 * MS, ProcessLeft("executor", "e2", "lost"))]
    lost = story(events=waited, control=[*left, (START_US + 1590 * MS, load)])
    assert any("cold load" in reason for reason in queue_reasons(lost))
    assert "executor e2 left while it waited" in queue_reasons(lost)


def test_a_load_that_had_begun_before_says_so() -> None:
    load = VersionLoaded("e1", "m", 2, "hash", 1, b"", load_ns=5_000_000_000)
    told = story(events=events(("accepted", 0, {}), batched(50)), control=[(START_US + 40 * MS, load)])
    assert queue_reasons(told) == [
        "version 2 was not loaded: executor e1 loaded it in 5 s, which had begun before (cold load)"
    ]


def in_batch(batch: str, attempt: int, ms: int, *ids: bytes) -> tuple[int, JournalFact]:
    return START_US + ms * MS, JournalFact("batched", ids, (attempt,) * len(ids), (), "e1", batch)


def test_a_poison_request_is_found_by_its_batches() -> None:
    happened = events(
        ("accepted", 0, {}),
        batched(1, "b1"),
        ("returned", 10, {"executor": "e1", "reason": "died"}),
        batched(10, "b2"),
        ("returned", 20, {"executor": "e1", "reason": "died"}),
        ("failed", 21, {"error": "not healthy", "dead_letter": True}),
    )
    journal = [in_batch("b1", 1, 1, ME, other(1), other(2)), in_batch("b2", 2, 10, ME)]
    told = story(events=happened, journal=journal, dead_letter=True)
    assert told.verdict.startswith("Poison: each attempt, in batches of 3, 1 requests, took its instance down.")
    assert [one.outcome for one in told.attempts] == ["returned", "returned"]
    assert [one.others for one in told.attempts] == [(other(1).hex(), other(2).hex()), ()]
    assert [one.kind for one in told.stretches] == ["queue", "lost", "queue", "lost"]
    assert [len(one.reasons) for one in told.stretches if one.kind == "lost"] == [1, 2]
    assert told.stretches[-1].reasons[1] == "the start of its instance after attempt 1 may be part of this"
    assert "dead letter" in [one.kind for one in told.moments]


def test_an_innocent_request_was_tried_again() -> None:
    happened = events(
        ("accepted", 0, {}),
        batched(0, "b1"),
        ("returned", 400, {"executor": "e1", "reason": "died."}),
        batched(401, "b2"),
        succeeded(420, 402),
    )
    journal = [in_batch("b1", 1, 0, ME, other(1)), in_batch("b2", 2, 401, ME)]
    told = story(events=happened, journal=journal)
    assert told.verdict == (
        "1 attempt came back without an outcome and cost 400 ms (died); it was tried again, in batches of 2, 1 "
        "requests, and succeeded."
    )
    assert told.stretches[1].text == "queued again"
    assert told.stretches[1].reasons[0] == "attempt 1 had no outcome (died), so it was queued again"


def test_the_restart_after_a_lost_attempt_is_where_the_time_went() -> None:
    died = ("returned", 10, {"executor": "e1", "reason": "died"})
    journal = [in_batch("b1", 1, 0, ME, other(1)), in_batch("b2", 2, 11, ME)]
    told = story(
        events=events(("accepted", 0, {}), batched(0, "b1"), died, batched(11, "b2"), succeeded(420, 402)),
        journal=journal,
    )
    assert told.verdict.endswith(
        "and succeeded. Most of the time, 391 ms of 420 ms, was spent in the executor, until its instance had been "
        "started again."
    )


def test_the_journal_says_when_a_run_without_an_outcome_started() -> None:
    """20 ms before it says so, at most."""
    died = {"executor": "e1", "reason": "died"}
    happened = events(
        ("accepted", 0, {}),
        batched(0, "b1"),
        ("returned", 400, died),
        batched(400, "b2"),
        ("returned", 900, died),
        batched(900, "b3"),
        succeeded(920, 910),
    )
    journal = [in_batch(f"b{number}", number, ms, ME) for number, ms in ((1, 0), (2, 400), (3, 900))]
    journal.insert(1, (START_US + 15 * MS, JournalFact("started", (ME,), (1,), (), "e1", "b1")))
    journal.insert(3, (START_US + 720 * MS, JournalFact("started", (ME,), (2,), (), "e1", "b2")))
    told = story(events=happened, journal=journal)
    spent = [(one.kind, one.lasted_us // MS) for one in told.stretches if one.kind != "queue"]
    assert spent == [("lost", 400), ("executor", 300), ("lost", 200), ("executor", 10), ("run", 10)]
    assert told.stretches[2].text == "in the executor, until its instance had been started again"
    assert [len(one.reasons) for one in told.stretches if one.kind == "lost"] == [1, 1]
    told = story(events=happened[:4], journal=journal[:4])  # it runs
    assert [(one.kind, one.lasted_us // MS) for one in told.stretches[-2:]] == [("executor", 300), ("run", 59_300)]


def test_a_start_that_the_journal_reports_with_the_end_is_no_wait() -> None:
    """As of all short requests."""
    ended = JournalFact("ended", (ME,), (1,), (JobState.SUCCEEDED,))
    started = JournalFact("started", (ME,), (1,), (), "e1", "b1")
    for waited_ms in (0, 300):
        end_us = START_US + (16 + waited_ms) * MS
        told = story(journal=[in_batch("b1", 1, 1, ME), (end_us, started), (end_us, ended)])
        spent = [(one.kind, one.lasted_us // MS) for one in told.stretches[1:]]
        assert spent == ([("executor", 295), ("run", 20)] if waited_ms else [("run", 15)])


def test_the_longest_of_many_parts_is_not_most_of_the_time() -> None:
    told = story(events=events(("accepted", 0, {}), batched(30), succeeded(80, 40)))
    assert told.verdict.startswith("The longest part of the time, 40 ms of 80 ms, was spent in the model")


def test_a_request_that_is_no_job_is_told_from_the_journal() -> None:
    journal = [
        (START_US, JournalFact("accepted", (ME, other(1)))),
        in_batch("b1", 1, 5, ME, other(1)),
        (START_US + 49 * MS, JournalFact("started", (ME, other(1)), (1, 1), (), "e1", "b1")),
        (START_US + 60 * MS, JournalFact("ended", (other(1), ME), (1, 1), (JobState.FAILED, JobState.SUCCEEDED))),
    ]
    told = story(journal=journal)
    assert (told.state, told.total_us) == ("succeeded", 60 * MS)
    assert [(one.kind, one.lasted_us // MS) for one in told.stretches] == [("queue", 5), ("executor", 24), ("run", 31)]
    assert told.attempts[0].others == (other(1).hex(),)


def test_waits_that_only_the_model_or_nothing_explains() -> None:
    delayed = events(("accepted", 0, {}), batched(5))
    (reason,) = queue_reasons(story(events=delayed, max_delay_us=5 * MS))
    assert reason == "the batcher waited for more requests, up to the batch delay of 5 ms"
    (reason,) = queue_reasons(story(events=delayed))
    assert reason.startswith("no fact in the log says why")
    (reason,) = queue_reasons(story(events=delayed, max_delay_us=5 * MS, journal_cut=True))
    assert reason.startswith("the journal is too long")
    queued = story(events=events(("accepted", 0, {})), paused=True)
    assert queue_reasons(queued) == ["the queue is paused"]
    assert (queued.state, queued.total_us) == ("queued", 60_000 * MS)


def test_a_delivery_is_a_call_of_a_webhook_or_what_a_gateway_noted() -> None:
    happened = events(("accepted", 0, {}), batched(30), succeeded(100, 40))
    told = story(events=happened, webhook=WebhookCall("delivered", 2, 200, "", START_US + 150 * MS))
    assert [(one.kind, one.after_us) for one in told.moments][-2:] == [("succeeded", 100 * MS), ("delivered", 150 * MS)]
    assert told.total_us == 100 * MS
    told = story(events=happened, webhook=WebhookCall("pending", 1, 503, "", START_US + 150 * MS))
    assert told.moments[-1].kind == "webhook called"
    told = story(events=happened, webhook=WebhookCall("pending"))
    assert told.moments[-1].kind == "succeeded"
    told = story(events=happened, given=DeliveryNote(START_US + 120 * MS, "gateway-7"))
    assert [(one.kind, one.text, one.after_us) for one in told.moments[-1:]] == [
        ("delivered", "gateway-7 gave it to a caller", 120 * MS)
    ]
    assert told.total_us == 100 * MS
    assert told.delivery == "Settled: the outcome is kept with the job; gateway-7 gave it to a caller."
    assert story(events=happened, given=DeliveryNote(START_US, "gateway-7")).moments[-1].after_us == 100 * MS
    assert story(events=events(("accepted", 0, {}))).delivery == ""


def test_clocks_that_differ_give_no_negative_times() -> None:
    told = story(events=events(("accepted", 0, {}), batched(-20), succeeded(10, -30)))
    assert all(one.lasted_us >= 0 for one in told.stretches)
    assert all(one.after_us >= 0 for one in told.moments)
