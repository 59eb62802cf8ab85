"""`charonia jobs`: reads, cancels and awaits jobs in the log, without a gateway. Gateways submit jobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from charonia import keys
from charonia.calls.request_endings import Ending, cancel_requests
from charonia.errors import NotFound
from charonia.eventlog.control import folded_control
from charonia.eventlog.port import Entry, JobLog, Jobs, QueueLog, RequestLog
from charonia.facts.jobs import JobRecord, JobState, ahead_of, parse_public_id, public_id
from charonia.wire import ResponseRecord, unpack_response

from .queued import find_queued, queued_of_model
from .text.tensor_text import described, saved_all

_PAGE = 200
_WAIT_LOOK_S = 1.0
BY_OPERATOR = Ending(JobState.CANCELLED, "the job was cancelled by an operator", "operator")


class Place(NamedTuple):
    """Of a job in the listing, where it was when it was read. `time_us` is that of its end, or of its acceptance."""

    model: str
    ended: bool
    time_us: int
    id: bytes


@dataclass(frozen=True, slots=True)
class Filter:
    """Selects jobs. Empty fields match all; `after` is the id of the last job seen, or its place."""

    models: tuple[str, ...] = ()
    states: frozenset[JobState] = frozenset()
    tenant: str | None = None
    older_than_s: float = 0.0
    after: str | Place = ""


async def list_jobs(log: Jobs, wanted: Filter, now_us: int, limit: int, scan: int = 0) -> dict[str, Any]:
    """Jobs of each model in turn: active ones oldest first, then ended ones newest first. `next` continues the list.

    `scan` is how many records may be read for one answer, 0 for any number: there may be fewer than `limit` jobs, or
    none, before `next` then.
    """
    found, last = await read_jobs(log, wanted, now_us, limit, scan)
    return {"jobs": [job_json(job, now_us) for job in found], "next": last.public_id if last is not None else None}


async def read_jobs(
    log: Jobs, wanted: Filter, now_us: int, limit: int, scan: int = 0
) -> tuple[list[JobRecord], JobRecord | None]:
    """The jobs of `list_jobs`, and the one after which the list goes on, which may be one that does not match."""
    found: list[JobRecord] = []
    read, last = 0, None
    async for page in _pages(log, wanted):
        for job in page:
            if scan and read >= scan:
                return found, last
            read, last = read + 1, job
            if _matches(job, wanted, now_us):
                if len(found) == limit:
                    return found, found[-1] if found else None
                found.append(job)
    return found, None


def place_of(job: JobRecord) -> Place:
    """Where a listing goes on after a job."""
    ended = job.state.terminal
    return Place(job.model, ended, job.ended_us if ended else job.accepted_us, job.id)


async def _pages(log: Jobs, wanted: Filter) -> AsyncIterator[list[JobRecord]]:
    models = list(wanted.models or await log.job_models())
    seen = wanted.after if isinstance(wanted.after, Place) else None
    if isinstance(wanted.after, str) and wanted.after:
        seen = place_of(await _must_be(log, wanted.after))
    if seen is not None:
        models = models[models.index(seen.model) :] if seen.model in models else []
    any_state = not wanted.states
    for model in models:
        for ended in (False, True):
            if not any_state and not any(state.terminal == ended for state in wanted.states):
                continue
            after: tuple[int, bytes] | None = None
            if seen is not None and seen.ended and not ended:
                continue
            if seen is not None and seen.ended == ended:
                after = (seen.time_us, seen.id)
            seen = None
            while page := await log.jobs(model, ended=ended, after=after, count=_PAGE):
                yield page
                after = (page[-1].ended_us if ended else page[-1].accepted_us, page[-1].id)


def _matches(job: JobRecord, wanted: Filter, now_us: int) -> bool:
    if wanted.states and job.state not in wanted.states:
        return False
    if wanted.tenant is not None and job.tenant != wanted.tenant:
        return False
    return now_us - job.accepted_us >= wanted.older_than_s * 1e6


async def show_job(log: JobLog, text: str, now_us: int) -> dict[str, Any]:
    """One job with its place in the queue. Raises `NotFound`."""
    job = await _must_be(log, text)
    found = await log.job_position(job.model, job.id)
    position = 0
    if found is not None and job.state is JobState.QUEUED:
        shares = len({lane for level, lane in found.lines if level == found.line[0]}) > 1
        weights = (await folded_control(log)).lane_weights if shares else {}
        position = ahead_of(found, weights).jobs + 1
    place = {"position": position, "queue_length": found.active if found is not None else 0}
    about = {name: plain(value) for name, value in job.about.items()}
    return {**job_json(job, now_us), **place, "about": about}


async def timeline(log: Jobs, text: str, now_us: int) -> dict[str, Any]:
    """A job and all its events. Raises `NotFound`."""
    job = await _must_be(log, text)
    events = [
        {
            "number": event.number,
            "event": event.kind,
            "time_us": event.time_us,
            "after_s": (event.time_us - job.accepted_us) / 1e6,
            "detail": plain(event.detail),
        }
        for event in job.events
    ]
    return {**job_json(job, now_us), "events": events}


async def result(log: Jobs, text: str, directory: Path | None) -> dict[str, Any]:
    """An ended job's answer: v2 outputs, or files of `directory`; `error` of one that failed. Raises `NotFound`.

    A job of a model that may answer more than once has `responses`, each with its outputs, files or error.
    """
    job = await _must_be(log, text)
    about: dict[str, Any] = {"id": job.public_id, "state": job.state.value, "model_name": job.model}
    record = await log.job_result(job.model, job.id)
    if record is None:
        error = "the job has not ended" if not job.state.terminal else _ending_text(job) or "no result is kept"
        return {**about, "error": error}
    response: ResponseRecord = unpack_response(record)
    if response.error is not None:
        return {**about, "error": response.error.message, "code": response.error.code.name}
    answer: dict[str, Any] = {**about, "model_version": str(response.version), "error": None}
    if response.place is None:
        return {**answer, **_answered(response, directory)}
    responses: list[dict[str, Any]] = []
    while page := await log.job_responses(job.model, job.id, len(responses) - 1, _PAGE):
        responses += [_placed(unpack_response(packed), directory) for _, _, packed in page]
    return {**answer, "responses": [*responses, _placed(response, directory)]}


def _placed(response: ResponseRecord, directory: Path | None) -> dict[str, Any]:
    attempt, index = response.place or (1, 0)
    place = {"attempt": attempt, "index": index}
    if response.error is not None:
        return {**place, "error": response.error.message, "code": response.error.code.name}
    return {**place, **_answered(response, directory / str(index) if directory is not None else None)}


def _answered(response: ResponseRecord, directory: Path | None) -> dict[str, Any]:
    parameters = {"parameters": plain(response.parameters)} if response.parameters else {}
    if directory is None:
        return {**parameters, "outputs": [described(tensor, whole=True) for tensor in response.outputs]}
    return {**parameters, "files": saved_all(response.outputs, directory)}


async def cancel_jobs(
    log: RequestLog, ids: Sequence[str], wanted: Filter | None, now_us: int, ending: Ending = BY_OPERATOR
) -> dict[str, Any]:
    """Cancel jobs by id, or all active ones that match. A job that ended before keeps its end. `ending` says who."""
    cancelled: list[str] = []
    ended: list[dict[str, str]] = []
    missing: list[str] = []
    for text in ids:
        found = await _find(log, text)
        if found is None:
            missing.append(text)
        elif await _cancel(log, found, ending):
            cancelled.append(found.public_id)
        else:
            job = await _find(log, text)
            ended.append({"id": text, "state": job.state.value if job is not None else "unknown"})
    if wanted is not None:
        for model in wanted.models or await log.job_models():
            cancelled += await _cancel_matching(log, model, wanted, now_us, ending)
    return {"cancelled": cancelled, "ended": ended, "missing": missing}


async def _cancel_matching(log: RequestLog, model: str, wanted: Filter, now_us: int, ending: Ending) -> list[str]:
    states = wanted.states or frozenset({JobState.QUEUED, JobState.RUNNING})
    active = replace(wanted, models=(model,), states=states)
    matching = {job.id async for page in _pages(log, active) for job in page if _matches(job, active, now_us)}
    cancelled: list[str] = []
    async for requests in queued_of_model(log, model):
        records = [request.record for request in requests if request.record.id in matching]
        cancelled += [public_id(model, job_id) for job_id in await cancel_requests(log, model, records, ending)]
    return cancelled


async def _cancel(log: QueueLog, job: JobRecord, ending: Ending) -> bool:
    if job.state.terminal:
        return False
    carrier = await find_queued(log, job.model, job.id, job.accepted_us)
    return carrier is not None and bool(await cancel_requests(log, job.model, [carrier.record], ending))


async def wait_for_job(log: JobLog, text: str, now_us: int, timeout_s: float) -> dict[str, Any]:
    """A job once it has ended, or its state when the time is over. Raises `NotFound`.

    The journal wakes this; without a journal the record is read every second.
    """
    job = await _must_be(log, text)
    changed = asyncio.Event()

    def on_entries(_stream: bytes, _entries: list[Entry]) -> None:
        changed.set()

    reader = log.reader()
    reader.start(on_entries)
    reader.add(keys.journal(job.model), b"$")
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + timeout_s
    try:
        while not (job := await _must_be(log, text)).state.terminal and loop.time() < give_up_s:
            changed.clear()
            try:
                await asyncio.wait_for(changed.wait(), min(_WAIT_LOOK_S, max(0.0, give_up_s - loop.time())))
            except TimeoutError:
                pass
    finally:
        await reader.close()
    return {**job_json(job, now_us), "error": _ending_text(job)}


def job_json(job: JobRecord, now_us: int) -> dict[str, Any]:
    """The part of a job that every listing has. Times are microseconds since the epoch, null if not reached."""
    return {
        "id": job.public_id,
        "state": job.state.value,
        "model_name": job.model,
        "tenant": job.tenant,
        "attempts": job.attempts,
        "accepted_us": job.accepted_us,
        "ended_us": job.ended_us or None,
        "age_s": (now_us - job.accepted_us) / 1e6,
        "bytes": job.size_bytes,
        "result_bytes": job.result_size_bytes,
        "durability": job.durability,
        "retention_s": job.retention_s,
    }


def plain(value: Any) -> Any:
    """`value` as JSON values: bytes as text, or as hex if they are not UTF-8."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            return bytes(value).hex()
    if isinstance(value, dict) or hasattr(value, "items"):
        return {str(plain(name)): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


def _ending_text(job: JobRecord) -> str | None:
    """The reason of its end, from its last event."""
    if not job.state.terminal or job.state is JobState.SUCCEEDED:
        return None
    error = job.events[-1].detail.get("error") if job.events else None
    return str(error) if error else f"the job has {job.state.value}"


async def _find(log: Jobs, text: str) -> JobRecord | None:
    parsed = parse_public_id(text)
    return await log.job(*parsed) if parsed is not None else None


async def _must_be(log: Jobs, text: str) -> JobRecord:
    job = await _find(log, text)
    if job is None:
        raise NotFound(f"job '{text}' is unknown to this log")
    return job
