"""Journals become recorded requests; times within a millisecond keep the order of the entries."""

from __future__ import annotations

from charonia.facts.journal import FIELD, pack_accepted, pack_batched, pack_ended, pack_started
from charonia.facts.processor_use import ProcessorUse
from charonia.simulation.journal_recording import RESOLUTION_NS, JournalRecording
from charonia.simulation.recorded_requests import Outcome, batches_of, begun_in_turn


def request(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_a_batch_is_what_was_dispatched_together() -> None:
    fold = JournalRecording("m")
    first, second, third, fourth = map(request, range(4))
    entries = [
        (b"1000-0", pack_accepted([first, second])),
        (b"1001-0", pack_accepted([third])),
        (b"1002-0", pack_batched([first, second, third], 1, "e", "b-1")),
        (b"1010-0", pack_ended([first, second], [1, 1], b"ss", ("e", "b-1"))),
        (b"1010-1", pack_ended([third], [1], b"f", ("e", "b-1"))),
        (b"1011-0", pack_accepted([fourth])),
    ]
    for entry_id, packed in entries:
        fold.fold(entry_id, [FIELD, packed])
    found = fold.recording()
    assert [one.outcome for one in found.requests] == [
        Outcome.ANSWERED, Outcome.ANSWERED, Outcome.REFUSED, Outcome.LOST,
    ]  # fmt: skip
    assert [one.arrived_ns // RESOLUTION_NS for one in found.requests] == [1000, 1000, 1001, 1011]
    assert all(one.journalled for one in found.requests)
    (batch,) = batches_of(found.requests)
    assert (batch.rows, batch.started_ns // RESOLUTION_NS, batch.computed_ns // RESOLUTION_NS) == (2, 1002, 1010)


def test_a_batch_that_was_sent_ahead_begins_when_an_instance_is_free() -> None:
    fold = JournalRecording("m")
    first, second, third = map(request, range(3))
    entries = [
        (b"1000-0", pack_accepted([first, second, third])),
        (b"1001-0", pack_batched([first], 1, "e", "b-1")),
        (b"1002-0", pack_batched([second], 1, "e", "b-2")),
        (b"1003-0", pack_batched([third], 1, "other", "b-3")),
        (b"1010-0", pack_ended([first], [1], b"s", ("e", "b-1"))),
        (b"1015-0", pack_ended([third], [1], b"s", ("other", "b-3"))),
        (b"1020-0", pack_ended([second], [1], b"s", ("e", "b-2"))),
    ]
    for entry_id, packed in entries:
        fold.fold(entry_id, [FIELD, packed])
    found = fold.recording()
    assert not found.knows_starts
    one, two = begun_in_turn(found, 1), begun_in_turn(found, 2)
    assert [batch.started_ns // RESOLUTION_NS for batch in batches_of(one.requests)] == [1001, 1003, 1010]
    assert [batch.started_ns // RESOLUTION_NS for batch in batches_of(two.requests)] == [1001, 1002, 1003]
    assert one.knows_starts


def test_what_the_processors_did_is_read_and_cut_by_time() -> None:
    fold = JournalRecording("m")
    uses = [ProcessorUse("h", 2.0, 1, at_s * 1_000_000_000, 0, 0, 0, 0, at_s) for at_s in (1, 2, 3)]
    for number, use in enumerate(uses):
        one = request(number)
        fold.fold(b"%d-0" % (1000 * number + 1000), [FIELD, pack_accepted([one])])
        ran = ("e", f"b-{number}", use.packed())
        fold.fold(b"%d-1" % (1000 * number + 1000), [FIELD, pack_ended([one], [1], b"s", ran)])
    found = fold.recording()
    assert found.said == tuple(("e", use) for use in uses)
    assert found.cut(500_000_000, 1_000_000_000).said == (("e", uses[1]),)


def test_entries_of_one_millisecond_keep_their_order() -> None:
    fold = JournalRecording("m")
    for number in range(50):
        fold.fold(b"7-%d" % number, [FIELD, pack_accepted([request(number)])])
        fold.fold(b"7-%d" % (100 + number), [FIELD, pack_started([request(number)], [1], "e", f"b-{number}")])
    for number in range(50):
        fold.fold(b"7-%d" % (200 + number), [FIELD, pack_ended([request(number)], [1], b"s")])
    found = fold.recording().requests
    assert len(found) == 50
    assert all(7 * RESOLUTION_NS <= one.arrived_ns <= one.started_ns < one.computed_ns for one in found)
    assert all(one.ended_ns < 8 * RESOLUTION_NS + 1 for one in found)
    assert [one.batch for one in found] == [f"b-{number}" for number in range(50)]


def test_ends_of_requests_that_began_before_are_left_out() -> None:
    fold = JournalRecording("m")
    fold.fold(b"5-0", [FIELD, pack_ended([request(1)], [1], b"s", ("e", "b-1"))])
    assert fold.recording().requests == ()
