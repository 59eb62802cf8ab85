"""Answers and settles executed waves (docs/adr/0015).

The replies of a wave are written first, to its gateway's socket or stream; then its entry is deleted, which settles it.
Deletions of answered waves are gathered for a moment, and their statistics are written with them: a process that is
killed loses only counts of waves that will run again. Before a gateway reads statistics, they are written (`fold`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from charonia import failpoints, keys
from charonia.errors import CharoniaError, LogUnavailable
from charonia.eventlog.port import Reply, Work
from charonia.facts.events import FIELD_FACT, RequestsEnded, pack_fact
from charonia.tasks import Tasks, insist
from charonia.wire import FIELD_WAVE, BatchHeader, Wave, record_fields
from executors.batches.accounting import Execution, Failure
from executors.batches.wave_execution import ExecutedWaves
from executors.metrics import ExecutorMetrics
from executors.running.instance_pool import LoadedVersion
from executors.running.submitted_batch import SubmittedBatch

from .reply_sockets import ReplySockets
from .settlement import batch_died, batch_finished, batch_finished_here
from .settler import OwnerReports

_log = logging.getLogger(__name__)

_Answered = tuple[bytes, Wave, BatchHeader]
"""A wave that has its reply: the id of its entry, the wave, and the header of its batch."""

_GATHER_S = 0.01
"""Waves answered within this time are settled together: one by one would cost the log server as much as accepting
them. Waves that were answered but not settled run again if this process dies; those answers find no caller."""
_FOLD_S = 1.0
_RETRY_S = 0.2
_UNCOUNTED_S = 0.001


class WaveCounts:
    """The counts of one loaded version since the last `take`. Times in ns."""

    __slots__ = (
        "_count",
        "_executions",
        "_failures",
        "_infer_ns",
        "_input_ns",
        "_last_ms",
        "_output_ns",
        "_queued_ns",
        "_rows",
        "_sizes",
        "_whole_ns",
    )

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._count = self._rows = self._queued_ns = self._whole_ns = self._executions = self._last_ms = 0
        self._input_ns = self._infer_ns = self._output_ns = 0
        self._sizes: dict[int, tuple[int, int, int, int]] = {}
        self._failures: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._executions or self._failures)

    def executed(
        self, execution: Execution, waves: Sequence[Wave], failed: dict[int, int], share: dict[int, int] | None = None
    ) -> None:
        """Count one execution of waves, or with `share` (`ExecutedWaves.shares`) of some of their requests.

        `failed` is the number of failed requests by wave.
        """
        start, end = execution.start_ns, execution.end_ns
        total = 0
        for index in execution.indices:
            wave = waves[index]
            if share is not None:
                count = share[index]
            else:
                count = wave.count - failed.get(index, 0) if failed else wave.count
            total += count
            self._rows += count * wave.rows
            accepted = wave.accepted_ns
            if accepted < start:  # clocks of two machines may differ
                self._queued_ns += count * (start - accepted)
            if accepted < end:
                self._whole_ns += count * (end - accepted)
        self._count += total
        input_ns, infer_ns, output_ns = execution.input_ns, execution.infer_ns, execution.output_ns
        self._input_ns += total * input_ns
        self._infer_ns += total * infer_ns
        self._output_ns += total * output_ns
        self._executions += 1
        runs, inputs, infers, outputs = self._sizes.get(execution.rows, (0, 0, 0, 0))
        self._sizes[execution.rows] = (runs + 1, inputs + input_ns, infers + infer_ns, outputs + output_ns)
        self._last_ms = max(self._last_ms, start // 1_000_000)

    def failed(self, failures: Sequence[Failure], waves: Sequence[Wave]) -> None:
        """Count failed requests. A failure's index is that of its wave."""
        counts = self._failures
        for failure in failures:
            waited_ns = max(0, failure.end_ns - waves[failure.index].accepted_ns)
            for name, amount in (("fail_count", 1), ("fail_ns", waited_ns), (failure.reason, 1)):
                counts[name] = counts.get(name, 0) + amount

    def take(self) -> dict[str, int]:
        """Return the increments so far, and start again from zero."""
        taken = dict(self._failures)
        if self._executions:
            count = self._count
            taken |= {
                "success_count": count,
                "success_ns": self._whole_ns,
                "queue_count": count,
                "queue_ns": self._queued_ns,
                "compute_input_count": count,
                "compute_input_ns": self._input_ns,
                "compute_infer_count": count,
                "compute_infer_ns": self._infer_ns,
                "compute_output_count": count,
                "compute_output_ns": self._output_ns,
                "inference_count": self._rows,
                "execution_count": self._executions,
                "last_inference_ms": self._last_ms,
            }
            for rows, (runs, input_ns, infer_ns, output_ns) in self._sizes.items():
                taken[f"b{rows}_count"] = runs
                taken[f"b{rows}_input_ns"] = input_ns
                taken[f"b{rows}_infer_ns"] = infer_ns
                taken[f"b{rows}_output_ns"] = output_ns
        self._clear()
        return taken


def merge(totals: dict[str, int], increments: dict[str, int]) -> None:
    """Add increments to totals; of `last_*`, keep the maximum."""
    for name, amount in increments.items():
        known = totals.get(name, 0)
        totals[name] = max(known, amount) if name.startswith("last_") else known + amount


class WaveSettler:
    """Settles one executor's waves. `tasks` holds writes that are repeated until the log takes them."""

    def __init__(
        self,
        log: Work,
        executor: str,
        metrics: ExecutorMetrics,
        sockets: ReplySockets,
        tasks: Tasks,
        reports: OwnerReports,
    ) -> None:
        self._log = log
        self._executor = executor
        self._metrics = metrics
        self._sockets = sockets
        self._tasks = tasks
        self._reports = reports
        self._gathered: dict[bytes, list[_Answered]] = {}
        self._told: set[str] = set()
        """The endpoints to whose sockets the gathered waves were answered."""
        self._timer: asyncio.TimerHandle | None = None
        self._counts: dict[LoadedVersion, WaveCounts] = {}
        self._unwritten: dict[bytes, dict[str, int]] = {}
        """By statistics key: the increments that are not in the log yet."""
        metrics.before_collecting = self.count
        self._fold_timer: asyncio.TimerHandle | None = None
        self._writing: set[asyncio.Future[None]] = set()
        """The pending writes of statistics."""
        self._uncounted: set[SubmittedBatch] = set()
        """Batches that are answered, and that `settle` has not got yet."""
        self.unsettled = 0
        """The number of pending deletions."""
        self._quiet: asyncio.Event | None = None

    def answer(self, job: SubmittedBatch, executed: ExecutedWaves) -> None:
        """Answer through gateways' sockets, in an instance's thread or the event loop; `settle` follows in the loop."""
        if job.abandoned:
            return
        failpoints.hit("executor.executed")
        self._uncounted.add(job)
        sent = executed.sent = set()
        try:
            for index, answer in enumerate(executed.answers):
                if answer and self._sockets.send(job.waves[index].endpoint, answer):
                    sent.add(index)
        except Exception:  # the thread continues, and the event loop answers the others
            _log.exception("waves could not be answered from their instance's thread")

    def settle(self, job: SubmittedBatch, executed: ExecutedWaves, incarnation: LoadedVersion) -> None:
        """Answer the waves of a batch that have no answer yet, settle all, and report its end to their owner."""
        header = job.header
        assert header is not None
        self._uncounted.discard(job)
        sent = executed.sent or ()
        self._account(job, executed, incarnation)
        replies: list[Reply] = []
        through_log: dict[bytes, list[_Answered]] = {}
        left: list[bytes] = []
        for index, (wave, (stream, entry_id)) in enumerate(zip(job.waves, header.waves, strict=True)):
            answer = executed.answers[index]
            singly = executed.singly.get(index)
            if index in sent or (answer and self._sockets.send(wave.endpoint, answer)):
                self._told.add(wave.endpoint)
                self._gather(stream, (entry_id, wave, header))
                continue
            if answer:
                self._sockets.seek(wave.endpoint)
                replies.append(Reply(keys.replies(wave.endpoint), [FIELD_WAVE, answer]))
            elif singly is not None:
                replies.append(Reply(keys.replies(wave.endpoint), record_fields(singly)))
            else:
                left.append(wave.id)
                continue
            through_log.setdefault(stream, []).append((entry_id, wave, header))
        if through_log:
            self._flush(through_log, replies)
        self._tell(job, executed, left)

    def _tell(self, job: SubmittedBatch, executed: ExecutedWaves, left: list[bytes]) -> None:
        """Report to the owner that the batch has ended, or how its instance died."""
        header = job.header
        assert header is not None
        if executed.death is not None:
            fields = batch_died(self._executor, header.batch_id, executed.death, left)
        elif not header.report_to:
            self._reports.hand(header, batch_finished_here(self._executor, header.batch_id))
            return
        else:
            fields = batch_finished(self._executor, header.batch_id)
        self._tasks.spawn(self._reports.send(header, fields))

    # -- deletions ----------------------------------------------------------------------------------------------------

    def _gather(self, stream: bytes, answered: _Answered) -> None:
        self._gathered.setdefault(stream, []).append(answered)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_GATHER_S, self._flush)

    def _flush(self, answered: dict[bytes, list[_Answered]] | None = None, replies: Sequence[Reply] = ()) -> None:
        """Settle the gathered waves and those `answered` by `replies`, and write the statistics, in one write.

        So an executor that is killed has either settled and counted a wave, or neither.
        """
        ending = answered or {}
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if all(map(self._sockets.is_sent, self._told)):
            if self._gathered:
                failpoints.hit("executor.answered")
            for stream, waves in self._gathered.items():
                ending[stream] = ending.get(stream, []) + waves
            self._gathered = {}
            self._told.clear()
        elif self._gathered:
            # replies that this process has not sent would be lost with it, and their waves must then run again
            self._timer = asyncio.get_running_loop().call_later(_GATHER_S, self._flush)
        self.count()
        unwritten, self._unwritten = self._unwritten, {}
        for key, increments in unwritten.items():
            self._write(key, increments)
        for stream, waves in ending.items():
            self._end(stream, waves, replies)
            replies = ()

    def _end(self, stream: bytes, answered: list[_Answered], replies: Sequence[Reply]) -> None:
        """Settle waves, repeating until the log answers."""
        entry_ids = [entry_id for entry_id, _, _ in answered]
        unsure = False

        def done(result: int | CharoniaError) -> None:
            nonlocal unsure
            if isinstance(result, CharoniaError):
                unsure = True
                _log.warning("%d waves cannot be settled, trying again: %s", len(entry_ids), result)
                asyncio.get_running_loop().call_later(_RETRY_S, attempt)
                return
            if result < len(entry_ids):  # an owner has burst some, or an earlier attempt has settled them
                self._tasks.spawn(self._settle_burst(answered, len(entry_ids) - result, unsure))
            else:
                self._ended()

        def attempt() -> None:
            if not self._log.waves.end(stream, entry_ids, replies, done):
                asyncio.get_running_loop().call_later(_RETRY_S, attempt)

        self.unsettled += 1
        attempt()

    def _ended(self) -> None:
        self.unsettled -= 1
        if not self.unsettled and self._quiet is not None:
            self._quiet.set()
            self._quiet = None

    async def _settle_burst(self, answered: list[_Answered], missing: int, unsure: bool) -> None:
        """Settle the rest of answered waves, some of which an owner has burst after dispatching them.

        Requests that have ended by now count as fenced: those of `missing` waves, which may be any of these, unless an
        earlier attempt of ours has deleted them (`unsure`).
        """
        late = sum([wave.count for _, wave, _ in answered]) * missing // len(answered)
        try:
            for _, wave, header in answered:
                late -= await self._settle_requests(header.model, wave)
        finally:
            self._ended()
        if late > 0 and not unsure:
            header = answered[0][2]
            self._metrics.fenced(header.model, header.version, late)
            _log.warning("%d requests of %d waves were settled by others first", late, missing)

    async def _settle_requests(self, model: str, wave: Wave) -> int:
        """Settle a wave's unsettled requests and report them to their owner; return how many there were."""
        ids = wave.ids()
        ended = Reply(keys.facts(model), [FIELD_FACT, pack_fact(RequestsEnded(b"".join(ids)))])
        won = 0

        async def settle() -> None:
            nonlocal won
            if any(attempt >= 0 for attempt in await self._log.unsettled(model, ids)):
                won += sum(await self._log.settle(model, [(request_id, 1) for request_id in ids], None, [], [ended]))

        await insist(settle, "the requests of a wave that was burst cannot be settled")
        return won

    async def settled(self) -> None:
        """Wait until all answered waves are settled and counted."""
        while self._gathered or self.unsettled:
            if self._gathered:
                self._flush()
            if self.unsettled:
                self._quiet = self._quiet or asyncio.Event()
                await self._quiet.wait()
            elif self._gathered:
                await asyncio.sleep(_GATHER_S)  # a gateway is reading slowly
        await self.fold()

    # -- statistics ---------------------------------------------------------------------------------------------------

    def _account(self, job: SubmittedBatch, executed: ExecutedWaves, incarnation: LoadedVersion) -> None:
        metrics, model, version = self._metrics, incarnation.model, incarnation.version
        metrics.executed(model, version, executed)
        counts = self._counts.get(incarnation)
        if counts is None:
            counts = self._counts[incarnation] = WaveCounts()
        for place, execution in enumerate(executed.executions):
            counts.executed(execution, job.waves, executed.failed, executed.shares.get(place))
        if executed.failures:
            counts.failed(executed.failures, job.waves)
        if metrics.measures:
            self._measure(job, executed, incarnation)
        self._arm()

    def count(self) -> None:
        """Add the counts so far to this process's metrics, and keep them for the log."""
        for incarnation, counts in self._counts.items():
            if not counts:
                continue
            increments = counts.take()
            self._metrics.settled(incarnation.model, incarnation.version, increments)
            key = keys.statistics(incarnation.model, incarnation.version, incarnation.content_hash)
            merge(self._unwritten.setdefault(key, {}), increments)

    def _measure(self, job: SubmittedBatch, executed: ExecutedWaves, incarnation: LoadedVersion) -> None:
        for place, execution in enumerate(executed.executions):
            for index in execution.indices:
                wave = job.waves[index]
                count = executed.succeeded(place, index, wave.count)
                waited_ns = max(0, execution.start_ns - wave.accepted_ns)
                self._metrics.observe_wave(incarnation.model, incarnation.version, count, waited_ns, execution)

    def _write(self, key: bytes, increments: dict[str, int]) -> None:
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(error: CharoniaError | None) -> None:
            self._writing.discard(written)
            if error is not None:
                self._keep(key, increments, error)
            if not written.done():
                written.set_result(None)

        if self._log.waves.count(key, increments, done):
            self._writing.add(written)
        else:
            self._keep(key, increments, LogUnavailable("the event log takes nothing now"))

    def _keep(self, key: bytes, increments: dict[str, int], error: CharoniaError) -> None:
        """Keep statistics that could not be written, to write them later."""
        _log.warning("statistics cannot be written, trying again: %s", error)
        merge(self._unwritten.setdefault(key, {}), increments)
        self._arm()

    def _arm(self) -> None:
        if self._fold_timer is None:
            self._fold_timer = asyncio.get_running_loop().call_later(_FOLD_S, self._fold_soon)

    def _fold_soon(self) -> None:
        self._fold_timer = None
        self._counts = {incarnation: counts for incarnation, counts in self._counts.items() if counts}
        self._flush()

    async def fold(self) -> None:
        """Write the statistics of all answered waves; returns when the log has them, or is unavailable."""
        answered = self._uncounted.copy()
        while any(not job.abandoned for job in answered & self._uncounted):  # noqa: ASYNC110  (a moment, and rare)
            await asyncio.sleep(_UNCOUNTED_S)
        self._uncounted.difference_update([job for job in answered if job.abandoned])
        self._flush()
        if self._writing:
            await asyncio.wait(self._writing)
