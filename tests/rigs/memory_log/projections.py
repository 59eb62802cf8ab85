"""What `memory_log.log` keeps beside streams and work: leases, statistics, blobs, notes, times and uses.

Each of them by its key, as the port describes it; nothing here knows of models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from charonia import keys
from charonia.clock import monotonic_ns, wall_ns
from charonia.eventlog.port import MOST_TAKEN
from charonia.tensors import Buffer


class MemoryProjections:
    """The port's methods about them."""

    def __init__(self) -> None:
        self._leases: dict[bytes, tuple[int, int]] = {}
        self._statistics: dict[bytes, dict[str, int]] = {}
        self._blobs: dict[bytes, tuple[bytes, int]] = {}
        self._times: dict[bytes, dict[bytes, int]] = {}
        self._recent: dict[bytes, dict[bytes, tuple[int, int]]] = {}
        self._until: dict[bytes, int] = {}

    def _forget(self, key: bytes) -> None:
        for projection in (self._leases, self._statistics, self._blobs, self._times, self._recent, self._until):
            projection.pop(key, None)

    # -- leases -------------------------------------------------------------------------------------------------------

    async def beat(self, role: str, incarnation: str, ttl_ms: int) -> bool:
        now = monotonic_ns()
        (was_alive,) = await self.alive(role, [incarnation])
        self._leases[keys.alive(role, incarnation)] = now, now + ttl_ms * 1_000_000
        return was_alive

    async def prolong(self, role: str, incarnation: str, ttl_ms: int) -> bool:
        (is_alive,) = await self.alive(role, [incarnation])
        return is_alive and await self.beat(role, incarnation, ttl_ms)

    async def end_beat(self, role: str, incarnation: str) -> None:
        self._leases.pop(keys.alive(role, incarnation), None)

    async def alive(self, role: str, incarnations: Sequence[str]) -> list[bool]:
        now = monotonic_ns()
        return [self._leases.get(keys.alive(role, incarnation), (0, 0))[1] > now for incarnation in incarnations]

    async def last_beat_ms(self, role: str, incarnations: Sequence[str]) -> list[int]:
        now = monotonic_ns()
        leases = [self._leases.get(keys.alive(role, incarnation), (0, 0)) for incarnation in incarnations]
        return [(now - began) // 1_000_000 if end > now else -1 for began, end in leases]

    # -- statistics and payloads --------------------------------------------------------------------------------------

    async def add_statistics(self, key: bytes, increments: Mapping[str, int]) -> None:
        self.count_here(key, increments)

    def count_here(self, key: bytes, increments: Mapping[str, int]) -> None:
        totals = self._statistics.setdefault(key, {})
        for name, value in increments.items():
            if name.startswith("last_"):
                totals[name] = max(totals.get(name, 0), value)
            else:
                totals[name] = totals.get(name, 0) + value

    async def statistics(self, key: bytes) -> dict[str, int]:
        return dict(self._statistics.get(key, {}))

    async def put_blob(self, blob_id: str, data: Buffer, ttl_s: int) -> None:
        self._keep(keys.blob(blob_id), bytes(data), ttl_s)

    async def blob(self, blob_id: str) -> bytes | None:
        return self._kept(keys.blob(blob_id))

    def _keep(self, key: bytes, data: bytes, ttl_s: int) -> None:
        now = monotonic_ns()
        for old in [old for old, (_, until) in self._blobs.items() if until <= now]:
            del self._blobs[old]
        self._blobs[key] = (data, now + ttl_s * 1_000_000_000)

    def _kept(self, key: bytes) -> bytes | None:
        data, until = self._blobs.get(key, (None, 0))
        return data if until > monotonic_ns() else None

    # -- notes and times ----------------------------------------------------------------------------------------------

    async def put_note(self, key: bytes, data: bytes, ttl_s: int) -> None:
        self._keep(key, data, ttl_s)

    async def notes(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self._kept(key) for key in keys]

    async def add_to_count(self, key: bytes, amount: int) -> int:
        await self.add_statistics(key, {"n": amount})
        return self._statistics[key]["n"]

    async def set_times(self, key: bytes, times: Mapping[bytes, int]) -> None:
        self._times.setdefault(key, {}).update(times)

    async def due(self, key: bytes, until_us: int, count: int) -> list[bytes]:
        times = self._times.get(key, {})
        return [member for at, member in sorted((at, member) for member, at in times.items()) if at <= until_us][:count]

    async def drop_times(self, key: bytes, members: Sequence[bytes]) -> None:
        times = self._times.get(key, {})
        for member in members:
            times.pop(member, None)

    async def count_times(self, key: bytes) -> int:
        return len(self._times.get(key, {}))

    async def keep_until(self, key: bytes, until_us: int) -> None:
        """They go when this is called, not in between."""
        self._until[key] = max(until_us, self._until.get(key, 0))
        if self._until[key] <= wall_ns() // 1000:
            self._forget(key)

    async def keep_recent(
        self, key: bytes, uses: Mapping[bytes, tuple[int, int]], limit_bytes: int, drop: Sequence[bytes] = ()
    ) -> list[bytes]:
        kept = self._recent.setdefault(key, {})
        for member in drop:
            kept.pop(member, None)
        for member, (at_us, size_bytes) in uses.items():
            before_us, before_bytes = kept.get(member, (0, -1))
            if size_bytes >= 0 or before_bytes >= 0:
                kept[member] = (max(at_us, before_us), size_bytes if size_bytes >= 0 else before_bytes)
        total_bytes = sum(size_bytes for _, size_bytes in kept.values())
        taken: list[bytes] = []
        for _, member in sorted((at_us, member) for member, (at_us, _) in kept.items()):
            if total_bytes <= limit_bytes or len(taken) == MOST_TAKEN:
                break
            total_bytes -= kept.pop(member)[1]
            taken.append(member)
        return taken
