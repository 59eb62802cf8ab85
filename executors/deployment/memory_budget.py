"""The memory budget of models on demand: which are loaded, their sizes, and which may be evicted. Pure.

Times are ns of one monotonic clock. A model counts with its files' size until its memory was measured at a load; the
measured size is remembered after it is evicted. The caller finds out whether a candidate for eviction is idle.
"""

from __future__ import annotations

from dataclasses import dataclass

VersionKey = tuple[str, int]
"""Model and version."""

MIN_STAY_NS = 250_000_000
"""Time that a model stays after its load: otherwise two models that evict each other would only be loaded."""

_MIN_LEARNING_BYTES = 1024**2
"""With smaller files, most of the memory is overhead that every model has, so nothing is learnt from them."""


@dataclass(slots=True)
class LoadedModel:
    """A model in memory. `used_ns` is the time of its last batch, `min_idle_ns` how long it stays
    after that at least."""

    size_bytes: int
    loaded_ns: int
    used_ns: int
    min_idle_ns: int = 0


class MemoryBudget:
    """One executor's budget for models on demand. A limit of 0 means none."""

    def __init__(self, *, budget_bytes: int, max_models: int) -> None:
        self.budget_bytes = budget_bytes
        self.max_models = max_models
        self._loaded: dict[VersionKey, LoadedModel] = {}
        self._known_bytes: dict[VersionKey, int] = {}
        self._growth: dict[str, float] = {}
        """By backend: bytes of memory per byte of files."""

    @property
    def used_bytes(self) -> int:
        return sum(held.size_bytes for held in self._loaded.values())

    @property
    def models(self) -> int:
        return len(self._loaded)

    def __contains__(self, key: VersionKey) -> bool:
        return key in self._loaded

    def guess_bytes(self, key: VersionKey, files_bytes: int, backend: str = "") -> int:
        """Estimate a model's memory: its last measured size, but at least the size of its files.

        The first estimate uses the ratio of the backend's last loaded model. When that exceeds the whole budget, the
        size of the files is used, and the load will show the true size.
        """
        if (known := self._known_bytes.get(key)) is not None:
            return max(known, files_bytes)
        guess = int(files_bytes * self._growth.get(backend, 1.0))
        return files_bytes if self.never_fits(guess) else guess

    def learn(self, backend: str, files_bytes: int, grown_bytes: int) -> None:
        """Learn a backend's ratio of memory to file size from one load."""
        if files_bytes >= _MIN_LEARNING_BYTES:
            self._growth[backend] = max(1.0, grown_bytes / files_bytes)

    def never_fits(self, size_bytes: int) -> bool:
        """Whether a model of this size exceeds the whole budget."""
        return bool(self.budget_bytes) and size_bytes > self.budget_bytes

    def fits(self, size_bytes: int) -> bool:
        """Whether a model of this size fits now."""
        if self.max_models and len(self._loaded) >= self.max_models:
            return False
        return not self.budget_bytes or self.used_bytes + size_bytes <= self.budget_bytes

    def over_budget(self) -> bool:
        """Whether the measured sizes exceed the budget."""
        return bool(self.budget_bytes) and self.used_bytes > self.budget_bytes

    def reserve(self, key: VersionKey, size_bytes: int, now_ns: int, *, min_idle_ns: int = 0) -> None:
        """Reserve memory for a model that is about to be loaded."""
        self._loaded[key] = LoadedModel(size_bytes, now_ns, now_ns, min_idle_ns)

    def set_size(self, key: VersionKey, grown_bytes: int, files_bytes: int, now_ns: int) -> None:
        """Record by how much a load grew the memory; it counts instead of the estimate that was reserved.

        The largest growth ever measured counts, and at least the files' size: reused free memory hides a part of it.
        """
        held = self._loaded[key]
        size_bytes = max(self._known_bytes.get(key, 0), files_bytes, grown_bytes)
        held.size_bytes = self._known_bytes[key] = size_bytes
        held.loaded_ns = held.used_ns = now_ns

    def mark_used(self, key: VersionKey, now_ns: int) -> None:
        """Record the time of a model's last batch."""
        if (held := self._loaded.get(key)) is not None:
            held.used_ns = max(held.used_ns, now_ns)

    def release(self, key: VersionKey) -> None:
        """Free the memory of a model that was unloaded."""
        self._loaded.pop(key, None)

    def candidates(self, now_ns: int) -> list[VersionKey]:
        """The models that have stayed long enough to be evicted, least recently used first."""
        free = [
            (held.used_ns, key)
            for key, held in self._loaded.items()
            if now_ns - held.loaded_ns >= MIN_STAY_NS and now_ns - held.used_ns >= held.min_idle_ns
        ]
        free.sort(key=lambda entry: entry[0])
        return [key for _, key in free]
