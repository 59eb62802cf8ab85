"""The blocks that hold keys and values: who refers to each, and which computed ones may be used again.

Pure. A block is free, held by requests (several may share one), or idle: computed, named by the hash of its text, held
by no request. Idle blocks are found by their names, and are taken again, the least recently used first, when none is
free. `executors.generation.step_scheduler` decides which request gets blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class BlockPool:
    """`size` blocks, numbered from 0."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._references = [0] * size
        self._free = list(range(size - 1, -1, -1))
        self._names: list[int | None] = [None] * size
        self._by_name: dict[int, int] = {}
        self._idle: dict[int, None] = {}

    @property
    def available(self) -> int:
        """How many blocks `take` can give."""
        return len(self._free) + len(self._idle)

    def find(self, names: Sequence[int]) -> list[int]:
        """The computed blocks of the longest known prefix of a chain. They may be gone unless `hold` follows."""
        found: list[int] = []
        for name in names:
            block = self._by_name.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, blocks: Iterable[int]) -> None:
        """Refer to blocks that `find` gave."""
        references = self._references
        for block in blocks:
            if references[block] == 0:
                del self._idle[block]
            references[block] += 1

    def take(self, count: int) -> list[int]:
        """Blocks with one reference each and no content. Raises `ValueError` when fewer are available."""
        if count > self.available:
            raise ValueError(f"{count} blocks of {self.available}")
        taken: list[int] = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block = next(iter(self._idle))
                del self._idle[block]
                name = self._names[block]
                assert name is not None
                del self._by_name[name]
                self._names[block] = None
            self._references[block] = 1
            taken.append(block)
        return taken

    def name(self, block: int, name: int) -> None:
        """Let a held block be found by its name from now on, unless another block has this name."""
        if self._names[block] is None and name not in self._by_name:
            self._names[block] = name
            self._by_name[name] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each. The last of a chain are taken again before those they follow."""
        references = self._references
        for block in reversed(blocks):
            references[block] -= 1
            if references[block] == 0:
                if self._names[block] is None:
                    self._free.append(block)
                else:
                    self._idle[block] = None

    def held_once(self, blocks: Iterable[int]) -> int:
        """How many of these blocks one release would make available."""
        references = self._references
        return sum(references[block] == 1 for block in blocks)

    def references(self) -> Sequence[int]:
        """How often each block is referred to."""
        return tuple(self._references)

    def check(self) -> None:
        """Raises `AssertionError` when a block is lost or in two places. For tests."""
        free, idle = set(self._free), set(self._idle)
        held = {block for block, count in enumerate(self._references) if count}
        assert all(count >= 0 for count in self._references)
        assert len(free) == len(self._free)
        assert not free & idle
        assert not (free | idle) & held
        assert len(free) + len(idle) + len(held) == self.size
        assert all(self._names[block] is None for block in free)
        assert all(self._names[block] is not None for block in idle)
        named = {block: name for block, name in enumerate(self._names) if name is not None}
        assert {name: block for block, name in named.items()} == self._by_name
