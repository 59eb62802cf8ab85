"""Background tasks of a part of a process; steps that are repeated periodically, or until the log takes them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

from .errors import CharoniaError

_log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.05
LAST_RETRY_S = 2.0


MODEL_ERRORS = (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError)
"""What code of a model may raise where it is called without `await`: an exit is an error of the model, and so is a
`CancelledError` of an event loop of its own. They end no thread or loop."""


def ends_caller(error: BaseException) -> bool:
    """Whether an error ends the current task, which is being cancelled or closed. Another `CancelledError` came out of
    what the task awaited: code of others may let one escape.
    """
    task = asyncio.current_task()
    cancelled = isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling() > 0)
    return cancelled or isinstance(error, GeneratorExit)


class Tasks:
    """The tasks that one part has started and that have not ended: the event loop itself keeps only weak references.

    A task that fails is reported to `on_error`, or to the event loop's exception handler.
    """

    def __init__(self, on_error: Callable[[BaseException], None] | None = None) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_error = on_error

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        """The tasks that have not ended now."""
        return iter(list(self._tasks))

    def spawn(self, work: Coroutine[Any, Any, Any], name: str | None = None) -> asyncio.Task[Any]:
        """Start a coroutine as a task with this name."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if self._on_error is not None:
            self._on_error(error)
        else:
            context = {"message": f"{task.get_name()} failed", "exception": error, "task": task}
            task.get_loop().call_exception_handler(context)

    async def settled(self) -> None:
        """Wait until no task is left, those included that tasks start meanwhile."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def cancel(self) -> None:
        """Cancel all tasks."""
        for task in list(self._tasks):
            task.cancel()

    async def close(self) -> None:
        """Cancel all tasks and wait for their ends."""
        self.cancel()
        await self.settled()


async def periodic(
    step: Callable[[], Awaitable[object]],
    pause_s: float | Callable[[], float],
    complaint: str,
    *,
    at_once: bool = False,
    on_refusal: Callable[[CharoniaError], object] | None = None,
) -> None:
    """Run a step every `pause_s` seconds, counted from the end of the last one, until cancelled.

    The pause comes before the first step, unless `at_once`. After a `CharoniaError`, most often because the log cannot
    be reached, `on_refusal` is called and the next step tries again. Any other error is logged behind `complaint`: a
    step that fails is never the last one.
    """
    if not at_once:
        await asyncio.sleep(pause_s() if callable(pause_s) else pause_s)
    while True:
        try:
            await step()
        except CharoniaError as error:
            if on_refusal is not None:
                on_refusal(error)
        except Exception:
            _log.exception("%s", complaint)
        await asyncio.sleep(pause_s() if callable(pause_s) else pause_s)


async def insist(
    step: Callable[[], Awaitable[object]],
    complaint: str,
    *,
    first_s: float = FIRST_RETRY_S,
    last_s: float = LAST_RETRY_S,
    given_up: Callable[[], bool] | None = None,
) -> bool:
    """Repeat an idempotent step until it raises no `CharoniaError`; whether it succeeded.

    The pauses between attempts double from `first_s` to `last_s` seconds. `given_up` is asked before each attempt and
    ends the repetition, as cancellation does. `complaint` begins the warning that is logged for each failure.
    """
    delay_s = first_s
    while given_up is None or not given_up():
        try:
            await step()
            return True
        except CharoniaError as error:
            _log.warning("%s, trying again: %s", complaint, error)
        await asyncio.sleep(delay_s)
        delay_s = min(delay_s * 2, last_s)
    return False
