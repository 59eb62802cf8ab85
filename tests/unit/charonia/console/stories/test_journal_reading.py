"""What is read of a journal that is longer than may be read."""

from __future__ import annotations

from typing import Any, cast

from charonia.console.stories.journal_reading import JournalReader, entry_us
from charonia.eventlog.port import Entry, Streams
from charonia.facts.jobs import OUTCOME_CODES, JobState
from charonia.facts.journal import FIELD, pack_accepted, pack_ended

ME = bytes(16)
NOW_US = 1_800_000_000_000_000
S = 1_000_000


def other(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Journal:
    """Entries at times of the test's choice, read as the log reads them."""

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[int, int], list[Any]]] = []
        self.read = 0

    def add(self, at_us: int, packed: bytes) -> None:
        self._entries.append(((at_us // 1000, len(self._entries)), [FIELD, packed]))
        self._entries.sort(key=lambda one: one[0])

    def accept(self, at_us: int, request_id: bytes) -> None:
        self.add(at_us, pack_accepted([request_id]))

    def end(self, at_us: int, request_id: bytes) -> None:
        self.add(at_us, pack_ended([request_id], [1], OUTCOME_CODES[JobState.SUCCEEDED]))

    async def range(self, _stream: bytes, after: bytes = b"0-0", count: int = 1000) -> list[Entry]:
        first = tuple(int(part) for part in after.split(b"-"))
        found = [Entry(b"%d-%d" % place, fields) for place, fields in self._entries if place > first][:count]
        self.read += len(found)
        return found

    def reader(self, most: int) -> JournalReader:
        return JournalReader(cast("Streams", self), "m", most)


def filled() -> Journal:
    """An entry each second of an hour before now, and five after the request's end; it ran for five seconds."""
    journal = Journal()
    for number in range(1, 3601):
        journal.accept(NOW_US - number * S, other(number))
    journal.accept(NOW_US, ME)
    for number in range(1, 5):
        journal.accept(NOW_US + number * S, other(10_000 + number))
    journal.end(NOW_US + 5 * S, ME)
    for number in range(6, 11):
        journal.accept(NOW_US + number * S, other(10_000 + number))
    return journal


async def test_the_requests_own_time_is_read_before_what_was_earlier() -> None:
    for ended_us in (NOW_US + 5 * S, 0):
        found, cut = await filled().reader(16).around(ME, NOW_US, ended_us)
        assert cut
        times = [at_us for at_us, _ in found]
        assert times == sorted(times)
        kinds = [(at_us, fact.kind) for at_us, fact in found if ME in fact.ids]
        assert kinds == [(NOW_US, "accepted"), (NOW_US + 5 * S, "ended")]
        assert times[0] < NOW_US  # the rest went into the time before, the nearest first
        assert times[0] >= NOW_US - 5 * S


async def test_a_minute_before_is_whole_if_the_bound_allows_it() -> None:
    journal = filled()
    found, cut = await journal.reader(1000).around(ME, NOW_US, NOW_US + 5 * S)
    assert not cut
    assert found[0][0] == NOW_US - 60 * S
    assert len(found) == len({at_us for at_us, _ in found})
    assert journal.read <= 1000


async def test_an_acceptance_is_looked_for_from_the_newest_entries_backwards() -> None:
    journal = filled()
    now_us = NOW_US + 11 * S
    assert await journal.reader(100).acceptance(ME, now_us) == NOW_US
    assert await journal.reader(10_000).acceptance(other(3000), now_us) == NOW_US - 3000 * S
    assert await journal.reader(100).acceptance(other(3000), now_us) == 0
    assert await journal.reader(10_000).acceptance(b"x" * 16, now_us) == 0


async def test_the_newest_acceptance_of_a_busy_model_is_found() -> None:
    journal = Journal()
    for number in range(500):  # of ten seconds, more than may be read
        journal.accept(NOW_US - number * S // 50, other(number))
    assert await journal.reader(200).acceptance(other(50), NOW_US) == NOW_US - S
    assert journal.read <= 200


def test_times_of_entries() -> None:
    assert entry_us(b"17-3") == 17_000
