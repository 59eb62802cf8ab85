"""Executors and batchers that are killed while requests have had some of their responses: nothing is spliced.

Real processes over a real log; the test plays the gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gateway_side import GatewaySide

from charonia.calls.request_endings import BY_CALLER, end_jobs
from charonia.facts.jobs import JobState
from charonia.tensors import Tensor
from charonia.wire import (
    ResponseRecord,
)

pytestmark = pytest.mark.integration


MODEL_PY = '''
import json, os, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """Answers N times with its number and its executor's process; after `hold` of them it waits for the file `gate`,
    or until it is cancelled."""

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request,)).start()

    def answer(self, request):
        sender, said = request.get_response_sender(), json.loads(request.parameters())
        count = int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0])
        for number in range(count):
            while number == said.get("hold", -1) and not os.path.exists(said["gate"]):
                if request.is_cancelled():
                    open(said["gate"] + ".cancelled", "w").close()
                    sender.send(flags=FINAL)
                    return
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


class Stack(GatewaySide):
    """Keeps the responses to each request."""

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self.records: dict[bytes, list[ResponseRecord]] = {}
        self._serial = 0

    def take(self, response: ResponseRecord) -> None:
        self.records.setdefault(response.id, []).append(response)

    async def ask(self, model: str, count: int, *, hold: int = -1, job: bool = False) -> bytes:
        self._serial += 1
        request_id = self._serial.to_bytes(16, "big")
        parameters = {"hold": hold, "gate": str(self.gate)} if hold >= 0 else {}
        await self.send(model, request_id, [Tensor.of("N", np.array([count], np.int32))], parameters, job=job)
        return request_id

    async def count(self, request_id: bytes, count: int) -> list[ResponseRecord]:
        await self.until(lambda: len(self.records.get(request_id, [])) >= count)
        return self.records[request_id]

    async def ended(self, request_id: bytes) -> list[ResponseRecord]:
        await self.until(lambda: any(record.final for record in self.records.get(request_id, [])))
        return self.records[request_id]


@pytest.fixture
async def stack(fresh_log_url: str, repository: Path, tmp_path: Path) -> AsyncIterator[Stack]:
    async with Stack.over(fresh_log_url, tmp_path, repository) as stack:
        yield stack


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
        await stack.left_nothing(model, [asked[model, False], asked[model, True]])


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


async def test_a_job_that_is_cancelled_while_its_model_has_no_owner_is_stopped_by_the_next_one(stack: Stack) -> None:
    first, _ = await asyncio.gather(stack.start("batcher"), stack.start("executor"))
    job = await stack.ask("once", 4, hold=2, job=True)
    await stack.count(job, 2)
    first.kill()
    record = await stack.log.job("once", job)
    assert record is not None
    assert await end_jobs(stack.log, "once", [record], BY_CALLER) == [record]
    await stack.start("batcher")
    async with asyncio.timeout(stack.PATIENCE_S):
        while not stack.gate.with_name("gate.cancelled").exists():
            await asyncio.sleep(0.01)
    await stack.left_nothing("once", [job])


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
