"""Records a share of the requests of models that ask for it, with their tensors and answers, for `charonia replay`.

`charonia.models.recording_rules` says which, ADR 0060 why. A request is recorded once it is answered, in a task that no
caller waits for; one that is answered later once it is a job, which keeps its answer. What the bounds do not let
through is counted, never queued. Sequences are recorded whole or not at all: after a step that could not be recorded,
the rest of its sequence is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import Sequence
from typing import Protocol

from charonia import keys
from charonia.catalog.served import ServedVersion
from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import CharoniaError, ErrorCode
from charonia.eventlog.port import MOST_TAKEN, Notes
from charonia.inference import InferenceRequest, wanted_outputs
from charonia.models.recording_rules import RecordingRules
from charonia.releases.route_rule import WHOLE, sticky_draw
from charonia.tasks import Tasks
from charonia.wire import ResponseRecord, pack_failure, pack_response
from charonia.wire.recorded_calls import REPLAY_PRIORITY, RecordedCall, RecordedStep, pack_recorded_call
from gateway.requests.delivery import DeliveryOptions

MAX_CALL_BYTES = 4 << 20
"""Of one request with its answer: a larger one is noted without tensors. The event loop copies this much in 1 ms."""
MAX_PENDING_BYTES = 32 << 20
"""On the way into the log, of one gateway."""
_MAX_PENDING = 256
_MAX_BROKEN = 10_000
_OVERHEAD_BYTES = 512
"""Approximately, of a recording beside its bytes: its key and its places in two sets."""
_RESPONSE_BYTES = 256
"""Approximately, of a response beside its tensors: a stream may have many small ones."""
_SWEEP_NS = 60_000_000_000
_INDEX_SPARE_S = 3600
"""Indexes outlive the recordings: they go by themselves when a model stops to record."""
_CLOSE_WITHIN_S = 2.0
_CLOCK_SET_NS = 1_000_000_000
"""The clock was set, or the machine slept, if the time of day is further from the monotonic clock than it was."""
_NO_ID = bytes(16)

TOO_LARGE = "larger than a recording may be"
IN_REGIONS = "its outputs lie in shared memory of the client"

_NOT_THE_MODELS = frozenset(
    {ErrorCode.UNAVAILABLE, ErrorCode.RESOURCE_EXHAUSTED, ErrorCode.CANCELLED, ErrorCode.DEADLINE_EXCEEDED}
)
"""Errors of full queues, of time and of lost processes: another run of the same request may end otherwise."""

_log = logging.getLogger(__name__)


class AdmittedRequest(Protocol):
    """What is recorded of a `gateway.dataplane.AdmittedRequest`."""

    @property
    def request(self) -> InferenceRequest: ...
    @property
    def served(self) -> ServedVersion: ...
    @property
    def options(self) -> DeliveryOptions: ...


class Tape:
    """The recording of one request that is under way. What it holds counts towards its gateway's bound until it is
    given back, to `RequestRecorder.ended` or `left`.
    """

    __slots__ = (
        *("_recorder", "_started_ns", "inputs", "is_skipped", "is_whole", "job", "model", "packed", "request", "rules"),
        *("size_bytes", "tenant", "unkept", "version"),
    )

    def __init__(self, recorder: RequestRecorder, rules: RecordingRules, one: AdmittedRequest, started_ns: int) -> None:
        request = one.request
        self._recorder = recorder
        self._started_ns = started_ns
        self.rules = rules
        self.model = one.served.model
        self.version = one.served.version
        self.request = request
        self.tenant = one.options.caller.tenant
        self.inputs = list(request.inputs)
        self.packed: list[bytes] = []
        self.job = b""
        """The id of the job that will have its answer."""
        self.is_whole = True
        """False after an error that says nothing about the model."""
        self.is_skipped = False
        self.unkept = IN_REGIONS if request.regions is not None and request.regions.outputs else ""
        self.size_bytes = 0
        self._grow(sum([len(tensor.data) for tensor in self.inputs]))

    def add(self, response: ResponseRecord) -> None:
        """Keep one response. Its bytes are copied: those of a stream must not keep its entries in memory."""
        error, self.version = response.error, response.version
        if error is not None:
            if error.code in _NOT_THE_MODELS:
                self.is_whole = False
            elif self._grow(_RESPONSE_BYTES + len(error.message)):
                self.packed.append(pack_failure(_NO_ID, self.model, response.version, error))
        elif response.outputs or response.bare or not response.final or response.place is None:  # not the flag alone
            outputs = wanted_outputs(response.outputs, self.request.outputs)
            if self._grow(_RESPONSE_BYTES + sum([len(tensor.data) for tensor in outputs])):
                self.packed.append(pack_response(_NO_ID, self.model, response.version, outputs, {}))

    def _grow(self, size_bytes: int) -> bool:
        """Whether so much more may be held."""
        if self.unkept or self.is_skipped:
            return False
        if self.size_bytes + size_bytes > min(MAX_CALL_BYTES, self.rules.limit_bytes):
            self.unkept = TOO_LARGE
        elif self._recorder.pending_bytes + size_bytes > MAX_PENDING_BYTES:
            self.is_skipped = True
        else:
            self.size_bytes += size_bytes
            self._recorder.pending_bytes += size_bytes
            return True
        self.release()
        return False

    def release(self) -> None:
        """Drop what it holds."""
        self._recorder.pending_bytes -= self.size_bytes
        self.size_bytes = 0
        self.inputs.clear()
        self.packed.clear()

    def call(self) -> RecordedCall:
        request = self.request
        step = None
        if request.sequence_id:
            step = RecordedStep(request.sequence_id, request.sequence_start, request.sequence_end)
        at_us = self._recorder.wall_us(self._started_ns)
        return RecordedCall(
            *(at_us, self.version, [] if self.unkept else self.inputs, (), request.outputs, request.parameters),
            tenant=self.tenant,
            client_id=request.id,
            sequence=step,
            unkept=self.unkept,
            job=self.job,
        )


class RequestRecorder:
    """The recordings that one gateway makes."""

    def __init__(self, log: Notes) -> None:
        self._log = log
        self._tasks = Tasks()
        self._random = random.Random()
        self.pending_bytes = 0
        """Tensors of requests that are recorded now."""
        self._broken: dict[tuple[str, str, int | str], None] = {}
        """Sequences of which a step is missing, until they begin again."""
        self._swept_ns: dict[str, int] = {}
        self._failing = False
        self._offset_ns = wall_ns() - monotonic_ns()
        """From monotonic time to the time of day: measured for each request, it would change their order."""
        self.counts: dict[tuple[str, str], int] = {}
        """By model and result: recorded, unkept, skipped, failed."""

    def tape(self, rules: RecordingRules, one: AdmittedRequest, started_ns: int) -> Tape | None:
        """Begin the recording of an admitted request, before it is sent; None if it is not one of the share."""
        request, model, tenant = one.request, one.served.model, one.options.caller.tenant
        if request.priority == REPLAY_PRIORITY or not rules.may_record(tenant):
            return None
        if not request.sequence_id:
            if rules.share < 1 and self._random.random() >= rules.share:
                return None
        else:
            # a hash, so that all gateways record the same sequences
            if sticky_draw(model, f"recorded {tenant} {request.sequence_id}".encode()) >= rules.share * WHOLE:
                return None
            key = (model, tenant, request.sequence_id)
            if request.sequence_start:
                self._broken.pop(key, None)
            elif key in self._broken:
                self._count(model, "skipped")
                return None
        return Tape(self, rules, one, started_ns)

    def wall_us(self, started_ns: int) -> int:
        """The time of day of a monotonic time, in us. Requests keep their order, as long as no clock is set."""
        offset_ns = wall_ns() - monotonic_ns()
        if abs(offset_ns - self._offset_ns) > _CLOCK_SET_NS:
            self._offset_ns = offset_ns
        return (started_ns + self._offset_ns) // 1000

    def answered(self, rules: RecordingRules, one: AdmittedRequest, record: ResponseRecord, started_ns: int) -> None:
        """Record a request that has its one answer, if it is one of the share."""
        tape = self.tape(rules, one, started_ns)
        if tape is not None:
            tape.add(record)
            self.ended(tape)

    def submitted(self, rules: RecordingRules, one: AdmittedRequest, job: bytes, started_ns: int) -> None:
        """Record a request that is a job now and will be answered later, if it is one of the share."""
        tape = self.tape(rules, one, started_ns)
        if tape is not None:
            tape.job = job
            self.ended(tape)

    def ended(self, tape: Tape) -> None:
        """Record a request that has all its responses; it is in the log soon."""
        if tape.is_whole and not tape.is_skipped and len(self._tasks) < _MAX_PENDING:
            self._tasks.spawn(self._keep(tape), "a recorded request")
            return
        if tape.is_whole:
            self._count(tape.model, "skipped")
        self.left(tape)

    def left(self, tape: Tape) -> None:
        """A request has no answer that could be recorded."""
        tape.release()
        self._interrupted(tape.model, tape.tenant, tape.request)

    def lost(self, one: AdmittedRequest) -> None:
        """A request ended without an answer, and without a tape."""
        self._interrupted(one.served.model, one.options.caller.tenant, one.request)

    def _interrupted(self, model: str, tenant: str, request: InferenceRequest) -> None:
        """The sequence of a request, if it is of one, has a gap from here."""
        if request.sequence_id:
            if len(self._broken) >= _MAX_BROKEN:
                del self._broken[next(iter(self._broken))]
            self._broken[model, tenant, request.sequence_id] = None

    async def _keep(self, tape: Tape) -> None:
        try:
            call = tape.call()
            await self._put(tape, call, b"".join(pack_recorded_call(call, tape.packed)))
            self._failing = False
            self._count(tape.model, "unkept" if tape.unkept else "recorded")
        except CharoniaError as error:
            self._count(tape.model, "failed")
            self._interrupted(tape.model, tape.tenant, tape.request)
            if not self._failing:  # said once, until one succeeds again
                self._failing = True
                _log.warning("requests of model '%s' are not recorded: %s", tape.model, error)
        finally:
            tape.release()

    async def _put(self, tape: Tape, call: RecordedCall, record: bytes) -> None:
        log, model, rules = self._log, tape.model, tape.rules
        call_id = call.at_us.to_bytes(8, "big") + os.urandom(8)
        # the indexes last: who evicts a member finds its recording
        await log.put_note(keys.recorded_call(model, call_id), record, rules.keep_s)
        await log.set_times(keys.recorded_times(model), {call_id: call.at_us})
        use = {call_id: (call.at_us, len(record) + _OVERHEAD_BYTES)}
        while True:
            taken = await log.keep_recent(keys.recorded_sizes(model), use, rules.limit_bytes)
            await self._drop(model, taken)
            if len(taken) < MOST_TAKEN:
                break
            use = {}
        now_ns = monotonic_ns()
        if now_ns - self._swept_ns.get(model, -_SWEEP_NS) >= _SWEEP_NS:
            self._swept_ns[model] = now_ns
            await self._sweep(model, rules)

    async def _sweep(self, model: str, rules: RecordingRules) -> None:
        """Take recordings out of the indexes that have expired, and say when the indexes do."""
        until_us = wall_ns() // 1000 + (rules.keep_s + _INDEX_SPARE_S) * 1_000_000
        for index in (keys.recorded_times(model), keys.recorded_sizes(model)):
            await self._log.keep_until(index, until_us)
        before_us = wall_ns() // 1000 - rules.keep_s * 1_000_000
        while expired := await self._log.due(keys.recorded_times(model), before_us, MOST_TAKEN):
            await self._log.keep_recent(keys.recorded_sizes(model), {}, rules.limit_bytes, drop=expired)
            await self._drop(model, expired)

    async def _drop(self, model: str, call_ids: Sequence[bytes]) -> None:
        if call_ids:
            await self._log.delete_keys([keys.recorded_call(model, call_id) for call_id in call_ids])
            await self._log.drop_times(keys.recorded_times(model), call_ids)

    def _count(self, model: str, result: str) -> None:
        self.counts[model, result] = self.counts.get((model, result), 0) + 1

    async def settled(self) -> None:
        """Returns when what has ended is recorded."""
        await self._tasks.settled()

    async def close(self) -> None:
        """Give what has ended a moment to reach the log."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_WITHIN_S):
                await self.settled()
        await self._tasks.close()
