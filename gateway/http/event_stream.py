"""A job's events as an HTTP response of server-sent events: paced by its reader, kept alive, ended with the job.

An event is fetched only after the one before it has been taken by the transport, so a reader that does not read holds
the transport's buffer (64 KiB) and one event, whatever happens to the job.
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
"""Proxies close connections that are silent for a minute, and a client that is gone is noticed by writing to it."""

_RETRY_MS = 1000
_HEARTBEAT = b": the job goes on\n\n"

Happening = JobEvent | InferenceResponse

logger = logging.getLogger("charonia.gateway.http")


_ONE_CHUNK_BYTES = 8 << 20


class EventStream(Response):
    """Streams `events` until they end; `text` gives a response as JSON, `closed` is called once, whatever ends it."""

    def __init__(
        self,
        events: AsyncIterator[Happening],
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
        coming: asyncio.Task[Happening | None] | None = None
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _write(send, b"retry: %d\n\n" % _RETRY_MS)
            while True:
                coming = coming or asyncio.create_task(self._next())
                await asyncio.wait({coming}, timeout=self._heartbeat_s)
                if not coming.done():
                    await _write(send, _HEARTBEAT)
                    continue
                event = coming.result()
                coming = None
                if event is None:
                    break
                if isinstance(event, JobEvent):
                    await _write(send, self._writer.event(event))
                    continue
                for part in in_chunks(self._writer.response(event, () if event.is_flag else await self._text(event))):
                    await _write(send, part)
        except CharoniaError as error:
            # headers are out: ending without a last event makes the reader come again, to another gateway perhaps
            logger.info("an event stream ended early: %s", error.message)
        except asyncio.CancelledError:
            pass  # the reader left, or the server stops and the stream ends as it should
        finally:
            await self._end(coming)
        await send({"type": "http.response.body", "body": b""})

    async def _next(self) -> Happening | None:
        try:
            return await anext(self._events)
        except StopAsyncIteration:
            return None

    async def _end(self, coming: asyncio.Task[Happening | None] | None) -> None:
        if coming is not None:
            coming.cancel()
            await asyncio.wait({coming})
            if not coming.cancelled():
                coming.exception()  # seen
        close = getattr(self._events, "aclose", None)
        if close is not None:
            with contextlib.suppress(CharoniaError):
                await close()
        self._closed()


def in_chunks(parts: Sequence[Buffer]) -> Sequence[Buffer]:
    """The parts of an event as chunks: one, as readers that do not look for its end expect, if copying it is quick."""
    return (b"".join(parts),) if sum(map(len, parts)) <= _ONE_CHUNK_BYTES else parts


async def _write(send: Send, data: Buffer) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})
