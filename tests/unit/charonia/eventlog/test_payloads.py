from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from charonia.errors import InvalidRecord
from charonia.eventlog.payloads import PayloadDirectory
from charonia.wire import BLOB, FILE, Reference


@pytest.fixture
def gateway(tmp_path: Path) -> PayloadDirectory:
    directory = PayloadDirectory(str(tmp_path / "shm"), "g-1")
    directory.open()
    return directory


@pytest.fixture
def executor(tmp_path: Path) -> PayloadDirectory:
    directory = PayloadDirectory(str(tmp_path / "shm"), "e-1")
    directory.open()
    return directory


def test_what_one_writes_the_other_reads_also_once_it_is_removed(
    gateway: PayloadDirectory, executor: PayloadDirectory
) -> None:
    reference = gateway.write([b"abc", memoryview(bytearray(5)), b""])
    assert reference is not None
    assert reference.size_bytes == 8
    view = executor.read(Reference.unpack(reference.pack()))
    gateway.remove(reference)
    assert bytes(view) == b"abc" + bytes(5)
    with pytest.raises(InvalidRecord):
        executor.read(reference)


def test_an_answer_is_written_into_the_directory_of_who_waits(
    gateway: PayloadDirectory, executor: PayloadDirectory
) -> None:
    reference = executor.write([b"answer"], owner="g-1")
    assert reference is not None
    assert bytes(gateway.read(reference)) == b"answer"
    assert executor.write([b"answer"], owner="nobody") is None


def test_sharing_is_proven_by_the_token(gateway: PayloadDirectory, executor: PayloadDirectory, tmp_path: Path) -> None:
    assert gateway.shares_with("e-1", executor.token)
    assert not gateway.shares_with("e-1", "another token")
    assert not gateway.shares_with("e-2", executor.token)
    assert not gateway.shares_with("e-1", "")
    elsewhere = PayloadDirectory(str(tmp_path / "other"), "g-2")
    elsewhere.open()
    assert not elsewhere.shares_with("e-1", executor.token)


def test_a_file_of_another_size_is_refused(gateway: PayloadDirectory) -> None:
    reference = gateway.write([b"12345678"])
    assert reference is not None
    with pytest.raises(InvalidRecord, match="size"):
        gateway.read(Reference(FILE, reference.name, 4))


@pytest.mark.parametrize("name", ["../secret", "a/../../b", "/etc/passwd", "a/b/c", ".", "..", "", "a/\0", ".hidden/x"])
def test_a_name_that_leaves_the_directory_is_no_reference(name: str) -> None:
    with pytest.raises(InvalidRecord):
        Reference.unpack(Reference(FILE, name, 1).pack())


def test_a_directory_that_cannot_be_made_is_off(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    directory = PayloadDirectory(str(tmp_path / "file" / "below"), "g-1")
    directory.open()
    assert directory.token == ""
    assert directory.write([b"x"]) is None
    with pytest.raises(InvalidRecord):
        directory.read(Reference(FILE, "g-1/x", 1))


def test_closing_and_sweeping_leave_nothing(
    gateway: PayloadDirectory, executor: PayloadDirectory, tmp_path: Path
) -> None:
    executor.write([b"x"])
    gateway.sweep(["e-1"])
    assert (tmp_path / "shm" / "e-1").is_dir(), "its process lives"
    executor.release()  # as the kernel does when it ends
    gateway.sweep(["e-1"])
    gateway.close()
    assert list((tmp_path / "shm").iterdir()) == []


def test_a_process_whose_directory_was_removed_by_mistake_uses_none_of_its_slots_again(
    gateway: PayloadDirectory, executor: PayloadDirectory, tmp_path: Path
) -> None:
    content = b"x" * 50_000
    held = gateway.lend([content])
    assert held is not None
    assert gateway.slots is not None
    received = gateway.slots.lend(50_000)
    free = gateway.lend([content])
    assert received is not None
    assert free is not None
    gateway.remove(free)
    seen = executor.read(held)
    shutil.rmtree(tmp_path / "shm" / "g-1")  # as an older release does, which knows no locks
    gateway.renew()

    received[:] = content
    again = [gateway.lend([content]), gateway.lend([content]), gateway.lend([received])]
    assert [bytes(executor.read(one)) for one in again if one is not None] == [content] * 3
    assert bytes(seen) == content
    assert executor.reads_slots("g-1")
    assert PayloadDirectory(str(tmp_path / "shm"), "e-2").shares_with("g-1", gateway.token)
    for one in (held, *again):
        assert one is not None
        gateway.remove(one)
    del received, seen
    later = gateway.lend([content])
    assert later is not None
    assert bytes(executor.read(later)) == content
    assert len(list((tmp_path / "shm" / "g-1").glob("s?"))) == 3, "slots of before the removal are forgotten"
    assert gateway.slots.size_bytes == 3 * 57_344


def test_a_directory_that_is_there_keeps_its_slots_and_a_closed_one_is_not_made_again(
    gateway: PayloadDirectory, tmp_path: Path
) -> None:
    reference = gateway.lend([b"x" * 50_000])
    assert reference is not None
    gateway.renew()
    gateway.remove(reference)
    again = gateway.lend([b"y" * 50_000])
    assert again is not None
    assert again.name.split("-")[:2] == reference.name.split("-")[:2], "the same slot"
    gateway.close()
    gateway.tidy()
    assert not (tmp_path / "shm" / "g-1").exists()


def test_a_blob_is_no_file(gateway: PayloadDirectory) -> None:
    with pytest.raises(InvalidRecord):
        gateway.read(Reference(BLOB, "ab", 1))


def test_a_standing_directory_is_taken_over_as_it_is(tmp_path: Path) -> None:
    first, second = (PayloadDirectory(str(tmp_path), "ensemble.e") for _ in range(2))
    first.open(standing=True)
    kept, old = first.write([b"kept"], name="ab12"), first.write([b"nobody's"])
    assert kept is not None
    assert old is not None
    second.open(standing=True)
    assert bytes(second.read(kept)) == b"kept"
    again = second.write([b"another"], name="ab12")
    assert again is not None
    assert again.name == kept.name
    assert bytes(second.read(again)) == b"another"
    assert second.forget({again.name}, min_age_s=3600) == 0
    assert second.forget({again.name}, min_age_s=0) == 1
    with pytest.raises(InvalidRecord):
        second.read(old)
    assert second.token  # it is no payload
    assert (tmp_path / "ensemble.e" / "token").exists()
