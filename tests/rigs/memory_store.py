"""An object store in memory, which may fail and lie: for what no server can be made to do."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from executors.repository.remote.store import ObjectChanged, RemoteError, RemoteObject, Sink


class MemoryStore:
    """`content` is by name; every `put` gives an object another stamp. `asked` is what was listed and copied."""

    def __init__(self, content: dict[str, bytes] | None = None) -> None:
        self._content: dict[str, tuple[bytes, str]] = {}
        self._puts = 0
        self._lock = threading.Lock()
        self.asked: list[str] = []
        self.failing = ""
        self.breaks: dict[str, int] = {}
        """Objects whose next so many copies end half way."""
        self.closed = False
        for name, data in (content or {}).items():
            self.put(name, data)

    def put(self, name: str, data: bytes | str = b"") -> None:
        self._puts += 1
        self._content[name] = (data.encode() if isinstance(data, str) else data, f"stamp{self._puts}")

    def delete(self, name: str) -> None:
        del self._content[name]

    def objects(self, below: str = "") -> Iterator[RemoteObject]:
        self.asked.append(f"list {below}")
        if self.failing:
            raise RemoteError(self.failing)
        for name, (data, stamp) in reversed(list(self._content.items())):
            if name.startswith(below):
                yield RemoteObject(name.rstrip("/"), len(data), stamp, name.endswith("/"))

    def copy(self, found: RemoteObject, sink: Sink) -> None:
        with self._lock:
            self.asked.append(found.name)
            breaks = self.breaks.get(found.name, 0)
            self.breaks[found.name] = breaks - 1
        if self.failing:
            raise RemoteError(self.failing)
        data, stamp = self._content.get(found.name, (b"", ""))
        if stamp != found.stamp:
            raise ObjectChanged(f"{found.name} changed")
        for begin in range(0, len(data), 4):
            if breaks > 0 and begin >= len(data) // 2:
                raise RemoteError("the connection broke")
            sink.write(data[begin : begin + 4])

    def close(self) -> None:
        self.closed = True

    def copied(self) -> list[str]:
        """What was copied since this was asked last, by name."""
        copied = sorted(name for name in self.asked if not name.startswith("list "))
        self.asked.clear()
        return copied
