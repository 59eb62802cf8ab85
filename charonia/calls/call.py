"""One request to a model as its caller holds it: answers in order, one or several, and its end.

Sending it and finding its answers is `caller`'s.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from charonia.errors import Cancelled, CharoniaError, StreamInterrupted
from charonia.wire import Reference, ResponseRecord

from .splicing import Visible


@dataclass(slots=True)
class HeldBytes:
    """What the calls of a process hold together: requests without an end, answers that were not read."""

    count: int = 0


class Call:
    """Made by `Caller.open`. Read it to its end, or `cancel` it: answers that are not read are held for ever.

    `on_end` is told once, when nothing more will come. `repeatable`: the model says so of itself.
    """

    __slots__ = (
        "_answers",
        "_failure",
        "_held",
        "_on_end",
        "_visible",
        "_waiting",
        "accepted",
        "ended",
        "id",
        "lent",
        "model",
        "on_its_way",
        "size_bytes",
        "timer",
        "unwanted",
    )

    def __init__(
        self,
        model: str,
        request_id: bytes,
        size_bytes: int,
        held: HeldBytes,
        on_end: Callable[[Call], None],
        *,
        repeatable: bool = False,
    ) -> None:
        self.model = model
        self.id = request_id
        self.size_bytes = size_bytes
        self.on_its_way = True
        """It is being written to the log; `accepted`: it may be there."""
        self.accepted = False
        self.ended = False
        self.unwanted = False
        """It was given up before its end: its owner is to be told."""
        self.lent: Reference | None = None
        self.timer: asyncio.TimerHandle | None = None
        self._held = held
        self._visible = Visible(repeatable=repeatable)
        self._answers: deque[tuple[ResponseRecord, int]] = deque()
        self._failure: CharoniaError | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._on_end = on_end
        held.count += size_bytes

    async def next(self) -> ResponseRecord | None:
        """The next answer, None after the last. An answer may be an error of the model (`ResponseRecord.error`).

        One task reads. Raises what kept the call from being answered: `LogUnavailable`, `ResourceExhausted`,
        `DeadlineExceeded`, `StreamInterrupted`, `Cancelled`.
        """
        while not self._answers:
            if self.ended:
                if self._failure is not None:
                    raise self._failure.again()
                return None
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        answer, size = self._answers.popleft()
        self._held.count -= size
        return answer

    async def __aiter__(self) -> AsyncIterator[ResponseRecord]:
        while (answer := await self.next()) is not None:
            yield answer

    def cancel(self) -> None:
        """The reader leaves: the model's owner is notified, unless all answers have come. `next` raises `Cancelled`."""
        self._held.count -= sum(size for _, size in self._answers)
        self._answers.clear()
        self._failure = Cancelled("")
        if not self.ended:
            self.unwanted = True
            self._end()

    # -- the caller's side --------------------------------------------------------------------------------------------

    def answered(self, answer: ResponseRecord, size_bytes: int) -> bool:
        """An answer has come; False for a repetition of one that came before."""
        if self.ended:
            return False
        if answer.place is not None:
            try:
                if not self._visible.admits(answer.place, final=answer.final):
                    return False
            except StreamInterrupted as error:
                self.fail(error, unwanted=not answer.final)
                return True
        self._answers.append((answer, size_bytes))
        self._held.count += size_bytes
        if answer.final:
            self._end()
        else:
            self._wake()
        return True

    def fail(self, error: CharoniaError, *, unwanted: bool = False) -> None:
        """End without a last answer, unless it has ended. Answers that were not read yet are still read first."""
        if not self.ended:
            self._failure = error
            self.unwanted = unwanted
            self._end()

    def _end(self) -> None:
        self.ended = True
        self._held.count -= self.size_bytes
        if self.timer is not None:
            self.timer.cancel()
        self._on_end(self)
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
