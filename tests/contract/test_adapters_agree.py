"""The log on a server against the plain one in memory: the same calls in any order give the same answers.

What differs between them is how requests are kept: groups of ids, whole or torn apart, grown later, of many sizes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from memory_log.log import MemoryLog

from charonia import keys
from charonia.errors import ResourceExhausted
from charonia.eventlog.port import EventLog, Limits, ProgressPart
from charonia.eventlog.redis import open_log
from charonia.facts.jobs import JobEnd, JobState, NewJob
from charonia.facts.journal import read_facts

TENANTS = ["", "", "", "a", "b:{c} d"]
TOKEN = object()
STATES = [JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED]


class Calls:
    """A random walk over the calls of the port; `one()` is a call for both logs."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.known: list[bytes] = []
        self.jobs: list[bytes] = []
        self.accepted = 0
        self.progress: dict[bytes, int] = {}

    def ids(self) -> tuple[list[bytes], str]:
        """New ids: a group from 0 on, a group with gaps, members of an earlier group, or ids of their own."""
        kind = self.random.randrange(5)
        count = self.random.choice([1, 2, 3, 8, 16, 70])
        prefix = self.random.randbytes(15)
        if kind == 0:
            lasts = list(range(count))
        elif kind == 1:
            lasts = self.random.sample(range(256), count)
        elif kind == 2 and self.known:
            prefix = self.random.choice(self.known)[:15]
            taken = {one[15] for one in self.known if one[:15] == prefix}
            lasts = self.random.sample([last for last in range(256) if last not in taken], min(count, 5))
        else:
            ids = [prefix[:1] + self.random.randbytes(15) for _ in range(count)]
            return ids, tenant_of(prefix)
        return [prefix + bytes([last]) for last in lasts], tenant_of(prefix)

    def some(self, most: int = 40) -> list[bytes]:
        """Ids of before, in runs or mixed, some of them settled, some never known."""
        if not self.known:
            return [self.random.randbytes(16)]
        start = self.random.randrange(len(self.known))
        found = self.known[start : start + self.random.randrange(1, most)]
        if self.random.random() < 0.4:
            found = self.random.sample(self.known, min(len(self.known), self.random.randrange(1, most)))
        if self.random.random() < 0.2:
            found = [*found, self.random.randbytes(16), *found[:1]]
        return found

    def part(self, request_id: bytes) -> ProgressPart:
        """Records that follow the earlier ones, repeat some, leave some out, or differ from them."""
        first = self.progress.get(request_id, 0)
        if self.random.random() < 0.3:
            first = max(0, first + self.random.choice([-2, -1, 1]))
        count = self.random.choice([1, 1, 3])
        self.progress[request_id] = first + count
        odd = self.random.random() < 0.05
        records = [b"odd" if odd else b"%d" % number for number in range(first, first + count)]
        return ProgressPart(request_id, self.random.choice([0, 1, 2, 3]), first, records)

    def one(self) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        choice = self.random.random()
        journalled = self.random.random() < 0.5
        if choice < 0.3:
            ids, tenant = self.ids()
            self.known += ids
            uniform = self.random.random() < 0.5
            requests = [(one, 100 if uniform else self.random.choice([0, 1, 7, 5000, 10**9])) for one in ids]
            limits = self.random.choice([Limits(), Limits(requests=300, tenant_requests=100, tenant_size_bytes=10**10)])
            more = {"tenant": tenant, "journalled": journalled}
            return "accept", ("m", 0, self.random.randrange(3), requests, [b"r", b"x"], limits), more
        if choice < 0.4:
            self.accepted += 1
            job_id = self.random.randbytes(16)
            job = NewJob(job_id, 50, 10**15 + self.accepted, 600, tenant_of(job_id))
            self.known.append(job.id)
            self.jobs.append(job.id)
            return "accept_job", ("m", 0, 0, job, [b"r", b"x"], Limits()), {"journalled": journalled}
        if choice < 0.55:
            ids = list(dict.fromkeys(self.some()))
            jobs = [one for one in ids if one in self.jobs]
            told = [one for one in ids if self.random.random() < 0.7] if journalled else []
            attempt = self.random.choice([1, 1, 1, 2, 3, 120])
            return "begin_attempt", ("m", TOKEN, ids, attempt), {"jobs": jobs, "journalled": told, "executor": "x"}
        if choice < 0.62:
            return "unsettled", ("m", self.some()), {}
        if choice < 0.72:
            return "append_progress", ("m", [self.part(one) for one in self.some()]), {}
        ids = self.some()
        attempt = self.random.choice([0, 1, 1, 2, 2**31 - 1])
        mixed = self.random.random() < 0.2
        requests = [(one, self.random.choice([0, 1, 2]) if mixed else attempt) for one in ids]
        state = self.random.choice(STATES)
        ends = {one: JobEnd(state, b"y" * 10, {"n": 1}) for one in ids if one in self.jobs}
        outcomes = bytes(self.random.choice(b"-sfcx") for _ in ids) if journalled else b""
        statistics = (b"s:{m}:1:h", {"n": len(ids), "zero": 0, "ns": 10**14, "last_ms": self.random.randrange(10**13)})
        ran = ("x", "b") if attempt < 3 and self.random.random() < 0.3 else None
        return "settle", ("m", requests, statistics, []), {"ends": ends, "outcomes": outcomes, "ran": ran}


def tenant_of(request_id: bytes) -> str:
    """Ids that differ in the last byte alone are one tenant's."""
    return TENANTS[request_id[0] % len(TENANTS)]


async def answer(log: EventLog, token: int, name: str, arguments: tuple[Any, ...], more: dict[str, Any]) -> object:
    arguments = tuple(token if one is TOKEN else one for one in arguments)
    try:
        return await getattr(log, name)(*arguments, **more)
    except ResourceExhausted as error:
        return str(error)


async def state_of(log: EventLog, calls: Calls) -> dict[str, object]:
    statistics = await log.statistics(b"s:{m}:1:h")
    journal = []
    for entry in await log.range(keys.journal("m"), count=10**6):
        for fact in read_facts(entry.fields):
            # an adapter may tell the requests of a settlement in another order
            outcomes = fact.outcomes or (None,) * len(fact.ids)
            about = sorted(zip(fact.ids, fact.attempts or (0,) * len(fact.ids), outcomes, strict=True))
            journal.append((fact.kind, about, fact.executor, fact.batch_id))
    return {
        "pending": await log.pending("m"),
        "tenants": await log.pending_of_tenants("m", TENANTS[3:]),
        "unsettled": await log.unsettled("m", calls.known),
        "lanes": await log.lanes("m"),
        "progress": await log.progress("m", calls.known),
        "in progress": sorted(await log.progress_ids("m")),
        "statistics": {name: value for name, value in statistics.items() if value},
        "journal": journal,
        "jobs": {
            (r.id, r.state, r.attempts, len(r.events))
            for one in calls.jobs
            if (r := await log.job("m", one)) is not None
        },
        "active": [r.id for r in await log.jobs("m", ended=False, count=1000)],
        "ended": {r.id for r in await log.jobs("m", ended=True, count=1000)},
    }


@pytest.mark.parametrize("seed", range(12))
async def test_a_server_and_the_memory_agree(seed: int, fresh_log_url: str, log_client: Callable[[], Any]) -> None:
    plain, server = MemoryLog(), open_log(fresh_log_url)
    await server.open()
    calls = Calls(seed)
    tokens = [await log.take_ownership("m", "me", "") for log in (plain, server)]
    for number in range(150):
        call = calls.one()
        assert await answer(plain, tokens[0], *call) == await answer(server, tokens[1], *call), (number, call)
        if number % 30 == 29:
            assert await state_of(server, calls) == await state_of(plain, calls), number
    # at the end all that is left can be settled, and nothing remains of it
    rest = [(one, 2**31 - 1) for one in dict.fromkeys(calls.known)]
    assert await server.settle("m", rest, None, []) == await plain.settle("m", rest, None, [])
    assert await server.pending("m") == (0, 0)
    assert await server.pending_of_tenants("m", TENANTS[3:]) == [(0, 0), (0, 0)]
    await server.close()
    with log_client() as client:
        assert client.exists(keys.unsettled("m")) == 0
        assert client.keys(keys.progress_index("m") + b"*") == []
