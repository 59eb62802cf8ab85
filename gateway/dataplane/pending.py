"""The pending map of one gateway: who waits for which request's answer.

The single place where a synchronous request gets its one visible outcome: what answers a waiter first (a reply, an
error, a deadline, the caller's cancellation) decides; later replies find nothing and are dropped. How requests get into
the log is `dataplane`'s and `jobs`'.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterator

from charonia import failpoints
from charonia.calls.replies import OUTCOME_UNKNOWN, answers_in, no_longer_open, without_held
from charonia.calls.splicing import Visible
from charonia.errors import (
    CharoniaError,
    LogUnavailable,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from charonia.eventlog.port import Entry, RequestLog
from charonia.facts.events import FIELD_FACT
from charonia.tensors import Buffer
from charonia.wire import FIELD_WAVE, Reference, ResponseRecord
from gateway.requests.request_rules import SERVER_EXITING

from .job_outcomes import job_outcome
from .waiters import Held, StreamWaiter, Waiter

_log = logging.getLogger(__name__)

EPOCH_CHANGED = "the log epoch changed while the request was in flight: its outcome is unknown"
RECHECK_S = 1.0


class Ids:
    """Unguessable 128-bit request ids, drawn from the system 256 at a time: one system call less per request."""

    def __init__(self) -> None:
        self._block = b""
        self._at = 0

    def next(self) -> bytes:
        if self._at >= len(self._block):
            self._block = os.urandom(16 * 256)
            self._at = 0
        at = self._at
        self._at = at + 16
        return self._block[at : at + 16]


class PendingMap:
    """Waiters by request id, bounded in bytes. `watch` sees to it that no caller waits for ever."""

    def __init__(
        self,
        log: RequestLog,
        max_size_bytes: int,
        take: Callable[[Reference], Buffer] | None = None,
        *,
        max_stream_bytes: int = 16 * 1024**2,
    ) -> None:
        self._log = log
        self._held = Held(max_stream_bytes, max_size_bytes // 2)
        self._take = take
        self._max_size_bytes = max_size_bytes
        self._size_bytes = 0
        self._waiters: dict[bytes, Waiter] = {}
        self._up = True
        self._unanswered: set[bytes] = set()
        self._coming = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.report_for: Callable[[ResponseRecord], bool] = lambda _response: False
        """Takes what comes for a job that no caller waits for; whether it was wanted."""
        self.on_wave: Callable[[Buffer], None] = lambda _reply: None
        """Takes the answers to a wave."""
        self.on_response_of_wave: Callable[[ResponseRecord], bool] = lambda _response: False
        """Takes what comes for one request of a wave; whether it was one."""
        self.on_facts: Callable[[Entry], None] = lambda _entry: None
        self.duplicates = 0
        self.rechecks = 0
        """Answers that were read from a job's record because the reply did not come."""

    def __len__(self) -> int:
        return len(self._waiters)

    async def wait_idle(self) -> None:
        """Returns when no caller waits (drain)."""
        while self._waiters or self._coming:
            await self._idle.wait()

    @contextlib.contextmanager
    def coming(self) -> Iterator[None]:
        """While this lasts a caller counts as waiting, even without a request of its own here, or before it has one."""
        self._coming += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._coming -= 1
            self._look_idle()

    def _look_idle(self) -> None:
        if not self._waiters and not self._coming:
            self._idle.set()

    def add(
        self, model: str, request_id: bytes, record: bytes, *, is_job: bool = False, beside_bytes: int = 0
    ) -> Waiter:
        """A new waiter; `remove` it in the end. Raises `ResourceExhausted` when this gateway holds too much.

        `beside_bytes` are those of its payload that do not travel in the record.
        """
        size = self._take_room(len(record) + beside_bytes)
        future: asyncio.Future[ResponseRecord] = asyncio.get_running_loop().create_future()
        waiter = self._waiters[request_id] = Waiter(model, request_id, record, size, future, is_job)
        return waiter

    def add_stream(
        self,
        model: str,
        request_id: bytes,
        record: bytes,
        visible: Visible,
        *,
        is_job: bool = False,
        beside_bytes: int = 0,
    ) -> StreamWaiter:
        """As `add`, a waiter that reads several responses; `close` it, too, in the end."""
        size = self._take_room(len(record) + beside_bytes)
        future: asyncio.Future[ResponseRecord] = asyncio.get_running_loop().create_future()
        waiter = StreamWaiter(model, request_id, record, size, future, is_job, visible, self._held)
        self._waiters[request_id] = waiter
        return waiter

    def _take_room(self, size: int) -> int:
        if self._size_bytes + size > self._max_size_bytes:
            raise ResourceExhausted(
                f"this gateway holds {self._size_bytes} bytes of unanswered requests, its bound is "
                f"{self._max_size_bytes}; retry later"
            )
        self._size_bytes += size
        self._idle.clear()
        return size

    def hold(self, size: int) -> None:
        """A wave is under way. Raises `ResourceExhausted` when this gateway holds too much; `release` it in the end."""
        self._take_room(size)
        self._coming += 1

    def release(self, size: int) -> None:
        """A wave has ended."""
        self._size_bytes -= size
        self._coming -= 1
        self._look_idle()

    def get(self, request_id: bytes) -> Waiter | None:
        return self._waiters.get(request_id)

    def remove(self, waiter: Waiter) -> None:
        if self._waiters.pop(waiter.id, None) is not None:
            self._size_bytes -= waiter.size_bytes
        self._look_idle()

    def refuse_all(self) -> None:
        """The gateway ends: callers that still wait will not be answered."""
        for waiter in self._waiters.values():
            waiter.failed(Unavailable(SERVER_EXITING))

    def lose_all(self) -> None:
        """The log is another one: it knows none of these requests."""
        for waiter in self._waiters.values():
            waiter.failed(LogUnavailable(EPOCH_CHANGED))

    # -- replies ------------------------------------------------------------------------------------------------------

    def on_replies(self, _stream: bytes, entries: list[Entry]) -> None:
        """The callback of the reply stream's reader."""
        failpoints.hit("gateway.notified")
        waiters = self._waiters
        for entry in entries:
            if entry.fields[0] == FIELD_WAVE:
                self.on_wave(entry.fields[1])
            elif entry.fields[0] == FIELD_FACT:
                self.on_facts(entry)
        for response, _ in answers_in(entries, self._take):
            waiter = waiters.get(response.id)
            if waiter is None or waiter.future.done():
                if not self.on_response_of_wave(response) and not self.report_for(response):
                    self.duplicates += 1
            elif not isinstance(waiter, StreamWaiter):
                waiter.future.set_result(response)
            elif not waiter.arrived(response):
                self.duplicates += 1

    def on_log_state(self, up: bool) -> None:
        self._up = up
        self._unanswered.clear()

    # -- lost replies -------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """No caller waits for ever: the log may lose requests (a flush, a power cut) and a dying executor a reply."""
        before: set[bytes] = set()
        while True:
            await asyncio.sleep(RECHECK_S)
            try:
                await self.recheck(before)
            except CharoniaError:
                self._unanswered.clear()
            except Exception:
                _log.exception("pending requests could not be checked")
            before = set(self._waiters)

    async def recheck(self, before: set[bytes]) -> None:
        """Look after requests that wait since the last look: what is settled or unknown will get no reply.

        Jobs are answered from their records at once. Others fail when two looks in a row find them so, with no reply
        in between and none that waits for its order.
        """
        if not self._up:
            return
        suspects: dict[str, list[bytes]] = {}
        for request_id in before:
            waiter = self._waiters.get(request_id)
            if waiter is not None and waiter.accepted:
                suspects.setdefault(waiter.model, []).append(request_id)
        unanswered = await no_longer_open(self._log, suspects)
        again = unanswered & self._unanswered
        lost = await without_held(self._log, again, suspects) if again else again
        for request_id in unanswered:
            waiter = self._waiters.get(request_id)
            if waiter is None or waiter.future.done():
                continue
            if waiter.is_job:
                await self._answer_from_record(waiter)
            elif request_id in lost:
                waiter.failed(LogUnavailable(OUTCOME_UNKNOWN))
        self._unanswered = unanswered

    async def _answer_from_record(self, waiter: Waiter) -> None:
        try:
            outcome = await job_outcome(self._log, waiter.model, waiter.id)
        except NotFound:
            waiter.failed(LogUnavailable(OUTCOME_UNKNOWN))
            return
        except LogUnavailable:
            raise
        except CharoniaError as error:
            waiter.failed(error)  # one record that cannot be read must not keep the others waiting
            return
        if outcome is not None and not waiter.future.done():
            self.rechecks += 1
            waiter.answered(outcome)
