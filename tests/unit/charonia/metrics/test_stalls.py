"""`charonia.metrics.stalls`: what stands still is reported with its stack, and what waits is not."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable

from charonia.metrics.stalls import StallWatch


def occupy() -> None:
    """Python code that runs for longer than the limit of the tests."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1)
    enough_s = time.thread_time() + 0.3
    while time.thread_time() < enough_s:
        pass


def one_call() -> None:
    """One call into native code that keeps the interpreter's lock throughout."""
    sorted(range(4_000_000), key=int.__neg__)


async def _watched(work: Callable[[], None] | None) -> StallWatch:
    watch = StallWatch(100)
    watch.start()
    try:
        await asyncio.sleep(0.05)
        while work is not None and not any(work.__qualname__ in stall.text() for stall in watch.recent):
            work()  # again, where a busy machine did not let the watch look meanwhile
            await asyncio.sleep(0.01)
    finally:
        watch.stop()
    return watch


def test_python_code_is_named() -> None:
    watch = asyncio.run(_watched(occupy))
    stall = next(stall for stall in watch.recent if "occupy" in stall.text())
    assert stall.length_ms >= 100
    assert stall.on_processor_ms > 0
    assert any("test_stalls.py" in line and line.endswith(" occupy") for line in stall.stack)
    assert watch.count >= 1
    assert watch.longest_ns <= watch.total_ns


def test_a_call_that_keeps_the_lock_is_named() -> None:
    watch = asyncio.run(_watched(one_call))
    assert any(line.endswith(" one_call") for stall in watch.recent for line in stall.stack)


def test_a_loop_that_waits_does_not_stand_still() -> None:
    watch = asyncio.run(_watched(None))
    # a busy machine may hold it up wherever it is, but it does nothing meanwhile
    busy = [stall.text() for stall in watch.recent if stall.stack and stall.on_processor_ms >= 50]
    assert not busy


def test_the_page_has_both_families() -> None:
    page = asyncio.run(_watched(occupy)).render().decode()
    assert "# TYPE charonia_event_loop_stalls_total counter" in page
    assert float(page.split("charonia_event_loop_stall_seconds_total ")[-1]) >= 0.1
