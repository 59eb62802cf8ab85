"""The event loop of a model's coroutines."""

from __future__ import annotations

import asyncio
import sys
import threading

from executors.backends.python.stub.model_host import _outcome_of, _run_for_ever


async def nested_exit() -> None:
    async def leave() -> None:
        sys.exit(3)

    await asyncio.gather(leave())


async def one() -> int:
    return 1


def test_the_loop_outlives_tasks_that_leave_it() -> None:
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run_for_ever, args=(loop,), daemon=True).start()
    _, ending = asyncio.run_coroutine_threadsafe(_outcome_of(nested_exit()), loop).result(60)
    assert isinstance(ending, SystemExit)
    loop.call_soon_threadsafe(sys.exit)
    assert asyncio.run_coroutine_threadsafe(_outcome_of(one()), loop).result(60) == (1, None)
