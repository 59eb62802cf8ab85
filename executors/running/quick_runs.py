"""Runs batches of quick models in the event loop (docs/adr/0025).

Passing a batch to an instance's thread costs two wake-ups, which take longer than many a small model. A model that was
seen to be quick therefore runs in the event loop. A thread of this module looks at the loop's execution from time to
time and interrupts one that takes long: its batch then runs in the instance's thread, where it delays nothing else.
"""

from __future__ import annotations

import threading
import time

from charonia.backend import InterruptibleInstance
from charonia.clock import monotonic_ns
from executors.batches.accounting import Executed

_QUICK_NS = 150_000
"""A batch that takes longer gains little in the event loop, and would delay other batches."""
_MEASURED = 4
"""The least of so many times is what a model takes: a busy machine adds to single ones."""
_CLOSED_NS = (1_000_000_000, 60_000_000_000)
"""For how long a model stays in its threads after an interrupted execution: at first, and at most."""
_LOOK_S = 0.02
"""An execution in the event loop is interrupted at the second look."""
_IDLE_LOOKS = 50
"""After so many looks without an execution the thread sleeps until the next."""


class Pace:
    """How quick the instances of one model version are: whether its batches may run in the event loop."""

    __slots__ = ("_closed_ns", "_closed_until_ns", "_least_ns", "_measured", "is_quick")

    def __init__(self) -> None:
        self.is_quick = False
        self._least_ns = self._measured = 0
        self._closed_ns, _ = _CLOSED_NS
        self._closed_until_ns = 0

    def seen(self, executed: Executed) -> None:
        """Count the time of a batch."""
        took_ns = 0
        for run in executed.executions:
            took_ns += run.input_ns + run.infer_ns + run.output_ns
        if not self._measured or took_ns < self._least_ns:
            self._least_ns = took_ns
        self._measured += 1
        if self._measured == _MEASURED:
            self._measured = 0
            self.is_quick = self._least_ns <= _QUICK_NS and monotonic_ns() >= self._closed_until_ns

    def interrupted(self) -> None:
        """An execution was interrupted: the model stays in its threads for a while, each time for longer."""
        self.is_quick = False
        self._measured = 0
        least_ns, most_ns = _CLOSED_NS
        now_ns = monotonic_ns()
        if now_ns - self._closed_until_ns > most_ns:
            self._closed_ns = least_ns
        self._closed_until_ns = now_ns + self._closed_ns
        self._closed_ns = min(most_ns, 2 * self._closed_ns)


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
        if not self._is_looking:
            with self._lock:
                if self._is_looking:
                    return
                self._is_looking = True
            # a daemon: an execution that cannot be interrupted must not keep the process from ending
            threading.Thread(target=self._look, name="interrupter", daemon=True).start()

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
                instance.interrupt()
            elif (idle := idle + 1) > _IDLE_LOOKS:
                with self._lock:
                    self._is_looking = False  # first: an execution that begins now starts a thread or is seen here
                    if self._number == seen:
                        return
                    self._is_looking = True


INTERRUPTER = Interrupter()
"""Of this process, whose event loop runs one execution at a time."""
