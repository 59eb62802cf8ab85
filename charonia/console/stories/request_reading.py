"""Reads what the log has about one request, for its page: `request_story` explains it.

A viewer with a tenant sees its own jobs alone: once a call has ended, no record says whose it was.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Awaitable, Callable
from typing import Any

from charonia import keys
from charonia.catalog.catalog import Catalog
from charonia.clock import wall_ns
from charonia.console.viewers import Viewer
from charonia.errors import InvalidRecord, NotFound
from charonia.eventlog.control import folded_control
from charonia.eventlog.port import START, EventLog
from charonia.facts.events import Fact, facts_of
from charonia.facts.jobs import DeliveryNote, JobRecord, public_id
from charonia.operations import job_commands as jobs
from charonia.operations.queued import find_queued

from .answer_delivery import WebhookCall
from .journal_reading import JournalReader, entry_us
from .request_story import ENDS, History, explain

_ID = re.compile(r"[0-9a-f]{32}")
_PAGE = 1000

ReadWebhook = Callable[[EventLog, JobRecord], Awaitable[WebhookCall | None]]
"""How far the webhook of an ended job has come; None for one without a webhook, or whose end calls none."""


async def no_webhooks(_log: EventLog, _job: JobRecord) -> WebhookCall | None:
    """A `ReadWebhook` of a log whose jobs have none."""
    return None


async def request_page(
    log: EventLog, model: str, text: str, viewer: Viewer, read_webhook: ReadWebhook = no_webhooks
) -> dict[str, Any]:
    """The story of a job, or of a request that the journal or the queue has. Raises `NotFound`."""
    if not _ID.fullmatch(text):
        raise NotFound(f"'{text}' is no id of a request: 32 hex digits")
    request_id = bytes.fromhex(text)
    job = await log.job(model, request_id)
    if (job is not None and not viewer.may_see(job.tenant)) or (job is None and viewer.scoped):
        raise NotFound(f"request '{text}' is unknown to this log")
    accepted_us = job.accepted_us if job is not None else await _accepted_us(log, model, request_id)
    if not accepted_us:
        raise NotFound(
            f"request '{text}' is unknown to this log: neither queued, nor a job, nor in what was read of the journal"
        )
    ended_us = job.ended_us if job is not None else 0
    journal, cut = await JournalReader(log, model).around(request_id, accepted_us, ended_us)
    catalog = await folded_control(log)
    ended = job.events[-1].detail if job is not None and job.events else {}
    history = History(
        request_id,
        accepted_us,
        wall_ns() // 1000,
        model,
        job.events if job is not None else (),
        journal,
        await _control(log),
        _batch_delay_us(catalog, model),
        await log.paused(model),
        cut,
        ended.get("dead_letter") is True,
        await read_webhook(log, job) if job is not None and ended_us else None,
        await _given(log, model, request_id) if ended_us else None,
    )
    story = explain(history)
    return {
        "model": model,
        "id": request_id.hex(),
        "public_id": public_id(model, request_id),
        "job": jobs.job_json(job, history.now_us) if job is not None else None,
        "about": {name: jobs.plain(value) for name, value in job.about.items()} if job is not None else {},
        "accepted_us": accepted_us,
        "story": story,
        "ended": story.state in ENDS,
        "dead_letter": history.dead_letter,
        "names_others": not viewer.scoped,
    }


async def _given(log: EventLog, model: str, job_id: bytes) -> DeliveryNote | None:
    """When a job's outcome was first given to a caller; None as well for a note of a newer release."""
    (data,) = await log.notes([keys.job_delivery(model, job_id)])
    with contextlib.suppress(InvalidRecord):
        return DeliveryNote.unpack(data) if data is not None else None
    return None


async def _accepted_us(log: EventLog, model: str, request_id: bytes) -> int:
    """When a request that is no job was accepted, as the queue or the journal say it; 0 if they do not."""
    if await log.unsettled(model, [request_id]) != [-1]:
        found = await find_queued(log, model, request_id, wall_ns() // 1000)
        if found is not None:
            return found.record.accepted_ns // 1000
    return await JournalReader(log, model).acceptance(request_id, wall_ns() // 1000)


async def _control(log: EventLog) -> list[tuple[int, Fact]]:
    """The control facts that are still in the log, each with its time."""
    after, found = START, list[tuple[int, Fact]]()
    while entries := await log.range(keys.CONTROL, after, _PAGE):
        after = entries[-1].id
        found += [(entry_us(entry.id), fact) for entry in entries for fact in facts_of(entry)]
    return found


def _batch_delay_us(catalog: Catalog, model: str) -> int | None:
    served = catalog.held(model)
    if not served:
        return None
    config = served[max(served)].config
    if not config.HasField("dynamic_batching"):
        return None
    return int(config.dynamic_batching.max_queue_delay_microseconds)
