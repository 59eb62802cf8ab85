"""The hot connection: authenticates, fails fast while the server cannot be reached, and reconnects by itself.

`transport` writes commands and matches replies, `log` defines commands, `reader` holds blocking reads. A command whose
reply was lost is never sent again: its outcome is unknown to the caller.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import hiredis

from charonia.errors import LogAway, LogUnavailable
from charonia.tensors import Buffer

from .address import Address
from .sentinel import ANSWER_S, Primary
from .transport import Argument, Done, Refused, Wire, lost, pack

_logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_FIRST_CONNECT_TIMEOUT_S = 15.0
"""A process that starts without the log ends with an error; a busy machine takes seconds to connect over TLS."""
_FIRST_ANSWER_S = 5.0
_STALL_TIMEOUT_S = 15.0
_FIRST_DELAY_S = 0.02
_LONGEST_DELAY_S = 1.0
_LONGEST_LOCAL_DELAY_S = 0.1
_LOADING_DELAY_S = 0.05


class Connection:
    """A connection that reconnects by itself: call `open` once.

    `prepare` are commands sent together with the authentication, as are those that `ask` returns; the latter's replies,
    refusals included, go to `on_answers` before anything else is sent, and an error raised there ends the attempt.
    `on_state(up)` is called in the event loop. `watch`: a server that leaves commands unanswered for 15 s counts as
    lost (not for blocking connections). `primary` finds the server if the address has sentinels.
    """

    def __init__(
        self,
        address: Address,
        *,
        name: str,
        prepare: Sequence[Sequence[Argument]] = (),
        ask: Callable[[], Sequence[Sequence[Argument]]] | None = None,
        on_answers: Callable[[list[Any]], None] | None = None,
        on_state: Callable[[bool], None] | None = None,
        watch: bool = True,
        primary: Primary | None = None,
    ) -> None:
        self.address = address
        self.primary = primary
        self.client_id = 0
        self._name = name
        self._prepare = prepare
        self._ask = ask
        self._on_answers = on_answers
        self._on_state = on_state
        self._watch = watch
        self._wire: Wire | None = None
        self._place: tuple[str, int] = (address.host, address.port)
        self._closed = False
        self._delay_s = 0.0
        self._up_since_s = 0.0
        self._coming_back: asyncio.Task[None] | None = None
        self._watchdog: asyncio.TimerHandle | None = None

    @property
    def up(self) -> bool:
        return self._wire is not None

    async def open(self) -> None:
        """Connect once. Raises OSError, TimeoutError or `Refused`."""
        self._closed = False
        wire = await self._connect(_FIRST_CONNECT_TIMEOUT_S, _FIRST_ANSWER_S)
        if self.primary is not None:
            self.primary.watch(self._moved)
        self._up(wire)

    def start(self) -> None:
        """Connect in the background, as soon as possible."""
        if self.primary is not None:
            self.primary.watch(self._moved)
        if self._coming_back is None and self._wire is None:
            self._coming_back = asyncio.get_running_loop().create_task(self._come_back())

    async def close(self) -> None:
        """Close the connection; what was written before is still sent."""
        self._closed = True
        if self.primary is not None:
            await self.primary.unwatch(self._moved)
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._coming_back is not None:
            self._coming_back.cancel()
            await asyncio.gather(self._coming_back, return_exceptions=True)
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
            await asyncio.wait([wire.closed], timeout=1.0)
            wire.abort()

    def drop(self) -> None:
        """Drop the transport and connect again."""
        if self._wire is not None:
            self._wire.abort()

    def _moved(self, place: tuple[str, int]) -> None:
        """The sentinels name another primary: the old one may accept writes for a while and lose them."""
        if self._wire is not None and place != self._place:
            _logger.warning("the primary of the event log moved from %s:%d to %s:%d", *self._place, *place)
            self._wire.abort()

    # -- commands -----------------------------------------------------------------------------------------------------

    def call(self, pieces: Sequence[Buffer]) -> asyncio.Future[Any]:
        """Send one packed command; the future gets its reply. Raises `LogUnavailable` without a connection."""
        wire = self._wire
        if wire is None:
            raise self._away()
        return wire.call(pieces)

    def batch(self, pieces: Sequence[Buffer], count: int, done: Done, *, lazy: bool = False) -> None:
        """Send `count` packed commands; `done` is called with their replies. Raises as `call`.

        Lazy ones share the next write, within 20 ms.
        """
        wire = self._wire
        if wire is None:
            raise self._away()
        wire.batch(pieces, count, done, lazy=lazy)

    @property
    def takes_writes(self) -> bool:
        """Whether the server is connected and accepts more now."""
        wire = self._wire
        return wire is not None and not wire.paused and not wire.closed.done()

    def batch_now(self, pieces: Sequence[Buffer], count: int, done: Done) -> bool:
        """As `batch`, written before this returns; False if the server is not connected or accepts no more now."""
        wire = self._wire
        if wire is None or wire.paused or wire.closed.done():
            return False
        wire.batch_now(pieces, count, done)
        return True

    def batch_soon(self, pieces: Sequence[Buffer], count: int, done: Done) -> bool:
        """As `batch_now`, written at the end of the tick; False if the server is not connected or accepts no more."""
        wire = self._wire
        if wire is None or wire.paused or wire.closed.done():
            return False
        wire.batch(pieces, count, done)
        return True

    async def drained(self) -> None:
        """Wait until the server accepts more; for callers of `batch`, which does not wait."""
        if self._wire is not None and self._wire.paused:
            await self._wire.drained()

    async def execute(self, *command: Argument) -> Any:
        """Send one small command, waiting while the server accepts no more; returns the reply."""
        if self._wire is not None and self._wire.paused:
            await self._wire.drained()
        return await self.call((pack(command),))

    async def execute_lazily(self, *command: Argument) -> Any:
        """Send one small command that is not urgent: it shares the next write, within 20 ms."""
        wire = self._wire
        if wire is None:
            raise self._away()
        return await wire.call((pack(command),), lazy=True)

    async def execute_pieces(self, pieces: Sequence[Buffer]) -> Any:
        if self._wire is not None and self._wire.paused:
            await self._wire.drained()
        return await self.call(pieces)

    async def execute_all(self, pieces: Sequence[Buffer], count: int) -> list[Any]:
        """The replies to `count` packed commands, errors among them as `hiredis.ReplyError`."""
        if self._wire is not None and self._wire.paused:
            await self._wire.drained()
        future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()

        def done(replies: list[Any] | None) -> None:
            if future.done():
                return
            if replies is None:
                future.set_exception(lost())
            else:
                future.set_result(replies)

        self.batch(pieces, count, done)
        return await future

    def _away(self) -> LogUnavailable:
        if self._closed:
            return LogUnavailable("the event log has been closed")
        return LogAway(f"the event log at {self.address.text} cannot be reached")

    # -- coming and going ---------------------------------------------------------------------------------------------

    async def _connect(self, timeout_s: float, answer_s: float) -> Wire:
        address = self.address
        loop = asyncio.get_running_loop()
        wire = Wire(address.text, self._lost)
        commands: list[Sequence[Argument]] = []
        if address.database:
            commands.append(("SELECT", address.database))
        # a server that loads its log accepts connections but serves no data yet: this command detects it
        commands.append(("DBSIZE",) if address.in_cluster else ("EXISTS", "ctl"))
        if self.primary is not None:
            commands.append(("ROLE",))
        commands.extend(self._prepare)
        questions = self._ask() if self._ask is not None else ()
        wanted = len(commands)
        commands.extend(questions)
        try:
            async with asyncio.timeout(timeout_s):
                if address.path:
                    await loop.create_unix_connection(lambda: wire, address.path)
                else:
                    if self.primary is not None:
                        self._place = await self.primary.find(answer_s)
                    await loop.create_connection(lambda: wire, *self._place, ssl=address.tls)
                # first by itself: before that the server drops connections that send long scripts, without a reason
                hello = _accepted(await _told(wire, [self._hello()]))[0]
                replies = await _told(wire, commands)
            _accepted(replies[:wanted])
            if self.primary is not None and not any(type(r) is list and r[:1] == [b"master"] for r in replies[:wanted]):
                raise ConnectionError(f"{self._place[0]}:{self._place[1]} is no primary")
            if self._on_answers is not None:
                self._on_answers(replies[wanted:])
        except BaseException:
            wire.abort()
            raise
        self.client_id = dict(zip(hello[::2], hello[1::2], strict=True))[b"id"]
        return wire

    def _hello(self) -> Sequence[Argument]:
        address = self.address
        sign_in: tuple[Argument, ...] = ()
        if address.username or address.password:
            sign_in = ("AUTH", address.username or "default", address.password)
        return ("HELLO", 2, *sign_in, "SETNAME", self._name)

    def _up(self, wire: Wire) -> None:
        if wire.closed.done():
            self.start()
            return
        self._wire = wire
        self._up_since_s = asyncio.get_running_loop().time()
        if self._watch:
            self._watchdog = asyncio.get_running_loop().call_later(_STALL_TIMEOUT_S, self._look, wire, False)
        if self._on_state is not None:
            self._on_state(True)

    def _lost(self, wire: Wire, error: Exception | None) -> None:
        if wire is not self._wire:
            return
        self._wire = None
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._closed:
            return
        _logger.warning("lost the event log at %s: %s", self.address.text, error or "closed by the server")
        if asyncio.get_running_loop().time() - self._up_since_s > _LONGEST_DELAY_S:
            self._delay_s = 0.0  # otherwise it reconnects and fails repeatedly: keep slowing down
        self._slow_down()
        self._coming_back = None
        self.start()
        if self._on_state is not None:
            self._on_state(False)

    def _slow_down(self) -> None:
        longest_s = _LONGEST_LOCAL_DELAY_S if self.address.path else _LONGEST_DELAY_S
        self._delay_s = min(max(self._delay_s * 2, _FIRST_DELAY_S), longest_s)

    async def _come_back(self) -> None:
        failures = 0
        while True:
            # jitter over the whole delay: processes that lost the server together must not reconnect together
            await asyncio.sleep(random.uniform(0, self._delay_s))
            try:
                wire = await self._connect(_CONNECT_TIMEOUT_S, ANSWER_S)
                break
            except (OSError, LogUnavailable) as error:  # TimeoutError is an OSError
                failures += 1
                if failures == 1:
                    why = str(error) or f"no answer within {_CONNECT_TIMEOUT_S:.0f} s"
                    _logger.warning("the event log at %s cannot be reached: %s", self.address.text, why)
                if isinstance(error, Refused) and error.reply.startswith("LOADING"):
                    self._delay_s = _LOADING_DELAY_S
                    continue
            self._slow_down()
        self._coming_back = None
        _logger.info("connected to the event log at %s", self.address.text)
        self._up(wire)

    def _look(self, wire: Wire, waited: bool) -> None:
        """Called once per stall time-out: drops the connection if commands waited a whole one without any reply."""
        waits = wire.waits()
        if waits and waited and not wire.received:
            _logger.error("the event log at %s does not answer", self.address.text)
            wire.abort()
            return
        wire.received = False
        self._watchdog = asyncio.get_running_loop().call_later(_STALL_TIMEOUT_S, self._look, wire, waits)


async def _told(wire: Wire, commands: Sequence[Sequence[Argument]]) -> list[Any]:
    """The replies to commands, errors among them as `hiredis.ReplyError`. Raises `ConnectionResetError`."""
    answered: asyncio.Future[list[Any] | None] = asyncio.get_running_loop().create_future()

    def done(replies: list[Any] | None) -> None:
        if not answered.done():
            answered.set_result(replies)

    wire.batch([pack(command) for command in commands], len(commands), done)
    replies = await answered
    if replies is None:
        raise ConnectionResetError("the server closed the connection")
    return replies


def _accepted(replies: list[Any]) -> list[Any]:
    """Raises `Refused` for the first error among the replies."""
    for reply in replies:
        if isinstance(reply, hiredis.ReplyError):
            raise Refused(str(reply))
    return replies
