"""What both ends of a model process know before they can talk: its command line, as `ps` shows it, and a signal."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass

_TITLE = "charonia-instance"

TRACEBACK_SIGNAL: int = getattr(signal, "SIGRTMAX", signal.SIGUSR1)
"""Makes the process print the tracebacks of its threads, even while it is stuck in native code."""


@dataclass(frozen=True, slots=True)
class StartupArguments:
    """`descriptor` is the inherited socket, `parent` the executor's process id."""

    model: str
    instance: str
    descriptor: int
    parent: int

    def command(self) -> list[str]:
        """The whole command; -P because the working directory is no place to import from."""
        title = f"{_TITLE}:{self.model}:{self.instance}"
        module = f"{__package__}.stub"
        return [sys.executable, "-P", "-m", module, title, str(self.descriptor), str(self.parent)]

    @staticmethod
    def of(arguments: list[str]) -> StartupArguments:
        """Read back what follows the module name in `command`. Raises `ValueError`."""
        title, descriptor, parent = arguments
        word, model, instance = title.split(":", 2)
        if word != _TITLE:
            raise ValueError(f"not the title of a model process: {title}")
        return StartupArguments(model, instance, int(descriptor), int(parent))
