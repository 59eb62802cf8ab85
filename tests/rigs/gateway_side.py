"""Executors and batchers as processes over a real log; the test is their gateway: it sends, and reads the replies."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import role_processes as roles

from charonia import keys
from charonia.clock import wall_ns
from charonia.eventlog.port import Entry, EventLog, Limits
from charonia.eventlog.redis import open_log
from charonia.facts.jobs import NewJob
from charonia.tensors import Tensor
from charonia.wire import (
    FIELD_RECORD,
    FLAG_JOB,
    FLAG_JOURNALLED,
    ResponseRecord,
    pack_request,
    records_of,
    request_meta,
    unpack_response,
)


class GatewaySide:
    """The processes of one test and its side of the log. A test says in `take` what it keeps of responses."""

    PATIENCE_S = 60.0

    def __init__(self, log: EventLog, url: str, directory: Path, repository: Path) -> None:
        self.log, self.url, self.directory, self._repository = log, url, directory, repository
        self.gate = directory / "gate"
        self._arrived = asyncio.Event()
        self._processes: list[Any] = []
        self._reader = log.reader()
        self._reader.start(self._take)
        self._reader.add(keys.replies("gw"))

    @classmethod
    @asynccontextmanager
    async def over(cls, url: str, directory: Path, repository: Path) -> AsyncIterator[Self]:
        """A log that is opened, with the gateway `gw` alive on it; all processes end with it."""
        log = open_log(url)
        await log.open()
        await log.beat("gateway", "gw", 3_600_000)
        side = cls(log, url, directory, repository)
        yield side
        await side.close()
        await log.close()

    def take(self, response: ResponseRecord) -> None:
        raise NotImplementedError

    def _take(self, _stream: bytes, entries: list[Entry]) -> None:
        for entry in entries:
            for record in records_of(entry.fields):
                self.take(unpack_response(bytes(record)))
        self._arrived.set()

    async def start(self, role: str, *more: str, waits: bool = True) -> Any:
        """A new process of a role; with `waits` when it is up."""
        flags = [f"--log-url={self.url}", *more]
        if role == "executor":
            flags.append(f"--model-repository={self._repository}")
        process = roles.Role(role, self.directory, *flags)
        self._processes.append(process)
        if waits:
            await asyncio.to_thread(process.until_up)
        return process

    async def send(
        self,
        model: str,
        request_id: bytes,
        tensors: Sequence[Tensor],
        parameters: Mapping[str, Any],
        *,
        job: bool = False,
    ) -> None:
        """Put a request, or a job, into the model's queue."""
        record = pack_request(
            *(request_id, b"gw", b"", request_meta(1, "", tensors, (), parameters), [t.data for t in tensors]),
            rows=1,
            signature=0,
            level=0,
            accepted_ns=wall_ns(),
            flags=FLAG_JOB | FLAG_JOURNALLED if job else 0,
        )
        if job:
            new = NewJob(request_id, len(record), wall_ns() // 1000, 3600)
            await self.log.accept_job(model, 0, 0, new, [FIELD_RECORD, record], Limits())
        else:
            await self.log.accept(model, 0, 0, [(request_id, len(record))], [FIELD_RECORD, record], Limits())

    async def until(self, met: Callable[[], bool]) -> None:
        """Wait for what responses make true."""
        async with asyncio.timeout(self.PATIENCE_S):
            while not met():
                self._arrived.clear()
                await self._arrived.wait()

    async def left_nothing(self, model: str, ids: Sequence[bytes]) -> None:
        """Wait until nothing of these requests, which have ended, is left in the log."""
        async with asyncio.timeout(self.PATIENCE_S):
            while await self.log.unsettled_ids(model):
                await asyncio.sleep(0.01)
        assert await self.log.progress_ids(model) == []
        assert not any(await self.log.progress(model, ids))
        assert await self.log.pending(model) == (0, 0)

    async def close(self) -> None:
        await self._reader.close()
        for process in self._processes:
            if process.process.poll() is None:
                process.process.send_signal(signal.SIGCONT)
                process.kill()
