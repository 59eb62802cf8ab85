"""Keeps executions of quick models in the event loop short, and waits for model processes (docs/adr/0025).

Passing a batch to an instance's thread costs two wake-ups, which take longer than many a small model. A model that was
seen to be quick (`instance_pool.Pace`) therefore runs in the event loop. A thread of this module looks at the loop's
execution from time to time and interrupts one that takes long: its batch then runs in the instance's thread.
"""

from __future__ import annotations

import contextlib
import threading
import time

from charonia.backend import InterruptibleInstance

_LOOK_S = 0.02
"""An execution in the event loop is interrupted at the second look."""
_IDLE_LOOKS = 50
"""After so many looks without an execution the thread sleeps until the next."""

_IN_VAIN = 20
"""After waiting in vain the loop does not wait for so many times as long."""


class Interrupter:
    """Interrupts executions in the event loop that take long; `begin` and `end` come around each.

    Its thread runs while there are executions, and ends when there was none for a second.
    """

    __slots__ = ("_instance", "_is_looking", "_lock", "_number")

    def __init__(self) -> None:
        self._instance: InterruptibleInstance | None = None
        """What runs now."""
        self._number = 0
        """Counts executions."""
        self._is_looking = False
        self._lock = threading.Lock()

    def begin(self, instance: InterruptibleInstance) -> None:
        self._instance = instance
        self._number += 1
        if not self._is_looking and self._is_first_to_look():
            # a daemon: an execution that cannot be interrupted must not keep the process from ending
            threading.Thread(target=self._look, name="interrupter", daemon=True).start()

    def _is_first_to_look(self) -> bool:
        with self._lock:
            is_first = not self._is_looking
            self._is_looking = True
        return is_first

    def end(self) -> None:
        self._instance = None

    def _look(self) -> None:
        seen, idle = -1, 0
        while True:
            time.sleep(_LOOK_S)
            number, instance = self._number, self._instance
            if number != seen:
                seen, idle = number, 0
            elif instance is not None:
                # if this execution ends just now, the next one may be interrupted, and runs again in a thread
                with contextlib.suppress(Exception):  # one that cannot be interrupted runs to its end
                    instance.interrupt()
            elif (idle := idle + 1) > _IDLE_LOOKS:
                with self._lock:
                    self._is_looking = False  # first: an execution that begins now starts a thread or is seen here
                    if self._number == seen:
                        return
                    self._is_looking = True


class Looks:
    """How often the event loop may wait for the answer of a model process: for half of the time at most.

    So other models, and other instances of the same one, get their batches while one runs. After an answer that did not
    come it does not wait for a while.
    """

    __slots__ = ("_began_ns", "_next_ns")

    def __init__(self) -> None:
        self._began_ns = self._next_ns = 0

    def begin(self, now_ns: int) -> bool:
        """Whether the loop may wait now; then call `end`. Times are monotonic."""
        self._began_ns = now_ns
        return now_ns >= self._next_ns

    def end(self, now_ns: int, *, answered: bool) -> None:
        """The loop waits no longer; `answered`: it did not wait in vain."""
        took_ns = now_ns - self._began_ns
        self._next_ns = now_ns + (took_ns if answered else _IN_VAIN * took_ns)


LOOKS = Looks()
INTERRUPTER = Interrupter()
"""Of this process, whose event loop runs one execution at a time."""
