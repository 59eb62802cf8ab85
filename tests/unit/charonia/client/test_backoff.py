"""When a failed call is made again: only where nothing can be executed twice, later each time, never for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.client import ConnectionLost, NotConnected, Refused, RetryPolicy
from charonia.errors import (
    CharoniaError,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    KeyReused,
    NotFound,
    ResourceExhausted,
    StreamInterrupted,
    Unavailable,
)

POLICY = RetryPolicy(attempts=5, first_pause_s=0.1, max_pause_s=1.0)


def exhausted(retry_after_s: int) -> ResourceExhausted:
    error = ResourceExhausted("the queue is full")
    error.retry_after_s = retry_after_s
    return error


@pytest.mark.parametrize(
    ("error", "once", "repeatable"),
    [
        (NotConnected("refused"), True, True),
        (Refused("draining", 0), True, True),
        (exhausted(2), True, True),
        (ConnectionLost("reset"), False, True),
        (Unavailable("the log is away"), False, True),
        (exhausted(0), False, False),
        (StreamInterrupted("its executor was lost"), False, False),
        (DeadlineExceeded("late"), False, False),
        (InvalidArgument("wrong"), False, False),
        (InternalError("broken"), False, False),
        (NotFound("unknown"), False, False),
        (KeyReused("another request"), False, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, CharoniaError) else str(value),
)
def test_what_is_repeated(error: CharoniaError, once: bool, repeatable: bool) -> None:
    """`once` is a call that must not be executed twice, `repeatable` one with a key, or a question."""
    assert (POLICY.pause_s(error, 1, repeatable=False, chance=0.5) is not None) == once
    assert (POLICY.pause_s(error, 1, repeatable=True, chance=0.5) is not None) == repeatable


@pytest.mark.parametrize(
    ("failed", "shortest", "longest"), [(1, 0.05, 0.1), (2, 0.1, 0.2), (3, 0.2, 0.4), (4, 0.4, 0.8)]
)
def test_pauses_double_and_are_drawn_from_the_upper_half(failed: int, shortest: float, longest: float) -> None:
    error = NotConnected("refused")
    assert POLICY.pause_s(error, failed, repeatable=False, chance=0.0) == pytest.approx(shortest)
    assert POLICY.pause_s(error, failed, repeatable=False, chance=1.0) == pytest.approx(longest)


def test_attempts_are_counted_with_the_first_one() -> None:
    assert POLICY.pause_s(NotConnected("refused"), 5, repeatable=True, chance=0.0) is None
    assert RetryPolicy(attempts=1).pause_s(NotConnected("refused"), 1, repeatable=True, chance=0.0) is None


def test_the_servers_own_word_is_waited_for() -> None:
    assert POLICY.pause_s(exhausted(7), 1, repeatable=False, chance=0.9) == 7
    assert POLICY.pause_s(Refused("draining", 2.5), 1, repeatable=False, chance=0.9) == 2.5


@given(
    failed=st.integers(1, 10_000),
    attempts=st.integers(1, 10_000),
    first=st.floats(0.001, 10),
    longest=st.floats(0.001, 100),
    chance=st.floats(0, 1, exclude_max=True),
)
def test_pauses_are_bounded(failed: int, attempts: int, first: float, longest: float, chance: float) -> None:
    pause = RetryPolicy(attempts, first, longest).pause_s(
        ConnectionLost("reset"), failed, repeatable=True, chance=chance
    )
    if failed >= attempts:
        assert pause is None
    else:
        assert pause is not None
        assert 0 < pause <= longest
