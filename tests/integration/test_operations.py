"""The operators' commands as a user runs them, against a real server: find the log, do, print, exit."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from charonia import keys
from charonia.clock import wall_ns
from charonia.eventlog.port import EventLog, Limits
from charonia.eventlog.redis import open_log
from charonia.facts.events import FIELD_FACT, RepositoryScanned, pack_fact
from charonia.facts.jobs import OUTCOME_CODES, JobEnd, JobState, NewJob, public_id
from charonia.tensors import Tensor
from charonia.wire import FLAG_JOB, FLAG_JOURNALLED, pack_request, pack_response, record_fields, request_meta

pytestmark = pytest.mark.integration

MODEL = "identity"
INPUT = Tensor.of("X", np.arange(16, dtype=np.float32).reshape(1, 16))
META = request_meta(1, "hash", [INPUT], ("Y",), {})


@pytest.fixture
async def log(fresh_log_url: str) -> AsyncIterator[EventLog]:
    log = open_log(fresh_log_url)
    await log.open()
    scanned = RepositoryScanned("executor-1", (MODEL,), "none", True)
    await log.append(keys.CONTROL, [FIELD_FACT, pack_fact(scanned)])
    yield log
    await log.close()


def record(request_id: bytes, flags: int) -> bytes:
    return pack_request(
        request_id,
        b"gateway-1",
        b"",
        META,
        [INPUT.data],
        rows=1,
        signature=1,
        level=0,
        accepted_ns=wall_ns(),
        flags=flags,
    )


async def submit(log: EventLog, *, tenant: str = "", lane: int = 0) -> bytes:
    job_id = secrets.token_bytes(16)
    packed = record(job_id, FLAG_JOB | FLAG_JOURNALLED)
    new = NewJob(job_id, len(packed), wall_ns() // 1000, 600, tenant)
    await log.accept_job(MODEL, 0, lane, new, record_fields([packed]), Limits())
    return job_id


async def begin(log: EventLog, *ids: bytes, attempt: int = 1) -> None:
    owner, token = await log.owner(MODEL)
    if not owner:
        token = await log.take_ownership(MODEL, "batcher-1", "")
    await log.begin_attempt(MODEL, token, ids, attempt, jobs=ids, journalled=ids, executor="e1", batch_id="b1")
    joined = b"".join(ids)
    facts = [b"k", b"started", b"i", joined, b"a", b"%d" % attempt, b"x", b"e1", b"b", b"b1"]
    await log.append(keys.journal(MODEL), facts)


async def finish(log: EventLog, job_id: bytes, attempt: int = 1) -> None:
    end = JobEnd(JobState.SUCCEEDED, pack_response(job_id, MODEL, 1, [INPUT], {}), {"batch_rows": 1})
    code = OUTCOME_CODES[JobState.SUCCEEDED]
    assert await log.settle(MODEL, [(job_id, attempt)], None, [], ends={job_id: end}, outcomes=code) == [True]


async def charonia(url: str, *words: str) -> tuple[int, Any]:
    """Exit code and JSON document of a command in a process of its own."""
    command = [str(Path(sys.executable).parent / "charonia"), *words, "--json"]
    environment = {**os.environ, "CHARONIA_LOG_URL": url}
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, env=environment, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


async def test_queues_and_jobs_are_seen_held_and_cancelled(fresh_log_url: str, log: EventLog) -> None:
    first, second, third = [await submit(log, tenant="acme", lane=48) for _ in range(3)]
    await begin(log, first)

    code, document = await charonia(fresh_log_url, "queue", "ls")
    assert code == 0
    (lane,) = document["queues"]
    assert (lane["level"], lane["lane"], lane["requests"], lane["begun"]) == (0, 48, 3, 1)
    assert document["models"][0]["tenants"]["acme"]["requests"] == 3

    code, document = await charonia(fresh_log_url, "queue", "pause", MODEL)
    assert (code, await log.paused(MODEL)) == (0, True)
    code, document = await charonia(fresh_log_url, "queue", "inspect", MODEL)
    assert [row["id"] for row in document["queue"]] == [first.hex(), second.hex(), third.hex()]
    assert [row["attempt"] for row in document["queue"]] == [1, 0, 0]

    code, document = await charonia(fresh_log_url, "jobs", "cancel", public_id(MODEL, third))
    assert (code, document["cancelled"]) == (0, [public_id(MODEL, third)])
    code, document = await charonia(fresh_log_url, "queue", "cancel", MODEL, "--id", second.hex())
    assert (code, document["cancelled"]) == (0, [second.hex()])
    assert await log.unsettled(MODEL, [first, second, third]) == [1, -1, -1]
    assert len(await log.range(keys.replies("gateway-1"))) == 2

    await finish(log, first)
    code, document = await charonia(fresh_log_url, "jobs", "ls")
    states = {job["id"]: job["state"] for job in document["jobs"]}
    assert states == {
        public_id(MODEL, first): "succeeded",
        public_id(MODEL, second): "cancelled",
        public_id(MODEL, third): "cancelled",
    }
    code, document = await charonia(fresh_log_url, "jobs", "result", public_id(MODEL, first))
    assert (code, document["outputs"][0]["data"]) == (0, [float(n) for n in range(16)])
    code, document = await charonia(fresh_log_url, "audit")
    assert (code, document["clean"], document["models"][0]["unfinished"]) == (0, True, 0)


async def test_wait_ends_with_the_job(fresh_log_url: str, log: EventLog) -> None:
    job_id = await submit(log)
    waiting = asyncio.create_task(charonia(fresh_log_url, "jobs", "wait", public_id(MODEL, job_id)))
    await begin(log, job_id)
    await finish(log, job_id)
    code, document = await asyncio.wait_for(waiting, 60)
    assert (code, document["state"]) == (0, "succeeded")


async def test_a_spoiled_journal_fails_the_audit(fresh_log_url: str, log: EventLog) -> None:
    done, waiting = await submit(log), await submit(log)
    await begin(log, done)
    await finish(log, done)
    assert (await charonia(fresh_log_url, "audit"))[0] == 0
    await log.append(keys.journal(MODEL), [b"k", b"ended", b"i", done, b"a", b"1", b"o", b"s"])
    await log.append(keys.journal(MODEL), [b"k", b"batched", b"i", done, b"a", b"2", b"x", b"e1", b"b", b"b2"])
    await log.delete_stream(keys.queue(MODEL, 0))

    code, document = await charonia(fresh_log_url, "audit", "--model", MODEL)

    assert code == 1
    found = [(finding["rule"], finding["request"]) for finding in document["findings"]]
    assert found == [
        ("ended_twice", done.hex()),
        ("ran_after_end", done.hex()),
        ("uncarried", waiting.hex()),
    ]


async def test_a_trimmed_journal_is_audited_from_where_it_begins(fresh_log_url: str, log: EventLog) -> None:
    done, waiting = await submit(log), await submit(log)
    await begin(log, done)
    await finish(log, done)
    entries = await log.range(keys.journal(MODEL))
    await log.set_retention(MODEL, size_bytes=0, journal_s=0, journal_size_bytes=1)
    assert await log.trim_journal(MODEL, entries[1].id) == 1
    code, document = await charonia(fresh_log_url, "audit")
    assert (code, document["models"][0]["complete"], document["models"][0]["earlier"]) == (0, False, 1)

    await log.delete_entries(keys.journal(MODEL), [entries[1].id])
    code, document = await charonia(fresh_log_url, "audit")
    assert code == 1
    assert [(f["rule"], f["request"]) for f in document["findings"]] == [("trimmed_unfinished", waiting.hex())]


async def test_a_dead_letter_is_shown_replayed_and_dropped(fresh_log_url: str, log: EventLog, tmp_path: Path) -> None:
    dead = secrets.token_bytes(16)
    about = {"id": dead, "model": MODEL, "version": 1, "content_hash": "hash", "attempts": 4, "error": "it died"}
    about |= {"stderr": "Segmentation fault", "time_us": wall_ns() // 1000, "tenant": "", "job": True}
    await log.append(keys.dead_letters(MODEL), [b"r", record(dead, FLAG_JOB), b"m", msgpack.packb(about)])
    name = public_id(MODEL, dead)

    code, document = await charonia(fresh_log_url, "dlq", "show", name, "--out", str(tmp_path / "letter"))
    assert (code, document["stderr"]) == (0, ["Segmentation fault"])
    assert np.load(document["files"][0]).tolist() == [list(range(16))]
    code, document = await charonia(fresh_log_url, "dlq", "replay", name)
    (again,) = document["replayed"]
    code, document = await charonia(fresh_log_url, "jobs", "show", again["job"])
    assert (code, document["state"], document["about"]["replay_of"]) == (0, "queued", dead.hex())
    code, document = await charonia(fresh_log_url, "dlq", "drop", "--all")
    assert (code, document["dropped"]) == (0, [dead.hex()])
    assert (await charonia(fresh_log_url, "dlq", "ls"))[1]["letters"] == []
