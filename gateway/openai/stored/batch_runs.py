"""Drives batches: each line is a job of the log, and each gateway may drive any batch.

A batch belongs to one living gateway at a time, by a token of the log as a model belongs to a batcher. The log refuses
facts of a former owner by that token. When the owner is lost another gateway takes the batch over and asks for the
lines without a result again. A line's job has an idempotency key made of batch and line, so that asking again finds the
job there was; of two results of a line the first one counts. If the batch is to stop, the next gateway finds the jobs
of the lost one by these keys, and cancels them. Jobs that are not to be stored are deleted after their line's result is
in the log, and again by the next gateway that drives the batch. A gateway that stalled may ask for such a line again
after that. It deletes the new job when it notices that another gateway drives the batch.
`batch_lines` reads the input, `line_calls` asks the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from charonia.clock import monotonic_ns
from charonia.errors import Cancelled, CharoniaError
from charonia.tasks import Tasks
from gateway.handler import Handler
from gateway.openai.shapes.api_errors import ApiError
from gateway.requests.delivery import Caller

from .batch_facts import ASKED, CANCELLED, COMPLETED, ENDED, EXPIRED, FAILED, FINALIZING, STARTED, BatchState, Counts
from .batch_lines import BatchLine, LineReader, LineResult, Validation
from .stored_objects import FileRecord, FileWriter, StoredBatches, StoredFiles, now_s

MAX_IN_FLIGHT = 32
"""Lines of a batch that are jobs at a time: enough for a model's slots, few beside a queue's bounds."""
MAX_DRIVEN = 8
"""Batches that one gateway drives at a time; the others wait. A tenant may have all of these slots, for a day."""
MAX_WITH_FIRST = 32
"""Batches with the first one of each other tenant: it needs no slot, so that no tenant waits for another's to end."""
MAX_ENDING = 4
"""Batches that are ended without a slot, as they were cancelled or have expired while they waited."""
_READ_AGAIN = 64
"""Waiting batches whose state is read in one look: another gateway may have been asked to cancel them."""
_LOOK_S = 1.0
_CHECK_S = 0.25
_SWEEP_EVERY = 60
_SPACE_CHECK_S = 1.0
"""Between two looks at what a tenant has stored: meanwhile its other batches may bring it over the bound."""
_FULL = "full"
_REASONS = {CANCELLED: "batch_cancelled", EXPIRED: "batch_expired", _FULL: "storage_exceeded"}
_TEXTS = {
    _FULL: "This request was not executed: the files of its tenant, and the results of its batches, take all the space "
    "that they may have. Delete some files, and ask for it in another batch.",
    CANCELLED: "This request was not executed: the batch was cancelled.",
    EXPIRED: "This request could not be executed before the completion window expired.",
}

logger = logging.getLogger("charonia.gateway.openai")


async def _write_nothing(_model: str) -> None:
    """The `will_ask` of a run that submits no jobs."""


@dataclass(slots=True)
class BatchRun:
    """One batch while this gateway drives it. `stop` is why it is to end early: cancelled or expired."""

    state: BatchState
    token: int
    caller: Caller
    counts: Counts
    will_ask: Callable[[str], Awaitable[None]] = _write_nothing
    """To be called before a job of this model is submitted, so that every gateway knows where to find it. Raises
    `CharoniaError` without the log.
    """
    stop: str = ""
    lost: bool = False
    """Another gateway drives it now."""
    left_bytes: int = 0
    """What its tenant may store besides."""
    is_full: bool = False
    """There was no space for more results: no further line is asked for."""
    missing: str = ""
    """Why its input file can no longer be read, "" while it can."""
    jobs: dict[int, list[str]] = field(default_factory=dict)
    """By line number the jobs under way."""
    calls: set[asyncio.Future[Any]] = field(default_factory=set)
    """The calls under way that are no jobs: they end with their future."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    dropped: dict[int, tuple[BatchLine, tuple[str, ...]]] = field(default_factory=dict)
    """Lines, by number, that may have left jobs behind, with the ids of the known ones: another gateway took the batch
    over while they were under way, or their jobs were not deleted after their result was written.
    """
    done: set[int] = field(default_factory=set)
    """The numbers of the lines that have a result."""
    begun_ns: int = field(default_factory=monotonic_ns)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is written which model is asked."""


class LineCalls(Protocol):
    """Asks a model for one line."""

    async def run(self, run: BatchRun, line: BatchLine) -> LineResult:
        """What became of a line. Raises `Cancelled` when `run` is to stop first."""

    async def cancel(self, run: BatchRun, line: BatchLine) -> None:
        """Cancel the jobs of a line that another gateway has asked for. Raises `CharoniaError` without the log."""

    async def delete(self, run: BatchRun, job_ids: Sequence[str]) -> None:
        """Delete jobs, those that are there. One that cannot be deleted stays until its retention."""

    async def forget(self, run: BatchRun, line: BatchLine) -> None:
        """Delete the jobs of a line that are not to be stored, however they came to be. Raises as `cancel`."""


class BatchRuns:
    """The batches that one gateway drives."""

    def __init__(
        self, batches: StoredBatches, files: StoredFiles, lines: LineCalls, handler: Handler, incarnation: str
    ) -> None:
        self._batches = batches
        self._files = files
        self._lines = lines
        self._handler = handler
        self._incarnation = incarnation
        self._runs: dict[str, BatchRun] = {}
        self._driven: dict[str, str] = {}
        """By the batches that have a slot, their tenants."""
        self._ending: set[str] = set()
        self._waiting: dict[str, BatchState] = {}
        """The batches that this gateway does not drive, those first whose state was read longest ago."""
        self._places: dict[str, int] = {}
        """The place of each batch in the line for slots. One that could not be driven goes to its end: otherwise as
        many as there are slots would keep all others from theirs.
        """
        self._next_place = itertools.count(1)
        self._woken = asyncio.Event()
        self._tasks = Tasks()

    def start(self) -> None:
        self._tasks.spawn(self._keep_looking(), "batches")

    async def close(self) -> None:
        """Give all batches back, so that another gateway takes them over at once."""
        await self._tasks.close()

    def wake(self, batch_id: str = "") -> None:
        """Something has changed that this gateway knows of: a new batch, or one that is cancelled."""
        self._woken.set()
        self._waiting.pop(batch_id, None)  # it is read again
        if batch_id in self._runs:
            self._runs[batch_id].changed.set()

    async def _keep_looking(self) -> None:
        looks = 0
        while True:
            self._woken.clear()
            try:
                await self._look()
                if looks % _SWEEP_EVERY == 0:
                    await self._batches.sweep()
                looks += 1
            except CharoniaError:
                pass  # the log cannot be reached: at the next look
            except Exception:
                logger.exception("batches could not be looked for")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S * random.uniform(0.75, 1.25)):
                    await self._woken.wait()

    async def _look(self) -> None:
        """Take batches that no gateway drives: the first in line of the tenant with the fewest slots first; and end
        those that are to stop.
        """
        active = await self._batches.active()
        self._places = {one: self._places.get(one) or next(self._next_place) for one in active}
        found = [one for one in active if one not in self._driven and one not in self._ending]
        found.sort(key=self._places.__getitem__)
        await self._read_waiting(found)
        waiting: dict[str, deque[str]] = {}
        for batch_id in found:
            if (state := self._waiting.get(batch_id)) is None:
                continue
            if _reason_to_stop(state):
                if len(self._ending) < MAX_ENDING and (token := await self._take(batch_id)):
                    self._ending.add(batch_id)
                    self._tasks.spawn(self._keep_driving(batch_id, token), f"batch {batch_id}")
            else:
                waiting.setdefault(state.tenant, deque()).append(batch_id)
        slots = Counter(self._driven.values())
        while waiting:
            tenant = min(waiting, key=slots.__getitem__)
            if len(self._driven) >= (MAX_DRIVEN if slots[tenant] else MAX_WITH_FIRST):
                return
            batch_id = waiting[tenant].popleft()
            if not waiting[tenant]:
                del waiting[tenant]
            if token := await self._take(batch_id):
                self._driven[batch_id] = tenant
                slots[tenant] += 1
                self._tasks.spawn(self._keep_driving(batch_id, token), f"batch {batch_id}")

    async def _read_waiting(self, found: Sequence[str]) -> None:
        """Read the state of the batches that are new, and of some others again."""
        for gone in self._waiting.keys() - set(found):
            del self._waiting[gone]
        new = [batch_id for batch_id in found if batch_id not in self._waiting]
        for batch_id in [*new, *list(self._waiting)[:_READ_AGAIN]]:
            try:
                state = await self._batches.state(batch_id)
            except CharoniaError:
                raise
            except Exception:  # of a newer release, perhaps: the others go on
                logger.exception("batch %s cannot be read", batch_id)
                continue
            self._waiting.pop(batch_id, None)
            self._waiting[batch_id] = state

    async def _take(self, batch_id: str) -> int:
        return await self._batches.take(batch_id, self._incarnation)

    async def _keep_driving(self, batch_id: str, token: int) -> None:
        try:
            await self._drive(batch_id, token)
        except Cancelled as error:
            logger.info("%s", error.message)
        except CharoniaError as error:
            logger.info("batch %s is driven again later: %s", batch_id, error.message)
            self._places[batch_id] = next(self._next_place)
        except Exception:
            logger.exception("batch %s could not be driven", batch_id)
            self._places[batch_id] = next(self._next_place)
        finally:
            self._runs.pop(batch_id, None)
            with contextlib.suppress(CharoniaError):
                await asyncio.shield(self._batches.release(batch_id, self._incarnation, token))
            self._driven.pop(batch_id, None)
            self._ending.discard(batch_id)

    # -- one batch ----------------------------------------------------------------------------------------------------

    async def _drive(self, batch_id: str, token: int) -> None:
        state = await self._batches.state(batch_id)
        if state.outcome or not state.exists:
            await self._batches.ended(batch_id)
            return
        caller = Caller(state.tenant, self._handler.identifies)
        run = BatchRun(state, token, caller, Counts(), lambda model: self._will_ask(run, model))
        run.is_full = state.finalizing_s > 0  # no owner asks for more after that: see `_leaves_jobs`
        self._runs[batch_id] = run
        file: FileRecord | None = None
        try:
            file = await self._files.find(state.input_file, state.tenant)
            if not state.started_s and not await self._validated(run, file):
                return
        except ApiError as error:
            if not state.started_s:
                await self._end(run, FAILED, errors=[_missing(error.message)])
                return
            run.missing = error.message  # what has been answered is kept
        run.counts.total = state.counts.total
        unstored: list[str] = []
        async for number, ok, tokens, result, jobs in self._batches.results(batch_id):
            self._count(run, number, ok, tokens)
            run.counts.result_bytes += len(result)
            unstored += jobs
        await self._is_to_stop(run)
        await self._check_space(run)
        loop = asyncio.get_running_loop()
        watching = loop.create_task(self._watch(run))
        deleting = loop.create_task(self._lines.delete(run, unstored))
        try:
            if file is not None and len(run.done) < run.counts.total:
                await self._run_lines(run, file)
            await deleting
            # a gateway that stalled may not have noticed yet that another one asks for the lines
            run.lost = run.lost or not await self._batches.owns(batch_id, token)
            if not run.lost and await self._leaves_jobs(run):
                with contextlib.suppress(Cancelled):  # it is lost
                    await self._ask_no_more(run)
            if file is not None and await self._leaves_jobs(run):
                await self._cancel_left(run, file)
            if run.lost:
                await self._forget_dropped(run)
        finally:
            for task in (watching, deleting):
                task.cancel()
            await asyncio.gather(watching, deleting, return_exceptions=True)
        if not run.lost:
            await self._finalize(run, file)

    async def _validated(self, run: BatchRun, file: FileRecord) -> bool:
        """Check the input as a whole; a batch whose input is wrong ends."""
        checked = Validation(run.state.endpoint)
        async for line in self._read(file):
            checked.check(line)
        checked.end()
        if checked.errors:
            await self._end(run, FAILED, errors=checked.errors)
            return False
        fact = {"kind": STARTED, "time_s": now_s(), "total": checked.lines, "model": checked.model, "names_asked": True}
        await self._add(run, fact)
        return True

    async def _read(self, file: FileRecord) -> AsyncIterator[bytes | None]:
        """The lines of a file."""
        reader = LineReader()
        async for chunk in self._files.content(file):
            for line in reader.feed(chunk):
                yield line
            await asyncio.sleep(0)  # parsing a chunk takes milliseconds
        for line in reader.end():
            yield line

    async def _add(self, run: BatchRun, fact: dict[str, Any]) -> None:
        """Write a fact. Raises `Cancelled` when another gateway drives the batch."""
        try:
            await self._batches.add(run.state.id, fact, run.token)
        except Cancelled:
            run.lost = True
            raise
        run.state.apply(fact)

    async def _will_ask(self, run: BatchRun, model: str) -> None:
        """See `BatchRun.will_ask`."""
        async with run.writing:
            if run.state.asked is not None and model not in run.state.asked:
                await self._add(run, {"kind": ASKED, "time_s": now_s(), "model": model})

    def _count(self, run: BatchRun, number: int, ok: bool, tokens: tuple[int, int]) -> bool:
        """Count a line's result; False when it has one already."""
        if number in run.done:
            return False
        run.done.add(number)
        counts = run.counts
        counts.completed += ok
        counts.failed += not ok
        counts.input_tokens += tokens[0]
        counts.output_tokens += tokens[1]
        return True

    async def _run_lines(self, run: BatchRun, file: FileRecord) -> None:
        """Ask for every line that has no result, so many at a time, until the end or until the run is to stop.

        When the file is gone meanwhile, the lines under way go on.
        """
        slots = asyncio.Semaphore(MAX_IN_FLIGHT)
        checked = Validation(run.state.endpoint)
        async with asyncio.TaskGroup() as tasks:
            try:
                async for text in self._read(file):
                    line = checked.check(text)
                    if line is None or line.number in run.done:
                        continue
                    await slots.acquire()
                    if run.stop or run.lost or run.is_full:
                        break
                    task = tasks.create_task(self._run_line(run, line, slots))
                    run.tasks.add(task)
                    task.add_done_callback(run.tasks.discard)
            except ApiError as error:
                run.missing = error.message

    async def _run_line(self, run: BatchRun, line: BatchLine, slots: asyncio.Semaphore) -> None:
        left: tuple[str, ...] = ()
        try:
            result = await self._lines.run(run, line)
            if not run.lost and await self._keep(run, result) and result.unstored:
                left = result.unstored
                if await self._delete(run, left):
                    left = ()
        except Cancelled:
            pass  # the run stops: its end says what became of the line
        finally:
            if left or (run.lost and line.number not in run.done):
                run.dropped[line.number] = (line, left)
            run.jobs.pop(line.number, None)
            slots.release()

    async def _keep(self, run: BatchRun, result: LineResult) -> bool:
        """Write a result to the log; False if another gateway drives the batch before that succeeds."""
        while True:
            try:
                line = result.line(run.state.id)
                await self._batches.add_result(
                    run.state.id, result.number, result.ok, result.usage, line, result.unstored
                )
            except CharoniaError:
                await asyncio.sleep(_LOOK_S)  # the log is away: what was computed is kept until it is back
                if run.lost:
                    return False
                continue
            self._count(run, result.number, result.ok, result.usage)
            run.counts.result_bytes += len(line)
            self._left(run, run.left_bytes - len(line))
            return True

    async def _delete(self, run: BatchRun, job_ids: Sequence[str]) -> bool:
        """Delete the jobs of a line whose result is in the log, unless another gateway drives the batch: it may have
        read the results before, and wait for these jobs. It deletes them itself. Returns whether that was done.
        """
        with contextlib.suppress(CharoniaError):
            if await self._batches.owns(run.state.id, run.token):
                await self._lines.delete(run, job_ids)
                return True
        return False

    async def _forget_dropped(self, run: BatchRun) -> None:
        """Delete the jobs that the owner of the batch does not know: it had the result of their line, and had deleted
        its own job, when this gateway asked again. It waits for the jobs of all other lines, and deletes those itself.
        """
        if not run.dropped:
            return
        kept: dict[int, list[str]] = {}
        async for number, _, _, _, jobs in self._batches.results(run.state.id):
            kept.setdefault(number, jobs)
        # after the results, which are deleted at the end
        has_ended = bool((await self._batches.state(run.state.id)).outcome)
        for number, (line, own) in run.dropped.items():
            if has_ended or (number in kept and (not own or list(own) != kept[number])):
                await self._lines.forget(run, line)

    async def _watch(self, run: BatchRun) -> None:
        """Publish the progress of a run, and notice that it is to stop."""
        reported = -1
        checked_ns = monotonic_ns()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_S):
                    await run.changed.wait()
            run.changed.clear()
            with contextlib.suppress(CharoniaError):
                if not await self._batches.owns(run.state.id, run.token):
                    run.lost = True
                    for task in list(run.tasks):
                        task.cancel()  # its job goes on: the other gateway waits for it
                    return
                if run.counts.done != reported:
                    reported = run.counts.done
                    await self._batches.report(run.state.id, run.counts)
                    if not run.is_full and monotonic_ns() - checked_ns >= _SPACE_CHECK_S * 1_000_000_000:
                        checked_ns = monotonic_ns()
                        await self._check_space(run)
                if run.stop or await self._is_to_stop(run):
                    await self._cancel_jobs(run)  # each time, as some came into being meanwhile

    async def _check_space(self, run: BatchRun) -> None:
        others = await self._batches.result_bytes(run.state.tenant, but=run.state.id)
        left_bytes = await self._files.left_bytes(run.state.tenant) - others
        self._left(run, left_bytes - run.counts.result_bytes)

    def _left(self, run: BatchRun, left_bytes: int) -> None:
        run.left_bytes = left_bytes
        run.is_full = run.is_full or left_bytes <= 0

    async def _is_to_stop(self, run: BatchRun) -> bool:
        state = await self._batches.state(run.state.id)
        run.stop = _reason_to_stop(state)
        if run.stop == CANCELLED:
            run.state = state
        return bool(run.stop)

    async def _cancel_jobs(self, run: BatchRun) -> None:
        """Cancel the lines under way. One that has been answered meanwhile keeps its answer."""
        for call in list(run.calls):
            call.cancel()
        for job_id in [job_id for jobs in run.jobs.values() for job_id in jobs]:
            with contextlib.suppress(CharoniaError):
                await self._handler.jobs.cancel(job_id, run.caller)

    async def _leaves_jobs(self, run: BatchRun) -> bool:
        """Whether there may be jobs whose lines are not asked for again."""
        if not run.lost:
            return bool(run.stop) or run.is_full
        # the owner cancels those there are, perhaps before this gateway has asked for its last ones
        run.state = await self._batches.state(run.state.id)
        return bool(_reason_to_stop(run.state) or run.state.finalizing_s or run.state.outcome)

    async def _ask_no_more(self, run: BatchRun) -> None:
        """Write that no gateway will ask for another line of this batch, unless that is known."""
        if not run.stop and not run.state.finalizing_s:
            await self._add(run, {"kind": FINALIZING, "time_s": now_s()})

    async def _cancel_left(self, run: BatchRun, file: FileRecord) -> None:
        """Cancel the jobs that another gateway has left. Lines are asked for in their order and so many at a time, so
        those under way are the first ones without a result.
        """
        checked, left = Validation(run.state.endpoint), MAX_IN_FLIGHT
        try:
            async for text in self._read(file):
                line = checked.check(text)
                if line is None or line.number in run.done:
                    continue
                await self._lines.cancel(run, line)
                left -= 1
                if not left:
                    return
        except ApiError as error:
            run.missing = error.message

    # -- the end ------------------------------------------------------------------------------------------------------

    async def _finalize(self, run: BatchRun, file: FileRecord | None) -> None:
        """Write the files and end the batch. The ids of the files have the token: a lost owner writes other files.

        Without its input the lines without an answer cannot be named: the batch says so, and keeps its answers.
        """
        await self._ask_no_more(run)
        state = run.state
        kept_s = state.output_ttl_s
        stem = f"file-{state.id.removeprefix('batch_')}{run.token:x}"
        output = self._files.writer(kept_s, file_id=f"{stem}o")
        errors = self._files.writer(kept_s, file_id=f"{stem}e")
        counts = Counts(state.counts.total)
        written = BatchRun(state, run.token, run.caller, counts)
        async for number, ok, tokens, line, _ in self._batches.results(state.id):
            if self._count(written, number, ok, tokens):
                await (output if ok else errors).write(line)
        why = run.stop or (_FULL if run.is_full else "")
        if why and file is not None and counts.done < counts.total:
            try:
                await self._write_rest(why, written, file, errors)
            except ApiError as error:
                run.missing = error.message
        outcome = run.stop or COMPLETED
        about: dict[str, Any] = {}
        if run.missing and (left := counts.total - counts.done) > 0:
            outcome = run.stop or FAILED
            about["errors"] = [_missing(f"{run.missing}: {left} requests have neither an answer nor an error")]
        name = state.id
        # from now on its results count as files: with both, a batch of the same tenant would find no space, and stop
        await self._batches.report(name, counts)
        made = [
            await self._end_file(output, state.tenant, f"{name}_output.jsonl"),
            await self._end_file(errors, state.tenant, f"{name}_error.jsonl"),
        ]
        output_file, error_file = [one.id if one is not None else None for one in made]
        try:
            await self._end(run, outcome, counts=counts.note(), output_file=output_file, error_file=error_file, **about)
        except Cancelled:
            for one in made:
                if one is not None:
                    await self._files.delete(one)
            raise

    async def _write_rest(self, stop: str, written: BatchRun, file: FileRecord, errors: FileWriter) -> None:
        """Write a line for each request that was not answered."""
        checked = Validation(written.state.endpoint)
        async for text in self._read(file):
            line = checked.check(text)
            if line is None or line.number in written.done:
                continue
            result = LineResult(line.number, line.custom_id, code=_REASONS[stop], message=_TEXTS[stop])
            await errors.write(result.line(written.state.id))
            self._count(written, line.number, False, (0, 0))

    async def _end_file(self, writer: FileWriter, tenant: str, name: str) -> FileRecord | None:
        """A written file; None for an empty one."""
        return await writer.end(tenant, name, "batch_output") if writer.size_bytes else None

    async def _end(self, run: BatchRun, outcome: str, **more: Any) -> None:
        await self._add(run, {"kind": ENDED, "time_s": now_s(), "outcome": outcome, **more})
        await self._batches.ended(run.state.id)


def _reason_to_stop(state: BatchState) -> str:
    """Why a batch is to end before all its lines are answered; "" if it is not."""
    if state.finalizing_s:
        return ""
    if state.cancelling_s:
        return CANCELLED
    return EXPIRED if now_s() >= state.expires_s else ""


def _missing(message: str) -> dict[str, Any]:
    return {"code": "input_file_missing", "line": None, "message": message, "param": "input_file_id"}
