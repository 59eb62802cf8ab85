"""Registrations that processes of one machine share, in a directory beside their objects or on another file system."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from memory_objects import MemoryObjects

from charonia.errors import AlreadyExists, InternalError, ResourceExhausted
from charonia.eventlog.payloads import PayloadDirectory
from gateway.regions import region_store
from gateway.regions.region_store import Region, RegionStore, open_object


@pytest.fixture(params=["beside", "elsewhere"])
def directory(request: pytest.FixtureRequest) -> Iterator[str]:
    """The payload directory of a machine: its regions can be linked to, or have to be opened by their keys."""
    made = tempfile.mkdtemp(dir="/dev/shm" if request.param == "beside" else "/var/tmp")
    is_beside = os.stat(made).st_dev == os.stat("/dev/shm").st_dev
    assert is_beside == (request.param == "beside")
    yield made
    shutil.rmtree(made)


def add(store: RegionStore, key: str, name: str = "r", tenant: str = "", size: int = 8) -> Region:
    descriptor = open_object(key)
    status = os.fstat(descriptor)
    region = Region(name, "system", size, key, 0, status.st_dev, status.st_ino)
    try:
        store.add(tenant, region, descriptor)
    finally:
        os.close(descriptor)
    return region


def content(store: RegionStore, name: str = "r") -> bytes:
    found = store.find("", name)
    assert found is not None
    descriptor = store.open("", found[1])
    try:
        return os.pread(descriptor, 100, 0)
    finally:
        os.close(descriptor)


def test_what_one_process_registers_all_have(directory: str, objects: MemoryObjects) -> None:
    one, other = RegionStore(directory), RegionStore(directory)
    assert other.find("", "r") is None
    region = add(one, objects.make(b"12345678"))
    assert content(other) == content(one) == b"12345678"
    assert other.all("", "system") == [region]
    assert other.all("", "cuda") == []
    with pytest.raises(AlreadyExists, match=r"^shared memory region 'r' already in manager$"):
        add(other, objects.make(b"abcdefgh"))
    other.remove("", "r")
    other.remove("", "r")  # is no error
    assert one.find("", "r") is None
    assert one.all("", "system") == []
    # the name is free for another object, and no process takes it for the first
    add(other, objects.make(b"abcdefgh"))
    assert content(one) == b"abcdefgh"


def test_an_object_is_not_taken_for_another_of_its_name(directory: str, objects: MemoryObjects) -> None:
    store = RegionStore(directory)
    key = objects.make(b"12345678")
    first = add(store, key)
    store.remove("", "r")
    objects.path(key).unlink()
    add(store, objects.make(b"abcdefgh"))
    with pytest.raises(InternalError, match=rf"^Unable to open shared memory region: '{key}'$"):
        store.open("", first)


def test_one_of_many_registers_a_name(directory: str, objects: MemoryObjects) -> None:
    key = objects.make(b"12345678")

    def register(_number: int) -> bool:
        try:
            add(RegionStore(directory), key)
        except AlreadyExists:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(register, range(40))) == 1
    assert [path.name for path in (Path(directory) / "regions").iterdir() if path.name.startswith(".")] == []


def test_tenants_have_names_of_their_own(directory: str, objects: MemoryObjects) -> None:
    store = RegionStore(directory)
    add(store, objects.make(b"12345678"), tenant="a")
    assert store.find("b", "r") is None
    assert store.find("", "r") is None
    assert store.all("b", "system") == []
    add(store, objects.make(b"12345678"), tenant="b")
    store.remove("b", "r")
    assert store.find("a", "r") is not None


@pytest.mark.parametrize("name", ["../../x", "a/b", ".", "\udc80", "ü" * 100, "a" * 1024])
def test_names_are_no_paths(directory: str, name: str, objects: MemoryObjects) -> None:
    store = RegionStore(directory)
    region = add(store, objects.make(b"12345678"), name)
    assert RegionStore(directory).all("", "system") == [region]
    (made,) = (Path(directory) / "regions").iterdir()
    assert len(made.name) == 40


def test_an_object_that_lost_its_key_stays_where_it_can(directory: str, objects: MemoryObjects) -> None:
    store = RegionStore(directory)
    key = objects.make(b"12345678")
    add(store, key)
    linked = "/dev/shm" in directory
    for replaced in (False, True):
        objects.path(key).unlink(missing_ok=True)
        if replaced:
            objects.path(key).write_bytes(b"another's")
        if linked:
            assert content(store) == b"12345678"
        else:
            with pytest.raises(InternalError, match=rf"^Unable to open shared memory region: '{key}'$"):
                content(store)


def test_regions_are_bounded(directory: str, objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_store, "MAX_REGIONS", 2)
    store = RegionStore(directory)
    for number in range(2):
        add(store, objects.make(b"12345678"), str(number))
    with pytest.raises(ResourceExhausted, match=r"^at most 2 shared memory regions can be registered$"):
        add(store, objects.make(b"12345678"))
    store.remove("", "0")
    add(store, objects.make(b"12345678"))


def test_without_a_directory_they_are_this_process_s_alone(objects: MemoryObjects) -> None:
    for directory in ("", "/proc/none"):
        one, other = RegionStore(directory), RegionStore(directory)
        add(one, objects.make(b"12345678"))
        assert content(one) == b"12345678"
        assert other.find("", "r") is None
        one.close()
        assert one.find("", "r") is None


def test_what_was_not_finished_or_is_damaged_is_none(
    directory: str, objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RegionStore(directory)
    add(store, objects.make(b"12345678"))
    (made,) = (Path(directory) / "regions").iterdir()
    (made.parent / ".unfinished").mkdir()
    assert len(store.all("", "system")) == 1
    assert (made.parent / ".unfinished").exists()  # it may be being made
    monkeypatch.setattr(region_store, "_UNFINISHED_S", -1.0)
    assert len(store.all("", "system")) == 1
    assert not (made.parent / ".unfinished").exists()
    for text in ("{", "[]", '{"tenant": ""}', '{"tenant": "", "odd": 1}'):
        (made / "about.json").write_text(text)
        assert store.all("", "system") == []
        assert store.find("", "r") is None


def test_the_sweep_of_dead_processes_leaves_them(directory: str, objects: MemoryObjects) -> None:
    add(RegionStore(directory), objects.make(b"12345678"))
    payloads = PayloadDirectory(directory, "gateway-1")
    payloads.open()
    assert payloads.others(-1.0) == []


@pytest.mark.parametrize("key", ["", "/", "nowhere", "/a/b", "../etc/passwd", "..", ".", "\0", "\udc80", "x" * 300])
def test_keys_of_nothing(key: str) -> None:
    with pytest.raises(InternalError) as caught:
        open_object(key)
    assert caught.value.message == f"Unable to open shared memory region: '{key}'"


def test_keys_of_what_is_no_object(objects: MemoryObjects, tmp_path: Path) -> None:
    key = objects.make(b"")
    for make in (
        lambda path: path.symlink_to("/etc/hostname"),
        lambda path: path.mkdir(),
    ):
        objects.path(key).unlink()
        make(objects.path(key))
        with pytest.raises(InternalError):
            open_object(key)
        if objects.path(key).is_dir() and not objects.path(key).is_symlink():
            objects.path(key).rmdir()
            objects.path(key).touch()


def test_slashes_before_a_key(objects: MemoryObjects) -> None:
    key = objects.make(b"1").lstrip("/")
    for slashes in ("", "/", "///"):
        os.close(open_object(slashes + key))
