"""Any sequence of lending, reading, late readers, deaths and sweeps: a reader sees its own bytes or none."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.errors import InvalidRecord
from charonia.eventlog import payload_slots as slots
from charonia.eventlog.payload_slots import SlotPool, SlotReader

_SIZES = [1, 100, 30_000, 33_000, 50_000, 64_000]
_MAX_BYTES = 320 * 1024
_READER = "r-1"


def content(number: int, size: int) -> bytes:
    return (number.to_bytes(4, "big") * (size // 4 + 1))[:size]


class _World:
    """One owner, two readers, and what each of them holds."""

    def __init__(self, root: Path, choose: random.Random) -> None:
        self.choose = choose
        self.root = root
        (root / "o-1").mkdir()
        (root / _READER).mkdir()
        self.pool = SlotPool(root / "o-1", max_bytes=_MAX_BYTES)
        self.readers = [SlotReader(root), SlotReader(root)]
        self.made = 0
        self.written: list[tuple[memoryview, int]] = []
        self.payloads: list[tuple[str, int, int, bool]] = []
        """Name, number, size, whether it was given to one reader."""
        self.over: set[str] = set()
        """Payloads that may be gone."""
        self.views: list[tuple[memoryview, bytes]] = []

    def lend(self) -> None:
        size = self.choose.choice(_SIZES)
        view = self.pool.lend(size, skew=self.choose.randrange(size))
        if view is not None:
            self.made += 1
            view[:] = content(self.made, size)
            self.written.append((view, self.made))

    def send(self) -> None:
        if self.written:
            view, number = self.written.pop(self.choose.randrange(len(self.written)))
            name, given_to_one = self.pool.name_of(view), self.choose.random() < 0.5
            assert name is not None
            if given_to_one:
                self.pool.give(name, view, _READER)
            else:
                self.pool.keep(name, view)
            self.payloads.append((name, number, len(view), given_to_one))

    def abandon(self) -> None:
        """A client left in the middle of its message."""
        if self.written:
            self.written.pop(self.choose.randrange(len(self.written)))

    def read(self) -> None:
        if self.payloads:
            name, number, size, given_to_one = self.choose.choice(self.payloads)
            try:
                view = self.choose.choice(self.readers).read("o-1/" + name, size, takes=given_to_one)
            except InvalidRecord:
                assert name in self.over
                return
            if given_to_one:
                self.over.add(name)
            self.views.append((view, content(number, size)))

    def let_go(self) -> None:
        if self.views:
            view, expected = self.views.pop(self.choose.randrange(len(self.views)))
            assert bytes(view) == expected

    def end(self) -> None:
        kept = [name for name, _, _, given_to_one in self.payloads if not given_to_one]
        if kept:
            self.pool.drop(name := self.choose.choice(kept))
            self.over.add(name)

    def reader_begins_again(self) -> None:
        which = self.choose.randrange(2)
        self.readers[which].close()
        self.readers[which] = SlotReader(self.root)

    def tidy(self) -> None:
        self.pool.tidy()
        for reader in self.readers:
            reader.tidy()

    def tidy_late(self) -> None:
        """Long after the last use of anything."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(slots, "IDLE_S", -1.0)
            patch.setattr(slots, "UNTAKEN_S", 0.0)
            self.tidy()
        self.over |= {name for name, _, _, given_to_one in self.payloads if given_to_one}

    def check(self) -> None:
        for view, expected in self.views:
            assert bytes(view) == expected
        for view, number in self.written:
            assert bytes(view) == content(number, len(view))
        sizes = sum(path.stat().st_size - 4096 for path in (self.root / "o-1").iterdir())
        assert sizes == self.pool.size_bytes <= _MAX_BYTES


_STEPS = ["lend", "lend", "send", "send", "read", "read", "abandon", "let_go", "end", "reader_begins_again", "tidy"]


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.sampled_from([*_STEPS, "tidy_late"]), max_size=60), st.randoms(use_true_random=False))
def test_readers_see_their_own_bytes_or_none(steps: list[str], choose: random.Random) -> None:
    with tempfile.TemporaryDirectory() as made:
        world = _World(Path(made), choose)
        for step in steps:
            getattr(world, step)()
            world.check()
        for name, *_ in world.payloads:
            world.pool.drop(name)
        world.written.clear()
        world.views.clear()
        world.tidy_late()
        assert world.pool.size_bytes == 0  # whatever happened, nothing is held for ever
