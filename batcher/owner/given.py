"""The batches an owner has given out: which executor has them and what is in them, until they end somehow."""

from __future__ import annotations

from collections.abc import Callable

from batcher.scheduling.observations import RequestQueued
from charonia.clock import monotonic_ns


class GivenBatches:
    """By batch id. Those with an executor of another process also have the instant they were given to it.

    `ended` is called with each that is over.
    """

    def __init__(self, ended: Callable[[str], None]) -> None:
        self._ended = ended
        self._batches: dict[str, tuple[str, list[RequestQueued]]] = {}
        self._unsent: set[str] = set()
        self._sent: dict[str, int] = {}

    def __contains__(self, batch_id: object) -> bool:
        return batch_id in self._batches

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, batch_id: str, executor: str, requests: list[RequestQueued]) -> None:
        """A batch is decided on; its members may become fewer before it is sent."""
        self._batches[batch_id] = (executor, requests)
        self._unsent.add(batch_id)

    def replace(self, batch_id: str, requests: list[RequestQueued]) -> None:
        """What is left of a batch, if it still is given out."""
        if batch_id in self._batches:
            self._batches[batch_id] = (self._batches[batch_id][0], requests)

    def sent(self, batch_id: str, *, elsewhere: bool) -> None:
        """Its executor has a batch from now on; `elsewhere`: in another process."""
        self._unsent.discard(batch_id)
        if elsewhere and batch_id in self._batches:
            self._sent[batch_id] = monotonic_ns()

    def unsent(self, executor: str) -> list[str]:
        """What was decided for an executor that does not have it yet."""
        return [batch_id for batch_id in self._unsent if self._batches[batch_id][0] == executor]

    def end(self, batch_id: str) -> list[RequestQueued]:
        """A batch ended; its requests, none when it had ended before."""
        self._sent.pop(batch_id, None)
        self._unsent.discard(batch_id)
        if batch_id in self._batches:
            self._ended(batch_id)
        return self._batches.pop(batch_id, ("", []))[1]

    def close(self) -> None:
        """Nothing is given out any more by this owner."""
        for batch_id in list(self._batches):
            self.end(batch_id)

    def lose(self, executor: str) -> list[RequestQueued]:
        """An executor is gone: a late report of its batches must not be taken for the end of the runs that follow.

        Returns what it had.
        """
        lost = [batch_id for batch_id, (holder, _) in self._batches.items() if holder == executor]
        return [request for batch_id in lost for request in self.end(batch_id)]

    def holder(self, request_id: bytes) -> tuple[str, str] | None:
        """The executor that has a request, and in which batch."""
        for batch_id, (executor, requests) in self._batches.items():
            if batch_id not in self._unsent and any(request.id == request_id for request in requests):
                return executor, batch_id
        return None

    def requests(self, batch_id: str) -> list[RequestQueued]:
        return self._batches[batch_id][1] if batch_id in self._batches else []

    def verified(self, batch_id: str) -> None:
        """Its executor has it still: nothing needs to be asked about it for a while."""
        if batch_id in self._sent:
            self._sent[batch_id] = monotonic_ns()

    def older_than(self, age_ns: int) -> dict[str, list[str]]:
        """By executor the batches it was given, or found with, at least so long ago."""
        before_ns = monotonic_ns() - age_ns
        found: dict[str, list[str]] = {}
        for batch_id, sent_ns in self._sent.items():
            if sent_ns <= before_ns:
                found.setdefault(self._batches[batch_id][0], []).append(batch_id)
        return found
