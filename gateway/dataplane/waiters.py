"""Callers that wait for answers: one who waits for one answer, and one who reads several as they come.

The first answer to a waiter decides; who waits for what is kept by `pending`.
"""

from __future__ import annotations

import asyncio
from collections import deque

from charonia.calls.splicing import Visible
from charonia.errors import CharoniaError, InternalError, ResourceExhausted, StreamInterrupted
from charonia.wire import ResponseRecord

_RECORD_BYTES = 512
"""What a held response costs beside its tensors."""


class Waiter:
    """One caller waiting for the answer to one request; it is also the request on its way into the log.

    `is_job`: its outcome can be read from its record when the reply is lost. `follows`: it waits for the outcome of
    another call's job, which its own end does not touch.
    """

    __slots__ = (
        "accepted",
        "follows",
        "future",
        "id",
        "is_job",
        "model",
        "record",
        "sent",
        "size_bytes",
        "withdrawn",
    )

    def __init__(
        self,
        model: str,
        request_id: bytes,
        record: bytes,
        size_bytes: int,
        future: asyncio.Future[ResponseRecord],
        is_job: bool,
    ) -> None:
        self.model = model
        self.id = request_id
        self.record = record
        self.size_bytes = size_bytes
        self.future = future
        self.is_job = is_job
        self.follows = False
        self.withdrawn = False
        self.sent = False
        self.accepted = False

    def failed(self, error: CharoniaError) -> None:
        """Answer with an error, unless there is an answer."""
        if not self.future.done():
            self.future.set_exception(error)

    def answered(self, response: ResponseRecord) -> None:
        """Answer, unless there is an answer."""
        if not self.future.done():
            self.future.set_result(response)


class Held:
    """Bytes of responses that wait for their readers, of all streams of one gateway together."""

    __slots__ = ("most_bytes", "of_one_bytes", "size_bytes")

    def __init__(self, of_one_bytes: int, most_bytes: int) -> None:
        self.of_one_bytes = of_one_bytes
        self.most_bytes = most_bytes
        self.size_bytes = 0


class StreamWaiter(Waiter):
    """One caller reading the responses of one request. Its future ends with the last of them, or with the error.

    What waits for the reader is bounded: one that falls too far behind ends the request and loses what
    it did not read.
    """

    __slots__ = ("_arrived", "_held", "_held_bytes", "_reader", "ended_by_reply", "visible")

    def __init__(
        self,
        model: str,
        request_id: bytes,
        record: bytes,
        size_bytes: int,
        future: asyncio.Future[ResponseRecord],
        is_job: bool,
        visible: Visible,
        held: Held,
    ) -> None:
        super().__init__(model, request_id, record, size_bytes, future, is_job)
        self.visible = visible
        self.ended_by_reply = False
        """Whether the request has ended in the log, so that there is nothing left to cancel."""
        self._held = held
        self._held_bytes = 0
        self._arrived: deque[tuple[ResponseRecord, int]] = deque()
        self._reader: asyncio.Future[None] | None = None
        future.add_done_callback(self._wake)

    def arrived(self, response: ResponseRecord) -> bool:
        """Take a reply; False for one that the reader has had, or that belongs to a run it does not see."""
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
            self.failed(error)
            return True
        self._keep(response)
        return True

    def _keep(self, response: ResponseRecord) -> None:
        size = _RECORD_BYTES + sum([len(t.data) for t in response.outputs])
        held = self._held
        # one response larger than the bound is still given to a reader who keeps up
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
            self.answered(response)
        self._wake()

    async def read(self) -> ResponseRecord | None:
        """The next response, None after the last one. Raises the error that ended the request."""
        while not self._arrived:
            if self.future.done():
                # a failure of the last response has been read as a response
                self.future.result()
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

    def close(self) -> None:
        """The reader has left."""
        self._forget()
        if not self.future.cancel() and not self.future.cancelled():
            self.future.exception()  # seen

    def _forget(self) -> None:
        self._arrived.clear()
        self._held.size_bytes -= self._held_bytes
        self._held_bytes = 0

    def _wake(self, _future: asyncio.Future[ResponseRecord] | None = None) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
