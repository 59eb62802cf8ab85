"""A server in a thread of a program that is not ours: the thread, its event loop, and a supervisor that lives there.

What runs in that loop beside the supervisor is `bound_parts`' and `charonia.inprocess.host`'s.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import shutil
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from charonia.errors import CharoniaError, StartupError
from charonia.options.values import Values

from .heartbeat_process import HeartbeatProcess
from .supervisor import Supervisor

if TYPE_CHECKING:
    from charonia.eventlog.redis import ClusterLog, RedisLog

_log = logging.getLogger(__name__)

_HURRY_S = 5.0


class HostedRun(ABC):
    """One run of a server in a thread of its own. `failure` says why it has ended by itself."""

    def __init__(self) -> None:
        self.failure = ""
        self._error: BaseException | None = None
        self._clean = True
        self._ready = threading.Event()
        self._ended = threading.Event()
        self._unwanted = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_wanted: asyncio.Event | None = None
        # a daemon, so that a program that forgets to stop can end (`stop_at_exit`)
        self._thread = threading.Thread(target=self._run, name="charonia server", daemon=True)

    def start(self) -> None:
        """Returns when `_became_ready` was called. Raises what kept it from that; then nothing is left running."""
        stop_at_exit(self)
        self._thread.start()
        try:
            self._ready.wait()
        except BaseException:
            self.stop()
            raise
        if self._error is not None:
            self.stop()
            raise self._error

    def wait(self) -> None:
        """Until it has ended."""
        self._ended.wait()

    def stop(self) -> bool:
        """Finish what is open and end. False when something was still running, or it had ended by itself."""
        self._unwanted.set()
        loop, wanted = self._loop, self._stop_wanted
        if loop is not None and wanted is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                loop.call_soon_threadsafe(wanted.set)
        self._thread.join()
        _started.discard(self)
        return self._clean and not self.failure

    @abstractmethod
    async def _main(self, directory: Path, wanted: asyncio.Event) -> bool:
        """Serve until a stop is wanted; True: all had ended in time. `directory` is empty and thrown away."""

    def _became_ready(self) -> None:
        self._ready.set()

    def _run(self) -> None:
        directory = tempfile.mkdtemp(prefix="charonia-")
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(self._begin(Path(directory)))
        except (StartupError, CharoniaError) as error:
            self._error, self.failure = error, str(error)
        except BaseException as error:
            _log.exception("the server failed")
            self._error, self.failure = error, f"{type(error).__name__}: {error}"
        finally:
            shutil.rmtree(directory, ignore_errors=True)
            self._ended.set()
            self._ready.set()

    async def _begin(self, directory: Path) -> None:
        self._stop_wanted = wanted = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if self._unwanted.is_set():  # before there was a loop to tell
            wanted.set()
        self._clean = await self._main(directory, wanted)

    async def _supervise(self, stack: HostedStack, wanted: asyncio.Event) -> bool:
        """Run a supervisor. Raises `StartupError` when it ended before it was ready."""
        following = asyncio.create_task(stack.stop_after(wanted))
        try:
            clean = await stack.run() == 0
        finally:
            following.cancel()
        if not self._ready.is_set():
            raise StartupError(stack.failure or "the server ended while it was starting")
        self.failure = stack.failure
        return clean


class HostedStack(Supervisor):
    """A supervisor in a program's thread: it receives no signals and prints nothing; a part of it runs in this loop."""

    def __init__(self, values: Values, ready: Callable[[], None]) -> None:
        super().__init__(values)
        self._tell_ready = ready
        self._reason = ""

    @property
    def failure(self) -> str:
        """What has ended it, with the words of the part that could not go on."""
        return ": ".join(filter(None, (self._failed, self._reason)))

    async def stop_after(self, wanted: asyncio.Event) -> None:
        """The first wish drains."""
        await wanted.wait()
        self._stop_wanted.set()

    def _listen_to_signals(self) -> None:
        pass

    def _fail(self, failure: str, sentence: str | None = None) -> None:
        self._failed, self._reason = failure, sentence or ""
        self._stop_wanted.set()

    async def _kill_all(self) -> None:
        try:
            async with asyncio.timeout(_HURRY_S):
                await self._end_here()
        except Exception:
            _log.exception("a part of the server in this process did not end")
        await super()._kill_all()

    async def _end_here(self) -> bool:
        """End what `_start_here` began; True: in time. A second call does nothing."""
        return True

    def _announce(self) -> None:
        self._tell_ready()


class Joined:
    """The log as a part in this process has it: `log` is open, `keeper` keeps the part's leases."""

    def __init__(self, keeper: HeartbeatProcess, log: RedisLog | ClusterLog) -> None:
        self.keeper = keeper
        self.log = log

    @classmethod
    async def open(cls, values: Values) -> Joined:
        """Raises `StartupError`, then nothing is left running."""
        from charonia.eventlog.redis import open_log

        from .roles import check_servers, check_urls, keeper_terms, open_blobs

        check_urls(values)
        try:
            keeper = HeartbeatProcess.spawn(keeper_terms(values))
        except OSError as error:
            raise StartupError(f"no heartbeat process can be started: {error}") from None
        keeper.start()
        joined = cls(keeper, open_log(keeper.url, durability=values.get("durability", "memory")))
        try:
            await check_servers(values, keeper.url)
            await open_blobs(joined.log, values)
            await joined.log.open()
        except BaseException:
            await joined.close()
            raise
        return joined

    async def close(self) -> None:
        from .roles import close_log

        await self.keeper.close()
        await close_log(self.log)


# -- the end of the program --------------------------------------------------------------------------------------------

_started: set[HostedRun] = set()
_exit_is_watched = False


def stop_at_exit(run: HostedRun) -> None:
    """Have a run that its program forgets stopped while threads can still be had, earlier than `atexit` does."""
    global _exit_is_watched
    _started.add(run)
    if not _exit_is_watched:
        _exit_is_watched = True
        import concurrent.futures.thread  # noqa: F401 - whose own end must come after ours

        getattr(threading, "_register_atexit", atexit.register)(_stop_all)


def _stop_all() -> None:
    for run in list(_started):
        run.stop()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
