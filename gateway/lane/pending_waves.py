"""The waves of one gateway, from a door into the log and from the reply to the callers.

A wave is answered by one reply, or, if its owner burst it, by a response to each request; the first answer counts. If a
wave is gone from the log, and two checks found no reply, its outcome is reported as unknown.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from struct import Struct
from typing import TYPE_CHECKING, Any

from charonia import failpoints, keys
from charonia.calls.payload_transfer import Payloads
from charonia.calls.request_endings import EXPIRED, end_requests
from charonia.calls.unsent_counts import failure_reason
from charonia.clock import monotonic_ns
from charonia.errors import (
    DEADLINE_EXCEEDED,
    OUTCOME_UNKNOWN,
    CharoniaError,
    DeadlineExceeded,
    InvalidRecord,
    LogUnavailable,
    ResourceExhausted,
)
from charonia.eventlog.port import Limits, QueueLog
from charonia.facts import counters
from charonia.tasks import periodic
from charonia.tensors import Buffer, Tensor
from charonia.wire import (
    PREFIX_BYTES,
    Reference,
    ResponseRecord,
    WaveReply,
    record_fields,
    unpack_wave,
    unpack_wave_reply,
)

from .door import Call, Door, Expiry, PendingWave, fail_unwritten
from .leases import Leases

if TYPE_CHECKING:
    from gateway.dataplane import DataPlane

_log = logging.getLogger(__name__)

_SIZE = Struct("<I")
_MAX_REPLY_BYTES = 1 << 28
_CHECK_INTERVAL_S = 1.0
_IDLE_NS = 10_000_000_000
_IDS_AT_ONCE = 64
_LOG_PATIENCE_S = 1.0
_ASK_AGAIN_S = 0.02


class Waves:
    """The waves in flight. `on_close(door)` forgets the signatures of a door; `doors()` returns the open ones."""

    def __init__(
        self, log: QueueLog, dataplane: DataPlane, endpoint: str, limits: Limits, payloads: Payloads | None
    ) -> None:
        self._log = log
        self.payloads = payloads
        self._send_wave, self._flush_waves = log.waves.send, log.waves.flush
        self._dataplane = dataplane
        self._requester = dataplane.requester
        self.endpoint = endpoint.encode()
        self._under_way: dict[bytes, PendingWave] = {}
        self.leases = Leases(log, endpoint, limits, dataplane.spawn)
        self._ids = b""
        self._ids_at = 0
        self.touched: list[Door] = []
        self.on_close: Callable[[Door], None] = lambda _door: None
        self.duplicates = 0
        self.requests = 0
        """Number of requests sent."""
        self.doors: Callable[[], Iterable[Door]] = tuple
        self.expiry = Expiry(self._outstanding, self._expire)

    @property
    def pending_requests(self) -> int:
        """Number of requests at doors and in waves that have no answer yet."""
        return sum(len(door.waiting) for door in self.doors()) + sum(wave.left for wave in self._under_way.values())

    # -- from a door into the log -------------------------------------------------------------------------------------

    def ready(self) -> None:
        """A front has read all its data: pass the touched doors to their queues."""
        touched = self.touched
        while touched:
            door = touched.pop()
            door.touched = False
            try:
                door.gathering.came(door)
            except Exception:  # requests at other doors leave nevertheless
                _log.exception("requests for model %r cannot leave", door.served.model)

    def begin(
        self, door: Door, calls: list[Call], size_bytes: int, references: Sequence[Reference] = ()
    ) -> PendingWave | None:
        """Begin a wave, counted against its bounds; None if these are exceeded: the full way then raises the error.

        The payloads at `references` are released with the wave, or now.
        """
        count = len(calls)
        model = door.served.model
        if not self.leases.take(model, count, size_bytes):
            self.end_payloads(references)
            return None
        held_bytes = 0 if references else size_bytes  # large requests hold theirs since they arrived
        try:
            self._requester.hold(held_bytes)
        except ResourceExhausted:
            self.leases.give_back(model, count, size_bytes)
            self.end_payloads(references)
            return None
        wave = PendingWave(self._next_prefix(), door, calls, size_bytes, held_bytes, references)
        for index, call in enumerate(calls):
            call.wave = wave
            call.index = index
        self._under_way[wave.prefix] = wave
        return wave

    def hold(self, size_bytes: int) -> bool:
        """Count a large request from its arrival on; False if this gateway holds too many bytes."""
        try:
            self._requester.hold(size_bytes)
        except ResourceExhausted:
            return False
        return True

    def release(self, size_bytes: int) -> None:
        """A large request has ended."""
        self._requester.release(size_bytes)

    def end_payloads(self, references: Iterable[Reference]) -> None:
        """Release the payloads of a wave."""
        for reference in references:
            assert self.payloads is not None
            self.payloads.end_slot(reference)

    def _next_prefix(self) -> bytes:
        at = self._ids_at
        if at >= len(self._ids):
            self._ids = os.urandom(PREFIX_BYTES * _IDS_AT_ONCE)
            at = 0
        self._ids_at = end = at + PREFIX_BYTES
        return self._ids[at:end]

    def send(self, wave: PendingWave, stream: bytes, pieces: list[Buffer]) -> bool:
        """Append a wave to its queue; False if the log cannot take it now, and nothing was sent."""
        wave.stream = stream
        failpoints.hit("gateway.parsed")
        try:
            if self._send_wave(stream, pieces, partial(self._accepted, wave)):
                self.requests += len(wave.calls)
                return True
        except LogUnavailable:
            pass
        self.forget(wave)
        return False

    def flush(self) -> None:
        """Write the waves that were sent."""
        self._flush_waves()

    def _accepted(self, wave: PendingWave, result: bytes | CharoniaError) -> None:
        if isinstance(result, CharoniaError):
            self._fail(wave, result)
            return
        failpoints.hit("gateway.stored")
        wave.accepted = True
        wave.entry_id = result
        counts = self._dataplane.counts
        counts.entries += 1
        counts.requests += len(wave.calls)
        if wave.reply is not None:
            self._answer(wave, wave.reply)

    # -- from the reply to the callers --------------------------------------------------------------------------------

    def on_reply(self, record: Buffer) -> None:
        """Handle the reply to a wave."""
        try:
            reply = unpack_wave_reply(record)
            if reply.reference is not None and self.payloads is not None:
                reply.read_columns(self.payloads.take(reply.reference))
        except InvalidRecord as error:
            _log.error("dropped an unreadable reply: %s", error)
            return
        wave = self._under_way.get(reply.prefix)
        if wave is None or wave.reply is not None:
            self.duplicates += 1
            return
        if reply.count != len(wave.calls):
            _log.error("dropped a reply of %d answers to a wave of %d requests", reply.count, len(wave.calls))
            return
        if wave.accepted:
            self._answer(wave, reply)
        else:  # its durability level is not reached, or the log's answer is on its way
            wave.reply = reply

    def _answer(self, wave: PendingWave, reply: WaveReply) -> None:
        door = wave.door
        if wave.left < len(wave.calls):  # some were answered one by one
            for call in [call for call in wave.calls if call.wave is wave]:
                self._one(wave, call, response_in(reply, call.index))
            return
        self.forget(wave)
        for call in wave.calls:
            call.wave = None
        try:
            door.answered(wave, reply)
        finally:
            door.gathering.ended(len(wave.calls))

    def on_response(self, response: ResponseRecord) -> bool:
        """Handle the response to one request; False if it belongs to no wave."""
        wave = self._under_way.get(response.id[:PREFIX_BYTES])
        index = response.id[PREFIX_BYTES]
        if wave is None or index >= len(wave.calls):
            return False
        call = wave.calls[index]
        if call.wave is not wave:
            self.duplicates += 1
            return True
        self._one(wave, call, response)
        return True

    def _one(self, wave: PendingWave, call: Call, response: ResponseRecord) -> None:
        """Answer one call of a wave by itself."""
        self._take_out(wave, call)
        if call.gone:
            return
        if call.signature.counted_by_lane:
            counts = wave.door.counts
            if counts.latencies is not None:
                counts.latencies.responded(monotonic_ns() - wave.sent_ns)
            if response.error is None:
                counts.succeeded(monotonic_ns() - wave.sent_ns)
            else:
                counts.failed(response.error, ensemble=False)
        try:
            call.signature.respond(call, response)
        except Exception as error:  # its caller and those of the others would wait for ever
            fail_unwritten((call,), error)

    def _take_out(self, wave: PendingWave, call: Call) -> None:
        """A call of a wave is answered by itself."""
        call.wave = None
        wave.left -= 1
        if not wave.left:
            self.forget(wave)
            wave.door.gathering.ended(len(wave.calls))

    def _fail(self, wave: PendingWave, error: CharoniaError) -> None:
        """End the remaining calls of a wave with an error of this gateway."""
        for call in [call for call in wave.calls if call.wave is wave]:
            try:
                self._fail_one(wave, call, error)
            except Exception:  # the other calls end nevertheless
                _log.exception("a caller could not be told of an error")

    def _fail_one(self, wave: PendingWave, call: Call, error: CharoniaError) -> None:
        self._take_out(wave, call)
        if not call.gone:
            if call.signature.counted_by_lane:
                wave.door.counts.failures[failure_reason(error, executed=False)] += 1
            call.signature.fail(call, error)

    # -- deadlines ----------------------------------------------------------------------------------------------------

    def _outstanding(self) -> Iterable[Call]:
        """The calls that may have deadlines: those at doors, and those of waves with any."""
        for door in self.doors():
            yield from door.waiting
        for wave in self._under_way.values():
            if wave.pieces is not None or wave.burst is not None:
                yield from [call for call in wave.calls if call.wave is wave]

    def _expire(self, call: Call) -> None:
        door, wave = call.signature.door, call.wave
        if wave is not None:
            self._dataplane.spawn(self._expire_in_log(wave, call))
        elif call in door.waiting:
            door.waiting.remove(call)
            self._dataplane.deadlines.expired += 1
            error = DeadlineExceeded(DEADLINE_EXCEEDED)
            if call.signature.counted_by_lane:
                door.counts.failures[failure_reason(error, executed=False)] += 1
            call.signature.fail(call, error)

    async def _expire_in_log(self, wave: PendingWave, call: Call) -> None:
        """Burst the wave and settle one request of it as expired. Its caller gets the deadline error only if this
        settlement is the first; otherwise its answer is on the way.
        """
        served = wave.door.served
        key = keys.statistics(served.model, served.version, served.content_hash)
        increments = counters.of_failures(1, monotonic_ns() - wave.sent_ns, "REJECTED")
        request_id = wave.prefix + bytes((call.index,))
        try:
            async with asyncio.timeout(_LOG_PATIENCE_S):
                while call.wave is wave and not wave.accepted:  # noqa: ASYNC110  (it is on its way into the log)
                    await asyncio.sleep(_ASK_AGAIN_S)
                if call.wave is wave:
                    await self._burst(wave)
                    statistics = key, increments
                    won = await end_requests(self._log, wave.model, [request_id], EXPIRED.state, statistics=statistics)
                    if won[0] and call.wave is wave:
                        self._dataplane.deadlines.expired += 1
                        self._fail_one(wave, call, DeadlineExceeded(DEADLINE_EXCEEDED))
        except (CharoniaError, TimeoutError):
            if call.wave is wave:
                self._fail_one(wave, call, LogUnavailable(OUTCOME_UNKNOWN))

    async def _burst(self, wave: PendingWave) -> None:
        """Burst a wave in the log, unless it was burst or settled."""
        pieces, wave.pieces = wave.pieces, None
        if pieces is not None:
            wave.burst = asyncio.ensure_future(self._burst_pieces(wave, pieces))
        if wave.burst is not None:
            await asyncio.shield(wave.burst)

    async def _burst_pieces(self, wave: PendingWave, pieces: list[Buffer]) -> None:
        try:
            record = unpack_wave(b"".join(pieces))
            sizes = list(zip(record.ids(), record.request_bytes(), strict=True))
            fields = record_fields([request.record for request in record.requests()])
            await self._log.waves.burst(wave.model, wave.stream, wave.entry_id, sizes, fields)
        except BaseException:  # the next deadline tries again: `burst` does nothing for a wave that was burst
            wave.pieces, wave.burst = pieces, None
            raise

    def forget(self, wave: PendingWave) -> None:
        """End what is counted and held for a wave, once."""
        if self._under_way.pop(wave.prefix, None) is None:
            return
        if wave.references:
            self.end_payloads(wave.references)
        self._requester.release(wave.held_bytes)
        self.leases.give_back(wave.model, len(wave.calls), wave.size_bytes)

    def abandoned(self, call: Call) -> None:
        """The client of a request in flight has left: notify the owner, which cancels it if it is still queued."""
        wave = call.wave
        if wave is None:
            return
        wave.gone += 1
        self._requester.cancels.send(wave.model, wave.prefix + bytes((call.index,)))

    # -- life ---------------------------------------------------------------------------------------------------------

    def close_door(self, door: Door) -> None:
        """Requests of a door take the full way from now on."""
        self.on_close(door)
        door.column_in_slot = False  # what closes a door may bring readers that do not see this gateway's slots
        if door.waiting:
            door.gathering.sent(door.send())
            self.flush()

    def lose_all(self, error: CharoniaError) -> None:
        """Fail all waves: the log was replaced, or the gateway ends."""
        for wave in list(self._under_way.values()):
            self._fail(wave, error)

    async def watch(self) -> None:
        """Fail calls of lost waves, so that no caller waits for ever, and release unused leases."""
        await periodic(self._check, _CHECK_INTERVAL_S, "waves could not be checked")

    async def _check(self) -> None:
        await self._fail_lost()
        await self._end_idle()

    async def _fail_lost(self) -> None:
        before_ns = monotonic_ns() - int(_CHECK_INTERVAL_S * 1e9)
        old = [wave for wave in self._under_way.values() if wave.accepted and wave.sent_ns < before_ns]
        for wave in old:
            (is_waiting,) = await self._log.waves.waiting(wave.stream, [wave.entry_id])
            if is_waiting:
                continue
            open_calls = [call for call in wave.calls if call.wave is wave]
            ids = [wave.prefix + bytes((call.index,)) for call in open_calls]
            attempts = await self._log.unsettled(wave.model, ids)
            lost = [call for call, attempt in zip(open_calls, attempts, strict=True) if attempt < 0]
            if wave.gone:
                # requests of a burst wave, perhaps with a new owner, who does not know what the former one noted
                for call, request_id, attempt in zip(open_calls, ids, attempts, strict=True):
                    if call.gone and attempt >= 0:
                        self._requester.cancels.keep(wave.model, request_id)
            if lost and not wave.was_missing:
                wave.was_missing = True
                continue
            for call in lost:
                if call.wave is wave:
                    self._fail_one(wave, call, LogUnavailable(OUTCOME_UNKNOWN))

    async def _end_idle(self) -> None:
        doors = list(self.doors())
        since_ns = monotonic_ns() - _IDLE_NS
        used = {door.served.model for door in doors if door.used_ns > since_ns}

        def close_doors(model: str) -> None:
            for door in [door for door in doors if door.served.model == model]:
                self.close_door(door)

        await self.leases.end_idle(used, close_doors)

    async def close(self) -> None:
        self.expiry.close()
        await self.leases.close()


def response_in(reply: WaveReply, index: int) -> ResponseRecord:
    """The response to one request of a wave."""
    outputs = []
    for column, place in zip(reply.columns, reply.outputs, strict=True):
        data = column[index * place.size_bytes : (index + 1) * place.size_bytes]
        outputs.append(Tensor(place.name, place.datatype, place.shape, data))
    return ResponseRecord(b"", reply.model, reply.version, outputs, {}, None)


class ReplyServer:
    """Receives replies from executors of this machine over this gateway's socket (docs/adr/0016)."""

    def __init__(self, waves: Waves) -> None:
        self._waves = waves
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Transport] = set()

    async def start(self, path: str) -> None:
        """Listen at `path`. If it is empty or that fails, replies arrive through the log."""
        if not path:
            return
        try:
            self._server = await asyncio.get_running_loop().create_unix_server(
                lambda: _Replies(self._waves, self._connections), path
            )
        except OSError as error:
            _log.warning("replies come through the log: no socket at '%s': %s", path, error.strerror)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for transport in list(self._connections):
            transport.close()


class _Replies(asyncio.Protocol):
    """The connection of one executor."""

    def __init__(self, waves: Waves, connections: set[asyncio.Transport]) -> None:
        self._waves = waves
        self._connections = connections
        self._transport: Any = None
        self._rest = bytearray()
        """The beginning of an incomplete reply; `_needed` is its size with its length."""
        self._needed = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._connections.add(self._transport)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._connections.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        failpoints.hit("gateway.notified")
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return
            data, self._rest = bytes(self._rest), bytearray()
        at, size = 0, len(data)
        while size - at >= _SIZE.size:
            (length,) = _SIZE.unpack_from(data, at)
            if length > _MAX_REPLY_BYTES:
                _log.error("an executor wrote a reply of %d bytes", length)
                self._transport.abort()
                return
            end = at + _SIZE.size + length
            if end > size:
                self._needed = end - at
                break
            try:
                self._waves.on_reply(data[at + _SIZE.size : end])
            except Exception:
                _log.exception("a reply could not be given to its callers")
            at = end
        else:
            self._needed = _SIZE.size
        self._rest += data[at:]
