"""The command line of a model process, and the signal that makes it print tracebacks."""

from __future__ import annotations

import signal
from dataclasses import dataclass

_TITLE = "charonia-instance"

TRACEBACK_SIGNAL: int = getattr(signal, "SIGRTMAX", signal.SIGUSR1)
"""Makes the process print the tracebacks of its threads, even while native code hangs."""


@dataclass(frozen=True, slots=True)
class StartupArguments:
    """The arguments. `descriptor` is the inherited socket, `parent` the executor's process id.

    `board` is the descriptor of its metrics, `slots` that of the memory shared with the executor; -1: none.
    """

    model: str
    instance: str
    descriptor: int
    parent: int
    board: int = -1
    slots: int = -1

    def words(self) -> list[str]:
        """The command-line arguments that follow the interpreter's."""
        numbers = (self.descriptor, self.parent, self.board, self.slots)
        return [f"{_TITLE}:{self.model}:{self.instance}", *map(str, numbers)]

    @staticmethod
    def of(arguments: list[str]) -> StartupArguments:
        """Parse `words`. Raises `ValueError`."""
        title, *numbers = arguments
        descriptor, parent, board, slots = map(int, numbers)
        word, model, instance = title.split(":", 2)
        if word != _TITLE:
            raise ValueError(f"not the title of a model process: {title}")
        return StartupArguments(model, instance, descriptor, parent, board, slots)
