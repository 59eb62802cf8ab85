"""The pipe that a model process prints into, on both event loops."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import uvloop

from executors.backends.python.child_process import _OutputPipe

LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop, uvloop.new_event_loop]


async def rounds() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("make_loop", LOOPS, ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("who_ends", ["process", "executor"])
def test_it_closes_its_descriptor_once(make_loop: Callable[[], asyncio.AbstractEventLoop], who_ends: str) -> None:
    """A second close would hit what got the number meanwhile."""

    async def read_all() -> None:
        read_end, write_end = os.pipe()
        seen: list[bytes] = []
        ended = asyncio.Event()
        pipe = _OutputPipe(asyncio.get_running_loop(), read_end, seen.append, ended.set)
        os.write(write_end, b"one line\n")
        if who_ends == "process":
            os.close(write_end)
            async with asyncio.timeout(30):
                await ended.wait()
            assert b"".join(seen) == b"one line\n"
        else:
            pipe.close()
            os.close(write_end)
        # the next file that is opened may get the number
        later = fcntl.fcntl(null, fcntl.F_DUPFD_CLOEXEC, read_end)
        pipe.close()
        del pipe
        await rounds()
        os.fstat(later)
        os.close(later)

    null = os.open(os.devnull, os.O_RDONLY)
    with ExitStack() as stack:
        stack.callback(os.close, null)
        runner = stack.enter_context(asyncio.Runner(loop_factory=make_loop))
        runner.run(read_all())
