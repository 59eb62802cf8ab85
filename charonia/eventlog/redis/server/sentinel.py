"""Finds the primary of a replicated log through the sentinels of the address, and notices when it changes.

redis-py does the discovery; it is imported only for an address with sentinels. `hot_connection` connects, and leaves a
former primary.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .topology import over_tls

if TYPE_CHECKING:
    from redis.asyncio.sentinel import Sentinel

    from .address import Address

_logger = logging.getLogger(__name__)

_INTERVAL_S = 0.5
ANSWER_S = 1.0

Place = tuple[str, int]


class Primary:
    """The primary of one service. Watchers are called when its place changes."""

    def __init__(self, address: Address) -> None:
        import redis.asyncio.sentinel  # noqa: F401, slow to import: not while a caller waits with a time-out

        self._address = address
        self._asked_first = address.sentinels
        self._watchers: list[Callable[[Place], None]] = []
        self._watching: asyncio.Task[None] | None = None

    async def find(self, answer_s: float = ANSWER_S) -> Place:
        """Host and port of the primary. Raises `ConnectionError` if no sentinel names one within `answer_s`.

        Each call has its own connections to sentinels: many callers connect at once, and each must close only its own.
        """
        sentinel = self._sentinels(answer_s)
        try:
            return await self._named_by(sentinel)
        finally:
            await _close(sentinel)

    async def _named_by(self, sentinel: Sentinel) -> Place:
        import redis

        try:
            place: tuple[Any, Any] = await sentinel.discover_master(self._address.service)
        except redis.RedisError as error:
            reason = str(error).partition(" : <")[0]  # the rest are representations of its objects
            raise ConnectionError(f"no sentinel names a primary of '{self._address.service}': {reason}") from None
        # the sentinel that answered comes first; those before it were slow
        known = [one.connection_pool.connection_kwargs for one in sentinel.sentinels]
        self._asked_first = tuple((ways["host"], ways["port"]) for ways in known)
        return str(place[0]), int(place[1])

    def watch(self, moved: Callable[[Place], None]) -> None:
        """Call `moved` with the primary's place, about twice a second."""
        if moved not in self._watchers:
            self._watchers.append(moved)
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._look(), name="watch of the log's primary")

    async def unwatch(self, moved: Callable[[Place], None]) -> None:
        """The last watcher ends the watch."""
        if moved in self._watchers:
            self._watchers.remove(moved)
        if self._watchers or self._watching is None:
            return
        watching, self._watching = self._watching, None
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    async def _look(self) -> None:
        """A primary that hangs answers nothing and closes nothing: only the sentinels report its replacement."""
        sentinel, myself = self._sentinels(ANSWER_S), asyncio.current_task()
        try:
            while self._watching is myself:  # a cancellation of this task may get lost in the library's waits
                await asyncio.sleep(_INTERVAL_S)
                try:
                    place = await self._named_by(sentinel)
                except OSError:
                    continue  # a failover is running; connections stay until there is a new primary
                except Exception:
                    _logger.exception("the sentinels could not be asked")
                    continue
                for moved in list(self._watchers):
                    moved(place)
        finally:
            await _close(sentinel)

    def _sentinels(self, answer_s: float) -> Sentinel:
        from redis.asyncio import Connection, ConnectionPool, Redis, SSLConnection
        from redis.asyncio.retry import Retry
        from redis.asyncio.sentinel import Sentinel
        from redis.backoff import NoBackoff

        address = self._address
        # an unreachable one is not tried again: the next one is asked
        ways: dict[str, Any] = {
            "socket_timeout": answer_s,
            "socket_connect_timeout": answer_s,
            "retry": Retry(NoBackoff(), 0),
            # redis-py would read all certificates of the machine for each, which takes longer than asking
            "connection_class": Connection if address.tls is None else over_tls(SSLConnection, address),
        }
        if address.sentinel_password:
            ways |= {"username": address.sentinel_username or None, "password": address.sentinel_password}
        sentinel = Sentinel([])  # type: ignore[no-untyped-call]
        pools = [ConnectionPool(host=host, port=port, **ways) for host, port in self._asked_first]
        sentinel.sentinels = [Redis.from_pool(pool) for pool in pools]
        return sentinel


async def _close(sentinel: Sentinel) -> None:
    """Finish closing even if cancelled meanwhile: an abandoned close leaves connections open."""
    closing = asyncio.ensure_future(asyncio.gather(sentinel.aclose(), return_exceptions=True))
    try:
        await asyncio.wait([closing])
    except asyncio.CancelledError:
        await asyncio.wait([closing])
        raise
