"""Sends requests to models through the log, for gateways, models that call models, and ensembles.

A requester packs requests (large tensors out of band), sends them, tracks the open ones and gives each its one visible
outcome: the first answer decides, later replies are dropped. It finds requests that will get no reply, and `cancels`
notifies owners of those that are no longer wanted. The part that uses it decides its policy: who may call, how requests
share entries, when they end by themselves and what becomes of a lost one (docs/adr/0023).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from charonia import failpoints, keys
from charonia.catalog.served import ServedVersion
from charonia.errors import (
    EPOCH_CHANGED,
    OUTCOME_UNKNOWN,
    SERVER_EXITING,
    Cancelled,
    CharoniaError,
    InvalidRecord,
    LogUnavailable,
    ResourceExhausted,
    Unavailable,
)
from charonia.eventlog.payloads import BY_REFERENCE_BYTES
from charonia.eventlog.port import START, Entry, Limits, QueueLog, StreamReader, Streams, Work
from charonia.facts.events import FIELD_FACT, BatchFinished, facts_of
from charonia.inference import InferenceRequest
from charonia.tasks import Tasks, periodic
from charonia.tensors import Buffer
from charonia.wire import FIELD_WAVE, Lineage, Reference, ResponseRecord, records_of, response_id, unpack_response

from .admission import Admitted
from .cancels import Cancels
from .entry_packer import EntryPacker, Ids, Spawn, Terms, request_record
from .payload_transfer import Payloads
from .waiters import Held, OpenRequest, Waiter

_log = logging.getLogger(__name__)

_RECHECK_S = 1.0
_MAX_IDS = 1000
_MAX_PACKERS = 10_000
_MAX_TOGETHER = 32
_MAX_TOGETHER_BYTES = 64 * 1024
_FULL = "this gateway holds {} bytes of unanswered requests"

R = TypeVar("R", bound=OpenRequest)


class Requester(Generic[R]):
    """The open requests of one endpoint by id, bounded in bytes; `full` is the error text when they exceed it.

    Once started it reads the endpoint's reply stream and sees to it that no caller waits for ever. `spawn` runs writes
    as tasks; by default these end with the requester.
    """

    def __init__(
        self,
        log: QueueLog,
        endpoint: str,
        payloads: Payloads | None = None,
        *,
        limits: Limits = Limits(),  # noqa: B008  (immutable)
        max_size_bytes: int = 0,
        max_stream_bytes: int = 0,
        full: str = _FULL,
        spawn: Spawn | None = None,
    ) -> None:
        self._log = log
        self.endpoint = endpoint.encode()
        self._stream = keys.replies(endpoint)
        self._reader: StreamReader | None = None
        self.payloads = payloads
        self._take = payloads.take if payloads is not None else None
        self._limits = limits
        self._max_size_bytes = max_size_bytes
        self._full = full
        self._tasks = Tasks()
        self._watching = Tasks()
        self.spawn: Spawn = spawn or self._tasks.spawn
        self.cancels = Cancels(log, self.spawn)
        self._size_bytes = 0
        self.held = Held(max_stream_bytes, max_size_bytes // 2)
        self.ids = Ids()
        self.requests: dict[bytes, R] = {}
        self._packers: dict[tuple[str, int, int, str, bool], EntryPacker] = {}
        self._up = True
        self._unanswered: set[bytes] = set()
        self._coming = 0
        self._idle: asyncio.Event | None = None
        """Set once no caller waits, if anybody waits for that."""
        self.duplicates = 0
        """Counts answers to requests that were answered before, or are not open."""
        self.make_packer = EntryPacker
        self.answer_job: Callable[[R], Awaitable[None]] | None = None
        """Answers an ended job from its record, when no reply will come."""
        self.lose: Callable[[R], None] = self._lose
        """Called with requests that are neither in the log nor answered."""
        self.on_stray: Callable[[ResponseRecord], bool] = lambda _response: False
        """Takes replies to requests that are not open; returns whether they were wanted."""
        self.on_wave: Callable[[Buffer], None] = lambda _reply: None
        """Takes the answers to a wave."""
        self.on_facts: Callable[[Entry], None] = lambda _entry: None

    # -- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._reader = self._log.reader()
        self._reader.start(self.on_replies, self._on_log_state)
        self._reader.add(self._stream, consume=True)
        self._watching.spawn(self._watch(), "requests without an answer")

    async def close(self, patience_s: float = 0.0) -> None:
        """The process ends: callers that still wait get no answer. Running writes get `patience_s` to finish."""
        for request in list(self.requests.values()):
            request.failed(Unavailable(SERVER_EXITING))
        await asyncio.sleep(0)  # their callers may still write
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._tasks.settled()
        await self._tasks.close()
        await self._watching.close()
        if self._reader is not None:
            await self._reader.close()
        with contextlib.suppress(CharoniaError):
            await self._log.delete_stream(self._stream)

    def begin_anew(self) -> None:
        """The log has a new epoch: it knows none of these requests."""
        self.cancels.forget()
        for request in list(self.requests.values()):
            request.withdrawn = True
            request.failed(LogUnavailable(EPOCH_CHANGED))

    async def wait_idle(self) -> None:
        """Returns when no caller waits (drain)."""
        while self.requests or self._coming:
            self._idle = self._idle or asyncio.Event()
            await self._idle.wait()

    @contextlib.contextmanager
    def waiting_caller(self) -> Iterator[None]:
        """While this context lasts a caller waits whose request is not open yet, or shares the execution of another."""
        self._coming += 1
        try:
            yield
        finally:
            self._coming -= 1
            self._look_idle()

    def _look_idle(self) -> None:
        if self._idle is not None and not self.requests and not self._coming:
            self._idle.set()
            self._idle = None

    # -- requests -----------------------------------------------------------------------------------------------------

    async def pack(
        self,
        waiter: Waiter,
        request: InferenceRequest,
        admitted: Admitted,
        level: int,
        served: ServedVersion,
        flags: int,
        *,
        lineage: Lineage | None = None,
        tenant: str = "",
        is_durable: bool = False,
    ) -> None:
        """Make the record of an admitted request. `end` releases its payloads. Raises `LogUnavailable`."""
        payloads, reference = self.payloads, None
        if payloads is not None:
            flags |= payloads.flags(served)
            if admitted.meta.size_bytes >= BY_REFERENCE_BYTES:
                with self.waiting_caller():
                    buffers = [t.data for t in request.inputs]
                    reference = waiter.reference = await payloads.lend(buffers, flags, served, durable=is_durable)
        waiter.record = record = request_record(
            waiter.id, self.endpoint, request, admitted, level, flags, reference, lineage, tenant=tenant
        )
        waiter.size_bytes = len(record) if reference is None else len(record) + reference.size_bytes

    def add(self, request: R, size_bytes: int) -> None:
        """Opens a request; call `end` for it later. Raises `ResourceExhausted` when too much is held here."""
        self._take_room(size_bytes)
        request.held_bytes = size_bytes
        self.requests[request.id] = request

    def withdraw(self, request: OpenRequest) -> None:
        """A request is no longer wanted: its model's owner is notified, unless it cannot be in the log."""
        if request.sent and not request.withdrawn:
            self.cancels.send(request.model, request.id)
        request.withdrawn = True

    def ask_to_end(self, request: OpenRequest) -> None:
        """A caller cancels a request and reads on: its model decides when it ends, once it runs (P13)."""
        if request.has_ended or request.withdrawn:
            return
        if request.sent:
            self.cancels.send(request.model, request.id, gentle=True)
        else:
            request.failed(Cancelled(""))

    def end(self, waiter: Waiter) -> None:
        """A request has its answer, or its caller has left: release its payloads."""
        if waiter.timer is not None:
            waiter.timer.cancel()
        if waiter.packer is not None:
            waiter.packer.ended(waiter)
        if self.requests.pop(waiter.id, None) is not None:
            self._size_bytes -= waiter.held_bytes
        if waiter.reference is not None and self.payloads is not None:
            reference, waiter.reference = waiter.reference, None
            self.spawn(self.payloads.end(reference))
        self._look_idle()

    def _take_room(self, size_bytes: int) -> None:
        if self._size_bytes + size_bytes > self._max_size_bytes:
            held = self._full.format(self._size_bytes)
            raise ResourceExhausted(f"{held}, its bound is {self._max_size_bytes}; retry later")
        self._size_bytes += size_bytes

    def hold(self, size_bytes: int) -> None:
        """Opens a wave; call `release` for it in the end. Raises `ResourceExhausted` when too much is held here."""
        self._take_room(size_bytes)
        self._coming += 1

    def release(self, size_bytes: int) -> None:
        """A wave has ended."""
        self._size_bytes -= size_bytes
        self._coming -= 1
        if self._idle is not None:
            self._look_idle()

    def packer(self, model: str, level: int, lane: int, tenant: str, *, journalled: bool) -> EntryPacker:
        """The packer for requests with this key, which share entries."""
        key = (model, level, lane, tenant, journalled)
        found = self._packers.get(key)
        if found is None:
            if len(self._packers) >= _MAX_PACKERS:  # idle ones hold nothing
                self._packers.clear()
            found = self._packers[key] = self.make_packer(
                self._log,
                model,
                level,
                Terms(lane, tenant, self._limits, journalled, ""),
                self.spawn,
                self.ids.next,
                max_requests=_MAX_TOGETHER,
                max_size_bytes=_MAX_TOGETHER_BYTES,
            )
        return found

    # -- replies ------------------------------------------------------------------------------------------------------

    def on_replies(self, _stream: bytes, entries: list[Entry]) -> None:
        """The callback of the reply stream's reader."""
        failpoints.hit("gateway.notified")
        for entry in entries:
            if entry.fields[0] == FIELD_WAVE:
                self.on_wave(entry.fields[1])
            elif entry.fields[0] == FIELD_FACT:
                self.on_facts(entry)
        requests = self.requests
        for response in answers_in(entries, self._take):
            request = requests.get(response.id)
            if (request is None or not request.answered(response)) and not self.on_stray(response):
                self.duplicates += 1

    def _on_log_state(self, up: bool) -> None:
        self._up = up
        self._unanswered.clear()

    # -- lost replies -------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Checks periodically: the log may lose requests (a flush, a power cut) and a dying executor a reply."""
        before: list[bytes] = []

        async def check() -> None:
            nonlocal before
            try:
                await self.recheck(before)
            finally:
                before = list(self.requests)

        complaint = "open requests could not be checked"
        await periodic(check, _RECHECK_S, complaint, on_refusal=lambda _: self._unanswered.clear())

    async def recheck(self, before: Iterable[bytes]) -> None:
        """Check requests that have waited since the last check: settled or unknown ones will get no reply. Jobs are
        answered from their records at once. Others are lost if two checks in a row find them so, without a reply in
        between or one held back for order. Cancels without effect are repeated. Raises what the log raises.
        """
        if not self._up:
            return
        suspects: dict[str, list[bytes]] = {}
        for request_id in before:
            request = self.requests.get(request_id)
            if request is not None and request.accepted:
                suspects.setdefault(request.model, []).append(request_id)
        unanswered = await _no_longer_open(self._log, suspects)
        again = unanswered & self._unanswered
        lost = await _without_held(self._log, again, suspects) if again else again
        self._unanswered = unanswered
        for request_id in unanswered:
            request = self.requests.get(request_id)
            if request is None or request.has_ended:
                continue
            if request.is_job and self.answer_job is not None:
                await self.answer_job(request)
            elif request_id in lost:
                self.lose(request)
        await self.cancels.repeat()

    @staticmethod
    def _lose(request: OpenRequest) -> None:
        request.withdrawn = True
        request.failed(LogUnavailable(OUTCOME_UNKNOWN))


def answers_in(entries: Sequence[Entry], take: Callable[[Reference], Buffer] | None) -> Iterator[ResponseRecord]:
    """Every answer of these entries, in order; `take` returns the bytes of those stored out of band. Unreadable answers
    are dropped and logged; the others belong to other callers.
    """
    for entry in entries:
        try:
            records = records_of(entry.fields)
        except InvalidRecord as error:
            _log.error("dropped unreadable replies in entry %s: %s", entry.id.decode(errors="replace"), error)
            continue
        for record in records:
            try:
                yield unpack_response(record, take)
            except InvalidRecord as error:
                _log.error("dropped an unreadable reply in entry %s: %s", entry.id.decode(errors="replace"), error)


async def _no_longer_open(log: Work, ids_by_model: Mapping[str, Sequence[bytes]]) -> set[bytes]:
    """The requests that are settled or unknown to the log: no reply will be sent to them any more."""
    found: set[bytes] = set()
    for model, ids in ids_by_model.items():
        for at in range(0, len(ids), _MAX_IDS):
            part = ids[at : at + _MAX_IDS]
            attempts = await log.unsettled(model, part)
            found.update(request_id for request_id, attempt in zip(part, attempts, strict=True) if attempt < 0)
    return found


async def _without_held(log: Streams, ids: set[bytes], models: Iterable[str]) -> set[bytes]:
    """These requests of these models, without those answered through their owner (S6), which still holds the answer
    until those before it are sent. Scans all facts of a model, so it is only for the few that seem lost.
    """
    left = set(ids)
    for model in models:
        after = START
        while left and (entries := await log.range(keys.facts(model), after)):
            after = entries[-1].id
            for fact in (fact for entry in entries for fact in facts_of(entry)):
                if isinstance(fact, BatchFinished):
                    left.difference_update(response_id(record) for _, record in fact.replies)
    return left
