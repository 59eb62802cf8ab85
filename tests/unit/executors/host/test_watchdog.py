"""The end of a process whose event loop cannot move any more; in processes of their own, because that ends them."""

from __future__ import annotations

import subprocess
import sys

HELD = """
import asyncio, ctypes
from executors.host.watchdog import watch_loop

async def main():
    watching = asyncio.ensure_future(watch_loop({limit}))
    for _ in range(4):
        await asyncio.sleep({limit} / 3)
    {then}
    watching.cancel()
    print("went on")

asyncio.run(main())
"""


def run(limit: float, then: str) -> subprocess.CompletedProcess[str]:
    code = HELD.format(limit=limit, then=then)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_a_loop_that_moves_is_left_alone() -> None:
    done = run(4.0, "pass")  # a busy machine stands still as well, but not for so long
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr


def test_a_library_that_keeps_the_interpreter_lock_ends_the_process() -> None:
    # PyDLL calls keep the lock
    done = run(0.3, "ctypes.PyDLL(None).sleep(50)")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Timeout" in done.stderr
    assert "in main" in done.stderr  # where it stood
