"""Counting requests in and out, and why one may not (go back to) wait."""

from __future__ import annotations

import pytest

from batcher.scheduling.decisions import Decision, RejectRequest
from batcher.scheduling.observations import RequestQueued, RequestState
from batcher.scheduling.queues.ledger import RequestLedger
from charonia.errors import ErrorCode
from charonia.models.interface import ModelInterface
from charonia.models.scheduling import DynamicBatching, QueuePolicy


def ledger(levels: int = 3, max_batch_size: int = 4) -> RequestLedger:
    made = RequestLedger()
    block = DynamicBatching(
        priority_levels=levels,
        default_priority_level=min(2, levels),
        default_queue_policy=QueuePolicy(default_timeout_us=10),
    )
    assert made.adopt_policy(
        ModelInterface(
            name="m",
            backend="",
            platform="",
            max_batch_size=max_batch_size,
            inputs={},
            outputs={},
            dynamic_batching=block,
        )
    )
    return made


def request(number: int, level: int = 0, rows: int = 1, deadline_ns: int = 0) -> RequestQueued:
    return RequestQueued(number.to_bytes(16, "little"), 1, level, rows, 7, 0, deadline_ns, 100)


@pytest.mark.parametrize("levels", [(1, 1, 1), (1, 2, 2), (0, 2, 3), (3,)])
def test_what_is_counted_in_is_counted_out(levels: tuple[int, ...]) -> None:
    book = ledger()
    requests = [request(number, level) for number, level in enumerate(levels)]
    for item in requests:
        book.count_again(item)
    assert (book.queued, sum(book.levels.values())) == (len(levels), len(levels))
    assert book.due.next_ns() == 100 + 10_000
    book.uncount_all(requests)
    assert (book.queued, book.levels, book.due.next_ns()) == (0, {}, 0)


def test_time_away_moves_the_timeout_and_a_delayed_request_has_none() -> None:
    book = ledger()
    away, delayed = request(1), request(2)
    away.away_ns = 500
    delayed.delayed = True
    book.count_again(away)
    book.count_again(delayed)
    assert (away.timeout_ns, delayed.timeout_ns) == (10_600, 0)


@pytest.mark.parametrize(
    ("item", "flag", "code"),
    [
        (request(1, deadline_ns=50), "", ErrorCode.DEADLINE_EXCEEDED),
        (request(1, rows=5), "", ErrorCode.INVALID_ARG),
        (request(1), "settled", None),
    ],
)
def test_a_request_that_may_not_wait_ends(item: RequestQueued, flag: str, code: ErrorCode | None) -> None:
    book = ledger()
    book.known[item.id] = item
    if flag:
        setattr(item, flag, True)
    decisions: list[Decision] = []
    assert not book.admit(item, 50, decisions)
    assert [d.code for d in decisions if isinstance(d, RejectRequest)] == ([code] if code else [])
    assert item.state is RequestState.ENDED
    assert not book.known


def test_a_deadline_still_ahead_and_a_full_batch_are_admitted() -> None:
    assert ledger().admit(request(1, rows=4, deadline_ns=51), 50, [])


def test_the_same_policy_again_is_no_change() -> None:
    book = ledger()
    interface = ModelInterface(name="m", backend="", platform="", max_batch_size=4, inputs={}, outputs={})
    assert book.adopt_policy(interface)
    assert not book.adopt_policy(interface)
