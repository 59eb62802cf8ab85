"""Open requests: the state of each, and how its caller gets the answer or answers.

The first of these decides: a reply, an error, a deadline, its caller's cancellation. `requester` tracks which requests
are open.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from charonia.errors import Cancelled, CharoniaError, InternalError, ResourceExhausted, StreamInterrupted, shed
from charonia.tensors import Buffer
from charonia.wire import Reference, ResponseRecord

_RECORD_BYTES = 512
"""Overhead of a held response besides its tensors."""


class OpenRequest:
    """An open request. `sent` is true once it is in transit, `accepted` once the log has it, `withdrawn` when no caller
    wants it any more or the log does not have it. `record` is kept until the log has it; `size_bytes` includes payloads
    out of band, and `held_bytes` is what its requester counts for it.
    """

    __slots__ = ("accepted", "held_bytes", "id", "model", "record", "sent", "size_bytes", "withdrawn")

    is_job = False
    """Whether its outcome can be read from its record when the reply is lost."""

    def __init__(self, model: str, request_id: bytes) -> None:
        self.model = model
        self.id = request_id
        self.record: Buffer = b""
        self.size_bytes = self.held_bytes = 0
        self.withdrawn = False
        self.sent = False
        self.accepted = False

    @property
    def has_ended(self) -> bool:
        """Whether no more replies are awaited."""
        return False

    def failed(self, error: CharoniaError) -> None:
        """End with an error, unless it has ended."""

    def answered(self, _response: ResponseRecord) -> bool:
        """Take a reply; False if it is not wanted, because it is late or a duplicate."""
        return False


class Packer(Protocol):
    """What packs a request into an entry, and is notified when the request has ended (`entry_packer`)."""

    def ended(self, request: OpenRequest, /) -> None: ...


class Waiter(OpenRequest):
    """A request whose caller waits for one answer. `follows`: it waits for the outcome of another call's job, which
    does not end with it. `reference`, `packer` and `timer` are released when it ends.
    """

    __slots__ = ("follows", "future", "is_job", "packer", "reference", "timer")

    def __init__(self, model: str, request_id: bytes, *, is_job: bool = False) -> None:
        super().__init__(model, request_id)
        self.future: asyncio.Future[ResponseRecord] = asyncio.get_running_loop().create_future()
        self.is_job = is_job
        self.follows = False
        self.reference: Reference | None = None
        self.packer: Packer | None = None
        self.timer: asyncio.TimerHandle | None = None

    @property
    def has_ended(self) -> bool:
        return self.future.done()

    def failed(self, error: CharoniaError) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def answered(self, response: ResponseRecord) -> bool:
        if self.future.done():
            return False
        self.future.set_result(response)
        return True

    def close(self) -> None:
        """No caller waits any more."""
        if not self.future.cancel() and not self.future.cancelled():
            self.future.exception()  # retrieved


class Held:
    """Total bytes of unread responses, over all streams of one process."""

    __slots__ = ("most_bytes", "of_one_bytes", "size_bytes")

    def __init__(self, of_one_bytes: int, most_bytes: int) -> None:
        self.of_one_bytes = of_one_bytes
        self.most_bytes = most_bytes
        self.size_bytes = 0


class StreamWaiter(Waiter):
    """A request whose caller reads one or several responses. Its future ends with the last of them, or with the error.
    Unread responses are bounded: a reader that falls too far behind ends the request and loses what it did not read.
    """

    __slots__ = ("_arrived", "_held", "_held_bytes", "_reader", "ended_by_reply", "visible")

    def __init__(self, model: str, request_id: bytes, visible: Visible, held: Held) -> None:
        super().__init__(model, request_id)
        self.visible = visible
        self.ended_by_reply = False
        """Whether the request has ended in the log, so that it needs no cancel."""
        self._held = held
        self._held_bytes = 0
        self._arrived: deque[tuple[ResponseRecord, int]] = deque()
        self._reader: asyncio.Future[None] | None = None
        self.future.add_done_callback(self._wake)

    def answered(self, response: ResponseRecord) -> bool:
        """Take a reply; False if the reader has had it, or it belongs to a run that the reader does not follow."""
        if self.future.done():
            return False
        if response.place is None:
            # the request as a whole: a failure, or the only answer of a model that gives one
            self.ended_by_reply = True
            if response.error is None and self.visible.count:
                self.failed(InternalError("an answer without a place came after responses that have one"))
            else:
                self._keep(response)
            return True
        try:
            if not self.visible.admits(response.place, final=response.final):
                return False
        except StreamInterrupted as error:
            self.ended_by_reply = response.final
            self.failed(error)
            return True
        self._keep(response)
        return True

    def _keep(self, response: ResponseRecord) -> None:
        size = _RECORD_BYTES + sum([len(t.data) for t in response.outputs])
        held = self._held
        # a reader that keeps up also gets a response larger than the bound
        if self._held_bytes and (
            self._held_bytes + size > held.of_one_bytes or held.size_bytes + size > held.most_bytes
        ):
            self.failed(
                ResourceExhausted(
                    f"the stream was ended: its reader is {len(self._arrived)} responses behind, and no more than "
                    f"{held.of_one_bytes} bytes are held for it"
                )
            )
            self._forget()
            return
        self.ended_by_reply = self.ended_by_reply or response.final
        self._arrived.append((response, size))
        self._held_bytes += size
        held.size_bytes += size
        if response.final or response.place is None:
            self.future.set_result(response)
        self._wake()

    async def next(self) -> ResponseRecord | None:
        """The next response, None after the last one. One task reads. Raises the error that ended the request.

        A response may be an error of the model (`ResponseRecord.error`).
        """
        while not self._arrived:
            if self.future.done():
                # the failure was already returned as the last response
                error = self.future.exception()
                if isinstance(error, CharoniaError):
                    raise shed(error)
                return None
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        response, size = self._arrived.popleft()
        self._held_bytes -= size
        self._held.size_bytes -= size
        return response

    def cancel(self) -> None:
        """The caller stops reading: the request ends, unless all its responses have arrived."""
        self._forget()
        self.failed(Cancelled(""))

    def close(self) -> None:
        self._forget()
        super().close()

    def _forget(self) -> None:
        self._arrived.clear()
        self._held.size_bytes -= self._held_bytes
        self._held_bytes = 0

    def _wake(self, _future: asyncio.Future[ResponseRecord] | None = None) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


NOT_REPEATABLE = (
    "the run that gave the first responses was lost; the model is not declared repeatable (charonia.repeatable)"
)


class Visible:
    """Selects the responses that a reader gets: each once, in order, and never those of two runs mixed.

    A response has a place (attempt, index). A repeated run gives its responses again from index 0; once one is visible
    only a model that declares `charonia.repeatable` may go on with another run. `attempt` is the run that is read,
    `count` how many responses are visible: those of index 0 to `count - 1`. A returning reader sends both to continue
    where it was.
    """

    __slots__ = ("_next", "attempt", "count", "repeatable")

    def __init__(self, *, repeatable: bool, attempt: int = -1, count: int = 0) -> None:
        self.repeatable = repeatable
        self.attempt = attempt
        self.count = count
        self._next = count

    def admits(self, place: tuple[int, int], *, final: bool) -> bool:
        """Whether a response goes to the reader; if so it counts as visible from now on. Known responses and those of
        an older run do not. Raises `StreamInterrupted` for a response that cannot follow the visible ones: it is of
        another run, responses before it are missing, or the run ends before them.
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
