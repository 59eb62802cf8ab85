"""Waves that a model process gets without a task: the same as with one, however and whenever it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from instance_pool import BROKEN, DEADLY, WRONG, DoublingRequests, Pool
from wave_senders import meta_of_one

from charonia.backend import ColumnOutput, InstanceDied, InstanceSpec, ModelResponse, RequestColumns
from charonia.datatypes import DataType
from charonia.errors import InvalidArgument
from charonia.models.interface import InstanceGroup
from charonia.tensors import Tensor
from charonia.wire import Wave, unpack_response, unpack_wave, unpack_wave_reply, wave_head
from executors.batches.wave_execution import ExecutedWaves
from executors.running import workers
from executors.running.submitted_batch import SubmittedBatch
from executors.running.task_queue import Looks

SINGLY = 5.0
"""A batch with this value is answered request by request."""
WITHIN_S = 30

Answers = list[ColumnOutput] | Sequence[ModelResponse]


class Columns(DoublingRequests):
    """Takes columns. Dies of 666, gives too few answers to 13, fails the batch for 99."""

    takes_columns = True

    def __init__(self) -> None:
        super().__init__()
        self.told: list[int] = []

    async def execute_columns(self, columns: RequestColumns) -> Answers:
        await asyncio.sleep(0)
        return self.answers_to(columns)

    def answers_to(self, columns: RequestColumns) -> Answers:
        x = np.frombuffer(columns.inputs[0].data, np.float32)
        if (x == DEADLY).any():
            raise InstanceDied("gone", "last words")
        if (x == BROKEN).any():
            raise InvalidArgument("not these")
        doubled = x * 2
        if (x == SINGLY).any() or (x == WRONG).any():
            single = [ModelResponse([Tensor.of("y", value.reshape(1, 1))]) for value in doubled]
            return single[:-1] if (x == WRONG).any() else single
        return [ColumnOutput("y", DataType.FP32, (1, 1), doubled.tobytes())]

    def cancel_columns(self, columns: RequestColumns, indices: Sequence[int]) -> None:
        self.told += indices


@dataclass
class Call:
    instance: Prompt
    asked: RequestColumns
    replied: Callable[[], None] | None
    reply: asyncio.Future[Answers]

    def look(self) -> None:
        self.instance.looked += 1
        if self.instance.is_there_at_once:
            self.instance.reply_to(self)

    def columns(self) -> list[ColumnOutput] | None:
        if not self.reply.done() or self.reply.exception() is not None:
            return None
        answers = self.reply.result()
        return answers if isinstance(answers[0], ColumnOutput) else None  # type: ignore[return-value]

    async def answers(self) -> Answers:
        return await self.reply


class Prompt(Columns):
    """The same, begun without a task. Answers while it is looked at, or when it is told to."""

    def __init__(self, *, is_there_at_once: bool) -> None:
        super().__init__()
        self.is_there_at_once = is_there_at_once
        self.looked = self.by_task = 0
        self.open: list[Call] = []

    async def execute_columns(self, columns: RequestColumns) -> Answers:
        self.by_task += 1
        return await super().execute_columns(columns)

    def begin_columns(self, columns: RequestColumns, replied: Callable[[], None] | None = None) -> Call:
        call = Call(self, columns, replied, asyncio.get_running_loop().create_future())
        self.open.append(call)
        if not self.is_there_at_once:
            asyncio.get_running_loop().call_soon(self.reply_to, call)
        return call

    def reply_to(self, call: Call) -> None:
        self.open.remove(call)
        try:
            call.reply.set_result(self.answers_to(call.asked))
        except (InstanceDied, InvalidArgument) as error:
            call.reply.set_exception(error)
        if call.replied is not None:
            call.replied()


class Sent:
    """Notes the batches whose answers leave."""

    def __init__(self) -> None:
        self.batches: list[SubmittedBatch] = []

    def answer(self, batch: SubmittedBatch, executed: ExecutedWaves) -> None:
        self.batches.append(batch)


def wave(number: int, *values: float) -> Wave:
    meta = meta_of_one(Tensor.of("x", np.zeros((1, 1), np.float32)), "y")
    head = wave_head(*(bytes((number,)) * 15, len(values), b"g-1", meta), rows=1, signature=7, level=0, accepted_ns=1)
    return unpack_wave(head + np.array(values, np.float32).tobytes())


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each test: how long others took has no effect."""

    class Always(Looks):
        def begin(self, now_ns: int) -> bool:
            return True

    monkeypatch.setattr(workers, "LOOKS", Always())


def facts(executed: Any) -> Any:
    """All that callers and statistics see, but for times."""
    answers = []
    for index, answer in enumerate(executed.answers):
        if answer:
            answers.append(np.frombuffer(unpack_wave_reply(answer).columns[0], np.float32).tolist())
        else:
            singly = [unpack_response(one) for one in executed.singly.get(index, ())]
            answers.append([one.error and one.error.message for one in singly])
    runs = [(one.indices, one.rows) for one in executed.executions]
    failures = [(one.index, one.reason) for one in executed.failures]
    return answers, runs, executed.failed, failures, executed.death


async def run(pool: Pool, sent: Sent, *waves: Wave) -> Any:
    _, future = pool.run_batch((), waves=list(waves), settler=sent)
    return await asyncio.wait_for(future, WITHIN_S)


BATCHES = [
    [(1.0,)],
    [(1.0, 2.0, 3.0)],
    [(1.0,), (2.0, 3.0)],
    [(SINGLY,)],
    [(1.0, SINGLY)],
    [(BROKEN,)],
    [(WRONG, 1.0)],
    [(1.0, 2.0, 3.0, 4.0, 5.5)],
    [(1.0, 2.0, 3.0), (4.0, 6.0)],
]


@pytest.mark.parametrize(
    ("is_there_at_once", "is_prompt"),
    [(True, True), (False, True), (False, False)],
    ids=["at once", "later", "nobody looks"],
)
@pytest.mark.parametrize("batch", BATCHES, ids=str)
async def test_it_is_answered_as_with_a_task(
    batch: list[tuple[float, ...]], is_there_at_once: bool, is_prompt: bool
) -> None:
    waves = [wave(number, *values) for number, values in enumerate(batch)]
    plain, prompt = Pool(Columns()), Prompt(is_there_at_once=is_there_at_once)
    pool = Pool(prompt)
    pool.pool._pace.is_prompt = is_prompt
    sent = Sent()
    for _ in range(2):  # the second finds the forms of the first
        await asyncio.sleep(0)
        expected, found = await run(plain, Sent(), *waves), await run(pool, sent, *waves)
        assert facts(found) == facts(expected)
    assert len(sent.batches) == 2
    assert not prompt.open
    assert (prompt.by_task > 0) == (len(waves) > 1 and sum(map(len, batch)) > 4), "only several runs need the task"
    await asyncio.gather(plain.pool.close(), pool.pool.close())
    assert prompt.closed


@pytest.mark.parametrize("is_there_at_once", [True, False])
async def test_a_process_that_dies_is_replaced_and_the_next_batch_runs(is_there_at_once: bool) -> None:
    made: list[Prompt] = []

    async def create(_spec: InstanceSpec) -> Prompt:
        made.append(Prompt(is_there_at_once=False))
        return made[-1]

    pool = Pool(Prompt(is_there_at_once=is_there_at_once), create=create)
    pool.pool._pace.is_prompt = True
    await asyncio.sleep(0)
    executed = await run(pool, Sent(), wave(1, DEADLY))
    assert executed.death is not None
    assert executed.death.stderr == "last words"
    assert executed.answers == [b""]
    assert facts(await run(pool, Sent(), wave(2, 1.0)))[0] == [[2.0]]
    assert len(made) == 1
    await pool.pool.close()


async def test_batches_that_wait_begin_when_the_one_before_has_its_answer() -> None:
    """In order, one at a time; those after one that needs the task are the task's, too."""
    instance = Prompt(is_there_at_once=False)
    pool, sent = Pool(instance), Sent()
    await asyncio.sleep(0)
    batches = [pool.run_batch((), waves=[wave(number, float(number))], settler=sent) for number in range(3)]
    single = pool.run(7.0)
    batches += [pool.run_batch((), waves=[wave(9, 9.0)], settler=sent)]
    assert len(instance.open) == 1
    found = [await asyncio.wait_for(future, WITHIN_S) for _, future in batches]
    assert [facts(one)[0] for one in found] == [[[0.0]], [[2.0]], [[4.0]], [[18.0]]]
    assert unpack_response((await single).answers[0]).outputs[0].array()[0, 0] == 14.0
    assert sent.batches == [batch for batch, _ in batches]
    assert instance.by_task == 1
    await pool.pool.close()


async def test_each_instance_gets_a_batch_of_its_own() -> None:
    instances = [Prompt(is_there_at_once=False) for _ in range(2)]
    pool = Pool(*instances, group=InstanceGroup("m", 2, "KIND_CPU"))
    await asyncio.sleep(0)
    futures = [pool.run_batch((), waves=[wave(number, 1.0)], settler=Sent())[1] for number in range(3)]
    assert [len(one.open) for one in instances] == [1, 1]
    for future in futures:
        assert facts(await asyncio.wait_for(future, WITHIN_S))[0] == [[2.0]]
    await pool.pool.close()


async def test_the_model_hears_of_requests_that_are_cancelled() -> None:
    instance = Prompt(is_there_at_once=True)
    pool = Pool(instance)
    await asyncio.sleep(0)
    waves = [wave(1, 1.0, 2.0)]
    batch, future = pool.run_batch((), waves=waves, settler=Sent())
    pool.pool.cancel(batch, frozenset([waves[0].ids()[1]]))
    assert instance.told == [1]
    instance.reply_to(instance.open[0])
    assert facts(await asyncio.wait_for(future, WITHIN_S))[0] == [[2.0, 4.0]]
    await pool.pool.close()


async def test_the_loop_looks_only_where_nothing_else_is_under_way() -> None:
    instances = [Prompt(is_there_at_once=False) for _ in range(2)]
    pool = Pool(*instances)
    pool.pool._pace.is_prompt = True
    await asyncio.sleep(0)
    futures = [pool.run_batch((), waves=[wave(number, 1.0)], settler=Sent())[1] for number in range(2)]
    assert [one.looked for one in instances] == [1, 0]
    await asyncio.wait(futures, timeout=WITHIN_S)
    await pool.pool.close()


def test_the_loop_waits_for_half_of_the_time_at_most() -> None:
    looks = Looks()
    assert looks.begin(1000)
    looks.end(1070, answered=True)
    assert not looks.begin(1100)
    assert looks.begin(1140)
    looks.end(1150, answered=False)
    assert not looks.begin(1300)
    assert looks.begin(1350)
