"""Shared memory objects of a client, as files of the memory file system; all are gone when the test ends."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest


class MemoryObjects:
    """`make` gives the key of a new object."""

    def __init__(self) -> None:
        self._paths: list[Path] = []

    def make(self, content: bytes) -> str:
        key = f"/test-{secrets.token_hex(8)}"
        self.path(key).write_bytes(content)
        self._paths.append(self.path(key))
        return key

    def path(self, key: str) -> Path:
        return Path("/dev/shm") / key.lstrip("/")

    def close(self) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)


@pytest.fixture
def objects() -> Iterator[MemoryObjects]:
    made = MemoryObjects()
    yield made
    made.close()
