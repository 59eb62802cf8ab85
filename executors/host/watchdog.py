"""Ends a process whose event loop hangs for good because a native library holds the interpreter's lock.

Then no Python code runs: no heartbeat, no time limit, no signal handler. So the timer is a thread of `faulthandler`,
which needs no lock: it dumps all stacks and ends the process with status 1, to be started again.
"""

from __future__ import annotations

import asyncio
import faulthandler
import sys

LIMIT_S = 120.0
"""Longer than a process may be suspended and still continue: its work runs elsewhere by then."""


async def watch_loop(limit_s: float = LIMIT_S) -> None:
    """Restart the timer periodically, until cancelled. Run one per process."""
    try:
        while True:
            faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.stderr)
            await asyncio.sleep(limit_s / 4)
    finally:
        faulthandler.cancel_dump_traceback_later()
