"""Answers and settles executed waves (docs/adr/0015).

The replies of a wave are written first, to its gateway's socket or stream; then its entry is deleted, which settles it.
Deletions of answered waves are gathered for 10 ms, and the log adds their statistics in the same step, but for waves
that an owner has burst meanwhile: who settles a request counts it, wherever a process is killed. Before a gateway reads
statistics, they are written (`fold`). What all requests have used, in waves or not (`usage_counts`), is written once a
second and by `fold`.

A gateway that shares the payload directory listens in its part of it (docs/adr/0016). A reply goes through the
gateway's stream of the log where there is no connection, the reply is too long, or too many bytes wait for the socket.
Any other reply depends on the socket: its wave is settled when the kernel has all of it, or when the connection has
ended. A reply that is cut off then is lost, as a rule with the gateway and its callers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from charonia import failpoints, keys
from charonia.calls.entry_packer import replies_to
from charonia.clock import wall_ns
from charonia.errors import CharoniaError, LogUnavailable
from charonia.eventlog.port import EndedWave, Reply, WaveLog
from charonia.facts import counters
from charonia.facts.events import FIELD_FACT, BatchFinished, RequestsEnded, pack_fact
from charonia.facts.usage import (
    FAILED_INSTANCE_NS,
    FAILURES,
    INPUT_BYTES,
    INSTANCE_NS,
    OUTPUT_BYTES,
    PPM,
    QUEUE_NS,
    REQUESTS,
    ROWS,
    SHARE_PPM,
    Amounts,
    nothing,
)
from charonia.tasks import Tasks, insist
from charonia.wire import FIELD_WAVE, BatchHeader, Wave, response_sizes, wave_reply_bytes
from executors.batches.batch_results import Execution, Failure
from executors.batches.wave_execution import ExecutedWaves
from executors.metrics import ExecutorMetrics
from executors.running.instance_pool import LoadedVersion
from executors.running.submitted_batch import SubmittedBatch

from .reply_sockets import Mark, ReplySockets
from .settlement import batch_died, batch_finished
from .settler import OwnerReports
from .usage_counts import UsageCounts
from .usage_writer import UsageWriter

_log = logging.getLogger(__name__)

_GATHER_S = 0.01
"""Waves answered within this time are settled together: one by one would cost the log server as much as accepting
them. Waves that were answered but not settled run again if this process dies; those answers find no caller."""
_FOLD_S = 1.0
_RETRY_S = 0.2
_UNCOUNTED_S = 0.001


@dataclass(slots=True)
class _Answered:
    """A wave that has its reply; `key` is that of its statistics, `held` what it adds there, once it is taken out of
    the other waves' increments.
    """

    key: bytes
    ended: EndedWave
    wave: Wave
    header: BatchHeader
    held: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class WaveCounts:
    """What was counted of one loaded version since it was last written. Times in ns."""

    count: int = 0
    rows: int = 0
    queued_ns: int = 0
    whole_ns: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0
    executions: int = 0
    last_ms: int = 0
    sizes: dict[int, tuple[int, int, int, int]] = field(default_factory=dict)
    """By rows of an execution: how many there were, and their input, infer and output times."""
    failures: dict[str, int] = field(default_factory=dict)
    used: dict[str, Amounts] = field(default_factory=dict)
    """By tenant, since that was last written (`usage_counts`), which is less often."""

    def __bool__(self) -> bool:
        return bool(self.executions or self.failures)

    def executed(
        self,
        execution: Execution,
        waves: Sequence[Wave],
        failed: dict[int, int],
        share: dict[int, int] | None = None,
        left: Collection[int] = (),
    ) -> None:
        """Count one execution of waves, or with `share` (`ExecutedWaves.shares`) of some of their requests.

        `failed` is the number of failed requests by wave. Waves in `left` have no answer: they run again.
        """
        start, end = execution.start_ns, execution.end_ns
        total = 0
        all_rows = execution.rows or 1
        spent_ns = execution.input_ns + execution.infer_ns + execution.output_ns
        used: Amounts | None
        for index in execution.indices:
            if left and index in left:
                continue
            wave = waves[index]
            if share is not None:
                count = share[index]
            else:
                count = wave.count - failed.get(index, 0) if failed else wave.count
            total += count
            rows = count * wave.rows
            self.rows += rows
            accepted = wave.accepted_ns
            used = self.used.get(wave.meta.tenant)
            if used is None:
                used = self.used[wave.meta.tenant] = nothing()
            used[REQUESTS] += count
            used[ROWS] += rows
            used[SHARE_PPM] += rows * PPM // all_rows
            used[INSTANCE_NS] += rows * spent_ns // all_rows
            if accepted < start:  # clocks of two machines may differ
                self.queued_ns += count * (start - accepted)
                used[QUEUE_NS] += count * (start - accepted)
            if accepted < end:
                self.whole_ns += count * (end - accepted)
        self.count += total
        input_ns, infer_ns, output_ns = execution.input_ns, execution.infer_ns, execution.output_ns
        self.input_ns += total * input_ns
        self.infer_ns += total * infer_ns
        self.output_ns += total * output_ns
        self.executions += 1
        runs, inputs, infers, outputs = self.sizes.get(execution.rows, (0, 0, 0, 0))
        self.sizes[execution.rows] = (runs + 1, inputs + input_ns, infers + infer_ns, outputs + output_ns)
        self.last_ms = max(self.last_ms, start // 1_000_000)

    def failed(self, failures: Sequence[Failure], waves: Sequence[Wave]) -> None:
        """Count failed requests. A failure's index is that of its wave."""
        counts = self.failures
        for failure in failures:
            wave = waves[failure.index]
            waited_ns = max(0, failure.end_ns - wave.accepted_ns)
            used = self.used.setdefault(wave.meta.tenant, nothing())
            used[FAILURES] += 1
            used[QUEUE_NS] += max(0, waited_ns - failure.ran_ns)
            used[FAILED_INSTANCE_NS] += failure.spent_ns(wave.rows)
            counters.add(counts, counters.of_failures(1, waited_ns, failure.reason))

    def transferred(self, waves: Sequence[Wave], executed: ExecutedWaves) -> None:
        """Count the tensor bytes of executed waves and of their answers."""
        for index, wave in enumerate(waves):
            answer = executed.answers[index]
            singly = executed.singly.get(index)
            if not answer and singly is None:
                continue  # its instance died: it runs again
            used = self.used.get(wave.meta.tenant)
            if used is None:
                used = self.used[wave.meta.tenant] = nothing()
            used[INPUT_BYTES] += sum(map(sum, wave.sizes)) if wave.sizes else wave.count * wave.meta.size_bytes
            used[OUTPUT_BYTES] += wave_reply_bytes(answer) if answer else sum(response_sizes(singly or ()))

    def increments(self) -> dict[str, int]:
        """What all of it adds to the statistics."""
        taken = dict(self.failures)
        if self.executions:
            count = self.count
            values = (
                *(count, self.whole_ns, count, self.queued_ns),
                *(count, self.input_ns, count, self.infer_ns),
                *(count, self.output_ns, self.rows, self.executions),
            )
            taken |= zip(counters.OF_REQUESTS, values, strict=True)
            for rows, runs in self.sizes.items():
                taken |= zip(counters.of_size(rows), runs, strict=True)
            taken[counters.LATEST] = self.last_ms
        return taken


class WaveSettler:
    """Settles one executor's waves. `tasks` holds writes that are repeated until the log takes them."""

    def __init__(
        self,
        log: WaveLog,
        executor: str,
        metrics: ExecutorMetrics,
        sockets: ReplySockets,
        tasks: Tasks,
        reports: OwnerReports,
        usage: UsageCounts,
    ) -> None:
        self._log = log
        self._usage = usage
        usage.on_first = self._arm
        self._usage_writer = UsageWriter(log, usage, tasks, self._arm)
        self._executor = executor
        self._metrics = metrics
        self._sockets = sockets
        self._tasks = tasks
        self._reports = reports
        self._link = reports.link
        self._gathered: dict[bytes, list[_Answered]] = {}
        """By statistics key: the answered waves that are not settled yet."""
        self._told: set[str] = set()
        """The endpoints to whose sockets the gathered waves were answered."""
        self._unread: dict[str, deque[tuple[Mark, _Answered]]] = {}
        """By endpoint, oldest first: the waves whose replies have not left this process."""
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

    def answer(self, batch: SubmittedBatch, executed: ExecutedWaves) -> None:
        """Answer through gateways' sockets, in an instance's thread or the event loop; `settle` follows in the loop."""
        if batch.abandoned:
            return
        failpoints.hit("executor.executed")
        self._uncounted.add(batch)
        sent = executed.sent = set()
        try:
            answered: dict[str, list[int]] = {}
            for index, answer in enumerate(executed.answers):
                if answer:
                    answered.setdefault(batch.waves[index].endpoint, []).append(index)
            for endpoint, indices in answered.items():  # each write costs more than the bytes, and may wake a gateway
                if self._sockets.send(endpoint, *[executed.answers[index] for index in indices]):
                    sent.update(indices)
                elif len(indices) > 1:
                    sent.update([index for index in indices if self._sockets.send(endpoint, executed.answers[index])])
        except Exception:  # the thread continues, and the event loop answers the others
            _log.exception("waves could not be answered from their instance's thread")

    def settle(self, batch: SubmittedBatch, executed: ExecutedWaves, loaded: LoadedVersion) -> None:
        """Answer the waves of a batch that have no answer yet, settle all, and report its end to their owner."""
        header = batch.header
        assert header is not None
        self._uncounted.discard(batch)
        sent = executed.sent or ()
        self._account(batch, executed, loaded)
        key = _statistics(loaded)
        successes = executed.successes(batch.waves)
        replies: list[Reply] = []
        through_log: list[_Answered] = []
        left: list[bytes] = []
        for index, (wave, (stream, entry_id)) in enumerate(zip(batch.waves, header.waves, strict=True)):
            answer = executed.answers[index]
            singly = executed.singly.get(index)
            count = successes[index]
            answered = _Answered(key, EndedWave(stream, entry_id, count, count * wave.rows), wave, header)
            if index in sent or (answer and self._sockets.send(wave.endpoint, answer)):
                self._told.add(wave.endpoint)
                self._gathered.setdefault(key, []).append(answered)
                if self._timer is None:
                    self._timer = asyncio.get_running_loop().call_later(_GATHER_S, self._flush)
                continue
            if answer:
                self._sockets.seek(wave.endpoint)
                replies.append(Reply(keys.replies(wave.endpoint), [FIELD_WAVE, answer]))
            elif singly is not None:
                replies += replies_to(wave.endpoint, singly)
            else:
                left.append(wave.id)
                continue
            through_log.append(answered)
        if through_log:
            self._flush({key: through_log}, replies)
        self._tell(batch, executed, left)

    def _tell(self, batch: SubmittedBatch, executed: ExecutedWaves, left: list[bytes]) -> None:
        """Report to the owner that the batch has ended, or how its instance died."""
        header = batch.header
        assert header is not None
        if executed.death is not None:
            fields = batch_died(self._executor, header.batch_id, executed.death, left)
        elif not header.report_to:
            if self._link is not None:  # else the header is forged: no owner is in this process
                ended: list[Any] = [FIELD_FACT, BatchFinished(self._executor, header.batch_id)]
                self._link.reports[header.model].hand(ended)
            return
        else:
            fields = batch_finished(self._executor, header.batch_id)
        self._tasks.spawn(self._reports.send(header, fields))

    # -- deletions ----------------------------------------------------------------------------------------------------

    def _flush(self, answered: dict[bytes, list[_Answered]] | None = None, replies: Sequence[Reply] = ()) -> None:
        """Settle and count the gathered waves and those `answered` by `replies`, and write all other statistics."""
        ending = answered or {}
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.count()
        if self._gathered or self._unread:
            self._take_sent(ending)
        unwritten, self._unwritten = self._unwritten, {}
        for key, waves in ending.items():
            if waves:
                self._end(key, waves, unwritten.pop(key, {}), replies)
                replies = ()
        for key, increments in unwritten.items():
            self._write(key, increments)

    def _take_sent(self, ending: dict[bytes, list[_Answered]]) -> None:
        """Move to `ending` the answered waves, but for those whose replies have not left this process.

        Such replies would be lost with it, and their waves must then run again.
        """
        ready, self._gathered = self._gathered, {}
        marks = {endpoint: mark for endpoint in self._told if (mark := self._sockets.mark(endpoint)) is not None}
        self._told.clear()
        if marks:
            for key, waves in ready.items():
                for one in waves:
                    if (mark := marks.get(one.wave.endpoint)) is not None:
                        self._hold(one)
                        self._unread.setdefault(one.wave.endpoint, deque()).append((mark, one))
                ready[key] = [one for one in waves if one.wave.endpoint not in marks]
        if self._unread:
            self._take_read(ready)
        if self._unread:
            self._timer = asyncio.get_running_loop().call_later(_GATHER_S, self._flush)
        if any(ready.values()):
            failpoints.hit("executor.answered")
        for key, waves in ready.items():
            if waves:
                ending[key] = ending.get(key, []) + waves

    def _hold(self, one: _Answered) -> None:
        """Keep what a wave adds to the statistics until it is settled."""
        counted = self._unwritten.get(one.key, {})
        one.held = counters.share_of(counted, one.ended.succeeded, one.ended.rows)
        self._unwritten[one.key] = counters.without(counted, one.ended.succeeded, one.ended.rows)

    def _take_read(self, ready: dict[bytes, list[_Answered]]) -> None:
        """Move to `ready` those of the unread waves whose replies have left since."""
        for endpoint, waiting in list(self._unread.items()):
            while waiting and waiting[0][0].is_passed:
                _, one = waiting.popleft()
                counters.add(self._unwritten.setdefault(one.key, {}), one.held)
                ready.setdefault(one.key, []).append(one)
            if not waiting:
                del self._unread[endpoint]

    def _end(self, key: bytes, answered: list[_Answered], increments: dict[str, int], replies: Sequence[Reply]) -> None:
        """Settle waves and add `increments` to their statistics, repeating until the log answers."""
        ended = [one.ended for one in answered]
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        unsure = False

        def tell() -> None:
            self._writing.discard(told)
            if not told.done():
                told.set_result(None)

        def done(result: Sequence[bool] | CharoniaError) -> None:
            nonlocal unsure
            tell()
            if isinstance(result, CharoniaError):
                unsure = True
                _log.warning("%d waves cannot be settled, trying again: %s", len(ended), result)
                asyncio.get_running_loop().call_later(_RETRY_S, attempt)
            elif all(result):
                self._ended()
            else:  # an owner has burst some, or an earlier attempt has settled them
                gone = [one for one, was_there in zip(answered, result, strict=True) if not was_there]
                runs = {} if any(result) else counters.of_runs(increments)
                self._tasks.spawn(self._settle_burst(gone, increments, runs, unsure))

        def attempt() -> None:
            if not self._log.waves.end(ended, (key, increments), replies, done):
                tell()
                asyncio.get_running_loop().call_later(_RETRY_S, attempt)

        self.unsettled += 1
        self._writing.add(told)
        attempt()

    def _ended(self) -> None:
        self.unsettled -= 1
        if not self.unsettled and self._quiet is not None:
            self._quiet.set()
            self._quiet = None

    async def _settle_burst(
        self, answered: Sequence[_Answered], increments: dict[str, int], runs: dict[str, int], unsure: bool
    ) -> None:
        """Settle answered waves that were not there any more: an owner has burst them after dispatching them.

        The log has not counted their part of `increments`, nor `runs`: whichever process settles the requests does.
        Requests that have ended by now count as fenced, unless an earlier attempt of ours may have ended them
        (`unsure`).
        """
        late = 0
        try:
            for one in answered:
                won = await self._settle_requests(one, increments, runs)
                late += one.wave.count - won
                if won:
                    runs = {}
        finally:
            self._ended()
        if late > 0 and not unsure:
            header = answered[0].header
            self._metrics.fenced(header.model, header.version, late)
            _log.warning("%d requests of %d waves were settled by others first", late, len(answered))

    async def _settle_requests(self, one: _Answered, increments: dict[str, int], runs: dict[str, int]) -> int:
        """Settle a wave's unsettled requests, count them and report them to their owner; return how many there were.

        Requests that a later attempt runs again are left to that attempt. Their owner would stop it if they were
        reported, and nothing would settle them. So the report follows the log's answer.
        """
        model, ids = one.header.model, one.wave.ids()
        is_whole = one.ended.succeeded == one.wave.count  # otherwise it is not known which of them failed
        won: list[bool] = []
        over: list[bytes] = []
        asked: set[bytes] = set()

        async def settle() -> None:
            nonlocal won, over
            attempts = dict(zip(ids, await self._log.unsettled(model, ids), strict=True))
            left = [request_id for request_id, attempt in attempts.items() if 0 <= attempt <= 1]
            over = [request_id for request_id in ids if request_id in asked and attempts[request_id] < 0]
            won = []
            if left:
                asked.update(left)
                share = self._share(one, increments, len(left)) | runs
                requests = [(request_id, 1) for request_id in left]
                rows = [one.wave.rows] * len(left) if is_whole else ()
                won = await self._log.settle(model, requests, (one.key, share) if share else None, [], rows=rows)
                over += [request_id for request_id, is_won in zip(left, won, strict=True) if is_won]

        await insist(settle, "the requests of a wave that was burst cannot be settled")
        if any(won) and not all(won) and not is_whole:
            part = self._share(one, increments, sum(won)) | runs
            await insist(lambda: self._log.add_statistics(one.key, part), "statistics cannot be added")
        if over:
            ended = [FIELD_FACT, pack_fact(RequestsEnded(b"".join(over)))]
            await insist(lambda: self._log.append(keys.facts(model), ended), "settled requests cannot be reported")
        return sum(won)

    @staticmethod
    def _share(one: _Answered, increments: dict[str, int], count: int) -> dict[str, int]:
        """What `count` requests of a wave have of the increments."""
        count = min(count, one.ended.succeeded)
        return counters.share_of(increments, count, count * one.wave.rows)

    async def settled(self) -> None:
        """Settle all answered waves, then write their counts (`fold`); returns when both is done."""
        while self._gathered or self._unread or self.unsettled:
            if self._gathered or self._unread:
                self._flush()
            if self.unsettled:
                self._quiet = self._quiet or asyncio.Event()
                await self._quiet.wait()
            elif self._unread:
                await asyncio.sleep(_GATHER_S)  # a gateway is reading slowly
        await self.fold()

    # -- statistics ---------------------------------------------------------------------------------------------------

    def _account(self, batch: SubmittedBatch, executed: ExecutedWaves, loaded: LoadedVersion) -> None:
        counts = self._counts.get(loaded)
        if counts is None:
            counts = self._counts[loaded] = WaveCounts()
        left = executed.left()
        for place, execution in enumerate(executed.executions):
            counts.executed(execution, batch.waves, executed.failed, executed.shares.get(place), left)
        counts.transferred(batch.waves, executed)
        if executed.failures:
            counts.failed(executed.failures, batch.waves)
        if self._metrics.measures:
            self._measure(batch, executed, loaded)
        if self._fold_timer is None:
            self._arm()

    def count(self) -> None:
        """Add the counts so far to this process's metrics, and keep them for the log."""
        for loaded, counts in self._counts.items():
            if not counts:
                continue
            self._counts[loaded] = WaveCounts(used=counts.used)
            model, version, increments = loaded.model, loaded.version, counts.increments()
            self._metrics.executed_waves(model, version, counts.sizes, increments)
            counters.add(self._unwritten.setdefault(_statistics(loaded), {}), increments)

    def _measure(self, batch: SubmittedBatch, executed: ExecutedWaves, loaded: LoadedVersion) -> None:
        for place, execution in enumerate(executed.executions):
            for index in execution.indices:
                wave = batch.waves[index]
                count = executed.succeeded(place, index, wave.count)
                waited_ns = max(0, execution.start_ns - wave.accepted_ns)
                self._metrics.observe_wave(loaded.model, loaded.version, count, waited_ns, execution)

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

    def _write_usage(self) -> None:
        """Write what requests have used since the last time."""
        for loaded, counts in self._counts.items():
            if counts.used:
                self._usage.add(loaded.model, loaded.version, counts.used)
                counts.used = {}
        self._usage_writer.write(wall_ns())

    def _keep(self, key: bytes, increments: dict[str, int], error: CharoniaError) -> None:
        """Keep statistics that could not be written, to write them later."""
        _log.warning("statistics cannot be written, trying again: %s", error)
        counters.add(self._unwritten.setdefault(key, {}), increments)
        self._arm()

    def _arm(self) -> None:
        if self._fold_timer is None:
            self._fold_timer = asyncio.get_running_loop().call_later(_FOLD_S, self._fold_soon)

    def _fold_soon(self) -> None:
        self._fold_timer = None
        self._counts = {loaded: counts for loaded, counts in self._counts.items() if counts or counts.used}
        self._flush()
        self._write_usage()

    async def fold(self) -> None:
        """Write the statistics of all answered waves; returns when the log has them, or is unavailable."""
        answered = self._uncounted.copy()
        while any(not batch.abandoned for batch in answered & self._uncounted):  # noqa: ASYNC110  (a moment, and rare)
            await asyncio.sleep(_UNCOUNTED_S)
        self._uncounted.difference_update([batch for batch in answered if batch.abandoned])
        self._flush()
        self._write_usage()
        if writing := self._writing | self._usage_writer.writing:
            await asyncio.wait(writing)


def _statistics(loaded: LoadedVersion) -> bytes:
    return keys.statistics(loaded.model, loaded.version, loaded.content_hash)
