"""What both ends of a model process know before they can talk: its command line, as `ps` shows it, and a signal."""

from __future__ import annotations

import signal
from dataclasses import dataclass

_TITLE = "charonia-instance"

TRACEBACK_SIGNAL: int = getattr(signal, "SIGRTMAX", signal.SIGUSR1)
"""Makes the process print the tracebacks of its threads, even while it is stuck in native code."""


@dataclass(frozen=True, slots=True)
class StartupArguments:
    """`descriptor` is the inherited socket, `parent` the executor's process id, `board` that of its metrics or -1."""

    model: str
    instance: str
    descriptor: int
    parent: int
    board: int = -1

    def words(self) -> list[str]:
        """The words after those that start the interpreter."""
        return [f"{_TITLE}:{self.model}:{self.instance}", str(self.descriptor), str(self.parent), str(self.board)]

    @staticmethod
    def of(arguments: list[str]) -> StartupArguments:
        """Read `words` back. Raises `ValueError`."""
        title, descriptor, parent, board = arguments
        word, model, instance = title.split(":", 2)
        if word != _TITLE:
            raise ValueError(f"not the title of a model process: {title}")
        return StartupArguments(model, instance, int(descriptor), int(parent), int(board))
