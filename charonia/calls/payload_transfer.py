"""Sends large tensors beside the log and takes large answers from there.

Only for keyless synchronous requests: what outlives its caller must be in the log itself. A caller that shares the
payload directory with every executor of a version lends them files; else large tensors travel as blobs of the log, so
that batchers need not carry them. Payloads end with their request, however it was answered.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence

from charonia import keys
from charonia.catalog.catalog import ServedVersion
from charonia.errors import CharoniaError
from charonia.eventlog.payload_slots import MAX_SLOT_BYTES
from charonia.eventlog.payloads import BY_REFERENCE_BYTES, PayloadDirectory, total_size
from charonia.eventlog.port import EventLog
from charonia.facts.events import ProcessJoined
from charonia.tensors import Buffer
from charonia.wire import BLOB, FLAG_REPLY_BY_REFERENCE, Reference

from .lent_blobs import LentBlobs, sweep_lent

_LONG_COPY_BYTES = 8 * 1024 * 1024
"""Copying so much takes 2 ms; more of it is done in a thread."""

_SWEEP_S = 60.0
_BLOBS_SWEEP_S = 5.0
_SWEPT_AFTER_S = 120.0
"""Longer than any lease: a process that has just made its directory has not joined yet."""
_BLOB_TTL_S = 86_400
"""For payloads that are not swept, as their caller is gone: no queue holds a synchronous request for longer."""


class Payloads:
    """The large payloads of one caller, be it a gateway. `processes` is the catalog's table of who has joined."""

    def __init__(
        self, log: EventLog, directory: PayloadDirectory, processes: Mapping[str, ProcessJoined], lender: str
    ) -> None:
        self._log = log
        self._directory = directory
        self._processes = processes
        self.blobs = LentBlobs(log, lender)
        self._left: list[str] = []
        self.leased: Callable[[], bool] = lambda: True
        """Whether this process's heartbeat lease has surely not ended."""
        self._reach: dict[tuple[str, int], tuple[ServedVersion, int]] = {}

    @property
    def socket_path(self) -> str:
        """Where this process takes replies of others on its machine; "" where it shares no directory."""
        return self._directory.socket_path()

    def flags(self, served: ServedVersion) -> int:
        """What a request's record says about the answer's way."""
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
        """Memory to receive a large message into; the byte at `skew` is aligned. `lend` copies no tensor that is in it.

        None where there is none. It is free again when no view of it is left and no reader has it.
        """
        slots = self._directory.slots
        return slots.lend(size_bytes, skew=skew) if slots is not None else None

    def sends_in_slots(self, served: ServedVersion, size_bytes: int) -> bool:
        """Whether `lend_slot` is worth trying for so many bytes."""
        return (
            BY_REFERENCE_BYTES <= size_bytes < MAX_SLOT_BYTES and bool(self.flags(served)) and self._reads_slots(served)
        )

    def lend_slot(self, buffers: Sequence[Buffer]) -> Reference | None:
        """As `lend`, at once, and in a slot or not at all. Give it back with `end_slot`."""
        return self._directory.lend(buffers)

    def end_slot(self, reference: Reference) -> None:
        self._directory.remove(reference)

    async def lend(
        self, buffers: Sequence[Buffer], flags: int, served: ServedVersion | None = None, *, durable: bool = False
    ) -> Reference | None:
        """Put a request's tensor bytes beside the log when they are large; None: they travel in the record.

        `flags` are those of `flags`, for the version that is `served`; `durable` is work above the level `memory`.
        Raises `LogUnavailable`. Give it back with `end`.
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
                return None  # a process that presumes us dead sweeps our payloads
            try:
                await self._log.put_blob(reference.name, b"".join(buffers), _BLOB_TTL_S)
            except BaseException:
                self._left.append(reference.name)  # it may be there all the same
                raise
        return reference

    def _store(self, buffers: Sequence[Buffer], in_slots: bool) -> Reference | None:
        reference = self._directory.lend(buffers) if in_slots else None
        return self._directory.write(buffers) if reference is None else reference

    async def _store_beside(self, buffers: Sequence[Buffer], in_slots: bool) -> Reference | None:
        """As `_store`, in a thread: copying 100 MB would keep the loop for 50 ms."""
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
        """An answer's tensor bytes; a file they lie in is gone at once. Raises `InvalidRecord`."""
        try:
            return self._directory.read(reference, takes=True)
        finally:
            self._directory.remove(reference)

    async def _delete(self, names: list[str]) -> None:
        await self._log.delete_keys([keys.blob(name) for name in names])
        for name in names:
            self.blobs.ended(name)

    async def renew(self) -> None:
        """This process was held for lost, or the log is another one."""
        self.blobs.begin_anew()

    async def watch(self) -> None:
        """Remove, now and again and again, what processes that are no more have left, and what could not be removed."""
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
                    continue  # of a model: its owner sees to it
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
