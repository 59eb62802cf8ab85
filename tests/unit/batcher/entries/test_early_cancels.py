"""Cancels that are read before the request they are about."""

from __future__ import annotations

from batcher.entries.early_cancels import EarlyCancels
from batcher.scheduling.observations import RequestCancelled, RequestQueued


def _queued(number: int) -> RequestQueued:
    return RequestQueued(bytes([number]) * 16, 1, 0, 1, 0, 0, 0, 0)


def test_a_request_that_comes_later_is_cancelled_once() -> None:
    early = EarlyCancels()
    early.note(b"\1" * 16)

    assert early.of([_queued(0), _queued(1)]) == [RequestCancelled(b"\1" * 16)]
    assert early.of([_queued(1)]) == []
    assert len(early) == 0


def test_the_oldest_are_forgotten() -> None:
    early = EarlyCancels(most=2)
    for number in range(3):
        early.note(bytes([number]) * 16)

    assert len(early) == 2
    found = early.of([_queued(number) for number in range(3)])
    assert [cancel.id for cancel in found] == [b"\1" * 16, b"\2" * 16]
