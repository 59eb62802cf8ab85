"""The directory `charonia serve` keeps its state in: one server at a time, and what it leaves there for others to read.

What the private log keeps in it is `charonia.eventlog.embedded`'s.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import tempfile
from pathlib import Path

from charonia.eventlog.embedded.holder import SERVE, hold_state_directory
from charonia.eventlog.embedded.state_files import WEBHOOK_SECRET
from executors.host import owned_folders

ENDPOINTS = "endpoints.json"
PROCESSES = "processes.json"


def default_state_dir() -> str:
    """`$XDG_STATE_HOME/charonia`, or `~/.local/state/charonia`."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return str(Path(base) / "charonia")


class StateDirectory:
    """One state directory; `lock` it before anything else."""

    def __init__(self, configured: str) -> None:
        """`configured` may be empty: then it is the user's."""
        self.path = Path(configured or default_state_dir()).expanduser().absolute()
        self._memory: Path | None = None

    def lock(self) -> int:
        """Make the directory and keep others out of it until the descriptor is closed. Raises `StartupError`."""
        return hold_state_directory(self.path, SERVE)

    def memory_directory(self) -> str:
        """Where the parts of this server keep large tensors: on a memory file system, empty; "" where there is none.

        What killed servers of this user left there is removed. Give it back with `remove_memory`. The name is new each
        time: a server in another container may have the same path of its state, and share the memory file system.
        """
        root = Path("/dev/shm")
        if not root.is_dir():
            return ""
        prefix = f"charonia-m-{os.getuid()}-"
        owned_folders.remove_abandoned(root, prefix)
        try:
            self._memory = owned_folders.owned(lambda: Path(tempfile.mkdtemp(prefix=prefix, dir=root)))
        except OSError:  # no space: large tensors travel in the log
            return ""
        return str(self._memory)

    def remove_memory(self) -> None:
        """Remove the directory of large tensors, if there is one."""
        if self._memory is not None:
            owned_folders.remove(self._memory)

    @property
    def webhook_secret(self) -> Path:
        """The file of the secret that webhooks are signed with when none is configured."""
        return self.path / WEBHOOK_SECRET

    def make_webhook_secret(self) -> str:
        """Make that file, once; its path."""
        made = self.webhook_secret
        if not made.exists():
            temporary = made.with_suffix(".tmp")
            temporary.unlink(missing_ok=True)
            with open(temporary, "w", opener=lambda path, flags: os.open(path, flags | os.O_EXCL, 0o600)) as file:
                file.write(f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}\n")
            temporary.replace(made)
        return str(made)

    def write(self, name: str, content: object) -> None:
        """Put `ENDPOINTS` or `PROCESSES` there, whole or not at all."""
        path = self.path / name
        temporary = path.with_suffix(".tmp")
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps(content, indent=1) + "\n")
            temporary.replace(path)

    def clear(self) -> None:
        """Remove what is said about a server: none runs."""
        for name in (PROCESSES, ENDPOINTS):
            (self.path / name).unlink(missing_ok=True)
