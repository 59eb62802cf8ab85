"""Which models on demand are in memory, what they take, and which would make room for another. Pure: no clock.

Times are ns of one monotonic clock. A model takes what was measured when it was loaded, before that the size of its
files; what it once took is remembered when it is gone. Whether one is idle is for others to find out.
"""

from __future__ import annotations

from dataclasses import dataclass

VersionKey = tuple[str, int]
"""Model and version."""

MIN_STAY_NS = 250_000_000
"""A model that was loaded stays so long, whoever else is wanted: else two that take turns would do nothing else."""

_MIN_LEARNING_BYTES = 1024**2
"""Of smaller files what comes with every model is most of what it takes."""


@dataclass(slots=True)
class LoadedModel:
    """A model in memory. `used_ns` is when it was last given work, `keep_ns` how long it stays after that."""

    size_bytes: int
    loaded_ns: int
    used_ns: int
    min_idle_ns: int = 0


class MemoryBudget:
    """The memory of one executor for models on demand; 0 for no bound."""

    def __init__(self, *, budget_bytes: int, max_models: int) -> None:
        self.budget_bytes = budget_bytes
        self.max_models = max_models
        self._loaded: dict[VersionKey, LoadedModel] = {}
        self._known_bytes: dict[VersionKey, int] = {}
        self._growth: dict[str, float] = {}
        """By backend, how much memory a byte of files took."""

    @property
    def used_bytes(self) -> int:
        return sum(held.size_bytes for held in self._loaded.values())

    @property
    def models(self) -> int:
        return len(self._loaded)

    def __contains__(self, key: VersionKey) -> bool:
        return key in self._loaded

    def guess_bytes(self, key: VersionKey, files_bytes: int, backend: str = "") -> int:
        """What a model would take: what it took before, at least the size of its files.

        The first time it is thought to take as much of its files' size as the last one of its backend did, unless that
        is more than there is: then only loading it will tell.
        """
        if (known := self._known_bytes.get(key)) is not None:
            return max(known, files_bytes)
        guess = int(files_bytes * self._growth.get(backend, 1.0))
        return files_bytes if self.never_fits(guess) else guess

    def learn(self, backend: str, files_bytes: int, grown_bytes: int) -> None:
        """A model of a backend took so much memory for files of such a size."""
        if files_bytes >= _MIN_LEARNING_BYTES:
            self._growth[backend] = max(1.0, grown_bytes / files_bytes)

    def never_fits(self, size_bytes: int) -> bool:
        """Whether it would not fit if nothing else was there."""
        return bool(self.budget_bytes) and size_bytes > self.budget_bytes

    def fits(self, size_bytes: int) -> bool:
        """Whether there is room now."""
        if self.max_models and len(self._loaded) >= self.max_models:
            return False
        return not self.budget_bytes or self.used_bytes + size_bytes <= self.budget_bytes

    def over_budget(self) -> bool:
        """Whether what was measured is more than there is room for."""
        return bool(self.budget_bytes) and self.used_bytes > self.budget_bytes

    def reserve(self, key: VersionKey, size_bytes: int, now_ns: int, *, min_idle_ns: int = 0) -> None:
        """A model is about to be loaded."""
        self._loaded[key] = LoadedModel(size_bytes, now_ns, now_ns, min_idle_ns)

    def set_size(self, key: VersionKey, size_bytes: int, now_ns: int) -> None:
        """It is loaded, and took so much. The most ever seen counts: free memory of before hides what it takes."""
        held = self._loaded[key]
        held.size_bytes = self._known_bytes[key] = max(held.size_bytes, size_bytes)
        held.loaded_ns = held.used_ns = now_ns

    def mark_used(self, key: VersionKey, now_ns: int) -> None:
        """It was given work."""
        if (held := self._loaded.get(key)) is not None:
            held.used_ns = max(held.used_ns, now_ns)

    def release(self, key: VersionKey) -> None:
        """It is no longer in memory."""
        self._loaded.pop(key, None)

    def candidates(self, now_ns: int) -> list[VersionKey]:
        """What may make room, least recently used first, as far as time is concerned."""
        free = [
            (held.used_ns, key)
            for key, held in self._loaded.items()
            if now_ns - held.loaded_ns >= MIN_STAY_NS and now_ns - held.used_ns >= held.min_idle_ns
        ]
        free.sort(key=lambda entry: entry[0])
        return [key for _, key in free]
