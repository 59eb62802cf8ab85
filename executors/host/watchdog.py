"""Ends a process whose event loop stands still for good: a native library holds the interpreter lock and hangs.

Then nothing written in Python runs any more: no heartbeat, no ceiling, no signal handler. So the clock is a thread of
`faulthandler`, which needs no lock; it writes where every thread is and ends the process with 1, to be started again.
"""

from __future__ import annotations

import asyncio
import faulthandler
import sys

LIMIT_S = 120.0
"""Longer than a process may be stopped from outside and still go on by itself; its work runs elsewhere by then."""


async def watch_loop(limit_s: float = LIMIT_S) -> None:
    """Keep the clock from running out, until cancelled. There is one per process."""
    try:
        while True:
            faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.stderr)
            await asyncio.sleep(limit_s / 4)
    finally:
        faulthandler.cancel_dump_traceback_later()
