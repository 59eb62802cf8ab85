"""Servers of different logs that have one `--shm-dir`: none removes what is another one's."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from memory_log.log import MemoryLog

from charonia.calls.payload_transfer import Payloads
from charonia.eventlog.payloads import PayloadDirectory
from charonia.eventlog.redis.epoch import Epoch
from charonia.wire import Reference

_PROCESS = """
import sys
from charonia.eventlog.payloads import PayloadDirectory

directory = PayloadDirectory(sys.argv[1], "executor-other-1")
directory.open()
print(directory.lend([b"x" * 50_000]).name, flush=True)
sys.stdin.read()
"""


def age(root: Path) -> None:
    """Make everything an hour old."""
    then = time.time() - 3600
    for path in [*root.rglob("*"), root]:
        os.utime(path, (then, then))


async def test_the_directory_of_another_logs_process_is_swept_only_once_that_has_ended(tmp_path: Path) -> None:
    log = MemoryLog()
    mine = PayloadDirectory(str(tmp_path), "gateway-mine-1")
    mine.open()
    await log.beat("gateway", "gateway-mine-1", 60_000)
    payloads = Payloads(log, mine, {}, "gateway-mine-1")
    pipe = asyncio.subprocess.PIPE
    arguments = (sys.executable, "-c", _PROCESS, str(tmp_path))
    other = await asyncio.create_subprocess_exec(*arguments, stdin=pipe, stdout=pipe)
    try:
        assert other.stdout is not None
        lent = (await other.stdout.readline()).decode()
        age(tmp_path)
        await payloads._sweep_directories()
        assert set(os.listdir(tmp_path / "executor-other-1")) == {
            "token",
            "slots",
            lent.partition("/")[2].partition("-")[0],
        }
    finally:
        other.kill()
        await other.wait()
    age(tmp_path)
    await payloads._sweep_directories()
    assert os.listdir(tmp_path) == ["gateway-mine-1"]
    mine.close()


def test_an_ensembles_owner_forgets_no_answer_of_another_logs_ensemble_of_that_name(tmp_path: Path) -> None:
    mine, other, executor = (PayloadDirectory(str(tmp_path), name) for name in ("ensemble.e", "ensemble.e", "e-1"))
    for owner, epoch in ((mine, "one"), (other, "another")):
        owner.open(standing=True)
        owner.belongs_to(epoch)
    executor.open()
    executor.belongs_to("another")
    answer = executor.write([b"answer"], owner="ensemble.e")
    asked = other.write([b"asked"], name="ab12")
    left = mine.write([b"left"])
    assert answer is not None
    assert asked is not None
    assert left is not None
    assert mine.write([b"mine"], name="ab12") is not None, "steps of the same id are two files"
    age(tmp_path)
    assert mine.forget({"nothing"}, 60) == 2
    assert bytes(other.read(Reference.unpack(answer.pack()))) == b"answer"
    assert bytes(other.read(asked)) == b"asked"
    assert other.forget({answer.name}, 60) == 1
    assert bytes(other.read(answer)) == b"answer"
    other.release()  # as the kernel does when its process ends
    assert mine.forget(set(), 60) == 2, "the file with its answer, and the one that it had locked"
    assert {path.name for path in (tmp_path / "ensemble.e").iterdir()} == {"token", mine.file_name("")[11:]}
    executor.close()


def test_processes_that_saw_other_rewinds_of_a_log_name_its_files_alike(tmp_path: Path) -> None:
    """Each counts those that it has seen, and an executor or an owner may have started since."""
    value, owner, executor = b"0123abcd", PayloadDirectory(str(tmp_path), "ensemble.e"), Epoch()
    executor.wrote(b"5-0")
    executor.answered([[], "no such key"])
    assert executor.name(value) != Epoch().name(value)
    owner.belongs_to(Epoch().name(value))
    named = owner.file_name("ab12")
    owner.belongs_to(executor.name(value))
    assert owner.file_name("ab12") == named


def test_files_of_an_older_release_have_no_mark_and_are_left_to_every_owner(tmp_path: Path) -> None:
    """An older release wrote them for one of several logs: nothing says for which."""
    older, mine = PayloadDirectory(str(tmp_path), "ensemble.e"), PayloadDirectory(str(tmp_path), "ensemble.e")
    older.open(standing=True)
    orphan, kept = older.write([b"orphan"]), older.write([b"kept"])
    assert orphan is not None
    assert kept is not None
    mine.belongs_to("one")
    age(tmp_path)
    assert mine.forget({kept.name}, 60) == 1
    assert bytes(mine.read(kept)) == b"kept"
