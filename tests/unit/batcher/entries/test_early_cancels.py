"""Cancels that are read before the request they are about."""

from __future__ import annotations

from batcher.entries.early_cancels import EarlyCancels
from batcher.scheduling.observations import RequestCancelled, RequestQueued, WaveOpened


def _queued(number: int) -> RequestQueued:
    return RequestQueued(bytes([number]) * 16, 1, 0, 1, 0, 0, 0, 0)


def _wave(prefix: bytes, count: int) -> RequestQueued:
    return RequestQueued(prefix + b"\xff", 1, 0, count, 0, 0, 0, 0, count=count, wave=True)


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


def test_those_of_a_wave_that_has_ended_are_forgotten() -> None:
    early = EarlyCancels()
    prefix, other = b"p" * 15, b"q" * 15
    for request_id in (prefix + b"\0", prefix + b"\2", other + b"\0"):
        early.note(request_id)

    early.forget_waves([_queued(1), _wave(prefix, 3), _wave(b"r" * 15, 3)])

    assert list(early.ids) == [other + b"\0"]
    assert early.of([_wave(prefix, 3), _wave(other, 3)]) == [WaveOpened(other + b"\xff")]
