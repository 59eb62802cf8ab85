"""Leases of capacity: the part of a model's bounds that this gateway has reserved for its waves (docs/adr/0015).

Waves are counted here, against the lease, and not in the log: a wave costs no count there, and no bound is exceeded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from charonia.errors import CharoniaError
from charonia.eventlog.port import Limits, Work

_FIRST_REQUESTS = 256
_FIRST_BYTES = 1 << 20
_SHARE = 8
"""A lease is at most this fraction of a bound, to leave capacity to other gateways."""
_FEW = 4
"""A lease grows by this many waves of the size that exceeded it, up to its share of the bound."""
_LEAST_BOUND = 4096
"""With a lower bound of waiting requests, each request is counted by itself."""


class Lease:
    """The lease of one model. `used_*` are requests and bytes of its waves in flight."""

    __slots__ = (
        "_asking",
        "_holder",
        "_limits",
        "_log",
        "_model",
        "held_bytes",
        "held_requests",
        "used_bytes",
        "used_requests",
    )

    def __init__(self, log: Work, model: str, holder: str, limits: Limits) -> None:
        self._log = log
        self._model = model
        self._holder = holder
        self._limits = limits
        self._asking = False
        self.held_requests = self.held_bytes = 0
        self.used_requests = self.used_bytes = 0

    @property
    def is_possible(self) -> bool:
        """Whether the bounds are wide enough for leases."""
        limits = self._limits
        return (not limits.requests or limits.requests >= _LEAST_BOUND) and (
            not limits.size_bytes or limits.size_bytes >= _SHARE * _FIRST_BYTES
        )

    def take(self, requests: int, size_bytes: int) -> bool:
        """Count a wave; False if it exceeds the lease. `is_short` may be True afterwards."""
        if self.used_requests + requests > self.held_requests or self.used_bytes + size_bytes > self.held_bytes:
            return False
        self.used_requests += requests
        self.used_bytes += size_bytes
        return True

    @property
    def is_short(self) -> bool:
        """Whether more should be reserved."""
        if self._asking:
            return False
        if not self.held_requests:  # others ended it, or it was never granted
            return True
        return 2 * self.used_requests > self.held_requests or 2 * self.used_bytes > self.held_bytes

    def is_short_of(self, size_bytes: int) -> bool:
        """Whether to reserve more after a wave of this size exceeded the lease: if it `is_short`, or if it has too few
        bytes and is below its share of the bound.
        """
        most = self._limits.size_bytes // _SHARE
        is_full = self.used_bytes + size_bytes > self.held_bytes and not (most and self.held_bytes >= most)
        return self.is_short or (is_full and not self._asking)

    @property
    def is_idle(self) -> bool:
        return not self.used_requests and not self._asking

    async def grow(self, least_bytes: int = 0) -> bool:
        """Reserve capacity, or twice as much, or enough for a few more waves of `least_bytes`.

        Returns False if there is none, or the log cannot be reached.
        """
        limits = self._limits
        times = 1 if least_bytes else 2
        requests = max(_FIRST_REQUESTS, times * self.held_requests)
        size_bytes = max(_FIRST_BYTES, times * self.held_bytes, self.used_bytes + _FEW * least_bytes)
        if limits.requests:
            requests = min(requests, limits.requests // _SHARE)
        if limits.size_bytes:
            size_bytes = min(size_bytes, limits.size_bytes // _SHARE)
        if (requests, size_bytes) == (self.held_requests, self.held_bytes):
            return True
        self._asking = True
        try:
            granted = await self._log.waves.lease(self._model, self._holder, requests, size_bytes, limits)
        except CharoniaError:
            return False
        finally:
            self._asking = False
        if granted:
            self.held_requests, self.held_bytes = requests, size_bytes
        return granted

    async def end(self) -> None:
        """Release the lease. Raises what the log raises."""
        self.held_requests = self.held_bytes = 0
        await self._log.waves.lease(self._model, self._holder, 0, 0, self._limits)


class Leases:
    """The leases of one gateway, by model. `spawn` runs requests to the log."""

    def __init__(
        self, log: Work, holder: str, limits: Limits, spawn: Callable[[Coroutine[Any, Any, Any]], object]
    ) -> None:
        self._log = log
        self._holder = holder
        self._limits = limits
        self._spawn = spawn
        self._held: dict[str, Lease] = {}

    def take(self, model: str, requests: int, size_bytes: int) -> bool:
        """Count a wave, and reserve more capacity if it gets short; False if the lease has none for this wave."""
        lease = self._held.get(model)
        if lease is None or not lease.take(requests, size_bytes):
            if lease is not None and lease.is_short_of(size_bytes):
                self._spawn(lease.grow(size_bytes))
            return False
        if lease.is_short:
            self._spawn(lease.grow())
        return True

    def give_back(self, model: str, requests: int, size_bytes: int) -> None:
        """A wave has ended."""
        lease = self._held.get(model)
        if lease is not None:
            lease.used_requests -= requests
            lease.used_bytes -= size_bytes

    def has(self, model: str) -> bool:
        """Whether capacity for a model's waves is reserved."""
        lease = self._held.get(model)
        return lease is not None and lease.held_requests > 0

    async def reserve(self, model: str) -> bool:
        """Lease capacity for a model's waves; False if there is none."""
        lease = self._held.get(model)
        if lease is None:
            lease = Lease(self._log, model, self._holder, self._limits)
            if not lease.is_possible:
                return False
            self._held[model] = lease
        return lease.held_requests > 0 or await lease.grow()

    def mark_ended(self) -> None:
        """Others ended the leases, because this gateway was presumed dead: reserve again when needed."""
        for lease in self._held.values():
            lease.held_requests = lease.held_bytes = 0

    def drop(self) -> None:
        """The log was replaced by another one, without leases."""
        self._held.clear()

    async def end_idle(self, used: Collection[str], closing: Callable[[str], None]) -> None:
        """Release the leases of unused models; `closing` is called before each. Raises as the log does."""
        for model in [model for model, lease in self._held.items() if model not in used and lease.is_idle]:
            lease = self._held.pop(model)
            closing(model)
            try:
                await lease.end()
            except CharoniaError:
                self._held.setdefault(model, lease)  # retried later
                raise

    async def close(self) -> None:
        """Release all leases."""
        held, self._held = self._held, {}
        for lease in held.values():
            with contextlib.suppress(CharoniaError):
                await lease.end()
