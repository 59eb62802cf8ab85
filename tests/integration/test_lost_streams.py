"""Executors and batchers that are killed while requests have had some of their responses: nothing is spliced.

Real processes over a real log; the test plays the gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import role_processes as roles

from charonia import keys
from charonia.clock import wall_ns
from charonia.eventlog.port import Entry, EventLog, Limits
from charonia.eventlog.redis import open_log
from charonia.facts.jobs import JobState, NewJob
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

pytestmark = pytest.mark.integration


PATIENCE_S = 60.0
MODEL_PY = '''
import json, os, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """Answers N times with its number and its executor's process; after `hold` of them it waits for the file `gate`."""

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request,)).start()

    def answer(self, request):
        sender, said = request.get_response_sender(), json.loads(request.parameters())
        count = int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0])
        for number in range(count):
            while number == said.get("hold", -1) and not os.path.exists(said["gate"]):
                time.sleep(0.005)
            value = np.array([number, os.getppid()], np.int32)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]))
        sender.send(flags=FINAL)
'''
CONFIG = """
backend: "python" max_batch_size: 0
input { name: "N" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 2 }
model_transaction_policy { decoupled: true }
instance_group { count: 1 kind: KIND_CPU }
"""
REPEATABLE = 'parameters { key: "charonia.repeatable" value { string_value: "true" } }'


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, more in (("once", ""), ("again", REPEATABLE)):
        (root / name / "1").mkdir(parents=True)
        (root / name / "1" / "model.py").write_text(MODEL_PY)
        (root / name / "config.pbtxt").write_text(CONFIG + more)
    return root


class Stack:
    """The processes of one test and its side of the log."""

    def __init__(self, log: EventLog, url: str, repository: Path, directory: Path) -> None:
        self.log, self._url, self._repository, self._directory = log, url, repository, directory
        self.gate = directory / "gate"
        self.records: dict[bytes, list[ResponseRecord]] = {}
        self._arrived = asyncio.Event()
        self._processes: list[Any] = []
        self._serial = 0
        self._reader = log.reader()
        self._reader.start(self._take)
        self._reader.add(keys.replies("gw"))

    def _take(self, _stream: bytes, entries: list[Entry]) -> None:
        for entry in entries:
            for record in records_of(entry.fields):
                response = unpack_response(bytes(record))
                self.records.setdefault(response.id, []).append(response)
        self._arrived.set()

    async def start(self, role: str) -> Any:
        flags = [f"--log-url={self._url}"]
        if role == "executor":
            flags.append(f"--model-repository={self._repository}")
        process = roles.Role(role, self._directory, *flags)
        self._processes.append(process)
        await asyncio.to_thread(process.until_up)
        return process

    async def ask(self, model: str, count: int, *, hold: int = -1, job: bool = False) -> bytes:
        self._serial += 1
        request_id = self._serial.to_bytes(16, "big")
        tensors = [Tensor.of("N", np.array([count], np.int32))]
        parameters = {"hold": hold, "gate": str(self.gate)} if hold >= 0 else {}
        record = pack_request(
            request_id,
            b"gw",
            b"",
            request_meta(1, "", tensors, (), parameters),
            [t.data for t in tensors],
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
        return request_id

    async def until(self, request_id: bytes, met: Callable[[list[ResponseRecord]], bool]) -> list[ResponseRecord]:
        async with asyncio.timeout(PATIENCE_S):
            while not met(self.records.get(request_id, [])):
                self._arrived.clear()
                await self._arrived.wait()
        return self.records[request_id]

    async def count(self, request_id: bytes, count: int) -> list[ResponseRecord]:
        return await self.until(request_id, lambda records: len(records) >= count)

    async def ended(self, request_id: bytes) -> list[ResponseRecord]:
        return await self.until(request_id, lambda records: any(record.final for record in records))

    async def close(self) -> None:
        await self._reader.close()
        for process in self._processes:
            if process.process.poll() is None:
                process.kill()


@pytest.fixture
async def stack(fresh_log_url: str, repository: Path, tmp_path: Path) -> AsyncIterator[Stack]:
    log = open_log(fresh_log_url)
    await log.open()
    await log.beat("gateway", "gw", 3_600_000)
    stack = Stack(log, fresh_log_url, repository, tmp_path)
    yield stack
    await stack.close()
    await log.close()


def numbers(records: list[ResponseRecord]) -> list[int]:
    return [int(record.outputs[0].array()[0]) for record in records if record.outputs]


def places(records: list[ResponseRecord]) -> list[tuple[int, int] | None]:
    return [record.place for record in records]


def executor_of(records: list[ResponseRecord]) -> int:
    return int(records[0].outputs[0].array()[1])


async def test_a_killed_executor_ends_or_repeats_streams_and_splices_none(stack: Stack) -> None:
    _, one, other = await asyncio.gather(stack.start("batcher"), stack.start("executor"), stack.start("executor"))
    whole = await stack.ask("once", 3)
    records = await stack.ended(whole)
    assert (numbers(records), places(records)) == ([0, 1, 2], [(1, 0), (1, 1), (1, 2), (1, 3)])

    # an instance has several of these at once: what freed its slot takes the next
    asked: dict[tuple[str, bool], bytes] = {}
    for model in ("once", "again"):
        for job in (False, True):
            asked[model, job] = await stack.ask(model, 5, hold=2, job=job)
    unseen = await stack.ask("once", 1, hold=0)
    for request_id in asked.values():
        assert executor_of(await stack.count(request_id, 2)) in (one.process.pid, other.process.pid)
    stack.gate.touch()
    assert numbers(await stack.ended(unseen)) == [0]
    for request_id in asked.values():
        assert numbers(await stack.ended(request_id)) == [0, 1, 2, 3, 4]
    stack.gate.unlink()

    asked = {}
    for model in ("once", "again"):
        for job in (False, True):
            asked[model, job] = await stack.ask(model, 5, hold=2, job=job)
    unseen = await stack.ask("once", 2, hold=0)
    first = {kind: list(await stack.count(request_id, 2)) for kind, request_id in asked.items()}
    victims = {executor_of(records) for records in first.values()}
    # both at once: the loss of one is known in milliseconds, and the other would get its streams
    dying = [executor for executor in (one, other) if executor.process.pid in victims]
    for executor in dying:
        executor.process.kill()
    for executor in dying:
        executor.process.wait()
    if len(victims) == 2:
        await stack.start("executor")
    stack.gate.touch()

    for job in (False, True):
        records = await stack.ended(asked["once", job])
        error = records[-1].error
        assert error is not None
        assert error.message.startswith("STREAM_INTERRUPTED: "), error.message
        assert (numbers(records), places(records)) == ([0, 1], [(1, 0), (1, 1), None])
    for job in (False, True):
        records = await stack.ended(asked["again", job])
        assert numbers(records) == [0, 1, 0, 1, 2, 3, 4]
        attempts = [record.place[0] for record in records if record.place is not None]
        assert attempts == [1, 1, *[attempts[-1]] * 6]
        assert attempts[-1] > 1
    assert numbers(await stack.ended(unseen)) == [0, 1], "nobody had seen anything of it"

    kept = await stack.log.job_responses("again", asked["again", True])
    assert [(attempt > 1, index) for attempt, index, _ in kept] == [(index > 1, index) for index in range(5)]
    for model, state in (("once", JobState.FAILED), ("again", JobState.SUCCEEDED)):
        record = await stack.log.job(model, asked[model, True])
        assert record is not None
        assert record.state is state
        assert await stack.log.pending(model) == (0, 0)


async def test_a_new_owner_knows_what_is_freed_and_what_was_seen(stack: Stack) -> None:
    first, executor = await asyncio.gather(stack.start("batcher"), stack.start("executor"))
    open_ = await stack.ask("once", 4, hold=2)
    job = await stack.ask("once", 4, hold=2, job=True)
    await stack.count(open_, 2)
    await stack.count(job, 2)
    first.kill()
    await stack.start("batcher")
    # the only instance has two batches that are not finished, and takes a third
    assert numbers(await stack.ended(await stack.ask("once", 2))) == [0, 1]

    executor.kill()
    await stack.start("executor")
    stack.gate.touch()
    for request_id in (open_, job):
        records = await stack.ended(request_id)
        error = records[-1].error
        assert error is not None
        assert error.message.startswith("STREAM_INTERRUPTED: "), error.message


async def test_what_was_kept_of_a_job_outlives_everybody_who_knew_of_it(stack: Stack) -> None:
    batcher, executor = await asyncio.gather(stack.start("batcher"), stack.start("executor"))
    once, again = await stack.ask("once", 4, hold=2, job=True), await stack.ask("again", 4, hold=2, job=True)
    await stack.count(once, 2)
    await stack.count(again, 2)
    batcher.kill()
    executor.kill()
    stack.gate.touch()
    await asyncio.gather(stack.start("batcher"), stack.start("executor"))
    records = await stack.ended(once)
    error = records[-1].error
    assert error is not None
    assert error.message.startswith("STREAM_INTERRUPTED: ")
    assert numbers(records) == [0, 1]
    records = await stack.ended(again)
    assert numbers(records) == [0, 1, 0, 1, 2, 3]
    kept = await stack.log.job_responses("again", again)
    assert [index for _, index, _ in kept] == [0, 1, 2, 3]
