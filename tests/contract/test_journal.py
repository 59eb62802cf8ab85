"""What every adapter of the log port promises about the journal, paused queues and the epoch."""

from __future__ import annotations

import asyncio
import os

from log_adapters import NO_LIMITS, PATIENCE_S, Subject
from log_jobs import HUGE, accept, end, journal, made

from charonia import keys
from charonia.eventlog.port import START
from charonia.facts.jobs import JobState
from charonia.facts.journal import JournalFact
from charonia.facts.seals import FIELD_SEAL

# -- journal -----------------------------------------------------------------------------------------------------------


async def test_the_journal_tells_a_requests_life(subject: Subject) -> None:
    ids = [b"q" * 15 + bytes([last]) for last in range(3)]
    token = await subject.log.take_ownership("m", "me", "")
    await subject.log.accept("m", 0, 0, [(one, 5) for one in ids], [b"r", b"x"], NO_LIMITS, journalled=True)
    await subject.log.begin_attempt("m", token, ids, 1, journalled=ids, executor="x", batch_id="b")
    assert await subject.log.settle("m", [(ids[1], HUGE)], None, [], outcomes=b"c") == [True]
    attempts = [(ids[0], 1), (ids[1], 1), (ids[2], 1)]
    assert await subject.log.settle("m", attempts, None, [], outcomes=b"sss") == [True, False, True]
    # nothing won, nothing told
    assert await subject.log.settle("m", attempts, None, [], outcomes=b"sss") == [False, False, False]

    assert await journal(subject.peer) == [
        JournalFact("accepted", tuple(ids)),
        JournalFact("batched", tuple(ids), (1, 1, 1), (), "x", "b"),
        JournalFact("ended", (ids[1],), (0,), (JobState.CANCELLED,)),
        JournalFact("ended", (ids[0], ids[2]), (0, 0), (JobState.SUCCEEDED,) * 2),
    ]


async def test_the_end_tells_where_requests_ran_when_that_is_said(subject: Subject) -> None:
    ids = [b"q" * 15 + bytes([last]) for last in range(3)]
    await subject.log.accept("m", 0, 0, [(one, 5) for one in ids], [b"r", b"x"], NO_LIMITS, journalled=True)
    assert await subject.log.settle("m", [(ids[1], HUGE)], None, [], outcomes=b"c") == [True]
    attempts = [(one, 1) for one in ids]
    told = ("executor-1", "batch-7")
    assert await subject.log.settle("m", attempts, None, [], outcomes=b"sfs", ran=told) == [True, False, True]
    assert (await journal(subject.peer))[2:] == [
        JournalFact("started", tuple(ids), (1, 1, 1), (), *told),
        JournalFact("ended", (ids[0], ids[2]), (0, 0), (JobState.SUCCEEDED,) * 2),
    ]
    # who won nothing has told nothing
    assert await subject.log.settle("m", attempts, None, [], outcomes=b"sfs", ran=told) == [False] * 3
    assert len(await journal(subject.peer)) == 4


async def test_several_attempts_of_one_settlement_are_told_one_by_one(subject: Subject) -> None:
    ids = [b"q" * 15 + bytes([last]) for last in range(4)]
    await subject.log.accept("m", 0, 0, [(one, 5) for one in ids], [b"r", b"x"], NO_LIMITS, journalled=True)
    requests = list(zip(ids, [1, 2, 3, 4], strict=True))
    assert await subject.log.settle("m", requests, None, [], outcomes=b"sf-x") == [True] * 4
    told = (ids[0], ids[1], ids[3])
    states = (JobState.SUCCEEDED, JobState.FAILED, JobState.EXPIRED)
    assert (await journal(subject.log))[-1] == JournalFact("ended", told, (0, 0, 0), states)
    ids = [b"r" * 15 + bytes([last]) for last in range(2)]
    await subject.log.accept("m", 0, 0, [(one, 5) for one in ids], [b"r", b"x"], NO_LIMITS, journalled=True)
    requests = list(zip(ids, [3, 4], strict=True))
    assert await subject.log.settle("m", requests, None, [], outcomes=b"ss", ran=("x", "b")) == [True] * 2
    assert (await journal(subject.log))[-2] == JournalFact("started", tuple(ids), (3, 4), (), "x", "b")


async def test_what_is_not_journalled_is_not_in_the_journal(subject: Subject) -> None:
    one = os.urandom(16)
    await subject.log.accept("m", 0, 0, [(one, 5)], [b"r", b"x"], NO_LIMITS)
    await subject.log.settle("m", [(one, 0)], None, [], outcomes=b"-")
    await accept(subject.log, made(), journalled=False)
    await end(subject.log, made())
    assert await journal(subject.log) == []


async def test_the_journal_is_trimmed_by_size_but_not_past_what_is_unfinished(subject: Subject) -> None:
    await subject.log.set_retention("m", size_bytes=0, journal_s=0, journal_size_bytes=3000)
    for _ in range(300):
        await subject.log.append(keys.journal("m"), [b"k", b"started", b"i", b"x" * 100])
    entries = await subject.log.range(keys.journal("m"))
    assert await subject.log.journal_complete("m")

    assert await subject.log.trim_journal("m", entries[0].id) == 0
    assert await subject.log.journal_complete("m")
    assert await subject.log.trim_journal("m", entries[10].id) == 10
    left = await subject.log.range(keys.journal("m"))
    assert [entry.id for entry in left] == [entry.id for entry in entries[10:]]
    assert not await subject.log.journal_complete("m")
    while await subject.log.trim_journal("m", b"+"):
        pass
    assert len(await subject.log.range(keys.journal("m"))) < 60
    assert await subject.log.trim_journal("other", b"+") == 0


async def test_the_journal_is_trimmed_by_age(subject: Subject) -> None:
    await accept(subject.log, made())
    assert await subject.log.trim_journal("m", b"+") == 0
    await subject.log.set_retention("m", size_bytes=0, journal_s=1, journal_size_bytes=0)
    async with asyncio.timeout(PATIENCE_S):
        while not await subject.log.trim_journal("m", b"+"):
            await asyncio.sleep(0.005)
    assert await journal(subject.log) == []


# -- seals -------------------------------------------------------------------------------------------------------------


async def seals(subject: Subject) -> list[bytes]:
    return [entry.id for entry in await subject.peer.range(keys.journal_seals("m"))]


async def test_only_one_of_two_sealers_continues_the_chain(subject: Subject) -> None:
    assert await subject.log.last_seal("m") is None
    assert await subject.log.seal_journal("m", START, b"7-3", b"one")
    assert not await subject.peer.seal_journal("m", START, b"8-0", b"another")
    assert not await subject.peer.seal_journal("m", b"7-2", b"8-0", b"another")
    assert await subject.peer.seal_journal("m", b"7-3", b"8-0", b"two")
    last = await subject.log.last_seal("m")
    assert last is not None
    assert (last.id, [bytes(field) for field in last.fields]) == (b"8-0", [FIELD_SEAL, b"two"])
    assert not await subject.log.seal_journal("m", b"8-0", b"8-0", b"again")
    assert await seals(subject) == [b"7-3", b"8-0"]
    # an id is not given again, though the seal that had it was deleted
    await subject.log.delete_entries(keys.journal_seals("m"), [b"8-0"])
    assert not await subject.log.seal_journal("m", b"7-3", b"7-9", b"two")
    assert not await subject.log.seal_journal("m", b"7-3", b"8-0", b"two")
    assert await subject.log.seal_journal("m", b"7-3", b"8-1", b"two")
    assert await seals(subject) == [b"7-3", b"8-1"]


async def test_a_sealed_journal_is_trimmed_in_whole_seals(subject: Subject) -> None:
    await subject.log.set_retention("m", size_bytes=0, journal_s=0, journal_size_bytes=1)
    for _ in range(50):
        await subject.log.append(keys.journal("m"), [b"k", b"started", b"i", b"x" * 100])
    entries = [entry.id for entry in await subject.log.range(keys.journal("m"))]
    assert await subject.log.trim_journal("m", b"+", sealed=True) == 0
    after = START
    for place in (9, 19, 29):
        assert await subject.log.seal_journal("m", after, entries[place], b"seal")
        after = entries[place]

    assert await subject.log.trim_journal("m", entries[9], sealed=True) == 0
    assert await subject.log.journal_complete("m")
    assert await subject.log.trim_journal("m", entries[25], sealed=True) == 20
    # the last seal whose entries are gone stays: the chain begins with it
    assert await seals(subject) == [entries[19], entries[29]]
    assert [entry.id for entry in await subject.log.range(keys.journal("m"))] == entries[20:]
    # a seal goes as a whole where sealing has ended, too
    assert await subject.log.trim_journal("m", entries[25]) == 0
    assert await subject.log.trim_journal("m", b"+", sealed=True) == 10
    assert await subject.log.trim_journal("m", b"+", sealed=True) == 0
    while await subject.log.trim_journal("m", b"+"):
        pass
    assert await subject.log.range(keys.journal("m")) == []
    assert await seals(subject) == [entries[29]]


# -- the rest ----------------------------------------------------------------------------------------------------------


async def test_a_paused_queue_stays_paused(subject: Subject) -> None:
    assert await subject.log.paused("m") is False
    await subject.log.set_paused("m", True)
    await subject.log.set_paused("m", True)
    assert await subject.peer.paused("m") is True
    assert await subject.peer.paused("other") is False
    await subject.peer.set_paused("m", False)
    assert await subject.log.paused("m") is False


async def test_the_epoch_is_one_for_all(subject: Subject) -> None:
    epochs = await asyncio.gather(subject.log.epoch(), subject.peer.epoch(), subject.log.epoch())
    assert len(set(epochs)) == 1
    assert epochs[0]
