"""Any change of what is sealed is found; trimming in whole seals from the beginning is none."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from memory_log.log import MemoryLog
from memory_log.streams import entry_number

from batcher.housekeeping import journal_sealing
from charonia import keys
from charonia.eventlog.port import START, Entry
from charonia.facts.seals import FIELD_SEAL, SegmentDigest, in_order, make_seal, read_seal
from charonia.operations.history.chain_verification import ChainVerification, Fault, Head

MODEL = "m"
FIELDS = st.lists(st.tuples(st.sampled_from([b"f", b"w", b""]), st.binary(max_size=6)), min_size=1, max_size=3)


def finished(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of work on a log in memory, which never waits: no event loop is needed."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits for something")


@dataclass
class Chain:
    """A journal and its seals, as entries that a test may spoil."""

    entries: list[Entry]
    seals: list[Entry]
    unsealed: int
    trimmed: bool = False

    def report(self, recorded: Any = None) -> dict[str, Any]:
        log = MemoryLog()
        log._of(MODEL).journal_complete = not self.trimmed
        for stream, entries in ((keys.journal(MODEL), self.entries), (keys.journal_seals(MODEL), self.seals)):
            for entry in sorted(entries, key=lambda entry: in_order(entry.id)):
                log._append_at(stream, entry_number(entry.id), list(entry.fields))
        report: dict[str, Any] = finished(ChainVerification(log, MODEL, recorded or {}).run())
        return report


def entry(number: int, fields: Any) -> Entry:
    return Entry(b"%d-%d" % (1000 + number // 3, number % 3), [part for pair in fields for part in pair])


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    """One to four seals of one to four entries, and up to two that are not sealed. Even numbers are free for others."""
    entries: list[Entry] = []
    seals: list[Entry] = []
    before = None
    for _ in range(draw(st.integers(1, 4))):
        segment = SegmentDigest()
        for _ in range(draw(st.integers(1, 4))):
            entries.append(entry(2 * len(entries) + 1, draw(FIELDS)))
            segment.add(entries[-1].id, entries[-1].fields)
        before, packed = make_seal(MODEL, before, segment, 5)
        seals.append(Entry(before.last, [FIELD_SEAL, packed]))
    unsealed = draw(st.integers(0, 2))
    entries += [entry(2 * (len(entries) + more) + 1, draw(FIELDS)) for more in range(unsealed)]
    return Chain(entries, seals, unsealed)


@given(chains())
def test_what_was_not_touched_is_intact(chain: Chain) -> None:
    report = chain.report()
    sealed = len(chain.entries) - chain.unsealed
    assert (report["intact"], report["sealed"], report["unsealed"]) == (True, sealed, chain.unsealed)
    assert (report["from"], report["to"]) == (chain.entries[0].id.decode(), chain.seals[-1].id.decode())
    assert (report["first_seal"], report["last_seal"]) == (1, len(chain.seals))


@given(chains(), st.data())
def test_any_change_of_a_sealed_entry_is_found(chain: Chain, data: st.DataObject) -> None:
    sealed = len(chain.entries) - chain.unsealed
    at = data.draw(st.integers(0, sealed - 1))
    here = chain.entries[at]
    match data.draw(st.sampled_from(["change", "remove", "insert", "swap", "move"])):
        case "change":
            fields = data.draw(FIELDS.map(lambda pairs: [part for pair in pairs for part in pair]))
            if fields == here.fields:
                fields = [*fields, b"", b""]
            chain.entries[at] = Entry(here.id, fields)
            faults = {Fault.ENTRIES_CHANGED}
        case "remove":
            del chain.entries[at]
            faults = {Fault.ENTRIES_MISSING}
        case "insert":
            chain.entries.append(entry(2 * at, data.draw(FIELDS)))
            faults = {Fault.ENTRIES_ADDED}
        case "swap":
            other = data.draw(st.integers(0, sealed - 1))
            if chain.entries[other].fields == here.fields:
                here.fields.append(b"")
                here.fields.append(b"")
            else:
                chain.entries[at] = Entry(here.id, chain.entries[other].fields)
                chain.entries[other] = Entry(chain.entries[other].id, here.fields)
            faults = {Fault.ENTRIES_CHANGED}
        case _:
            chain.entries[at] = entry(2 * at, list(zip(here.fields[::2], here.fields[1::2], strict=True)))
            faults = {Fault.ENTRIES_CHANGED}
    report = chain.report()
    assert not report["intact"]
    assert report["broken"]["fault"] in faults
    first, last = (in_order(report["broken"][name].encode()) for name in ("first", "last"))
    assert first <= last


@given(chains(), st.data())
def test_any_change_of_seals_is_found(chain: Chain, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(chain.seals) - 1))
    here = chain.seals[at]
    seal = read_seal(MODEL, here.id, here.fields)
    last = at == len(chain.seals) - 1
    match data.draw(st.sampled_from(["flip", "remove", "append", "renew"])):
        case "flip":
            place = data.draw(st.integers(0, len(here.fields[1]) - 1))
            spoilt = bytearray(here.fields[1])
            spoilt[place] ^= 1 << data.draw(st.integers(0, 7))
            chain.seals[at] = Entry(here.id, [FIELD_SEAL, bytes(spoilt)])
        case "remove":
            del chain.seals[at]
        case "append":
            chain.seals[at] = Entry(here.id, [FIELD_SEAL, bytes(here.fields[1]) + b"\x00"])
        case _:  # with a changed entry the seal is made again, and none of the later ones is
            segment = SegmentDigest()
            segment.add(here.id, [b"f", b"other"])
            entries = [e for e in chain.entries if not in_order(seal.first) <= in_order(e.id) <= in_order(seal.last)]
            chain.entries = [*entries, Entry(here.id, [b"f", b"other"])]
            before = read_seal(MODEL, chain.seals[at - 1].id, chain.seals[at - 1].fields) if at else None
            chain.seals[at] = Entry(here.id, [FIELD_SEAL, make_seal(MODEL, before, segment, 5)[1]])
    if last:  # nothing in the log stands behind the last seal: only what was recorded outside shows it
        recorded = {seal.number: Head(MODEL, seal.number, seal.last.decode(), seal.link.hex(), 5)}
        assert not chain.report(recorded)["intact"]
        return
    assert not chain.report()["intact"]


@given(chains(), st.data())
def test_whole_seals_may_be_trimmed_from_the_beginning(chain: Chain, data: st.DataObject) -> None:
    kept = data.draw(st.integers(0, len(chain.seals) - 1))
    anchor = in_order(chain.seals[kept].id)
    chain.seals = chain.seals[kept:]
    chain.trimmed = True
    partly = [e for e in chain.entries if in_order(e.id) > anchor]
    gone = len(chain.entries) - len(partly)
    chain.entries = partly
    report = chain.report()
    assert (report["intact"], report["first_seal"]) == (True, kept + 1)
    assert report["sealed"] == len(partly) - chain.unsealed
    assert gone
    chain.trimmed = False  # the log does not say that it was trimmed
    assert not chain.report()["intact"]
    chain.trimmed = True
    if report["sealed"]:
        del chain.entries[data.draw(st.integers(0, report["sealed"] - 1))]
        assert not chain.report()["intact"]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_what_the_sealer_seals_is_intact(bursts: list[int]) -> None:
    async def run() -> None:
        log = MemoryLog()
        sealers = [journal_sealing.JournalSealing(log, MODEL) for _ in range(2)]
        for turn, burst in enumerate(bursts):
            for number in range(burst):
                await log.append(keys.journal(MODEL), [b"f", b"%d" % number])
            while await sealers[turn % 2].seal():
                pass
        report = await ChainVerification(log, MODEL, {}).run()
        assert (report["intact"], report["sealed"], report["unsealed"]) == (True, sum(bursts), 0)
        assert len(await log.range(keys.journal_seals(MODEL), START)) == len(bursts)

    finished(run())
