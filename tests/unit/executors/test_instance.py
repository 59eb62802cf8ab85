"""Workers of one version: the common queue, failures, instances that die and come back, draining."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from charonia.backend import InstanceDied, InstanceSpec, ModelRequest, ModelResponse, ModelSource
from charonia.datatypes import DataType
from charonia.errors import InvalidArgument, Unavailable
from charonia.models.interface import InstanceGroup, ModelInterface, ResourceNeed, TensorSpec
from charonia.tensors import Tensor
from charonia.wire import RequestRecord, ResponseRecord, pack_request, request_meta, unpack_request, unpack_response
from executors.accounting import Death, Executed
from executors.instance import InstancePool
from executors.job import Job
from executors.rate_limiter import RateLimiter
from executors.turns import Turnstile
from protos.model_config_pb2 import ModelConfig

MODEL = ModelInterface(
    "m",
    "test",
    "",
    4,
    {"x": TensorSpec("x", DataType.FP32, (1,))},
    {"y": TensorSpec("y", DataType.FP32, (1,))},
    required_inputs=frozenset("x"),
)
SPEC = InstanceSpec("m_0", "CPU", -1, ModelSource("m", 1, Path("/none"), ModelConfig()), MODEL)
DEADLY, WRONG, BROKEN = 666.0, 13.0, 99.0


class Doubling:
    """Doubles; dies of 666, answers wrongly to 13, raises for 99."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.gate, self.closed, self.threads = gate, False, set[int]()

    def execute(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> Mapping[str, Any]:
        self.threads.add(threading.get_ident())
        if self.gate is not None:
            assert self.gate.wait(30)
        x = inputs["x"]
        if (x == DEADLY).any():
            raise InstanceDied("gone", "last words")
        if (x == BROKEN).any():
            raise ZeroDivisionError("nought")
        return {"y": np.concatenate([x, x]) if (x == WRONG).any() else x * 2}

    def close(self) -> None:
        self.closed = True


class DoublingRequests:
    """The same over single requests."""

    def __init__(self) -> None:
        self.closed = False

    async def execute_requests(self, requests: Sequence[ModelRequest]) -> Sequence[ModelResponse]:
        await asyncio.sleep(0)
        answers = []
        for request in requests:
            x = request.inputs[0].array()
            if (x == DEADLY).any():
                raise InstanceDied("gone", "last words")
            if (x == BROKEN).any():
                answers.append(ModelResponse(error=InvalidArgument("not this one")))
            else:
                answers.append(ModelResponse([Tensor.of("y", x * 2)], {"p": 1}))
        return answers[:-1] if any((r.inputs[0].array() == WRONG).any() for r in requests) else answers

    async def close_instance(self) -> None:
        self.closed = True


def record(value: float, number: int = 0, deadline_ns: int = 0) -> RequestRecord:
    tensor = Tensor.of("x", np.full((1, 1), value, np.float32))
    packed = pack_request(
        number.to_bytes(16, "big"),
        b"gw",
        b"",
        request_meta(1, "", [tensor], (), {}),
        [tensor.data],
        rows=1,
        signature=0,
        level=0,
        accepted_ns=1,
        deadline_ns=deadline_ns,
    )
    return unpack_request(packed)


class Pool:
    """A pool and what comes out of it."""

    def __init__(
        self, *instances: Any, create: Any = None, passive: bool = False, group: Any = None, **fields: Any
    ) -> None:
        async def none(_spec: InstanceSpec) -> Any:
            raise Unavailable("no instance to be had")

        self.pool = InstancePool(MODEL, 1, create or none, **fields)
        for instance in instances:
            self.pool.add(SPEC, instance, group or InstanceGroup("m", 1, "KIND_CPU", passive=passive))
        self.pool.start()

    def run(self, *values: float) -> asyncio.Future[Executed]:
        return self.run_job([record(value, i) for i, value in enumerate(values)])[1]

    def run_job(self, records: Sequence[RequestRecord], **fields: Any) -> tuple[Job, asyncio.Future[Executed]]:
        future: asyncio.Future[Executed] = asyncio.get_running_loop().create_future()
        job = Job(records, lambda _job, executed: future.set_result(executed), **fields)
        self.pool.submit(job)
        return job, future

    async def submit(self, *values: float) -> list[ResponseRecord]:
        return [unpack_response(answer) for answer in (await self.run(*values)).answers]


def values(responses: list[ResponseRecord]) -> list[float]:
    return [float(response.outputs[0].array()[0, 0]) for response in responses]


async def test_batches_run_in_threads_of_the_instances_own() -> None:
    instance = Doubling()
    under = Pool(instance)
    assert values(await under.submit(1, 2, 3)) == [2, 4, 6]
    await under.pool.close()
    assert instance.closed
    assert threading.get_ident() not in instance.threads


async def test_a_busy_instance_holds_nothing_back_from_a_free_one() -> None:
    gate = threading.Event()
    under = Pool(Doubling(gate), Doubling())
    assert under.pool.slots == 2
    answers = [asyncio.ensure_future(under.submit(i)) for i in range(6)]
    # one of them is stuck behind the gate; the other instance does all the rest
    _done, stuck = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED, timeout=30)
    while len(stuck) > 1:
        more, stuck = await asyncio.wait(stuck, return_when=asyncio.FIRST_COMPLETED, timeout=30)
        assert more
    gate.set()
    assert [values(await answer) for answer in answers] == [[2 * i] for i in range(6)]
    await under.pool.close()


@pytest.mark.parametrize(
    ("value", "text"),
    [(BROKEN, "ZeroDivisionError: nought"), (WRONG, "expecting a batch dimension of 2")],
)
async def test_a_batch_that_fails_fails_whole_and_the_next_one_runs(value: float, text: str) -> None:
    under = Pool(Doubling())
    for response in await under.submit(1, value):
        assert response.error is not None
        assert text in response.error.message
    assert values(await under.submit(5)) == [10]
    await under.pool.close()


async def test_what_is_past_its_deadline_never_starts() -> None:
    under = Pool(Doubling())
    future: asyncio.Future[Executed] = asyncio.get_running_loop().create_future()
    under.pool.submit(
        Job([record(1, 0, deadline_ns=1), record(2, 1)], lambda _job, executed: future.set_result(executed))
    )
    executed = await future
    late, fine = (unpack_response(answer) for answer in executed.answers)
    assert late.error is not None
    assert late.error.code.name == "DEADLINE_EXCEEDED"
    assert values([fine]) == [4]
    assert [failure.reason for failure in executed.failures] == ["fail_REJECTED"]
    await under.pool.close()


async def test_requests_of_an_instance_over_requests_fail_alone() -> None:
    """I13."""
    instance = DoublingRequests()
    under = Pool(instance)
    good, bad = await under.submit(1, BROKEN)
    assert values([good]) == [2]
    assert good.parameters == {"p": 1}
    assert bad.error is not None
    assert bad.error.message == "not this one"
    for response in await under.submit(1, WRONG):
        assert response.error is not None
        assert "answered 1 of 2 requests" in response.error.message
    await under.pool.close()
    assert instance.closed


@pytest.mark.parametrize("kind", [Doubling, DoublingRequests])
async def test_an_instance_that_dies_leaves_its_batch_without_answers_and_is_made_again(kind: Any) -> None:
    """P19."""
    first, created = kind(), []

    async def create(spec: InstanceSpec) -> Any:
        assert spec is SPEC
        created.append(kind())
        return created[-1]

    under = Pool(first, create=create)
    executed = await under.run(1, DEADLY)
    assert executed.answers == [b"", b""]  # it is the batcher who finds out which of them did it
    assert executed.failures == []
    assert executed.death == Death("m_0", "gone", "last words")
    assert values(await under.submit(4)) == [8]
    assert first.closed
    assert len(created) == 1
    await under.pool.close()
    assert created[0].closed


@pytest.mark.parametrize("kind", [Doubling, DoublingRequests])
async def test_waiting_batches_are_failed_when_no_instance_can_be_made(kind: Any) -> None:
    under = Pool(kind())
    deadly = under.run(DEADLY)
    for answer in [asyncio.ensure_future(under.submit(1)), asyncio.ensure_future(under.submit(2))]:
        (response,) = await asyncio.wait_for(answer, 30)
        assert response.error is not None
        assert response.error.message == "Stub process 'm_0' is not healthy."
    assert (await deadly).death is not None
    await asyncio.wait_for(under.pool.close(), 30)


async def test_queued_batches_can_be_taken_back_and_running_ones_finish() -> None:
    gate, instance = threading.Event(), Doubling()
    instance.gate = gate
    under = Pool(instance)
    running = asyncio.ensure_future(under.submit(1))
    while not instance.threads:
        await asyncio.sleep(0)
    under.run(2)
    under.run(3)
    assert len(under.pool.take_back()) == 2
    assert under.pool.unfinished == 1
    gate.set()
    await under.pool.idle()
    assert values(await running) == [2]
    await under.pool.close()


async def test_a_passive_instance_gets_no_work_but_is_closed() -> None:
    """C8."""
    instance = Doubling()
    under = Pool(instance, passive=True)
    assert under.pool.slots == 0
    await under.pool.close()
    assert instance.closed
    assert not instance.threads


async def test_an_instance_told_to_end_dies_without_blame() -> None:
    gate, instance = threading.Event(), Doubling()
    instance.gate = gate
    under = Pool(instance)
    deadly = under.run(DEADLY)
    closing = asyncio.ensure_future(under.pool.close())
    while not under.pool._workers[0]._closing.is_set():
        await asyncio.sleep(0)
    gate.set()
    await asyncio.wait_for(closing, 30)
    death = (await deadly).death
    assert death is not None
    assert death.blameless


async def test_a_queued_batch_leaves_out_what_was_settled_meanwhile() -> None:
    gate, instance = threading.Event(), Doubling()
    instance.gate = gate
    under = Pool(instance)
    running = under.run(1)
    job, queued = under.run_job([record(2, 2), record(3, 3)])
    under.pool.cancel(job, frozenset([(3).to_bytes(16, "big")]))
    gate.set()
    await running
    executed = await queued
    assert values([unpack_response(executed.answers[0])]) == [4]
    assert executed.answers[1] == b""
    assert [execution.rows for execution in executed.executions] == [1]
    assert executed.failures == []
    await under.pool.close()


@pytest.mark.parametrize("kind", [Doubling, DoublingRequests])
async def test_a_batch_knows_what_of_it_has_begun(kind: Any) -> None:
    under = Pool(kind())
    job, future = under.run_job([record(1, 0, deadline_ns=1), record(2, 1)])
    assert job.planned == ()
    await future
    assert [index for index, _ in job.planned] == [1]
    await under.pool.close()


async def test_a_batch_that_outlasts_its_ceiling_is_told_of_and_the_others_go_on() -> None:
    gate, hangs = threading.Event(), Doubling()
    hangs.gate = gate
    told: asyncio.Future[tuple[Job, Death]] = asyncio.get_running_loop().create_future()
    under = Pool(hangs, Doubling(), ceiling_s=0.2, on_hung=lambda job, death: told.set_result((job, death)))
    futures = {}
    while not hangs.threads:  # whichever batch the hanging instance takes
        job, future = under.run_job([record(1)])
        futures[job] = future
        await asyncio.sleep(0)
    job, death = await asyncio.wait_for(told, 30)
    assert (death.instance, death.reason) == ("m_0", "it exceeded max_execution_s (0.2 s)")
    assert "gate.wait" in death.stderr  # where it hangs
    await under.pool.idle()  # the hanging one is given up
    assert [j for j, future in futures.items() if not future.done()] == [job]
    gate.set()
    await asyncio.wait_for(under.pool.close(), 30)
    assert not futures[job].done()  # whatever it returns now is not heard


class Waiting(DoublingRequests):
    """Answers when it is told that its request is cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[int] = []
        self.began, self.told = asyncio.Event(), asyncio.Event()

    async def execute_requests(self, requests: Sequence[ModelRequest]) -> Sequence[ModelResponse]:
        self.runs.append(len(requests))
        self.began.set()
        await self.told.wait()
        return await super().execute_requests(requests)

    def cancel_requests(self, requests: Sequence[ModelRequest]) -> None:
        self.told.set()


async def test_a_cancel_reaches_the_run_and_keeps_the_rest_from_starting() -> None:
    instance = Waiting()
    under = Pool(instance)
    # more rows than the model takes at once: two runs of four, and a third
    records = [record(number, number) for number in range(9)]
    job, future = under.run_job(records)
    await instance.began.wait()
    assert instance.runs == [4]
    under.pool.cancel(job, frozenset(record.id for record in [records[0], *records[4:8]]))
    executed = await asyncio.wait_for(future, 30)
    assert instance.runs == [4, 1]
    assert [bool(answer) for answer in executed.answers] == [True] * 4 + [False] * 4 + [True]
    await under.pool.close()


# -- with a rate limiter -----------------------------------------------------------------------------------------------


class Limited:
    """Pools whose instances share resources, and gates that hold executions where they are."""

    def __init__(self) -> None:
        self.turnstile = Turnstile(RateLimiter())
        self.pools: list[Pool] = []

    def pool(self, *needs: ResourceNeed, instances: Sequence[Any], priority: int = 0, create: Any = None) -> Pool:
        group = InstanceGroup("m", len(instances), "KIND_CPU", resources=needs, priority=priority)
        under = Pool(*instances, create=create, group=group, turnstile=self.turnstile)
        self.pools.append(under)
        return under

    async def close(self) -> None:
        for under in self.pools:
            await under.pool.close()
        assert self.turnstile.limiter.counts() == {}


async def test_executions_of_two_models_that_share_a_resource_exclude_each_other() -> None:
    gate = threading.Event()
    limited = Limited()
    first = limited.pool(ResourceNeed("r", 1), instances=[Doubling(gate)])
    second = limited.pool(ResourceNeed("r", 1), instances=[DoublingRequests(), DoublingRequests()])
    held = first.run(1)
    waiting = [second.run(value) for value in (2, 3, 4)]
    await asyncio.sleep(0)
    assert second.pool.waiting_requests == 3
    assert limited.turnstile.limiter.used() == {(0, "r"): 1}
    assert not any(future.done() for future in waiting)
    gate.set()
    answered = [values([unpack_response(a) for a in (await future).answers]) for future in (held, *waiting)]
    assert answered == [[2], [4], [6], [8]]
    assert second.pool.waiting_requests == 0
    assert limited.turnstile.limiter.used() == {}
    await limited.close()


async def test_an_instance_that_died_gives_its_resources_back_and_another_takes_its_batches() -> None:
    limited = Limited()
    come_back = asyncio.Event()

    async def create(_spec: InstanceSpec) -> Any:
        await come_back.wait()
        return Doubling()

    under = limited.pool(ResourceNeed("r", 1), instances=[Doubling()], create=create)
    other = limited.pool(ResourceNeed("r", 1), instances=[Doubling()])
    died = under.run(DEADLY)
    waits = under.run(5)
    assert (await died).death is not None
    assert values(await other.submit(7)) == [14]  # nothing is held by the dead
    assert not waits.done()
    come_back.set()
    assert values([unpack_response(a) for a in (await waits).answers]) == [10]
    await limited.close()


async def test_what_waits_for_its_turn_can_be_taken_back() -> None:
    gate = threading.Event()
    limited = Limited()
    blocker = limited.pool(ResourceNeed("r", 1), instances=[Doubling(gate)])
    under = limited.pool(ResourceNeed("r", 1), instances=[Doubling()])
    held = blocker.run(1)
    jobs = [under.run_job([record(value)])[0] for value in (1, 2)]
    assert under.pool.take_back() == jobs
    await under.pool.idle()
    gate.set()
    await held
    assert values(await under.submit(3)) == [6]
    await limited.close()


async def test_a_pool_whose_needs_cannot_be_met_is_refused() -> None:
    limited = Limited()
    limited.pool(ResourceNeed("r", 1), instances=[Doubling()])
    with pytest.raises(InvalidArgument, match="both global and device-specific"):
        limited.pool(ResourceNeed("r", 1, True), instances=[Doubling()])
    await limited.close()
