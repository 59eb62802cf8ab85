"""The words of an interruption."""

from __future__ import annotations

import pytest

from charonia.calls.splicing import Visible
from charonia.errors import ErrorCode, StreamInterrupted


def test_another_run_cannot_go_on_for_the_first() -> None:
    visible = Visible(repeatable=False)
    assert visible.admits((1, 0), final=False)
    with pytest.raises(StreamInterrupted, match=r"^STREAM_INTERRUPTED: .*charonia.repeatable") as caught:
        visible.admits((2, 0), final=False)
    assert caught.value.code is ErrorCode.UNAVAILABLE


def test_another_run_may_begin_while_nothing_is_visible() -> None:
    visible = Visible(repeatable=False, attempt=1)
    assert visible.admits((2, 0), final=True)
    assert (visible.attempt, visible.count) == (2, 1)


def test_a_straggler_of_a_lost_run_is_dropped() -> None:
    visible = Visible(repeatable=True)
    assert visible.admits((1, 0), final=False)
    assert not visible.admits((2, 0), final=False)
    assert not visible.admits((1, 1), final=False)
    assert visible.admits((2, 1), final=False)
