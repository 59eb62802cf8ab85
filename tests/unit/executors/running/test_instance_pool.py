"""Workers of one version: the common queue, failures, instances that die and come back, draining."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from instance_pool import BROKEN, DEADLY, SPEC, WRONG, Doubling, DoublingRequests, Pool, record, values
from wave_senders import meta_of_one

from charonia.backend import DeviceLost, InstanceSpec, ModelRequest, ModelResponse
from charonia.errors import Unavailable
from charonia.tensors import Tensor
from charonia.wire import unpack_response, unpack_wave, wave_head
from executors.batches.batch_results import Death, Executed
from executors.batches.wave_execution import ExecutedWaves
from executors.running.submitted_batch import SubmittedBatch


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
        SubmittedBatch(
            [record(1, 0, deadline_ns=1), record(2, 1)], lambda _batch, executed: future.set_result(executed)
        )
    )
    executed = await future
    late, fine = (unpack_response(answer) for answer in executed.answers)
    assert late.error is not None
    assert late.error.code.name == "DEADLINE_EXCEEDED"
    assert values([fine]) == [4]
    assert [failure.reason for failure in executed.failures] == ["REJECTED"]
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


@pytest.mark.parametrize("kind", [Doubling, DoublingRequests])
async def test_waiting_batches_wait_for_an_instance_that_is_made_at_the_third_try(kind: Any) -> None:
    tries = 0
    gate = asyncio.Event()

    async def create(_: InstanceSpec) -> Any:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise Unavailable("it did not start in time")
        await gate.wait()
        return kind()

    under = Pool(kind(), create=create)
    deadly = under.run(DEADLY)
    waiting = [asyncio.ensure_future(under.submit(1)), asyncio.ensure_future(under.submit(2))]
    async with asyncio.timeout(30):
        assert (await deadly).death is not None
        while tries < 3:
            await asyncio.sleep(0)
        assert not any(answer.done() for answer in waiting)
        gate.set()
        assert [values(await answer) for answer in waiting] == [[2], [4]]
        await under.pool.close()


async def occupied() -> tuple[Pool, asyncio.Future[Any], threading.Event]:
    """A pool whose instance runs a batch until the event is set."""
    gate, instance = threading.Event(), Doubling()
    instance.gate = gate
    under = Pool(instance)
    running = asyncio.ensure_future(under.submit(1))
    while not instance.threads:
        await asyncio.sleep(0)
    return under, running, gate


async def test_queued_batches_can_be_taken_back_and_running_ones_finish() -> None:
    under, running, gate = await occupied()
    under.run(2)
    under.run(3)
    assert len(under.pool.take_queued()) == 2
    assert under.pool.unfinished == 1
    gate.set()
    await under.pool.idle()
    assert values(await running) == [2]
    await under.pool.close()


async def test_queued_batches_are_failed_when_no_instance_is_left_waves_request_by_request() -> None:
    under, running, gate = await occupied()
    single = under.run(2)
    tensor = Tensor.of("x", np.full((1, 1), 3, np.float32))
    head = wave_head(bytes(15), 2, b"gw", meta_of_one(tensor, "y"), rows=1, signature=7, level=0, accepted_ns=1)
    _, together = under.run_batch((), waves=[unpack_wave(head + 2 * bytes(tensor.data))])
    under.pool.fail_queued(Unavailable("no instance is left"))
    assert [str(unpack_response(answer).error) for answer in (await single).answers] == ["no instance is left"]
    executed = await together
    assert isinstance(executed, ExecutedWaves)
    assert [str(unpack_response(answer).error) for answer in executed.singly[0]] == ["no instance is left"] * 2
    assert (executed.death, executed.left()) == (None, [])
    gate.set()
    assert values(await running) == [2]
    await under.pool.close()


async def test_who_waits_for_idleness_waits_for_what_comes_meanwhile_too() -> None:
    gate, instance = threading.Event(), Doubling()
    instance.gate = gate
    under = Pool(instance)
    running = under.run(1)
    later: list[asyncio.Future[Executed]] = []

    async def first() -> None:
        await under.pool.idle()
        gate.clear()
        later.append(under.run(2))

    async def other() -> int:
        await under.pool.idle()
        return under.pool.unfinished

    one, *others = asyncio.ensure_future(first()), *[asyncio.ensure_future(other()) for _ in range(3)]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.wait_for(one, 30)
    assert running.done()
    assert not any(one.done() for one in others)
    gate.set()
    assert await asyncio.wait_for(asyncio.gather(*others), 30) == [0, 0, 0]
    assert later[0].done()
    await asyncio.wait_for(under.pool.idle(), 30)
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
    batch, queued = under.run_batch([record(2, 2), record(3, 3)])
    under.pool.cancel(batch, frozenset([(3).to_bytes(16, "big")]))
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
    batch, future = under.run_batch([record(1, 0, deadline_ns=1), record(2, 1)])
    assert batch.planned == ()
    await future
    assert [index for index, _ in batch.planned] == [1]
    await under.pool.close()


async def test_a_batch_that_outlasts_its_ceiling_is_told_of_and_the_others_go_on() -> None:
    gate, hangs = threading.Event(), Doubling()
    hangs.gate = gate
    told: asyncio.Future[tuple[SubmittedBatch, Death]] = asyncio.get_running_loop().create_future()
    under = Pool(hangs, Doubling(), ceiling_s=1.0, on_hung=lambda batch, death: told.set_result((batch, death)))
    futures = {}
    while not hangs.threads:  # whichever batch the hanging instance takes
        batch, future = under.run_batch([record(1)])
        futures[batch] = future
        await asyncio.sleep(0)
    batch, death = await asyncio.wait_for(told, 30)
    assert (death.instance, death.reason) == ("m_0", "it exceeded max_execution_s (1 s)")
    assert "gate.wait" in death.stderr  # where it hangs
    await under.pool.idle()  # the hanging one is given up
    assert [j for j, future in futures.items() if not future.done()] == [batch]
    gate.set()
    await asyncio.wait_for(under.pool.close(), 30)
    assert not futures[batch].done()  # whatever it returns now is not heard


class OnALostGpu(Doubling):
    def execute(self, inputs: Any, outputs: Any) -> Any:
        raise DeviceLost("model 'm' has lost GPU 0")


async def test_a_lost_gpu_brings_the_process_to_an_end() -> None:
    told: list[tuple[SubmittedBatch, Death]] = []
    under = Pool(OnALostGpu(), on_hung=lambda batch, death: told.append((batch, death)))
    batch, future = under.run_batch([record(1)])
    await under.pool.idle()
    ((reported, death),) = told
    assert reported is batch
    assert (death.instance, death.reason, death.ends_process) == ("m_0", "model 'm' has lost GPU 0", True)
    assert (death.blameless, death.shared_instance) == (False, True)
    await asyncio.wait_for(under.pool.close(), 30)
    assert not future.done(), "it is reported instead"


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
        if len(requests) == 1 and self.runs == [1]:
            self.told.clear()
        return await super().execute_requests(requests)

    def cancel_requests(self, requests: Sequence[ModelRequest]) -> None:
        self.settled = [request.settled for request in requests]
        self.told.set()


async def test_a_cancel_reaches_the_run_and_keeps_the_rest_from_starting() -> None:
    instance = Waiting()
    under = Pool(instance)
    # more rows than the model takes at once: two runs of four, and a third
    records = [record(number, number) for number in range(9)]
    batch, future = under.run_batch(records)
    await instance.began.wait()
    assert instance.runs == [4]
    under.pool.cancel(batch, frozenset(record.id for record in [records[0], *records[4:8]]))
    executed = await asyncio.wait_for(future, 30)
    assert instance.runs == [4, 1]
    assert [bool(answer) for answer in executed.answers] == [True] * 4 + [False] * 4 + [True]
    assert instance.settled == [True]
    await under.pool.close()


async def test_a_gentle_cancel_reaches_the_run_or_the_one_to_come_and_is_answered() -> None:
    instance = Waiting()
    under = Pool(instance)
    batches = [under.run_batch([record(number)]) for number in (1, 2)]
    await instance.began.wait()
    for batch, _ in reversed(batches):
        assert not instance.told.is_set()
        under.pool.ask_to_end(batch, frozenset(one.id for one in batch.records))
    for _, future in batches:
        executed = await asyncio.wait_for(future, 30)  # the second one waits until it is told
        assert (bool(executed.answers[0]), instance.settled) == (True, [False])
        instance.told.clear()
    await under.pool.close()
