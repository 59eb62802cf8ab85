"""The load of each tenant, and of each host that it sends webhooks to: which of them has more than its share waiting.

Its webhooks are postponed in the log, by the pace at which the others are called. How many calls run at a time is in
`turns`.
"""

from __future__ import annotations

import hashlib
from collections import Counter

from charonia.clock import wall_ns

from .addresses import Endpoint

DIGEST_BYTES = 8
_HELD_PER_TURN = 4
_FIRST_GUESS_S = 0.01
_HASTE = 2
"""Postponed webhooks come back twice as fast as expected: too early costs little, an idle host costs time."""
_WEIGHT = 0.2
_MAX_POSTPONED_S = 600.0
_REMEMBERED = 4096
_SLOW_S = 1.0
"""Calls that take longer than this, as a moving mean, are slow: an endpoint that stores what it gets answers sooner."""


def digest_of_host(endpoint: Endpoint) -> bytes:
    """Names a host in the set of webhooks to call, so that those of a busy host are skipped without reading jobs."""
    return hashlib.blake2b(endpoint.name.encode(), digest_size=DIGEST_BYTES).digest()


def digest_of_tenant(tenant: str) -> bytes:
    """Names a tenant there, for the same reason."""
    return hashlib.blake2b(tenant.encode(), digest_size=DIGEST_BYTES).digest()


class Load:
    """The load of one tenant, or of one tenant at one host. `held` are the webhooks that have or await a turn."""

    def __init__(self, concurrency: int) -> None:
        self.held = 0
        self._concurrency = concurrency
        self._call_s = _FIRST_GUESS_S
        self._free_us = 0

    @property
    def full(self) -> bool:
        return self.held >= self._concurrency * _HELD_PER_TURN

    @property
    def idle(self) -> bool:
        return self.held == 0 and self._free_us < wall_ns() // 1000

    @property
    def slow(self) -> bool:
        return self._call_s > _SLOW_S

    def took(self, seconds: float) -> None:
        """A call has ended after this time, which later ones are expected to take."""
        self._call_s += _WEIGHT * (seconds - self._call_s)

    def postponed_us(self) -> int:
        """When there may be capacity for one more: each is postponed a little further, by the pace of the calls."""
        now_us = wall_ns() // 1000
        step_us = int(self._call_s / self._concurrency / _HASTE * 1e6) + 1
        self._free_us = min(max(self._free_us, now_us) + step_us, now_us + int(_MAX_POSTPONED_S * 1e6))
        return self._free_us


class Loads:
    """Every load that is not idle, by digest, and some idle ones. `concurrency`: the calls that one can have."""

    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency
        self._loads: dict[bytes, Load] = {}
        self._sharing: Counter[bytes] = Counter()
        """How many of these begin with the digest of a host."""

    def get(self, name: bytes) -> Load:
        load = self._loads.get(name)
        if load is None:
            if len(self._loads) >= _REMEMBERED:
                for idle in [key for key, known in self._loads.items() if known.idle]:
                    del self._loads[idle]
                    self._sharing[idle[:DIGEST_BYTES]] -= 1
                self._sharing = +self._sharing
            load = self._loads[name] = Load(self._concurrency)
            self._sharing[name[:DIGEST_BYTES]] += 1
        return load

    def is_slow(self, name: bytes) -> bool:
        """Whether the calls of a tenant at a host are slow, and other tenants call that host."""
        load = self._loads.get(name)
        return load is not None and load.slow and self._sharing[name[:DIGEST_BYTES]] > 1
