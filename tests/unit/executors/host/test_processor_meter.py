"""What the processors do: read from files by hand, and from this machine with processes that keep it busy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from charonia.facts.processor_use import ProcessorUse
from executors.host.processor_meter import ProcessorMeter, busy_ticks, shared_number

S = 1_000_000_000
STAT = """cpu  60 6 24 900 9 2 4 6 1 1
cpu0 10 1 4 100 1 1 2 3 1 1
cpu1 20 2 8 300 3 1 2 3 0 0
cpu2 30 3 12 500 5 0 0 0 0 0
intr 4 5 6
"""


@pytest.mark.parametrize(
    ("processors", "expected"), [({0}, (16, 1, 4)), ({0, 1}, (42, 3, 12)), ({2}, (30, 3, 12)), ({7}, (0, 0, 0))]
)
def test_the_ticks_of_the_processors_that_may_be_used(processors: set[int], expected: tuple[int, int, int]) -> None:
    assert busy_ticks(STAT, processors) == expected


class Clock:
    """A time that passes when it is said, and the files of a machine."""

    def __init__(self, folder: Path) -> None:
        self.ns = 0
        self.proc, self.cgroup = folder / "proc", folder / "cgroup"
        self.proc.mkdir()
        self.cgroup.mkdir()
        self.stat(0, 0, 0)
        self.batches = 0
        self.meter = ProcessorMeter(lambda: (self.batches, 5 * self.batches), self.proc, self.cgroup, lambda: self.ns)

    def stat(self, usual: int, low: int, system: int) -> None:
        """Ticks of each processor that this process may use."""
        rows = [f"cpu{number} {usual} {low} {system} 0 0 0 0 0 0 0" for number in os.sched_getaffinity(0)]
        (self.proc / "stat").write_text("\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", *rows]))

    def due(self, reader: str = "journal", model: str = "m") -> ProcessorUse:
        found = self.meter.due(reader, model)
        assert found is not None
        return found


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Clock(tmp_path)


def test_each_reader_has_it_of_each_model_once_a_second(clock: Clock) -> None:
    clock.batches = 3
    assert (clock.due().batches, clock.due("reports").ran_ns, clock.due(model="n").batches) == (3, 15, 3)
    clock.ns = S - 1
    clock.batches = 4
    assert [clock.meter.due(*of) for of in (("journal", "m"), ("reports", "m"), ("journal", "n"))] == [None] * 3
    clock.ns = S
    assert (clock.due().batches, clock.due("reports").batches) == (4, 4)


@pytest.mark.skipif(os.getpriority(os.PRIO_PROCESS, 0) > 0, reason="all else is of no lower priority")
def test_system_time_is_of_low_priority_as_far_as_user_time_is(clock: Clock) -> None:
    clock.due()
    clock.stat(30, 10, 20)
    clock.ns = S
    count, ticks = len(os.sched_getaffinity(0)), os.sysconf("SC_CLK_TCK")
    real_time = os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR)
    found = clock.due()
    assert found.busy_ns == (found.server_ns if real_time else 45 * count * S // ticks)


def test_a_machine_without_such_files_says_nothing(clock: Clock) -> None:
    (clock.proc / "stat").unlink()
    assert clock.meter.due("journal", "m") is None
    (clock.proc / "stat").write_text("cpu0 what is this")
    clock.ns = S
    assert clock.meter.due("journal", "m") is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None), ({"cpu.max": "max 100000\n"}, None), ({"cpu.max": "50000 100000\n"}, 0.5),
        ({"cpu.max": "900000000 100000\n"}, None), ({"cpu.max": "nonsense"}, None), ({"cpu.max": "1 0"}, None),
        ({"cpu/cpu.cfs_quota_us": "25000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.25),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
    ],
)  # fmt: skip
def test_the_quota_of_a_container_counts(tmp_path: Path, files: dict[str, str], expected: float | None) -> None:
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    meter = ProcessorMeter(lambda: (0, 0), cgroup=tmp_path / "cgroup", now_ns=lambda: 0)
    found = meter.due("journal", "m")
    assert found is not None
    assert found.processors == (expected or len(os.sched_getaffinity(0)))
    if expected:  # others take nothing of a quota
        assert found.busy_ns == found.server_ns


@pytest.mark.parametrize(
    ("other", "is_alike"),
    [
        (("boot-1", {1, 0}, ""), True), (("boot-2", {0, 1}, ""), False), (("boot-1", {0}, ""), False),
        (("boot-1", {0, 1}, "c-1"), False),
    ],
)  # fmt: skip
def test_executors_that_use_the_same_processors_have_one_number(
    other: tuple[str, set[int], str], is_alike: bool
) -> None:
    number = shared_number("boot-1", {0, 1}, "")
    assert (shared_number(*other) == number) is is_alike
    assert 0 < number < 2**63
    assert shared_number("boot-1", {0}, "c-1") == shared_number("boot-1", {1}, "c-1")  # a quota is of any of them
    assert shared_number("", {0, 1}, "") == 0


def test_the_machine_is_known_by_its_boot(clock: Clock) -> None:
    assert clock.due().shared == 0
    boot_id = clock.proc / "sys/kernel/random/boot_id"
    boot_id.parent.mkdir(parents=True)
    boot_id.write_text("5e1f\n")
    meter = ProcessorMeter(lambda: (0, 0), clock.proc, clock.cgroup, lambda: 0)
    found = meter.due("journal", "m")
    assert found is not None
    assert found.shared == shared_number("5e1f", os.sched_getaffinity(0), "")


_BUSY = "import sys,time\nsys.stdin.readline()\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\n" + (
    "sys.stdin.readline()"
)


def test_processes_that_this_one_started_run_instances() -> None:
    now_ns = 0
    meter = ProcessorMeter(lambda: (0, 0), now_ns=lambda: now_ns)
    command = [sys.executable, "-c", _BUSY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        first = meter.due("journal", "m")
        child.stdin.write("go\n")
        child.stdin.flush()
        assert child.stdout.readline() == "done\n"
        now_ns = S
        second = meter.due("journal", "m")
        child.communicate("end\n", timeout=30)
    now_ns = 2 * S
    third = meter.due("journal", "m")  # what has ended takes nothing away
    assert first is not None
    assert second is not None
    assert third is not None
    assert 0.25 * S < second.instances_ns - first.instances_ns < 1.5 * S
    assert second.server_ns - first.server_ns >= 0.25 * S
    assert third.instances_ns >= second.instances_ns
    assert third.server_ns >= second.server_ns
