"""`ClusterReader`: follows streams of a Redis Cluster with one `RedisReader` for each slot in use.

A command may name streams of one slot only, and a blocking read occupies its connection. When a slot moves, a reader at
its new server continues where the old one stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from charonia.eventlog.port import START, OnEntries
from charonia.eventlog.redis.reader import RedisReader
from charonia.eventlog.redis.server.topology import Topology, slot_of
from charonia.tasks import Tasks


class Node(Protocol):
    """One server's part of the log."""

    def reader(self) -> RedisReader: ...


class _SlotReader:
    """The streams of one slot and their server; without a reader while no server holds the slot."""

    __slots__ = ("moving", "node", "reader", "streams", "up")

    def __init__(self) -> None:
        self.node: Node | None = None
        self.reader: RedisReader | None = None
        self.streams: dict[bytes, tuple[bytes, bool, OnEntries | None]] = {}
        self.up = False
        self.moving = False
        """The read was refused because the slot has moved, which does not mean that the log is lost."""


class ClusterReader:
    """`StreamReader` on a Redis Cluster. `holder(slot)` returns the server that holds a slot, None while none does."""

    def __init__(self, topology: Topology, holder: Callable[[int], Node | None]) -> None:
        self._topology = topology
        self._holder = holder
        self._slots: dict[int, _SlotReader] = {}
        self._on_entries: OnEntries | None = None
        self._on_state: Callable[[bool], None] | None = None
        self._told: bool | None = None
        self._tasks = Tasks()
        self._started = self._closed = False
        topology.listeners.append(self._moved)

    def start(self, on_entries: OnEntries | None = None, on_state: Callable[[bool], None] | None = None) -> None:
        self._on_entries = on_entries
        self._on_state = on_state
        self._started = True
        for slot in self._slots:
            self._place(slot)

    def add(self, stream: bytes, after: bytes = START, *, consume: bool = False, take: OnEntries | None = None) -> None:
        slot = slot_of(stream)
        of_slot = self._slots.setdefault(slot, _SlotReader())
        if stream in of_slot.streams:
            return
        of_slot.streams[stream] = (after, consume, take)
        if of_slot.reader is not None:
            of_slot.reader.add(stream, after, consume=consume, take=take)
        else:
            self._place(slot)

    def remove(self, stream: bytes) -> None:
        slot = slot_of(stream)
        of_slot = self._slots.get(slot)
        if of_slot is None or of_slot.streams.pop(stream, None) is None:
            return
        if of_slot.reader is not None:
            of_slot.reader.remove(stream)

    async def close(self) -> None:
        self._closed = True
        if self._moved in self._topology.listeners:
            self._topology.listeners.remove(self._moved)
        readers = [of_slot.reader for of_slot in self._slots.values() if of_slot.reader is not None]
        self._slots.clear()
        await asyncio.gather(*(reader.close() for reader in readers), self._tasks.settled(), return_exceptions=True)

    # -- places -------------------------------------------------------------------------------------------------------

    def _moved(self) -> None:
        for slot in list(self._slots):
            self._place(slot)

    def _place(self, slot: int) -> None:
        """Read a slot at its current server."""
        of_slot = self._slots[slot]
        node = self._holder(slot)
        if self._closed or not self._started or node is None or node is of_slot.node:
            return
        former, reader = of_slot.reader, node.reader()
        of_slot.node, of_slot.reader = node, reader
        reader.on_refused = lambda reply: self._refused(of_slot, reply)
        if former is not None:
            former.hand_over(reader)
            self._tasks.spawn(former.close())
        else:
            for stream, (after, consume, take) in of_slot.streams.items():
                reader.add(stream, after, consume=consume, take=take)
        reader.start(self._on_entries, lambda up: self._state(of_slot, reader, up))

    def _refused(self, of_slot: _SlotReader, reply: str) -> None:
        if reply.startswith(("MOVED", "ASK", "TRYAGAIN")):
            of_slot.moving = True
            self._spawn_refresh()

    def _spawn_refresh(self) -> None:
        if not self._closed:
            self._tasks.spawn(self._topology.refresh())

    # -- state --------------------------------------------------------------------------------------------------------

    def _state(self, of_slot: _SlotReader, reader: RedisReader, up: bool) -> None:
        if of_slot.reader is not reader:
            return
        if not up:
            self._spawn_refresh()
        if up or not of_slot.moving:
            of_slot.up = up
            of_slot.moving = False
            self._tell()

    def _tell(self) -> None:
        """The log is available when every slot is."""
        up = all(of_slot.up for of_slot in self._slots.values())
        if up != self._told and self._on_state is not None and not self._closed and (up or self._told is not None):
            self._told = up
            self._on_state(up)
