"""Jobs that a test writes straight into the queue of a cluster, as a gateway would, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from batching_cluster import HASH, MODEL, Cluster, until, until_so

from charonia import keys
from charonia.clock import wall_ns
from charonia.datatypes import DataType
from charonia.eventlog.port import EventLog, Limits
from charonia.facts.jobs import JobRecord, NewJob
from charonia.facts.journal import JournalFact, read_facts
from charonia.tensors import Tensor
from charonia.wire import FLAG_JOB, FLAG_JOURNALLED, batch_signature, pack_request, record_fields, request_meta

_ids = count(1)


async def submit(
    log: EventLog,
    value: int,
    *,
    lane: int = 0,
    deadline_ns: int = 0,
    endpoint: bytes = b"",
    job: bool = True,
    retention_s: int = 3600,
) -> bytes:
    """A request straight into the queue, as a gateway would write it; its id."""
    request_id = next(_ids).to_bytes(15, "big") + b"\0"
    tensor = Tensor("x", DataType.INT32, (1, 1), value.to_bytes(4, "little"))
    now = wall_ns()
    record = pack_request(
        request_id,
        endpoint,
        b"",
        request_meta(1, HASH, [tensor], (), {}),
        [tensor.data],
        rows=1,
        signature=batch_signature(1, [("x", (1,))]),
        level=0,
        accepted_ns=now,
        deadline_ns=deadline_ns,
        flags=FLAG_JOB | FLAG_JOURNALLED if job else 0,
    )
    fields = record_fields([record])
    if job:
        about = {"version": 1} | ({"deadline_us": deadline_ns // 1000} if deadline_ns else {})
        new = NewJob(request_id, len(record), now // 1000, retention_s, about=about)
        await log.accept_job(MODEL, 0, lane, new, fields, Limits())
    else:
        await log.accept(MODEL, 0, lane, [(request_id, len(record))], fields, Limits())
    return request_id


async def ended(log: EventLog, job_id: bytes) -> JobRecord:
    """A job once it has ended."""
    found: list[JobRecord] = []

    async def has() -> bool:
        record = await log.job(MODEL, job_id)
        assert record is not None
        found[:] = [record]
        return record.state.terminal

    await until_so(has)
    return found[0]


async def told(log: EventLog) -> list[JournalFact]:
    return [fact for entry in await log.range(keys.journal(MODEL)) for fact in read_facts(entry.fields)]


async def settled_then(cluster: Cluster, condition: Callable[[], bool]) -> None:
    await until(condition)
    await cluster.settled()


async def pending_are(log: EventLog, requests: int) -> bool:
    return (await log.pending(MODEL))[0] == requests
