"""Answers and settles executed waves (docs/adr/0015).

The replies of a wave are written first, to its gateway's socket or its stream; then its entry is deleted, which settles
it. Deletions of answered waves are gathered for a moment, statistics for a second: whoever asks for them makes them be
written first (`fold`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from charonia import keys
from charonia.errors import CharoniaError
from charonia.eventlog.colocated import ColocatedLog
from charonia.eventlog.port import EventLog, Reply
from charonia.wire import FIELD_WAVE, Wave, record_fields
from executors.accounting import Execution
from executors.announcing import insist
from executors.job import Job
from executors.loading import Incarnation
from executors.metrics import ExecutorMetrics
from executors.settlement import batch_died, batch_finished, batch_finished_here

from .execution import ExecutedWaves
from .replies import ReplySockets

_log = logging.getLogger(__name__)

_GATHER_S = 0.004
_MOST_GATHERED = 16
_FOLD_S = 1.0
_RETRY_S = 0.2


class WaveSettler:
    """The settlements of one executor's waves. `spawn` runs what has to be done again until the log takes it."""

    def __init__(
        self,
        log: EventLog,
        executor: str,
        metrics: ExecutorMetrics,
        sockets: ReplySockets,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._log = log
        self._executor = executor
        self._metrics = metrics
        self._sockets = sockets
        self._spawn = spawn
        self._gathered: dict[bytes, list[bytes]] = {}
        self._told: set[str] = set()
        """The endpoints that those gathered were answered through their sockets."""
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._counted: dict[bytes, dict[str, int]] = {}
        self._fold_timer: asyncio.TimerHandle | None = None
        self._folding: asyncio.Task[None] | None = None
        self.unsettled = 0
        """Deletions under way."""
        self._quiet: asyncio.Event | None = None

    def settle(self, job: Job, executed: ExecutedWaves, incarnation: Incarnation) -> None:
        """Answer and settle the waves of a batch and tell their owner of its end."""
        header = job.header
        assert header is not None
        waves: Sequence[Wave] = job.waves
        loop_replies: list[Reply] = []
        through_log: dict[bytes, list[bytes]] = {}
        left: list[bytes] = []
        for index, (wave, (stream, entry_id)) in enumerate(zip(waves, header.waves, strict=True)):
            answer = executed.answers[index]
            singly = executed.singly.get(index)
            if answer and self._sockets.send(wave.endpoint, answer):
                self._told.add(wave.endpoint)
                self._gather(stream, entry_id)
                continue
            if answer:
                loop_replies.append(Reply(keys.replies(wave.endpoint), [FIELD_WAVE, answer]))
            elif singly is not None:
                loop_replies.append(Reply(keys.replies(wave.endpoint), record_fields(singly)))
            else:
                left.append(wave.id)
                continue
            through_log.setdefault(stream, []).append(entry_id)
        for stream, entry_ids in through_log.items():
            self._end(stream, entry_ids, loop_replies)
            loop_replies = []
        self._tell(job, executed, left)
        self._account(job, executed, incarnation)

    def _tell(self, job: Job, executed: ExecutedWaves, left: list[bytes]) -> None:
        """Tell the owner that the batch has ended, or how it died."""
        header = job.header
        assert header is not None
        stream = header.report_to
        if executed.death is not None:
            fields = batch_died(self._executor, header.batch_id, executed.death, left)
        elif stream.startswith(keys.LOCAL):
            fields = batch_finished_here(self._executor, header.batch_id)
            if isinstance(self._log, ColocatedLog) and self._log.hand(stream, fields):
                return
        else:
            fields = batch_finished(self._executor, header.batch_id)
        self._spawn(insist(lambda: self._log.append(stream, fields), "the end of a batch cannot be reported"))

    # -- deletions ----------------------------------------------------------------------------------------------------

    def _gather(self, stream: bytes, entry_id: bytes) -> None:
        self._gathered.setdefault(stream, []).append(entry_id)
        self._count += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_GATHER_S, self._flush)

    def _flush(self) -> None:
        self._timer = None
        if not all(map(self._sockets.is_sent, self._told)):
            # what is still in this process would be lost with it, and the waves then have to run again
            self._timer = asyncio.get_running_loop().call_later(_GATHER_S, self._flush)
            return
        gathered, self._gathered = self._gathered, {}
        self._told.clear()
        self._count = 0
        for stream, entry_ids in gathered.items():
            self._end(stream, entry_ids, ())

    def _end(self, stream: bytes, entry_ids: list[bytes], replies: Sequence[Reply]) -> None:
        """Settle waves, again until the log has answered."""

        def done(result: int | CharoniaError) -> None:
            if isinstance(result, CharoniaError):
                _log.warning("%d waves cannot be settled, trying again: %s", len(entry_ids), result)
                asyncio.get_running_loop().call_later(_RETRY_S, attempt)
                return
            if result < len(entry_ids):  # an owner took them apart, or they were settled by a repetition of this
                _log.info("%d of %d waves were settled or burst before", len(entry_ids) - result, len(entry_ids))
            self.unsettled -= 1
            if not self.unsettled and self._quiet is not None:
                self._quiet.set()
                self._quiet = None

        def attempt() -> None:
            if not self._log.waves.end(stream, entry_ids, replies, done):
                asyncio.get_running_loop().call_later(_RETRY_S, attempt)

        self.unsettled += 1
        attempt()

    async def settled(self) -> None:
        """Wait until everything answered is settled and counted."""
        while self._gathered or self.unsettled:
            if self._timer is not None and self._gathered:
                self._timer.cancel()
                self._flush()
            if self.unsettled:
                self._quiet = self._quiet or asyncio.Event()
                await self._quiet.wait()
            elif self._gathered:
                await asyncio.sleep(_GATHER_S)  # a gateway reads slowly
        await self.fold()

    # -- statistics ---------------------------------------------------------------------------------------------------

    def _account(self, job: Job, executed: ExecutedWaves, incarnation: Incarnation) -> None:
        counted = wave_increments(job.waves, executed)
        self._metrics.executed(incarnation.model, incarnation.version, executed)
        if not counted:
            return
        self._metrics.settled(incarnation.model, incarnation.version, counted)
        if self._metrics.measures:
            self._measure(job, executed, incarnation)
        key = keys.statistics(incarnation.model, incarnation.version, incarnation.content_hash)
        totals = self._counted.get(key)
        if totals is None:
            self._counted[key] = dict(counted)  # the metrics keep the other
        else:
            for name, amount in counted.items():
                known = totals.get(name, 0)
                totals[name] = max(known, amount) if name.startswith("last_") else known + amount
        if self._fold_timer is None:
            self._fold_timer = asyncio.get_running_loop().call_later(_FOLD_S, self._fold_soon)

    def _measure(self, job: Job, executed: ExecutedWaves, incarnation: Incarnation) -> None:
        for place, execution in enumerate(executed.executions):
            for index in execution.indices:
                wave = job.waves[index]
                count = executed.succeeded(place, index, wave.count)
                waited_ns = max(0, execution.start_ns - wave.accepted_ns)
                self._metrics.observe_wave(incarnation.model, incarnation.version, count, waited_ns, execution)

    def _fold_soon(self) -> None:
        self._fold_timer = None
        if self._folding is None or self._folding.done():
            self._folding = asyncio.get_running_loop().create_task(self._write_statistics())

    async def fold(self) -> None:
        """Write what was counted so far; returns when the log has it, or cannot have it now."""
        if self._fold_timer is not None:
            self._fold_timer.cancel()
            self._fold_timer = None
        if self._folding is not None and not self._folding.done():
            await self._folding
        await self._write_statistics()

    async def _write_statistics(self) -> None:
        counted, self._counted = self._counted, {}
        for key, increments in counted.items():
            try:
                await self._log.add_statistics(key, increments)
            except CharoniaError as error:
                _log.warning("statistics cannot be written, trying again: %s", error)
                kept = self._counted.setdefault(key, {})
                for name, amount in increments.items():
                    known = kept.get(name, 0)
                    kept[name] = max(known, amount) if name.startswith("last_") else known + amount
                if self._fold_timer is None:
                    self._fold_timer = asyncio.get_running_loop().call_later(_FOLD_S, self._fold_soon)


def wave_increments(waves: Sequence[Wave], executed: ExecutedWaves) -> dict[str, int]:
    """What executed waves add to their model's statistics, as `accounting.increments` has it for requests."""
    totals: dict[str, int] = {}
    for place, execution in enumerate(executed.executions):
        _add_execution(totals, waves, place, execution, executed)
    if executed.failures:
        for failure in executed.failures:
            waited_ns = max(0, failure.end_ns - waves[failure.index].accepted_ns)
            for name, amount in (("fail_count", 1), ("fail_ns", waited_ns), (failure.reason, 1)):
                totals[name] = totals.get(name, 0) + amount
    return totals


def _add_execution(
    totals: dict[str, int], waves: Sequence[Wave], place: int, execution: Execution, executed: ExecutedWaves
) -> None:
    count = queued_ns = whole_ns = rows = 0
    for index in execution.indices:
        wave = waves[index]
        succeeded = executed.succeeded(place, index, wave.count)
        count += succeeded
        rows += succeeded * wave.rows
        queued_ns += succeeded * max(0, execution.start_ns - wave.accepted_ns)
        whole_ns += succeeded * max(0, execution.end_ns - wave.accepted_ns)
    size = f"b{execution.rows}"
    added = {
        "success_count": count,
        "success_ns": whole_ns,
        "queue_count": count,
        "queue_ns": queued_ns,
        "compute_input_count": count,
        "compute_input_ns": count * execution.input_ns,
        "compute_infer_count": count,
        "compute_infer_ns": count * execution.infer_ns,
        "compute_output_count": count,
        "compute_output_ns": count * execution.output_ns,
        "inference_count": rows,
        "execution_count": 1,
        size + "_count": 1,
        size + "_input_ns": execution.input_ns,
        size + "_infer_ns": execution.infer_ns,
        size + "_output_ns": execution.output_ns,
    }
    if totals:
        for name, amount in added.items():
            totals[name] = totals.get(name, 0) + amount
    else:
        totals.update(added)
    totals["last_inference_ms"] = max(totals.get("last_inference_ms", 0), execution.start_ns // 1_000_000)
