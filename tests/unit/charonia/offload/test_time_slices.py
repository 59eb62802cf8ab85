from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import get_native_id

import pytest

from charonia.offload.time_slices import LOOP_SLICE_NS, WORK_SLICE_NS, set_time_slice


def slice_ns(thread: int = 0) -> int:
    """Of this thread or, 0, the calling one. Skips where the kernel does not say."""
    try:
        with open(f"/proc/{thread or get_native_id()}/sched") as file:
            found = re.search(r"^se\.slice\s*:\s*(\d+)", file.read(), re.MULTILINE)
    except OSError:
        found = None
    if found is None:
        pytest.skip("this kernel has no slices of threads")
    return int(found[1])


def in_thread(work: object) -> object:
    assert callable(work)
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result()


@pytest.mark.parametrize(("wanted_ns", "inherited"), [(LOOP_SLICE_NS, False), (WORK_SLICE_NS, True)])
def test_a_slice_is_that_of_one_thread_or_of_those_it_starts_too(wanted_ns: int, inherited: bool) -> None:
    usual_ns = slice_ns()

    def work() -> tuple[int, object]:
        if not set_time_slice(wanted_ns, inherited=inherited):
            pytest.skip("this system has no slices of threads")
        return slice_ns(), in_thread(slice_ns)

    assert in_thread(work) == (wanted_ns, wanted_ns if inherited else usual_ns)
    assert slice_ns() == usual_ns


def test_the_slice_of_another_process_is_set_and_its_children_have_the_usual_one() -> None:
    usual_ns = slice_ns()
    words = (
        "import os, sys; input(); child = os.fork(); "
        "(print(child, flush=True), os.waitpid(child, 0)) if child else sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if not set_time_slice(LOOP_SLICE_NS, inherited=False, thread=process.pid):
            process.stdin.write(b"\n\n")
            pytest.skip("this system has no slices of threads")
        process.stdin.write(b"\n")
        process.stdin.flush()
        child = int(process.stdout.readline())
        assert (slice_ns(process.pid), slice_ns(child)) == (LOOP_SLICE_NS, usual_ns)
        process.stdin.close()


def test_a_process_that_has_ended_has_no_slice() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert not set_time_slice(LOOP_SLICE_NS, inherited=False, thread=process.pid)


def test_another_policy_is_kept() -> None:
    def work() -> tuple[bool, int]:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return set_time_slice(LOOP_SLICE_NS, inherited=True), os.sched_getscheduler(0)

    assert in_thread(work) == (False, os.SCHED_BATCH)


def test_a_nice_value_is_kept() -> None:
    words = (
        "import os; from charonia.offload.time_slices import *; before = os.nice(7); "
        "set_time_slice(WORK_SLICE_NS, inherited=True); print(before, os.nice(0))"
    )
    found = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    before, after = found.stdout.split()
    assert before == after != "0"
