"""Which of a request's responses its reader gets: each once, in order, and never those of two runs mixed. Pure.

A response has a place (attempt, index). A run that was begun again gives its responses again from index 0; once one is
visible only a model that declares `charonia.repeatable` may go on with another run.
"""

from __future__ import annotations

from charonia.errors import StreamInterrupted

NOT_REPEATABLE = (
    "the run that gave the first responses was lost; the model is not declared repeatable (charonia.repeatable)"
)


class Visible:
    """What the reader of one request's responses has had.

    `attempt` is the run that is read, `count` how many responses are visible: those of index 0 to `count - 1`. A reader
    that comes back says with both where it was.
    """

    __slots__ = ("_next", "attempt", "count", "repeatable")

    def __init__(self, *, repeatable: bool, attempt: int = -1, count: int = 0) -> None:
        self.repeatable = repeatable
        self.attempt = attempt
        self.count = count
        self._next = count

    def admits(self, place: tuple[int, int], *, final: bool) -> bool:
        """Whether a response goes to the reader; if so it counts as visible from now on.

        One seen before and one of an older run do not. Raises `StreamInterrupted` when it cannot follow what is
        visible: it is of another run, responses before it are missing, or the run ends before what is visible.
        """
        attempt, index = place
        if attempt < self.attempt:
            return False
        if attempt > self.attempt:
            if self.count and not self.repeatable:
                raise StreamInterrupted(NOT_REPEATABLE)
            self.attempt = attempt
            self._next = 0
        if index < self._next:
            return False
        if index > self._next:
            raise StreamInterrupted(f"response {self._next} was lost, response {index} came in its place")
        self._next = index + 1
        if index < self.count:
            if final:
                raise StreamInterrupted(
                    f"another run of the request ended after {index + 1} responses, {self.count} of the first are "
                    "visible"
                )
            return False
        self.count = index + 1
        return True
