"""A small process beside each part that prolongs its heartbeat leases while its event loop is busy (docs/adr/0024).

A thread would not do: what holds the interpreter's lock for seconds (a JSON body of millions of numbers, an import)
stops threads as well. It is forked before the part has loaded anything, so that most of its memory is shared; where
threads run already (bound functions), or when it has to be replaced, it is started as a program.

It reports the leases of its part as lost

- when the part ends without having dropped them: it watches a pidfd, so others hear of it in milliseconds, and looks
  whether the part was killed, as it may take seconds to end then;
- when the part's event loop has stood still for `stall_limit_s`, or for a lease's length and the part is stopped
  (SIGSTOP): what is stopped is not busy.

It never makes a lease again that has ended. The part ticks and sends its leases through a socket, as a line of JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from charonia import keys
from charonia.errors import CharoniaError, StartupError
from charonia.eventlog.neighbours import is_ending, is_stopped
from charonia.eventlog.port import ControlLog, EventLog
from charonia.facts.events import FIELD_FACT, ProcessLeft, pack_fact
from charonia.log_lines import current_file, descriptors, open_handler
from charonia.tasks import Tasks, insist

from .children import HEARTBEATS, backoff_s, name_process

_log = logging.getLogger(__name__)

_TICK_S = 0.5
_NICE = -10
_LOOK_S = 0.2
"""How often to poll whether the part was killed. Others must know within 0.3 s; this is the part spent on polling."""
_REPORT_WITHIN_S = 2.0
"""How long the loss of an ended part is reported to a log that takes nothing: after it the leases have run out."""
_END_WITHIN_S = 5.0
_READ_BYTES = 65536

Lease = tuple[str, str]
"""Role and incarnation."""


@dataclass(frozen=True, slots=True)
class KeeperTerms:
    """`url` holds the password. `interval_s` is between two heartbeats, `stall_limit_s` as above."""

    url: str
    interval_s: float
    stall_limit_s: float


class HeartbeatProcess:
    """The part's end: a `LeaseKeeper`. Make one with `fork` or `spawn`, `start` it in the event loop, `close` it."""

    def __init__(self, terms: KeeperTerms, pid: int, channel: socket.socket) -> None:
        self.url = terms.url
        self._terms = terms
        self._pid = pid
        self._channel = channel
        self._leases: dict[Lease, int] = {}
        self._tasks = Tasks()

    @classmethod
    def fork(cls, terms: KeeperTerms) -> HeartbeatProcess:
        """For a process without other threads. The log's adapter is loaded first, for both."""
        from charonia.eventlog.redis import open_log

        ours, theirs = socket.socketpair()
        part = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                gc.freeze()  # what both share is not to be touched
                _close_all_but({theirs.fileno(), *descriptors()})
                _run(terms, theirs, part, open_log)
                status = 0
            finally:
                os._exit(status)
        theirs.close()
        ours.setblocking(False)
        return cls(terms, pid, ours)

    @classmethod
    def spawn(cls, terms: KeeperTerms) -> HeartbeatProcess:
        """For a process that has threads. Raises `OSError` when no program can be started."""
        pid, channel = _spawn(terms)
        return cls(terms, pid, channel)

    def start(self) -> None:
        self._tasks.spawn(self._tick(), "heartbeat ticks")

    def keep(self, role: str, incarnation: str, ttl_ms: int) -> None:
        self._leases[role, incarnation] = ttl_ms
        self._send()

    def drop(self, role: str, incarnation: str) -> None:
        self._leases.pop((role, incarnation), None)
        self._send()

    async def close(self) -> None:
        """End it. Leases that were not dropped are reported lost, unless it does not end in time."""
        await self._tasks.close()
        self._channel.close()
        if not await asyncio.to_thread(_wait, self._pid, _END_WITHIN_S):  # it may not even have begun
            os.kill(self._pid, signal.SIGKILL)
            await asyncio.to_thread(_wait, self._pid, _END_WITHIN_S)

    async def _tick(self) -> None:
        failures = 0
        while True:
            if not self._send():
                failures += 1
                await asyncio.sleep(backoff_s(failures))
                await self._replace()
            await asyncio.sleep(_TICK_S)

    def _send(self) -> bool:
        """A tick, with all leases; False when no process is left to read it."""
        text = json.dumps([[*lease, ttl_ms] for lease, ttl_ms in self._leases.items()])
        try:
            self._channel.send(text.encode() + b"\n")
        except BlockingIOError:  # it is stopped, and ticks have filled the socket
            pass
        except OSError:
            return False
        return True

    async def _replace(self) -> None:
        """Start another one: it was killed, or it failed."""
        _log.error("the heartbeat process (pid %d) has ended: another one is started", self._pid)
        self._channel.close()
        _wait(self._pid, 0.0)
        try:
            self._pid, self._channel = await asyncio.to_thread(_spawn, self._terms)
        except OSError as error:
            _log.error("no heartbeat process can be started: %s", error)
        else:
            self._send()  # it has the leases from its first moment on, though this loop may stand still before a tick


def _wait(pid: int, within_s: float) -> bool:
    """Take the exit status of a child that ends within this time, so that it does not stay a zombie; False: it runs."""
    give_up_s = time.monotonic() + within_s
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() >= give_up_s:
                return False
            time.sleep(0.005)
    return True


def _spawn(terms: KeeperTerms) -> tuple[int, socket.socket]:
    """Its terms go through the socket: others can read a command line, and the URL has a password."""
    ours, theirs = socket.socketpair()
    with theirs:
        level = logging.getLogger().getEffectiveLevel()
        argv = [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid()), str(level), current_file()]
        process = subprocess.Popen(argv, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    process.returncode = 0  # it is waited for by its pid
    ours.sendall(json.dumps(asdict(terms)).encode() + b"\n")
    ours.setblocking(False)
    return process.pid, ours


# -- the process itself ------------------------------------------------------------------------------------------------


class Keeper:
    """Prolongs the leases of one part, until `gone`."""

    def __init__(self, log: ControlLog, terms: KeeperTerms, part: int, is_stopped: Callable[[], bool]) -> None:
        self.gone = asyncio.Event()
        """The part has ended, or has closed its end of the socket."""
        self._log = log
        self._terms = terms
        self._part = part
        self._is_stopped = is_stopped
        self._leases: dict[Lease, int] = {}
        self._silent_s = 0.0
        self._is_reported = False

    def tick(self, line: bytes) -> None:
        """The part's event loop runs; the line has all its leases."""
        self._silent_s = 0.0
        self._is_reported = False
        self._leases = {(role, incarnation): ttl_ms for role, incarnation, ttl_ms in json.loads(line)}

    async def run(self) -> None:
        """Returns once the part is gone and its leases are reported."""
        loop = asyncio.get_running_loop()
        last_s = loop.time()
        while not self.gone.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.gone.wait(), self._terms.interval_s)
            now_s = loop.time()
            # a pause of this process was one of the part as well, perhaps, and no silence of it that was heard
            self._silent_s += min(now_s - last_s, 2 * self._terms.interval_s)
            last_s = now_s
            if not self.gone.is_set():
                await self._turn()
        leases = list(self._leases)
        for _, incarnation in leases:
            _log.warning("%s (pid %d) is lost: its process has ended", incarnation, self._part)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REPORT_WITHIN_S):
                await insist(lambda: self._report(leases), "a loss cannot be reported")

    async def _turn(self) -> None:
        if self._is_reported or not self._leases:
            return
        try:
            if why := self._reason():
                for _, incarnation in self._leases:
                    _log.error("%s (pid %d) is taken for lost: %s", incarnation, self._part, why)
                await self._report(list(self._leases))
                self._is_reported = True
                return
            prolong = self._log.prolong
            await asyncio.gather(*(prolong(role, name, ttl_ms) for (role, name), ttl_ms in self._leases.items()))
        except CharoniaError as error:
            _log.debug("heartbeats cannot be written: %s", error)

    def _reason(self) -> str:
        """Why the part is to be taken for lost; "" while it is not."""
        if self._silent_s >= self._terms.stall_limit_s:
            return f"its event loop has stood still for {self._silent_s:.0f} s"
        if self._silent_s * 1000 >= min(self._leases.values()) and self._is_stopped():
            return f"it is stopped (SIGSTOP), and has been silent for {self._silent_s:.1f} s"
        return ""

    async def _report(self, leases: list[Lease]) -> None:
        for role, incarnation in leases:
            lost = ProcessLeft(role, incarnation, "lost")
            await self._log.append(keys.CONTROL, [FIELD_FACT, pack_fact(lost)])
            await self._log.end_beat(role, incarnation)


def _run(terms: KeeperTerms, channel: socket.socket, part: int, open_log: Callable[[str], EventLog]) -> None:
    # the same signal often goes to a whole group: this process ends with its part
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    name_process(HEARTBEATS)
    _go_first()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_keep(terms, channel, part, open_log(terms.url)))


def _go_first() -> None:
    """Where this is allowed, be scheduled before others: this process needs a processor for moments, and then at once.

    A part that was started with a higher priority keeps it: a lower one would let its leases run out.
    """
    present = os.getpriority(os.PRIO_PROCESS, 0)
    if present > _NICE:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, _NICE)


async def _keep(terms: KeeperTerms, channel: socket.socket, part: int, log: EventLog) -> None:
    keeper = Keeper(log, terms, part, lambda: is_stopped(part))
    unread = b""

    def read() -> None:
        nonlocal unread
        data = b"-"
        while data:
            try:
                data = channel.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                keeper.tick(line)
        loop.remove_reader(channel)
        keeper.gone.set()

    def ended() -> None:
        if descriptor >= 0:
            loop.remove_reader(descriptor)
        if not keeper.gone.is_set():
            read()  # it may have dropped its leases before
            keeper.gone.set()

    def look() -> None:
        if is_ending(part):
            ended()
        elif not keeper.gone.is_set():
            loop.call_later(_LOOK_S, look)

    loop = asyncio.get_running_loop()
    descriptor = -1
    channel.setblocking(False)
    loop.add_reader(channel, read)
    # the socket alone is not enough: what the part has forked holds the other end as well
    with contextlib.suppress(OSError):  # forbidden (seccomp), or gone already
        descriptor = os.pidfd_open(part)
        loop.add_reader(descriptor, ended)
    if os.getppid() != part:
        keeper.gone.set()
    look()
    while not keeper.gone.is_set():
        try:
            await log.open()
            break
        except StartupError:
            await asyncio.sleep(0.1)
    _log.info("prolongs the leases of process %d", part)
    await keeper.run()


def _close_all_but(kept: set[int]) -> None:
    """Listening sockets and pipes of the part must end with it."""
    with contextlib.suppress(OSError):
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2 and descriptor not in kept:
                with contextlib.suppress(OSError):
                    os.close(descriptor)


def main(argv: list[str]) -> None:
    """The program that `spawn` starts: the socket's descriptor, the part's pid, level and file of log lines."""
    from charonia.eventlog.redis import open_log

    logging.basicConfig(level=int(argv[2]), handlers=[open_handler(argv[3])])
    channel = socket.socket(fileno=int(argv[0]))
    first = b""
    while not first.endswith(b"\n"):
        if not (byte := channel.recv(1)):
            return
        first += byte
    _run(KeeperTerms(**json.loads(first)), channel, int(argv[1]), open_log)


if __name__ == "__main__":
    main(sys.argv[1:])
