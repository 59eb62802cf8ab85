"""The log server that `charonia serve` starts for itself, and starts again when it dies.

How such a server is started and stopped is `charonia.eventlog.embedded`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from charonia.errors import InvalidArgument, StartupError
from charonia.eventlog.durability_levels import FSYNC, Level, parse_level
from charonia.eventlog.embedded import PrivateServer, find_server
from charonia.eventlog.embedded.state_files import StateFiles
from charonia.tasks import Tasks

from .children import STABLE_S, backoff_s, watch

_log = logging.getLogger(__name__)


class PrivateLog:
    """`has_served` says whether anybody was ever served from it, `failed` ends the server that was not."""

    def __init__(
        self,
        state_dir: Path,
        binary: str,
        durability: str,
        *,
        has_served: Callable[[], bool],
        failed: Callable[[str], None],
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called when its process is another one. Raises `StartupError`."""
        found = find_server(binary or None, StateFiles(state_dir))
        level = _level(durability)
        if level.replicas:
            raise StartupError(f"--durability={level.text} needs replicas, which serve's private log has none of")
        self._state_dir = state_dir
        self._server = PrivateServer(state_dir, found, flush_before_replies=level == FSYNC)
        self._has_served, self._failed, self._changed = has_served, failed, changed
        self._failures = 0
        self._started_at_s = 0.0
        self._tasks = Tasks()
        self._stopping = False

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def pid(self) -> int:
        """0 while it does not run."""
        return self._server.process.pid if self._server.process.returncode is None else 0

    async def start(self) -> None:
        """Start it for a run of the server. Raises `StartupError`, `OSError` where the system refuses what it needs."""
        await asyncio.to_thread(self._server.prepare)
        self._start()
        # no process of a former run lives: what they said of themselves would only mislead, and grow from run to run
        await asyncio.to_thread(self._server.wait_ready)
        await asyncio.to_thread(self._server.begin_run)

    def leave(self) -> None:
        """From now on it is not started again."""
        self._stopping = True
        self._tasks.cancel()

    async def stop(self) -> None:
        self.leave()
        await asyncio.to_thread(self._server.stop)

    def _start(self) -> None:
        self._server.start()
        if self._server.repaired is not None:
            _log.warning("%s", self._server.repaired.text)
        loop = asyncio.get_running_loop()
        self._started_at_s = loop.time()
        try:
            watch(loop, self._server.process, self._ended)
        except OSError:  # its end would not be noticed
            self._server.kill()
            raise

    def _ended(self, status: int) -> None:
        if self._stopping:
            return
        if not self._has_served():
            self._failed(f"the private log server ended with status {status}; see {self._state_dir}")
            return
        stable = asyncio.get_running_loop().time() - self._started_at_s > STABLE_S
        self._failures = 0 if stable else self._failures
        _log.error("the private log server ended with status %d; starting it again", status)
        self._changed()
        self._tasks.spawn(self._restart(), "restart of the private log")

    async def _restart(self) -> None:
        """At once the first time; a server that cannot start, or ends again and again, is tried less and less often."""
        while True:
            if self._failures:
                await asyncio.sleep(backoff_s(self._failures))
            self._failures += 1
            try:
                await asyncio.to_thread(self._server.prepare, lock_patience_s=0)
                self._start()
            except (StartupError, OSError) as error:  # no descriptor, no memory, a full disk: it may pass
                _log.error("the private log server is not back yet: %s", error)
                continue
            self._changed()
            return


def _level(text: str) -> Level:
    try:
        return parse_level(text)
    except InvalidArgument as error:
        raise StartupError(f"--{error.message}") from None
