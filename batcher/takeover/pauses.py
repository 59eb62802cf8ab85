"""How long to wait before taking over a model again after that failed, or after an error stopped its owner. Pure."""

from __future__ import annotations

_FIRST_S = 0.2
_LONGEST_S = 5.0
_FORGOTTEN_AFTER_NS = 30_000_000_000


class Pauses:
    """By model: each pause is twice the last one, up to 5 s; after half a minute without one it is 0.2 s again. A
    permanent error, such as an unreadable entry, must not cost CPU time and a log line five times a second.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, int]] = {}

    def next_s(self, model: str, now_ns: int) -> float:
        """The pause that begins now; `now_ns` is monotonic."""
        self._last = {name: one for name, one in self._last.items() if now_ns - one[1] < _FORGOTTEN_AFTER_NS}
        before = self._last.get(model)
        pause_s = _FIRST_S if before is None else min(_LONGEST_S, 2 * before[0])
        self._last[model] = (pause_s, now_ns)
        return pause_s
