"""`charonia.metrics.stalls`: what stands still is reported with its stack, and what waits is not."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

from charonia.metrics.stalls import StallWatch


def occupy() -> None:
    """Python code that runs for longer than the limit of the tests."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1)
    deadline = asyncio.get_running_loop().time() + 0.3
    while asyncio.get_running_loop().time() < deadline:
        pass


def one_call() -> None:
    """One call into native code that keeps the interpreter's lock throughout."""
    sorted(range(4_000_000), key=int.__neg__)


async def _watched(work: Callable[[], None] | None) -> StallWatch:
    watch = StallWatch(100)
    watch.start()
    try:
        await asyncio.sleep(0.05)
        if work is not None:
            work()
        while work is not None and not any(work.__qualname__ in stall.text() for stall in watch.recent):
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
    assert all(not stall.stack for stall in watch.recent), [stall.text() for stall in watch.recent]


def test_the_page_has_both_families() -> None:
    page = asyncio.run(_watched(occupy)).render().decode()
    assert "# TYPE charonia_event_loop_stalls_total counter" in page
    assert float(page.split("charonia_event_loop_stall_seconds_total ")[-1]) >= 0.1
