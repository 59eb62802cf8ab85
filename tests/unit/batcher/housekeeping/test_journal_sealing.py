"""Sealing a journal in a log in memory: pages, other sealers, refusals."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from memory_log.log import MemoryLog

from batcher.housekeeping import journal_sealing
from batcher.housekeeping.journal_sealing import MOST_OF_SEAL, JournalSealing
from charonia import keys
from charonia.errors import LogRefused
from charonia.eventlog.port import Entry
from charonia.facts.seals import FIELD_SEAL, Seal, read_seal


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


async def grow(log: MemoryLog, count: int) -> None:
    for _ in range(count):
        await log.append(keys.journal("m"), [b"f", b"x"])


async def seals(log: MemoryLog) -> list[Seal]:
    return [read_seal("m", entry.id, entry.fields) for entry in await log.range(keys.journal_seals("m"))]


async def test_a_long_journal_gets_a_seal_for_each_page(log: MemoryLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_sealing, "_MOST_PAGES", 2)
    await grow(log, 2 * MOST_OF_SEAL + 3)
    sealing = JournalSealing(log, "m")
    assert await sealing.seal()
    assert [seal.count for seal in await seals(log)] == [MOST_OF_SEAL] * 2
    assert not await sealing.seal()
    assert not await sealing.seal()
    found = await seals(log)
    assert [(seal.number, seal.count) for seal in found] == [(1, MOST_OF_SEAL), (2, MOST_OF_SEAL), (3, 3)]
    assert [seal.previous for seal in found[1:]] == [seal.link for seal in found[:-1]]
    assert (sealing.sealed_entries, sealing.failures) == (2 * MOST_OF_SEAL + 3, 0)


async def test_a_journal_is_complete_when_nothing_is_left_to_seal(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_sealing, "_MOST_PAGES", 1)
    await grow(log, 2 * MOST_OF_SEAL - 1)
    sealing = JournalSealing(log, "m")
    began_ns = sealing.complete_ns
    assert await sealing.seal()
    assert sealing.complete_ns == began_ns
    assert not await sealing.seal()
    assert sealing.complete_ns > began_ns
    second_ns = sealing.complete_ns
    assert not await sealing.seal()
    assert sealing.complete_ns > second_ns


async def test_an_empty_journal_gets_none(log: MemoryLog) -> None:
    assert not await JournalSealing(log, "m").seal()
    assert await log.last_seal("m") is None


async def test_seals_that_the_log_lost_are_reported_and_made_again(
    log: MemoryLog, caplog: pytest.LogCaptureFixture
) -> None:
    sealing = JournalSealing(log, "m")
    for _ in range(2):
        await grow(log, 1)
        assert not await sealing.seal()
    await log.delete_entries(keys.journal_seals("m"), [(await seals(log))[1].last])
    await grow(log, 1)
    with caplog.at_level(logging.WARNING):
        assert await sealing.seal()
        assert not await sealing.seal()
    assert "the log has lost seals of the journal of model 'm': the last one is 1, not 2" in caplog.text
    assert [(seal.number, seal.count) for seal in await seals(log)] == [(1, 1), (2, 2)]


async def test_seals_that_were_deleted_are_made_again_in_one(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal_sealing, "MOST_OF_SEAL", 10)
    await grow(log, 45)
    sealing = JournalSealing(log, "m")
    assert not await sealing.seal()
    await log.delete_entries(keys.journal_seals("m"), [seal.last for seal in (await seals(log))[1:]])
    await grow(log, 1)
    assert await sealing.seal()
    # ids up to the last one that was deleted are not given again, so one seal has to reach beyond it
    for _ in range(2):
        assert not await sealing.seal()
        assert len(await seals(log)) == 1
    assert not await sealing.seal()
    assert [seal.count for seal in await seals(log)] == [10, 36]
    assert caplog.text.count("the last seals of the journal of model 'm' were deleted") == 1
    await grow(log, 15)
    assert not await sealing.seal()
    assert [seal.count for seal in await seals(log)] == [10, 36, 10, 5]


async def test_a_log_that_refuses_seals_is_asked_once(log: MemoryLog, caplog: pytest.LogCaptureFixture) -> None:
    error = LogRefused("no permission")
    asked = 0

    async def refuse(*_: Any) -> bool:
        nonlocal asked
        asked += 1
        raise error

    log.seal_journal = refuse  # type: ignore[method-assign]
    await grow(log, 1)
    sealing = JournalSealing(log, "m")
    with pytest.raises(LogRefused):
        await sealing.seal()
    error.passes = False
    for _ in range(2):
        assert not await sealing.seal()
    assert (asked, sealing.refused) == (2, True)
    assert (sealing.sealed_entries, sealing.failures) == (0, 3)
    assert "the journal of model 'm' is not sealed: no permission" in caplog.text


async def test_a_chain_whose_last_seal_is_none_is_left_alone(log: MemoryLog, caplog: pytest.LogCaptureFixture) -> None:
    await grow(log, 1)

    async def nonsense(_model: str) -> Entry:
        return Entry(b"1-0", [FIELD_SEAL, b"\xc1"])

    log.last_seal = nonsense  # type: ignore[method-assign]
    sealing = JournalSealing(log, "m")
    assert not await sealing.seal()
    assert sealing.refused
    assert "its last seal is none" in caplog.text
