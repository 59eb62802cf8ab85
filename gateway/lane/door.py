"""Doors, where requests alike wait, and the waves they are packed into; `gathering` decides when waves leave.

`Expiry` ends requests at their deadlines. It has one timer for all, set to the earliest deadline: a timer for each
would cost more than a request's place in a wave, and most are answered long before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from charonia import failpoints
from charonia.calls.payload_transfer import Payloads
from charonia.calls.unsent_counts import failure_reason
from charonia.catalog.served import ServedVersion
from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import CharoniaError, InternalError
from charonia.eventlog.payloads import BY_REFERENCE_BYTES
from charonia.tensors import Buffer
from charonia.wire import MAX_WAVE_REQUESTS, Reference, ResponseRecord, WaveReply, wave_head

from .gathering import Gathering

if TYPE_CHECKING:
    from charonia.calls.admission import Admitted
    from gateway.metrics import RequestCounts

_log = logging.getLogger(__name__)

MAX_WAVE_BYTES = 262_144
MIN_COLUMN_BYTES = 65_536
"""A column of this size is cheaper in a slot than in the log, which copies it five times (docs/adr/0017)."""
_MAX_LARGE = 4
"""Requests of a wave of large ones: joining more costs more than it saves."""


class Call:
    """A request at a door. `data` holds the raw bytes of its inputs, in the order of the signature.

    `deadline_ns` is wall clock, 0 for none. `wave` is None until the request has left its door, `index` is its
    position in the wave. `gone` is True once the client has left.
    """

    __slots__ = ("client_id", "data", "deadline_ns", "gone", "index", "signature", "wave")

    def __init__(self, signature: Signature, data: tuple[Buffer, ...], client_id: bytes = b"") -> None:
        self.signature = signature
        self.data = data
        self.client_id = client_id
        self.gone = False
        self.deadline_ns = 0
        self.index = 0
        self.wave: PendingWave | None = None

    @property
    def is_open(self) -> bool:
        """Whether its client still waits for an answer."""
        return not self.gone

    def abandon(self) -> None:
        """The client has left: remove the request from its door, or cancel it if its wave is not running."""
        if not self.gone:
            self.gone = True
            self.signature.door.abandoned(self)


class Signature(Protocol):
    """The common part of requests that look alike, as one front recognises them."""

    counted_by_lane: bool
    """Whether the lane counts these requests in the gateway's metrics, because no other part does."""

    @property
    def door(self) -> Door: ...

    def answer(self, calls: list[Call], start: int, reply: WaveReply) -> None:
        """Answer consecutive calls of a wave, the first at index `start`; calls that are `gone` get no answer."""

    def respond(self, call: Call, record: ResponseRecord) -> None:
        """Answer one call by itself, with an error or with different outputs."""

    def fail(self, call: Call, error: CharoniaError) -> None:
        """End a call with an error that this gateway raises itself: no response came for the call."""

    def leave_lane(self, call: Call) -> None:
        """Send a call the full way; nothing of it is in the log.

        It may be there after all if a defect of the log's adapter ended `Waves.send` after it took the wave. Then a
        model may compute the call twice, and the answer of the wave is dropped, because the wave is not under way.
        """


class PendingWave:
    """A wave without its answers. `left` counts requests without an answer, `gone` those whose clients have left."""

    __slots__ = (
        "accepted",
        "burst",
        "calls",
        "door",
        "entry_id",
        "gone",
        "held_bytes",
        "left",
        "model",
        "pieces",
        "prefix",
        "references",
        "reply",
        "sent_ns",
        "size_bytes",
        "stream",
        "was_missing",
    )

    def __init__(
        self,
        prefix: bytes,
        door: Door,
        calls: list[Call],
        size_bytes: int,
        held_bytes: int,
        references: Sequence[Reference],
    ) -> None:
        self.prefix = prefix
        self.references = references
        """References to the tensors of its requests, if they are not in the record."""
        self.held_bytes = held_bytes
        """Bytes counted for the wave, without those that its requests hold since they arrived. A column's copy in a
        slot is not counted: slots have a bound of their own."""
        self.door = door
        self.model = door.served.model
        self.calls = calls
        self.size_bytes = size_bytes
        self.left = len(calls)
        self.gone = 0
        self.sent_ns = monotonic_ns()
        self.accepted = False
        self.entry_id = b""
        self.stream = b""
        self.pieces: list[Buffer] | None = None
        """The pieces of the record, if this gateway may have to burst the wave."""
        self.burst: asyncio.Future[None] | None = None
        self.reply: WaveReply | None = None
        """The reply, until the wave is known to have reached its durability level."""
        self.was_missing = False


class Expiry:
    """Calls `expire` once for each call whose deadline has passed.

    `outstanding` yields the calls that wait for an answer; those without a deadline have `deadline_ns` 0.
    """

    def __init__(self, outstanding: Callable[[], Iterable[Call]], expire: Callable[[Call], None]) -> None:
        self._outstanding = outstanding
        self._expire = expire
        self._timer: asyncio.TimerHandle | None = None
        self._next_ns = 0
        """The deadline that the timer is set to, 0 without one."""

    def watch(self, deadline_ns: int) -> None:
        """Take notice of an outstanding call with this deadline."""
        if not self._next_ns or deadline_ns < self._next_ns:
            self._set(deadline_ns)

    def _set(self, deadline_ns: int) -> None:
        self.close()
        self._next_ns = deadline_ns
        delay_s = max(0.0, (deadline_ns - wall_ns()) / 1e9)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._check)

    def _check(self) -> None:
        self._timer, self._next_ns = None, 0
        now_ns, next_ns = wall_ns(), 0
        late: list[Call] = []
        for call in self._outstanding():
            deadline_ns = call.deadline_ns
            if not deadline_ns or call.gone:
                continue
            if deadline_ns <= now_ns:
                late.append(call)
            elif not next_ns or deadline_ns < next_ns:
                next_ns = deadline_ns
        for call in late:
            call.deadline_ns = 0
            try:
                self._expire(call)
            except Exception:  # the other calls expire nevertheless
                _log.exception("a caller cannot be notified that its deadline has passed")
        if next_ns:
            self.watch(next_ns)

    def close(self) -> None:
        """Stop watching; no further call expires."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._next_ns = None, 0


class WaveSender(Protocol):
    """Sends waves to the log (`pending_waves.Waves`)."""

    endpoint: bytes
    expiry: Expiry
    touched: list[Door]
    payloads: Payloads | None

    def begin(
        self, door: Door, calls: list[Call], size_bytes: int, references: Sequence[Reference]
    ) -> PendingWave | None: ...

    def hold(self, size_bytes: int) -> bool: ...

    def release(self, size_bytes: int) -> None: ...

    def end_payloads(self, references: Sequence[Reference]) -> None: ...

    def send(self, wave: PendingWave, stream: bytes, pieces: list[Buffer]) -> bool: ...

    def forget(self, wave: PendingWave) -> None: ...

    def abandoned(self, call: Call) -> None: ...

    def close_door(self, door: Door) -> None: ...


class Door:
    """The waiting requests of one model version, tenant, priority level, time-out and form of inputs.

    Fronts change `waiting` and `touched` too: while they read they append calls, and note the door once in
    `Waves.touched`.
    """

    __slots__ = (
        "_admitted",
        "_by_reference",
        "_level",
        "_meta",
        "_reply_by_reference",
        "_timeout_us",
        "_varies",
        "column_in_slot",
        "counts",
        "gathering",
        "held_bytes",
        "is_closed",
        "key",
        "most",
        "served",
        "touched",
        "used_ns",
        "waiting",
        "waves",
    )

    def __init__(
        self,
        waves: WaveSender,
        gathering: Gathering,
        key: object,
        served: ServedVersion,
        admitted: Admitted,
        counts: RequestCounts,
        *,
        level: int,
        timeout_us: int,
    ) -> None:
        self.waves = waves
        self.gathering = gathering
        self.key = key
        self.served = served
        self.counts = counts
        self._admitted = admitted
        self._meta = admitted.meta
        self._level = level
        self._timeout_us = timeout_us
        self._varies = bool(admitted.bytes_inputs)
        """Requests differ in the sizes of their inputs."""
        self.waiting: list[Call] = []
        self.touched = self.is_closed = False
        self.used_ns = monotonic_ns()
        self._by_reference = not self._varies and admitted.meta.size_bytes >= BY_REFERENCE_BYTES
        """Tensors travel as references, not in the log (docs/adr/0017)."""
        self.held_bytes = admitted.meta.size_bytes if self._by_reference else 0
        """Bytes that each request holds from its arrival."""
        payloads = waves.payloads
        self.column_in_slot = (
            payloads is not None
            and not (self._by_reference or self._varies)
            and len(admitted.meta.inputs) == 1
            and payloads.reads_columns(served)
        )
        """The column of a wave may lie in a slot."""
        self._reply_by_reference = payloads is not None and bool(payloads.flags(served))
        most = 1
        if served.interface.dynamic_batching is not None:
            most = min(MAX_WAVE_REQUESTS, served.interface.max_batch_size // admitted.rows)
        by_size = _MAX_LARGE if self._by_reference else MAX_WAVE_BYTES // max(1, admitted.meta.size_bytes)
        self.most = max(1, min(most, by_size))
        """Max requests of a wave."""

    def send(self, *, full_only: bool = False) -> int:
        """Send all waiting requests, or only full waves; returns the number of waves. Call `Waves.flush` afterwards."""
        count = 0
        waiting = self.waiting
        while len(waiting) >= (self.most if full_only else 1):
            calls = waiting[: self.most]
            del waiting[: self.most]
            count += self._send(calls)
        return count

    def _send(self, calls: list[Call]) -> bool:
        count = len(calls)
        if self._varies:
            size_bytes = sum([len(part) for call in calls for part in call.data])
        else:
            size_bytes = count * self._meta.size_bytes
        waves = self.waves
        wave = None
        try:
            references = self._put_in_slots(calls) if self._by_reference else []
            if references or not self._by_reference:
                wave = waves.begin(self, calls, size_bytes, references)
            if wave is not None:
                pieces = self._pieces(wave, calls, size_bytes, references)
                self.used_ns = wave.sent_ns
                if waves.send(wave, self.gathering.stream, pieces):
                    return True
        except Exception:  # otherwise its callers would wait for ever
            _log.exception("a wave for model %r cannot be sent", self.served.model)
            if wave is not None:
                waves.forget(wave)
        self._leave(calls)
        return False

    def _pieces(
        self, wave: PendingWave, calls: list[Call], size_bytes: int, references: list[Reference]
    ) -> list[Buffer]:
        """The record of a wave, in parts. A large column is put into a slot."""
        waves, meta, count = self.waves, self._meta, len(calls)
        column_at = None
        if self.column_in_slot and size_bytes >= MIN_COLUMN_BYTES and waves.payloads is not None:
            column_at = waves.payloads.lend_column([call.data[0] for call in calls])
            wave.references = () if column_at is None else (column_at,)
        client_ids = [call.client_id for call in calls]
        deadlines = [call.deadline_ns for call in calls]
        has_deadlines = any(deadlines)
        head = wave_head(
            wave.prefix,
            count,
            waves.endpoint,
            meta,
            rows=self._admitted.rows,
            signature=self._admitted.signature,
            level=self._level,
            accepted_ns=wall_ns(),
            timeout_us=self._timeout_us,
            client_ids=client_ids if any(client_ids) else (),
            deadlines=deadlines if has_deadlines else (),
            sizes=[[len(part) for part in column] for column in _columns(calls)] if self._varies else (),
            references=references,
            reply_by_reference=self._reply_by_reference,
            column_at=column_at,
        )
        if references or column_at is not None:
            pieces: list[Buffer] = [head]
        elif len(meta.inputs) == 1:
            pieces = [head, *[call.data[0] for call in calls]]
        else:
            pieces = [head]
            for column in _columns(calls):
                pieces += column
        if has_deadlines:
            wave.pieces = pieces
        return pieces

    def _put_in_slots(self, calls: list[Call]) -> list[Reference]:
        """Put the tensors of these calls into slots; returns nothing if there are not enough slots for all."""
        payloads = self.waves.payloads
        references: list[Reference] = []
        for call in calls:
            reference = payloads.lend_slot(call.data) if payloads is not None else None
            if reference is None:
                self.waves.end_payloads(references)
                return []
            references.append(reference)
        return references

    def abandoned(self, call: Call) -> None:
        """The client of a call has left."""
        if call.signature.counted_by_lane:
            self.counts.failures["CANCELED"] += 1
        if call.wave is not None:
            self.waves.abandoned(call)
        elif call in self.waiting:
            self.waiting.remove(call)

    def answered(self, wave: PendingWave, reply: WaveReply) -> None:
        """Distribute the reply to a wave."""
        if not self.gathering.measured(reply.infer_ns):
            self.waves.close_door(self)
        calls = wave.calls
        if len(calls) > 1 and failpoints.is_on():
            half = len(calls) // 2
            self._answer(wave, calls[:half], 0, reply)
            failpoints.hit("gateway.answering")
            self._answer(wave, calls[half:], half, reply)
        else:
            self._answer(wave, calls, 0, reply)

    def _answer(self, wave: PendingWave, calls: list[Call], at: int, reply: WaveReply) -> None:
        """Answer consecutive calls of a wave, the first at index `at`."""
        start = 0
        signature = calls[0].signature
        for end, call in enumerate(calls):
            if call.signature is not signature:
                self._answer_alike(wave, calls[start:end], at + start, reply)
                start, signature = end, call.signature
        self._answer_alike(wave, calls[start:] if start else calls, at + start, reply)

    def _answer_alike(self, wave: PendingWave, calls: list[Call], at: int, reply: WaveReply) -> None:
        """Answer calls of one signature. If one answer cannot be written, that call and those after it get an error."""
        signature = calls[0].signature
        if signature.counted_by_lane:
            count = len(calls) - sum([call.gone for call in calls]) if wave.gone else len(calls)
            self.counts.succeeded_together(count, monotonic_ns() - wave.sent_ns)
        try:
            signature.answer(calls, at, reply)
        except Exception as error:
            fail_unwritten(calls, error)

    def leave_all(self) -> None:
        """Send all waiting requests the full way."""
        waiting, self.waiting = self.waiting, []
        self._leave(waiting)

    def _leave(self, calls: list[Call]) -> None:
        """Send calls the full way. One that cannot be sent ends with an error, or with its connection; others go on."""
        for call in calls:
            call.wave = None
            try:
                call.signature.leave_lane(call)
            except Exception as error:
                _log.exception("a request for model %r cannot be sent the full way", self.served.model)
                failed = InternalError(f"the request cannot be sent: {type(error).__name__}: {error}")
                if call.signature.counted_by_lane and not call.gone:
                    self.counts.failures[failure_reason(failed, executed=False)] += 1
                _fail(call, failed)


def values_of(calls: list[Call], start: int, reply: WaveReply, *, with_ids: bool) -> Iterable[tuple[bytes, ...]]:
    """The individual parts of answers to consecutive calls of a wave: the id, with `with_ids`, and the outputs."""
    if with_ids and len(reply.outputs) == 1:
        column, size = reply.columns[0], reply.outputs[0].size_bytes
        return [(call.client_id, column[at * size : (at + 1) * size]) for at, call in enumerate(calls, start)]  # type: ignore[misc]
    columns = []
    for column, place in zip(reply.columns, reply.outputs, strict=True):
        size = place.size_bytes
        columns.append([column[at * size : (at + 1) * size] for at in range(start, start + len(calls))])
    if with_ids:
        columns.insert(0, [call.client_id for call in calls])
    return zip(*columns, strict=True)


def fail_unwritten(calls: Iterable[Call], error: Exception) -> None:
    """Notify callers whose answers cannot be written, because of `error`, which is being handled."""
    _log.exception("the answers of a wave cannot be written")
    failed = InternalError(f"the answer cannot be written: {type(error).__name__}: {error}")
    for call in calls:
        _fail(call, failed)


def _fail(call: Call, error: CharoniaError) -> None:
    """End a call with an error; what goes wrong meanwhile costs no other call."""
    try:
        if call.is_open:
            call.signature.fail(call, error)
    except Exception:
        _log.exception("a caller cannot be answered")


def _columns(calls: list[Call]) -> Iterable[tuple[Buffer, ...]]:
    """The bytes of each input, for all these calls."""
    return zip(*[call.data for call in calls], strict=True)
