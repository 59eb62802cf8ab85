"""Moves queued jobs to another priority level: `charonia queue move`. Only while the model is paused.

A request is identified by its id; queue entries only carry it. So a move is: the owner has read `RequestsMoved`, and
so also that the queue is paused; a second entry carries the request at the other level; the first entry is deleted.
After a failure at any step one entry is left, or both are: an owner that reads a request again moves it to where it was
read last, and settles its entries together. Requests that are no jobs are not moved: their first attempt is not in the
log, so no reader can tell that they are still queued.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from charonia import keys
from charonia.errors import InvalidArgument, NotFound
from charonia.eventlog.control import folded_control
from charonia.eventlog.port import ControlLog, EventLog, Limits, RequestLog, Streams
from charonia.facts.events import FIELD_FACT, RequestsMoved, pack_fact
from charonia.facts.jobs import MOVED, JobState
from charonia.wire import at_level, record_fields

from .queued import Queued, find_queued, must_be_known

_OWNER = "batcher"
_PATIENCE_S = 5.0
_LOOK_S = 0.01


async def move(log: EventLog, model: str, ids: Sequence[bytes], level: int) -> dict[str, Any]:
    """Move queued jobs to another level, behind the requests there. `left` lists those that stayed, with the reason.

    Raises `InvalidArgument` unless the model is paused and has that level, `NotFound` for an unknown model.
    """
    await must_be_known(log, model)
    if not await log.paused(model):
        raise InvalidArgument(
            f"the queue of model '{model}' is not paused; pause it first: charonia queue pause {model}"
        )
    await _check_level(log, model, level)
    left: dict[str, str] = {}
    moving: list[Queued] = []
    for request_id in ids:
        found, reason = await _movable(log, model, request_id, level)
        if found is None:
            left[request_id.hex()] = reason
        else:
            moving.append(found)
    applied = await _read_by_owner(log, model, moving) if moving else True
    for queued in list(moving):
        # it may have been dispatched just before the queue was paused
        if await log.unsettled(model, [queued.record.id]) != [queued.attempt]:
            left[queued.record.id.hex()] = "it began or ended meanwhile"
            moving.remove(queued)
    for queued in moving:
        await log.accept(
            model, level, queued.lane, [], record_fields([at_level(queued.record.record, level)]), Limits()
        )
        await log.delete_entries(keys.queue(model, queued.level, queued.lane), [queued.entry_id])
        await log.add_job_event(model, queued.record.id, MOVED, {"level": level, "from_level": queued.level})
    ids_moved = [queued.record.id.hex() for queued in moving]
    return {"model": model, "level": level, "moved": ids_moved, "left": left, "applied": applied}


async def _movable(log: RequestLog, model: str, request_id: bytes, level: int) -> tuple[Queued | None, str]:
    job = await log.job(model, request_id)
    if job is None:
        return None, "it is no job"
    if job.state is not JobState.QUEUED:
        return None, f"it is {job.state.value}"
    found = await find_queued(log, model, request_id, job.accepted_us)
    if found is None:
        return None, "it is not in the queue"
    return (None, "it is there already") if found.level == level else (found, "")


async def _check_level(log: Streams, model: str, level: int) -> None:
    catalog = await folded_control(log)
    versions = catalog.held(model)
    if not versions:
        raise NotFound(f"model '{model}' is served by nobody at the moment, its levels are not known")
    batching = versions[max(versions)].interface.dynamic_batching
    levels = batching.priority_levels if batching is not None else 0
    if not 1 <= level <= levels:
        has = f"has the levels 1 to {levels}" if levels else "has no priority levels"
        raise InvalidArgument(f"model '{model}' {has}, not {level}")


async def _read_by_owner(log: ControlLog, model: str, moving: Sequence[Queued]) -> bool:
    """Notify the owner and wait until it has read that, if there is a live one; False if it does not read."""
    owner, _ = await log.owner(model)
    if not owner or not (await log.alive(_OWNER, [owner]))[0]:
        return True
    stream = keys.facts(model)
    fact = pack_fact(RequestsMoved(b"".join([queued.record.id for queued in moving])))
    told = await log.append(stream, [FIELD_FACT, fact])
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + _PATIENCE_S
    while any(entry.id == told for entry in await log.range(stream)):
        if loop.time() > give_up_s:
            # an owner of an older release must not act on it later: it would have read the new entry by then
            await log.delete_entries(stream, [told])
            return False
        await asyncio.sleep(_LOOK_S)  # facts have one reader, which deletes what it has read
    return True
