"""Runs an engine in a thread of its own, and hands over what its steps gave in the event loop.

What the loop has not taken yet goes along with the next step: however late the loop is, one callback waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

from .engine import Engine, EngineLoad, EngineObserver, TokenEvent

_log = logging.getLogger(__name__)

_GAP_S, _GATHER_S = 0.002, 0.010
"""How long an idle engine waits for a further request, and for all of them. A client's texts arrive about a millisecond
apart, and a step for the first of them alone takes 15 ms or more, which all others would wait for.
"""


class EngineThread:
    """`deliver` gets events, `died` the exception that ended the engine, both in the loop that made this object.

    The engine's `admit` and `cancel` may be called by anybody; call `wake` afterwards.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        deliver: Callable[[Sequence[TokenEvent]], None],
        died: Callable[[BaseException], None],
        observer: EngineObserver | None = None,
    ) -> None:
        self._engine = engine
        self._deliver = deliver
        self._died = died
        self._observer = observer
        self._observes = observer is not None
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._events: list[TokenEvent] = []
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.load: EngineLoad | None = None
        """What the engine said after its last step."""

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """There is something to do, or may be."""
        self._wake.set()

    def stop(self) -> None:
        """End after the step that is under way, and close the engine. Blocks; a second call does nothing more."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                self._wake.clear()
                if self._stopping:  # looked at after `clear`: what sets it wakes afterwards
                    break
                events = self._engine.step()
                self.load = load = self._engine.load()
                self._observe(events, load)
                self._hand_over(events)
                if not load.running and not load.waiting:
                    self._wake.wait()
                    self._gather()
        except BaseException as error:
            self._call(self._died, error)
        finally:
            self._engine.close()
            if self._observer is not None:
                self._observer.closed()

    def _gather(self) -> None:
        """Let requests that come together share the first step after a rest: until none has come for `_GAP_S`."""
        end = time.monotonic() + _GATHER_S
        while not self._stopping and (left := end - time.monotonic()) > 0:
            self._wake.clear()
            if self._stopping or not self._wake.wait(min(_GAP_S, left)):
                return

    def _observe(self, events: Sequence[TokenEvent], load: EngineLoad) -> None:
        if self._observer is None or not self._observes:
            return
        try:
            self._observer.stepped(events, load)
        except Exception:  # an engine must not end because it cannot be counted
            _log.exception("an engine's metrics failed: there are no more of it")
            self._observes = False

    def _hand_over(self, events: Sequence[TokenEvent]) -> None:
        if not events:
            return
        with self._lock:
            is_waited_for = bool(self._events)
            self._events += events
        if not is_waited_for:
            self._call(self._take)

    def _take(self) -> None:
        with self._lock:
            events, self._events = self._events, []
        self._deliver(events)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)
