"""Fail points: named places at which a drill can stop a process, to kill it or another one just then. Off by default.

The names follow the steps of a request's life in the kill matrix (`loadtest/drill/matrix.py`). `activate` (hidden
option `--fail-points DIR`) turns them on for a process. A drill arms a point by making `DIR/<point>.armed`; the first
process that comes by renames it to `DIR/<point>.hit`, writes its pid into it and stands still until the file is gone.
What the drill kills meanwhile is its business. Turned off, a point costs the call of a builtin.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

POINTS = (
    "gateway.receiving",  # a  bytes of a request being received
    "gateway.parsed",  # b  parsed, not stored
    "gateway.stored",  # c  stored, reply not sent
    "gateway.waiting",  # d  202 sent, or a caller waiting
    "batcher.picked",  # e  read by the batcher
    "batcher.formed",  # f  batch formed, not recorded
    "batcher.dispatched",  # g  given to an executor
    "executor.executing",  # h  about to run
    "executor.executed",  # i  run, result not stored
    "executor.answered",  # i  replies of waves sent, their entries not deleted
    "executor.settled",  # j  result stored, its batch entry not deleted
    "batcher.bursting",  # f  a wave replaced by its requests, others not yet
    "batcher.finished",  # k  the batcher has heard, the queue entry is not deleted
    "gateway.notified",  # l  the reply is at the gateway, the caller has not read it
    "gateway.answering",  # l  half of the callers of a wave have their answers
    "webhooks.posting",  # l  a webhook is being delivered
    "gateway.read",  # m  a result has been read
)

_PATIENCE_S = 10.0
_directory = ""

_pass: Callable[[str], object] = bool

hit = _pass
"""Stand still here when the point is armed, until the drill lets go (10 s at most). Named as `failpoints.hit`."""


def activate(directory: str) -> None:
    """Turn the points of this process on; "" turns them off."""
    global _directory, hit
    _directory = directory
    hit = _hit if directory else _pass


def is_on() -> bool:
    """Whether this process has fail points."""
    return bool(_directory)


def _hit(point: str) -> None:
    mark = os.path.join(_directory, point)
    try:
        os.rename(mark + ".armed", mark + ".hit")
        with open(mark + ".hit", "r+") as file:  # not made again: a drill may have let go already
            file.write(f"{os.getpid()}\n")
    except OSError:
        return
    give_up_s = time.monotonic() + _PATIENCE_S
    while os.path.exists(mark + ".hit") and time.monotonic() < give_up_s:
        time.sleep(0.001)
