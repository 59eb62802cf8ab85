"""What every adapter of the log port promises about streams and their readers."""

from __future__ import annotations

import asyncio
import os

import pytest
from log_adapters import PATIENCE_S, Collector, Subject, put, values

from charonia.eventlog.port import START, Entry, StreamReader

# -- streams -----------------------------------------------------------------------------------------------------------


async def test_range_gives_entries_in_the_order_of_their_appends(subject: Subject) -> None:
    stream = b"s"
    ids = await put(subject.log, stream, b"a", b"b", b"c")

    entries = await subject.peer.range(stream)

    assert [entry.id for entry in entries] == ids
    assert values(entries) == [b"a", b"b", b"c"]


async def test_range_begins_above_an_id_and_ends_at_a_count(subject: Subject) -> None:
    stream = b"s"
    ids = await put(subject.log, stream, b"a", b"b", b"c", b"d")

    assert values(await subject.log.range(stream, ids[0], 2)) == [b"b", b"c"]
    assert await subject.log.range(stream, ids[3]) == []
    assert await subject.log.range(b"none") == []


async def test_appends_of_one_tick_keep_their_order(subject: Subject) -> None:
    stream = b"s"
    numbers = [b"%d" % number for number in range(200)]

    await asyncio.gather(*[subject.log.append(stream, [b"r", number]) for number in numbers])

    assert values(await subject.log.range(stream)) == numbers


async def test_deleted_entries_are_gone_and_deleting_again_does_nothing(subject: Subject) -> None:
    stream = b"s"
    ids = await put(subject.log, stream, b"a", b"b", b"c")

    for _ in range(2):
        await subject.log.delete_entries(stream, [ids[1]])
    await subject.log.delete_entries(stream, [])

    assert values(await subject.log.range(stream)) == [b"a", b"c"]


async def test_a_deleted_stream_is_empty_and_can_be_written_again(subject: Subject) -> None:
    stream = b"s"
    await put(subject.log, stream, b"a")

    await subject.log.delete_stream(stream)

    assert await subject.log.range(stream) == []
    await put(subject.log, stream, b"b")
    assert values(await subject.log.range(stream)) == [b"b"]


@pytest.mark.parametrize("fields", [[], [b"r"], [b"r", b"a", b"r"]], ids=["none", "one", "three"])
async def test_fields_that_are_no_pairs_are_refused(subject: Subject, fields: list[bytes]) -> None:
    stream = b"s"
    with pytest.raises(ValueError, match="alternate names and values"):
        await subject.log.append(stream, fields)
    assert await subject.log.range(stream) == []


async def test_large_and_binary_fields_come_back_as_they_were(subject: Subject) -> None:
    stream = b"s"
    large = os.urandom(5_000_000)
    every_byte = bytes(range(256)) + b"\r\n$5\r\n*1\r\n"
    fields = [b"h", every_byte, b"r", memoryview(large), b"r", bytearray(every_byte), b"r", b"", b"r", large]

    await asyncio.gather(subject.log.append(stream, fields), put(subject.log, stream, b"next"))

    first, second = await subject.peer.range(stream)
    assert [bytes(field) for field in first.fields] == [bytes(field) for field in fields]
    assert bytes(second.fields[1]) == b"next"


# -- readers -----------------------------------------------------------------------------------------------------------


async def test_a_reader_gives_what_is_there_and_then_what_comes_in_order(
    subject: Subject, reader: tuple[StreamReader, Collector]
) -> None:
    follow, collector = reader
    stream = b"s"
    before = [b"%d" % number for number in range(150)]
    after = [b"%d" % number for number in range(150, 300)]
    await asyncio.gather(*[subject.log.append(stream, [b"r", value]) for value in before])

    follow.add(stream)
    await collector.count(stream, 1)
    await asyncio.gather(*[subject.peer.append(stream, [b"r", value]) for value in after])

    assert await collector.count(stream, 300) == before + after


async def test_a_stream_may_be_added_before_the_reader_starts(subject: Subject) -> None:
    stream = b"s"
    await put(subject.log, stream, b"a")
    collector, states = Collector(), []
    reader = subject.log.reader()
    reader.add(stream)
    up = asyncio.Event()

    def on_state(is_up: bool) -> None:
        states.append(is_up)
        up.set()

    reader.start(collector, on_state)
    assert await collector.count(stream, 1) == [b"a"]
    await asyncio.wait_for(up.wait(), PATIENCE_S)
    assert states == [True]
    await reader.close()


async def test_a_reader_begins_after_an_id(subject: Subject, reader: tuple[StreamReader, Collector]) -> None:
    follow, collector = reader
    stream = b"s"
    ids = await put(subject.log, stream, b"a", b"b", b"c")

    follow.add(stream, ids[0])

    assert await collector.count(stream, 2) == [b"b", b"c"]


async def test_from_now_on_means_from_the_call(subject: Subject, reader: tuple[StreamReader, Collector]) -> None:
    follow, collector = reader
    full, empty = b"full", b"empty"
    await put(subject.log, full, b"old", b"older")

    follow.add(full, b"$")
    follow.add(empty, b"$")
    await asyncio.gather(put(subject.log, full, b"new"), put(subject.log, empty, b"first"))

    assert await collector.count(full, 1) == [b"new"]
    assert await collector.count(empty, 1) == [b"first"]


async def test_adding_a_followed_stream_again_changes_nothing(
    subject: Subject, reader: tuple[StreamReader, Collector]
) -> None:
    follow, collector = reader
    stream = b"s"
    await put(subject.log, stream, b"a")
    follow.add(stream)
    await collector.count(stream, 1)

    follow.add(stream, START, consume=True)
    await put(subject.log, stream, b"b")

    assert await collector.count(stream, 2) == [b"a", b"b"]
    assert values(await subject.log.range(stream)) == [b"a", b"b"]


async def test_streams_can_be_added_while_the_reader_waits(
    subject: Subject, reader: tuple[StreamReader, Collector]
) -> None:
    follow, collector = reader
    first = b"first"
    follow.add(first)
    for number in range(40):
        stream = b"more-%d" % number
        if number % 2:
            follow.add(stream)
            await put(subject.peer, stream, b"x")
        else:
            await put(subject.peer, stream, b"x")
            follow.add(stream)
        assert await collector.count(stream, 1) == [b"x"]
        await put(subject.peer, first, b"%d" % number)
        assert await collector.count(first, number + 1) == [b"%d" % n for n in range(number + 1)]


async def test_a_removed_stream_is_silent_and_goes_on_where_it_is_told_to(
    subject: Subject, reader: tuple[StreamReader, Collector]
) -> None:
    follow, collector = reader
    stream, other = b"s", b"other"
    follow.add(stream)
    follow.add(other)
    (first,) = await put(subject.log, stream, b"a")
    await collector.count(stream, 1)

    follow.remove(stream)
    follow.remove(b"never added")
    await put(subject.log, stream, b"b", b"c")
    await put(subject.log, other, b"x")
    await collector.count(other, 1)
    assert collector.values(stream) == [b"a"]

    follow.add(stream, first)
    assert await collector.count(stream, 3) == [b"a", b"b", b"c"]


async def test_a_stream_removed_and_added_at_once_is_read_from_its_new_place(
    subject: Subject, reader: tuple[StreamReader, Collector]
) -> None:
    follow, collector = reader
    stream = b"s"
    follow.add(stream)
    ids = await put(subject.log, stream, b"a", b"b")
    await collector.count(stream, 2)

    follow.remove(stream)
    follow.add(stream, ids[0])
    await put(subject.log, stream, b"c")

    assert await collector.count(stream, 4) == [b"a", b"b", b"b", b"c"]


async def test_a_stream_that_takes_the_place_of_another_is_read(
    subject: Subject, reader: tuple[StreamReader, Collector]
) -> None:
    follow, collector = reader
    for number, stream in enumerate([b"first", b"second", b"first"]):
        follow.add(stream)
        await put(subject.log, stream, b"%d" % number)
        await collector.until(lambda stream=stream, number=number: b"%d" % number in collector.values(stream))
        follow.remove(stream)
    assert collector.values(b"second") == [b"1"]


async def test_a_callback_may_remove_the_other_streams_of_the_same_read(subject: Subject) -> None:
    streams = [b"%d" % number for number in range(3)]
    for stream in streams:
        await put(subject.log, stream, b"a")
    reader, collector = subject.log.reader(), Collector()

    def only_one(stream: bytes, entries: list[Entry]) -> None:
        collector(stream, entries)
        for other in streams:
            if other != stream:
                reader.remove(other)

    for stream in streams:
        reader.add(stream)
    reader.start(only_one)
    await collector.until(lambda: bool(collector.entries))
    (delivered,) = collector.entries
    await put(subject.log, delivered, b"b")
    await collector.count(delivered, 2)

    assert set(collector.entries) == {delivered}
    await reader.close()


async def test_consumed_entries_are_deleted_after_the_callback_had_them(
    subject: Subject, reader: tuple[StreamReader, Collector]
) -> None:
    follow, collector = reader
    stream = b"s"
    ids = await put(subject.log, stream, b"old", b"a", b"b")
    follow.add(stream, ids[0], consume=True)
    await collector.count(stream, 2)
    await put(subject.log, stream, b"c")
    assert await collector.count(stream, 3) == [b"a", b"b", b"c"]

    async with asyncio.timeout(PATIENCE_S):
        while len(left := await subject.peer.range(stream)) > 1:
            await asyncio.sleep(0.001)
    # what the callback never had is not the reader's to delete
    assert values(left) == [b"old"]


async def test_entries_deleted_before_they_are_read_are_not_delivered(
    subject: Subject, reader: tuple[StreamReader, Collector]
) -> None:
    follow, collector = reader
    stream = b"s"
    ids = await put(subject.log, stream, b"a", b"b")
    await subject.log.delete_entries(stream, [ids[0]])

    follow.add(stream)

    assert await collector.count(stream, 1) == [b"b"]


async def test_a_failing_callback_loses_no_other_entries(subject: Subject) -> None:
    loop = asyncio.get_running_loop()
    failures: list[object] = []
    loop.set_exception_handler(lambda _, context: failures.append(context.get("exception")))
    stream = b"s"
    reader, collector = subject.log.reader(), Collector()

    def fail_once(stream: bytes, entries: list[Entry]) -> None:
        collector(stream, entries)
        if len(collector.values(stream)) == 1:
            raise RuntimeError("on purpose")

    reader.add(stream)
    reader.start(fail_once)
    await put(subject.log, stream, b"a")
    await collector.count(stream, 1)
    await put(subject.log, stream, b"b")

    assert await collector.count(stream, 2) == [b"a", b"b"]
    assert [str(failure) for failure in failures] == ["on purpose"]
    await reader.close()


async def test_two_readers_both_get_everything(subject: Subject) -> None:
    stream = b"s"
    readers = [(log.reader(), Collector()) for log in (subject.log, subject.peer)]
    for reader, collector in readers:
        reader.start(collector)
        reader.add(stream)
    await put(subject.log, stream, b"a", b"b")
    for reader, collector in readers:
        assert await collector.count(stream, 2) == [b"a", b"b"]
        await reader.close()
