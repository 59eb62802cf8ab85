"""A log in memory and a way to put requests, jobs and dead letters into it as gateway and batcher would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import pytest
from memory_log.log import MemoryLog

from charonia import keys
from charonia.eventlog.port import EventLog, Limits
from charonia.facts.events import FIELD_FACT, Fact, RepositoryScanned, pack_fact
from charonia.facts.jobs import OUTCOME_CODES, JobEnd, JobState, NewJob
from charonia.operations.arguments import parser
from charonia.operations.command_line import perform
from charonia.operations.text.command_reports import text
from charonia.tensors import Tensor
from charonia.wire import FLAG_JOB, FLAG_JOURNALLED, pack_request, pack_response, record_fields, request_meta

NOW_NS = 1_800_000_000_000_000_000
INPUTS = (
    Tensor.of("X", np.arange(12, dtype=np.float32).reshape(1, 12)),
    Tensor.of("S", np.array([["text", b"\xff\x00"]], dtype=np.object_)),
)


@dataclass
class Yard:
    """The log and what was put there. Times count back from `NOW_NS`."""

    log: EventLog
    model: str = "m"

    def record(
        self,
        request_id: bytes,
        *,
        job: bool = False,
        journalled: bool = True,
        age_s: float = 1.0,
        level: int = 0,
        tenant: str = "",
        **more: Any,
    ) -> bytes:
        meta = request_meta(1, "hash-1", INPUTS, ("Y",), {"speed": 3}).of_tenant(tenant)
        flags = (FLAG_JOB if job else 0) | (FLAG_JOURNALLED if journalled else 0)
        return pack_request(
            request_id,
            b"gateway-1",
            b"caller's id",
            meta,
            [tensor.data for tensor in INPUTS],
            rows=1,
            signature=7,
            level=level,
            accepted_ns=NOW_NS - int(age_s * 1e9),
            deadline_ns=NOW_NS + 5_000_000_000,
            flags=flags,
            **more,
        )

    async def requests(
        self, *ids: bytes, level: int = 0, journalled: bool = False, age_s: float = 1.0, tenant: str = ""
    ) -> None:
        """Synchronous requests of one entry."""
        records = [self.record(i, journalled=journalled, age_s=age_s, level=level, tenant=tenant) for i in ids]
        sizes = [(i, len(record)) for i, record in zip(ids, records, strict=True)]
        fields = record_fields(records)
        await self.log.accept(self.model, level, 0, sizes, fields, Limits(), journalled=journalled, tenant=tenant)

    async def job(
        self,
        job_id: bytes,
        *,
        level: int = 0,
        lane: int = 0,
        tenant: str = "",
        age_s: float = 1.0,
        parts: dict[str, Any] | None = None,
        **about: Any,
    ) -> None:
        """`parts` are rare parts of its record."""
        record = self.record(job_id, job=True, age_s=age_s, level=level, **parts or {})
        accepted_us = (NOW_NS - int(age_s * 1e9)) // 1000
        new = NewJob(job_id, len(record), accepted_us, 600, tenant, about=about)
        await self.log.accept_job(self.model, level, lane, new, record_fields([record]), Limits())

    async def begin(self, *ids: bytes, attempt: int = 1) -> None:
        if not (await self.log.owner(self.model))[0]:
            await self.log.take_ownership(self.model, "batcher-1", "")
        _, token = await self.log.owner(self.model)
        await self.log.begin_attempt(
            self.model, token, ids, attempt, jobs=ids, journalled=ids, executor="executor-1", batch_id="b1"
        )

    async def end(self, job_id: bytes, state: JobState = JobState.SUCCEEDED, attempt: int = 1, **detail: Any) -> None:
        answer = pack_response(job_id, self.model, 1, [Tensor("Y", *_like(INPUTS[0]))], {})
        end = JobEnd(state, answer if state is JobState.SUCCEEDED else b"", detail)
        code = OUTCOME_CODES[state]
        await self.log.settle(self.model, [(job_id, attempt)], None, [], ends={job_id: end}, outcomes=code)

    async def letter(self, request_id: bytes, *, job: bool = False, **about: Any) -> None:
        told = {
            "id": request_id,
            "model": self.model,
            "version": 1,
            "content_hash": "hash-1",
            "attempts": 3,
            "error": "the instance died",
            "stderr": "line one\nSegmentation fault",
            "time_us": NOW_NS // 1000 - 60_000_000,
            "tenant": "acme",
            "job": job,
        }
        fields = [b"r", self.record(request_id, job=job), b"m", msgpack.packb(told | about)]
        await self.log.append(keys.dead_letters(self.model), fields)

    async def control(self, fact: Fact) -> None:
        await self.log.append(keys.CONTROL, [FIELD_FACT, pack_fact(fact)])

    async def run(self, *words: str) -> tuple[dict[str, Any], bool, str]:
        """The document of a command, whether all was well, and the text it prints."""
        options = parser().parse_args(words)
        document, well = await perform(self.log, options)
        return document, well, text(options, document)


def _like(tensor: Tensor) -> tuple[Any, Any, Any]:
    return tensor.datatype, tensor.shape, tensor.data


@pytest.fixture
async def yard(monkeypatch: pytest.MonkeyPatch) -> Yard:
    """A yard with the models `m` and `idle`; the commands' clock stands at `NOW_NS`."""
    monkeypatch.setattr("charonia.operations.command_line.wall_ns", lambda: NOW_NS)
    made = Yard(MemoryLog())
    await made.control(RepositoryScanned("executor-1", ("m", "idle"), "none", True))
    return made


@pytest.fixture
def ids() -> Callable[[int], bytes]:
    return lambda number: number.to_bytes(16, "big")
