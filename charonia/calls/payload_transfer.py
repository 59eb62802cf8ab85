"""Moves large tensors out of band, for keyless synchronous requests: a request that outlives its caller must be in the
log.

A caller that shares the payload directory with every executor of a version passes them files; otherwise large tensors
travel as blobs of the log, so that batchers need not carry them. Payloads are deleted with their request, however it
ended.

The log has a process's blob names before blobs with these names exist (`LentBlobs`), so that those of a lost process
are deleted at once, not after a day: its requests are dropped before they run. Names are drawn by the dozen, so that a
payload costs no further command. A process that was presumed dead by mistake uses new names once it has joined again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence

from charonia import keys
from charonia.catalog.catalog import ServedVersion
from charonia.clock import wall_ns
from charonia.errors import CharoniaError
from charonia.eventlog.payload_slots import MAX_SLOT_BYTES, MAX_SLOTS
from charonia.eventlog.payloads import BY_REFERENCE_BYTES, PayloadDirectory, new_blob, total_size
from charonia.eventlog.port import EventLog, Notes
from charonia.facts.events import ProcessJoined
from charonia.tensors import Buffer
from charonia.wire import BLOB, FLAG_REPLY_BY_REFERENCE, Reference

_DRAWN = 48
_FAR_US = 2**53
_PAGE = 500


class LentBlobs:
    """The blob names of one process."""

    def __init__(self, log: Notes, lender: str) -> None:
        self._log = log
        self._lender = lender
        self._drawn: dict[bool, deque[str]] = {False: deque(), True: deque()}
        self._ended: list[bytes] = []
        self._drawing = asyncio.Lock()
        self._known = False

    async def next(self, *, durable: bool) -> str:
        """A name that the log has recorded for this process. Raises `LogUnavailable`."""
        drawn = self._drawn[durable]
        while not drawn:
            async with self._drawing:
                if not drawn:
                    await self._draw(durable)
        return drawn.popleft()

    async def _draw(self, durable: bool) -> None:
        names = [new_blob(0, durable=durable).name for _ in range(_DRAWN)]
        now_us = wall_ns() // 1000
        if not self._known:
            await self._log.set_times(keys.LENDERS, {self._lender.encode(): now_us})
            self._known = True
        await self._log.set_times(keys.lent(self._lender), {name.encode(): now_us for name in names})
        ended, self._ended = self._ended, []
        await self._log.drop_times(keys.lent(self._lender), ended)
        self._drawn[durable].extend(names)

    def ended(self, name: str) -> None:
        """The blob of this name was deleted."""
        self._ended.append(name.encode())

    def begin_anew(self) -> None:
        """Others may presume this process dead and delete its payloads, or the log has a new epoch."""
        for drawn in self._drawn.values():
            drawn.clear()
        self._known = False


async def sweep_lent(log: EventLog, present: Container[str]) -> int:
    """Delete the blobs of processes that left or were lost; returns the number of names. `present` are all others.
    Raises what the log raises.
    """
    swept = 0
    lenders = [name.decode() for name in await log.due(keys.LENDERS, _FAR_US, _PAGE)]
    for lender in [lender for lender in lenders if lender not in present]:
        role = lender.partition("-")[0]
        while not (await log.alive(role, [lender]))[0]:
            names = await log.due(keys.lent(lender), _FAR_US, _PAGE)
            # a process that came back drew names after its heartbeat: it is found alive here
            if (await log.alive(role, [lender]))[0]:
                break
            if not names:
                await log.drop_times(keys.LENDERS, [lender.encode()])
                break
            await log.delete_keys([keys.blob(name.decode()) for name in names])
            await log.drop_times(keys.lent(lender), names)
            swept += len(names)
    return swept


_LONG_COPY_BYTES = 4 * 1024 * 1024
"""Copying this much takes 1 ms into a slot that was used before, 5 ms into a new one; more is copied in a thread."""

_SWEEP_S = 60.0
_BLOBS_SWEEP_S = 5.0
_SWEPT_AFTER_S = 120.0
"""Longer than any lease: a process that has just made its directory may not have joined yet."""
_BLOB_TTL_S = 86_400
"""For payloads that are not swept because their caller has left: no queue holds a synchronous request for longer."""


class Payloads:
    """The large payloads of one caller, such as a gateway. `processes` is the catalog's table of joined processes."""

    def __init__(
        self, log: EventLog, directory: PayloadDirectory, processes: Mapping[str, ProcessJoined], lender: str
    ) -> None:
        self._log = log
        self._directory = directory
        self._processes = processes
        self.blobs = LentBlobs(log, lender)
        self._left: list[str] = []
        self.leased: Callable[[], bool] = lambda: True
        """Whether this process's heartbeat lease is certain to be valid."""
        self._reach: dict[tuple[str, int], tuple[ServedVersion, int]] = {}

    @property
    def socket_path(self) -> str:
        """The socket on which this process takes replies from its machine; "" if it shares no directory."""
        return self._directory.socket_path()

    def flags(self, served: ServedVersion) -> int:
        """The record flags for how the answer may travel."""
        key = (served.model, served.version)
        known = self._reach.get(key)
        if known is None or known[0] is not served:
            shared = FLAG_REPLY_BY_REFERENCE if self._shared_with_all(served) else 0
            known = self._reach[key] = (served, shared)
        return known[1]

    def _reads_slots(self, served: ServedVersion) -> bool:
        """Whether all executors of a version that shares the directory read slots."""
        processes = [self._processes.get(executor) for executor in served.slots]
        return all(process is not None and self._directory.reads_slots(process.incarnation) for process in processes)

    def _shared_with_all(self, served: ServedVersion) -> bool:
        joined = [self._processes.get(executor) for executor in served.slots]
        return bool(joined) and all(
            process is not None and self._directory.shares_with(process.incarnation, process.payload_token)
            for process in joined
        )

    def room(self, size_bytes: int, skew: int) -> memoryview | None:
        """Memory to receive a large message into; the byte at `skew` is aligned. `lend` copies no tensor that lies in
        it, if it is a slot. None if there is none. It is released when no view of it is left and no reader has it.
        """
        slots = self._directory.slots
        return slots.receive(size_bytes, skew=skew) if slots is not None else None

    def sends_in_slots(self, served: ServedVersion, size_bytes: int) -> bool:
        """Whether to try `lend_slot` for a message of this size."""
        return (
            BY_REFERENCE_BYTES <= size_bytes < MAX_SLOT_BYTES and bool(self.flags(served)) and self._reads_slots(served)
        )

    def lend_column(self, parts: Sequence[Buffer]) -> Reference | None:
        """Put the column of a wave, in parts, into a slot; None: it travels in the record. Release it with `end_slot`.

        Half of the slots are kept for large requests, which have no cheap other way.
        """
        slots = self._directory.slots
        if slots is None or slots.outstanding >= MAX_SLOTS // 2:
            return None
        return self._directory.lend([b"".join(parts)])  # one copy more, which costs less than one for each small part

    def reads_columns(self, served: ServedVersion) -> bool:
        """Whether the column of a wave may lie in a slot: all that may read it announced that they can."""
        if not (self.flags(served) and self._reads_slots(served)):
            return False
        readers = [self._processes.get(executor) for executor in served.slots]
        readers += [process for process in self._processes.values() if process.owns_queues]
        return all(process is not None and process.reads_wave_slots for process in readers)

    def lends_at_once(self, buffers: Sequence[Buffer]) -> bool:
        """Whether `lend_slot` has little or nothing to copy."""
        return total_size(buffers) < _LONG_COPY_BYTES or self._directory.is_there(buffers)

    def lend_slot(self, buffers: Sequence[Buffer]) -> Reference | None:
        """As `lend`, at once, and in a slot or not at all. Release it with `end_slot`."""
        return self._directory.lend(buffers)

    def end_slot(self, reference: Reference) -> None:
        self._directory.remove(reference)

    async def lend(
        self, buffers: Sequence[Buffer], flags: int, served: ServedVersion | None = None, *, durable: bool = False
    ) -> Reference | None:
        """Store a request's tensor bytes out of band when they are large; None: they travel in the record. `flags` are
        those of `flags`, for the version that is `served`; `durable` is work above the level `memory`. Raises
        `LogUnavailable`. Release it with `end`.
        """
        size = total_size(buffers)
        if size < BY_REFERENCE_BYTES:
            return None
        reference = None
        if flags & FLAG_REPLY_BY_REFERENCE:
            in_slots = served is not None and self._reads_slots(served)
            if size < _LONG_COPY_BYTES or (in_slots and self._directory.is_there(buffers)):
                reference = self._store(buffers, in_slots)
            else:
                reference = await self._store_beside(buffers, in_slots)
        if reference is None:
            reference = Reference(BLOB, await self.blobs.next(durable=durable), size)
            if not self.leased():
                return None  # a process that presumes this one dead deletes its payloads
            try:
                await self._log.put_blob(reference.name, b"".join(buffers), _BLOB_TTL_S)
            except BaseException:
                self._left.append(reference.name)  # the blob may exist nevertheless
                raise
        return reference

    def _store(self, buffers: Sequence[Buffer], in_slots: bool) -> Reference | None:
        reference = self._directory.lend(buffers) if in_slots else None
        return self._directory.write(buffers) if reference is None else reference

    async def _store_beside(self, buffers: Sequence[Buffer], in_slots: bool) -> Reference | None:
        """As `_store`, in a thread: copying 100 MB would block the loop for 50 ms."""
        storing = asyncio.ensure_future(asyncio.to_thread(self._store, buffers, in_slots))
        try:
            return await asyncio.shield(storing)
        except asyncio.CancelledError:
            storing.add_done_callback(self._remove_unwanted)
            raise

    def _remove_unwanted(self, storing: asyncio.Future[Reference | None]) -> None:
        if not storing.cancelled() and storing.exception() is None and (reference := storing.result()) is not None:
            self._directory.remove(reference)

    def take(self, reference: Reference) -> memoryview:
        """An answer's tensor bytes; a file that holds them is deleted at once. Raises `InvalidRecord`."""
        try:
            return self._directory.read(reference, takes=True)
        finally:
            self._directory.remove(reference)

    async def _delete(self, names: list[str]) -> None:
        await self._log.delete_keys([keys.blob(name) for name in names])
        for name in names:
            self.blobs.ended(name)

    async def renew(self) -> None:
        """This process was presumed dead, or the log has a new epoch."""
        self.blobs.begin_anew()
        self._directory.renew()

    async def watch(self) -> None:
        """Delete, at first and periodically, payloads of processes that left, and those that could not be deleted."""
        sweep_directories_s = 0.0
        while True:
            self._directory.tidy()
            with contextlib.suppress(CharoniaError):
                await sweep_lent(self._log, self._processes)
                await self._delete_left()
            if sweep_directories_s <= 0:
                await self._sweep_directories()
                sweep_directories_s = _SWEEP_S
            await asyncio.sleep(_BLOBS_SWEEP_S)
            sweep_directories_s -= _BLOBS_SWEEP_S

    async def _delete_left(self) -> None:
        left, self._left = self._left, []
        try:
            if left:
                await self._delete(left)
        except CharoniaError:
            self._left += left
            raise

    async def _sweep_directories(self) -> None:
        with contextlib.suppress(CharoniaError):
            by_role: dict[str, list[str]] = {}
            for incarnation in self._directory.others(_SWEPT_AFTER_S):
                if keys.is_standing(incarnation):
                    continue  # it belongs to a model: its owner deletes it
                by_role.setdefault(incarnation.partition("-")[0], []).append(incarnation)
            for role, incarnations in by_role.items():
                alive = await self._log.alive(role, incarnations)
                gone = [name for name, is_alive in zip(incarnations, alive, strict=True) if not is_alive]
                self._directory.sweep(gone)

    async def end(self, reference: Reference) -> None:
        """Releases payloads that no reader needs any more."""
        if reference.kind == BLOB:
            try:
                await self._delete([reference.name])
            except CharoniaError:
                self._left.append(reference.name)
        else:
            self._directory.remove(reference)
