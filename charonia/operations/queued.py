"""Reads the unsettled requests in a model's queue, lane by lane and in order, without taking them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from charonia import keys
from charonia.errors import InvalidRecord, NotFound
from charonia.eventlog.port import START, JobLog, QueueLog, RequestLog
from charonia.facts.events import ModelRequested, RepositoryScanned, VersionLoaded, facts_of
from charonia.wire import RequestRecord, Wave, work_in

FIRST_PAGE = 50
_MOST_PAGE = 1000
_PAGE_BYTES = 1 << 20
"""Entries hold payloads: pages have about this size, estimated from the page before."""
_MARGINS_US = (20_000, 1_000_000, 30_000_000)


@dataclass(frozen=True, slots=True)
class Queued:
    """An unsettled request and its entry. `attempt` 0: no attempt is recorded in the log.

    Requests in waves are in no count of the log.
    """

    record: RequestRecord
    level: int
    lane: int
    entry_id: bytes
    attempt: int
    in_wave: bool = False


async def queued(
    log: QueueLog, model: str, level: int, lane: int, *, after: bytes = START, first_page: int = FIRST_PAGE
) -> AsyncIterator[list[Queued]]:
    """The unsettled requests of one lane, a page of entries at a time, `first_page` of them at first.

    What cannot be read is its owner's to report.
    """
    stream = keys.queue(model, level, lane)
    page = first_page
    while entries := await log.range(stream, after, page):
        after = entries[-1].id
        size_bytes = sum(len(field) for entry in entries for field in entry.fields)
        page = max(1, min(_MOST_PAGE, _PAGE_BYTES * len(entries) // max(1, size_bytes)))
        found: list[tuple[bytes, RequestRecord]] = []
        waves: dict[bytes, list[Queued]] = {}
        for entry in entries:
            try:
                for work in work_in(entry.fields):
                    if isinstance(work, Wave):
                        members = [Queued(record, level, lane, entry.id, 0, True) for record in work.requests()]
                        waves.setdefault(entry.id, []).extend(members)
                    else:
                        found.append((entry.id, work))
            except InvalidRecord:
                continue
        attempts = await log.unsettled(model, [record.id for _, record in found])
        singly: dict[bytes, list[Queued]] = {}
        for (entry_id, record), attempt in zip(found, attempts, strict=True):
            if attempt >= 0:
                singly.setdefault(entry_id, []).append(Queued(record, level, lane, entry_id, attempt))
        yield [request for entry in entries for request in singly.get(entry.id) or waves.get(entry.id, [])]


async def queued_of_model(log: QueueLog, model: str) -> AsyncIterator[list[Queued]]:
    """All lanes, the most urgent level first."""
    for level, lane in sorted(await log.lanes(model)):
        async for found in queued(log, model, level, lane):
            yield found


async def find_queued(log: QueueLog, model: str, request_id: bytes, accepted_us: int) -> Queued | None:
    """The entry of one request. Entry ids are times, so those around its acceptance are searched first."""
    for margin_us in (*_MARGINS_US, accepted_us):
        after = b"%d-0" % max(0, (accepted_us - margin_us) // 1000)
        last_us = accepted_us + margin_us
        for level, lane in await log.lanes(model):
            async for found in queued(log, model, level, lane, after=after):
                for request in found:
                    if request.record.id == request_id:
                        return request
                if margin_us < accepted_us and found and found[-1].record.accepted_ns // 1000 > last_us:
                    break
    return None


async def known_models(log: JobLog) -> list[str]:
    """Every model in the control facts or the jobs of this log."""
    models = set(await log.job_models())
    after = START
    while entries := await log.range(keys.CONTROL, after):
        after = entries[-1].id
        for entry in entries:
            for fact in facts_of(entry):
                if isinstance(fact, RepositoryScanned):
                    models.update(fact.models)
                elif isinstance(fact, (VersionLoaded, ModelRequested)):
                    models.add(fact.model)
    return sorted(models)


async def must_be_known(log: RequestLog, model: str) -> None:
    """Raises `NotFound` for a name that neither a queue nor the control facts know: most likely it is misspelt."""
    if not await log.lanes(model) and model not in await known_models(log):
        raise NotFound(f"model '{model}' is unknown to this log")
