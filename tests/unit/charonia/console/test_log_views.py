"""What a viewer of one tenant learns from lists: nothing of others, not even where a page of theirs ends."""

from __future__ import annotations

from typing import Any

import pytest
from memory_log.log import MemoryLog

from charonia import keys
from charonia.console import log_views
from charonia.console.cursors import Cursors
from charonia.console.log_views import job_list, letter_list
from charonia.console.viewers import Viewer
from charonia.errors import NotFound
from charonia.eventlog.port import Limits
from charonia.facts.jobs import NewJob, public_id
from charonia.operations.dead_letters import LetterPlace
from charonia.operations.job_commands import Place
from charonia.wire import record_fields

ACME = Viewer("acme", True)


def job_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


async def with_jobs(tenants: list[str]) -> MemoryLog:
    log = MemoryLog()
    for number, tenant in enumerate(tenants, 1):
        new = NewJob(job_id(number), 1, 1_000_000 + number, 600, tenant, about={})
        await log.accept_job("m", 0, 0, new, record_fields([b"r"]), Limits())
    return log


async def test_the_next_page_of_a_tenant_names_no_job_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_views, "_JOBS_READ", 2)
    log, cursors = await with_jobs(["acme", "other", "other", "other", "acme"]), Cursors[Place]()
    seen, after = list[str](), ""
    for _ in range(3):
        found = await job_list(log, ACME, "", "", after, cursors)
        seen += [row["id"] for row in found["jobs"]]
        after = found["next"] or ""
        assert not any(job_id(number).hex() in after for number in range(6))
    assert (seen, after) == ([public_id("m", job_id(1)), public_id("m", job_id(5))], "")
    assert (await job_list(log, Viewer(), "", "", "", cursors))["next"] == public_id("m", job_id(2))


async def test_a_tenant_cannot_ask_whether_a_job_is_there() -> None:
    log, cursors = await with_jobs(["acme", "other"]), Cursors[Place]()
    said = set[str]()
    for number in (1, 2, 3):  # its own, another's, none
        with pytest.raises(NotFound) as raised:
            await job_list(log, ACME, "", "", public_id("m", job_id(number)), cursors)
        said.add(raised.value.message)
    assert len(said) == 1


async def test_a_page_of_dead_letters_reads_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_views, "_LETTERS_READ", 2)
    log, cursors = await with_jobs(["acme"]), Cursors[LetterPlace]()
    for _ in range(3):
        await log.append(keys.dead_letters("m"), [b"z", b""])
    reads = list[int]()
    plain = log.range

    async def counted(stream: bytes, after: bytes = b"0-0", count: int = 1000) -> Any:
        found = await plain(stream, after, count)
        reads.append(len(found))
        return found

    monkeypatch.setattr(log, "range", counted)
    first = await letter_list(log, ACME, "m", "", cursors)
    assert (first["letters"], first["next"] is None) == ([], False)
    assert await letter_list(log, ACME, "m", first["next"], cursors) == {"letters": [], "next": None}
