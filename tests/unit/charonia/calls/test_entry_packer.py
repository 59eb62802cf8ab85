"""What the requests of an entry have in common: ids that share a group."""

from __future__ import annotations

from charonia.calls.entry_packer import MAX_IN_GROUP, EntryIds, Ids


def test_ids_of_one_entry_differ_in_their_last_byte_alone() -> None:
    ids = EntryIds(Ids().next)
    entries = []
    for count in (3, 1, 4):
        entries.append([ids.next(16) for _ in range(count)])
        ids.turn()
    assert [[one[15] for one in entry] for entry in entries] == [[0, 1, 2], [0], [0, 1, 2, 3]]
    assert [len({one[:15] for one in entry}) for entry in entries] == [1, 1, 1]
    assert len({entry[0][:15] for entry in entries}) == 3
    assert all(len(one) == 16 for entry in entries for one in entry)


def test_a_full_entry_begins_the_next_one() -> None:
    ids = EntryIds(Ids().next)
    drawn = [ids.next(4) for _ in range(10)]
    assert [one[15] for one in drawn] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert len({one[:15] for one in drawn}) == 3
    assert len({ids.next(1)[:15] for _ in range(5)}) == 5


def test_a_group_is_never_larger_than_the_scripts_look_at_as_a_whole() -> None:
    ids = EntryIds(Ids().next)
    drawn = [ids.next(1000) for _ in range(3 * MAX_IN_GROUP)]
    assert len(set(drawn)) == len(drawn)
    assert len({one[:15] for one in drawn}) == 3
