"""Shares a bounded number of concurrent calls among tenants and hosts, so that slow hosts delay only their own tenant.

A bound for each tenant would waste turns while others have nothing to do. So a tenant may have as many turns as
`_SHARE` times those that are free (the dynamic thresholds of shared buffers): alone three quarters of all, one of n
tenants with endless work 3 of 3n + 1 parts, and one part stays free for a tenant that comes.

The turns of one host are too few to share them so. There, calls that are known to be slow leave one turn to others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

_SHARE = 3


def within_share(had: int, free: int) -> bool:
    """Whether a tenant that has `had` of something may have one more while `free` are free."""
    return had < _SHARE * free


class Turns:
    """At most `total` turns at a time, and `per_host` of one host. The next is for the tenant that has the fewest.

    `is_slow` says of a tenant and a host whether such calls are slow: these have one turn of the host less, if it has
    several. Callers bound how many wait.
    """

    def __init__(self, total: int, per_host: int, is_slow: Callable[[bytes, bytes], bool] = lambda *_: False) -> None:
        self._total = total
        self._is_slow = is_slow
        self._per_host = per_host
        self._running = 0
        self._of_tenants: Counter[bytes] = Counter()
        self._at_hosts: dict[bytes, Counter[bytes]] = {}
        """By host, how many of them each tenant has."""
        self._waiting: dict[bytes, dict[bytes, deque[asyncio.Future[None]]]] = {}
        """By tenant and host, in order of arrival; a tenant that had a turn goes behind the others that have as many,
        and a host behind its tenant's other ones."""

    @asynccontextmanager
    async def turn(self, tenant: bytes, host: bytes) -> AsyncIterator[None]:
        """Wait for a turn and have it until the block ends."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, {}).setdefault(host, deque()).append(turn)
        self._grant()
        try:
            await turn
            yield
        finally:
            if turn.cancelled():
                self._remove(tenant, host, turn)
            else:
                self._end(tenant, host)
                self._grant()

    def _grant(self) -> None:
        while (found := self._next()) is not None:
            tenant, host = found
            hosts = self._waiting.pop(tenant)
            self._waiting[tenant] = hosts
            hosts[host] = queue = hosts.pop(host)
            turn = queue[0]
            self._remove(tenant, host, turn)
            if not turn.done():
                self._running += 1
                self._of_tenants[tenant] += 1
                self._at_hosts.setdefault(host, Counter())[tenant] += 1
                turn.set_result(None)

    def _next(self) -> tuple[bytes, bytes] | None:
        """The tenant and host with the next turn; None while no waiting call may run."""
        free = self._total - self._running
        for tenant in sorted(self._waiting, key=self._of_tenants.__getitem__) if free else ():
            if not within_share(self._of_tenants[tenant], free):
                return None  # nor may those that have more
            for host in self._waiting[tenant]:
                if self._has_turn(tenant, host):
                    return tenant, host
        return None

    def _has_turn(self, tenant: bytes, host: bytes) -> bool:
        """Whether a host has a turn for a tenant."""
        running = self._at_hosts.get(host)
        if running is None or not self._is_slow(tenant, host):
            return running is None or running.total() < self._per_host
        slow = sum(count for other, count in running.items() if self._is_slow(other, host))
        return slow < self._per_host - 1 and running.total() < self._per_host

    def _remove(self, tenant: bytes, host: bytes, turn: asyncio.Future[None]) -> None:
        """Remove a waiting call, if it still waits."""
        hosts = self._waiting.get(tenant, {})
        with contextlib.suppress(KeyError, ValueError):
            hosts[host].remove(turn)
            if not hosts[host]:
                del hosts[host]
            if not hosts:
                del self._waiting[tenant]

    def _end(self, tenant: bytes, host: bytes) -> None:
        self._running -= 1
        running = self._at_hosts[host]
        for counted in (self._of_tenants, running):
            counted[tenant] -= 1
            if not counted[tenant]:
                del counted[tenant]
        if not running:
            del self._at_hosts[host]
