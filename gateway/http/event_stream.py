"""A job's events as server-sent events: paced by the reader, with heartbeats, ended with the job.

An event is fetched only when the transport has accepted the one before: a reader that does not read occupies the
transport's buffer (64 KiB) and one event.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from starlette.responses import Response

from charonia.errors import CharoniaError
from charonia.facts.jobs import JobEvent
from charonia.inference import InferenceResponse
from charonia.tensors import Buffer

from .bodies import Receive, Scope, Send
from .codec.job_json import EventWriter

HEARTBEAT_S = 15.0
"""Proxies close connections that are silent for a minute, and only a write shows that a client has gone."""

_RETRY_MS = 1000
_HEARTBEAT = b": the job goes on\n\n"

Update = JobEvent | InferenceResponse

logger = logging.getLogger("charonia.gateway.http")


_ONE_CHUNK_BYTES = 8 << 20


class EventStream(Response):
    """Streams `events` until they end. `text` writes a response as JSON; `closed` is called once at the end."""

    def __init__(
        self,
        events: AsyncIterator[Update],
        writer: EventWriter,
        text: Callable[[InferenceResponse], Awaitable[Sequence[Buffer]]],
        closed: Callable[[], None],
        *,
        heartbeat_s: float,
    ) -> None:
        super().__init__(
            headers={"cache-control": "no-store", "x-accel-buffering": "no"}, media_type="text/event-stream"
        )
        del self.headers["content-length"]
        self._events = events
        self._writer = writer
        self._text = text
        self._closed = closed
        self._heartbeat_s = heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pending: asyncio.Task[Update | None] | None = None
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _write(send, b"retry: %d\n\n" % _RETRY_MS)
            while True:
                pending = pending or asyncio.create_task(self._next())
                await asyncio.wait({pending}, timeout=self._heartbeat_s)
                if not pending.done():
                    await _write(send, _HEARTBEAT)
                    continue
                event = pending.result()
                pending = None
                if event is None:
                    break
                if isinstance(event, JobEvent):
                    await _write(send, self._writer.event(event))
                    continue
                for part in in_chunks(self._writer.response(event, () if event.is_flag else await self._text(event))):
                    await _write(send, part)
        except CharoniaError as error:
            # the headers are sent: without a last event the reader connects again, to another gateway perhaps
            logger.info("an event stream ended early: %s", error.message)
        except asyncio.CancelledError:
            pass  # the reader left, or the server stops: the stream ends in order
        finally:
            await self._end(pending)
        await send({"type": "http.response.body", "body": b""})

    async def _next(self) -> Update | None:
        try:
            return await anext(self._events)
        except StopAsyncIteration:
            return None

    async def _end(self, pending: asyncio.Task[Update | None] | None) -> None:
        if pending is not None:
            pending.cancel()
            await asyncio.wait({pending})
            if not pending.cancelled():
                pending.exception()  # retrieved, so that asyncio does not log it
        close = getattr(self._events, "aclose", None)
        if close is not None:
            with contextlib.suppress(CharoniaError):
                await close()
        self._closed()


def in_chunks(parts: Sequence[Buffer]) -> Sequence[Buffer]:
    """The parts of an event as HTTP chunks: one if joining is quick, as simple readers expect an event in one piece."""
    return (b"".join(parts),) if sum(map(len, parts)) <= _ONE_CHUNK_BYTES else parts


async def _write(send: Send, data: Buffer) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})
