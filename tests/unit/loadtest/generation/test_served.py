"""Times of streams: an item is a message with tokens, and a stream that fails fails the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from loadtest.generation import served
from loadtest.model import LoadTestError


def test_each_stream_has_a_first_time_and_the_gaps_after_it() -> None:
    def stream(prompt: Sequence[int], tokens: int) -> Iterator[object]:
        yield from range(tokens)

    run = served.run(stream, [[1], [2], [3]], 4)
    assert (len(run.first_s), len(run.gaps_s)) == (3, 9)
    assert run.rate > 0


def test_a_stream_that_fails_is_told() -> None:
    def stream(prompt: Sequence[int], tokens: int) -> Iterator[object]:
        if prompt == [2]:
            raise OSError("reset")
        yield from range(tokens)

    with pytest.raises(LoadTestError, match=r"1 of 2 streams failed.*reset"):
        served.run(stream, [[1], [2]], 4)
