from __future__ import annotations

import asyncio

from wave_senders import meta_of_one

from charonia.datatypes import DataType
from charonia.tensors import Tensor
from charonia.wire import Wave, unpack_wave, wave_head
from executors.batches.batch_results import Executed
from executors.running.submitted_batch import SubmittedBatch
from executors.running.task_queue import TaskQueue


def batch(*waves: Wave) -> SubmittedBatch:
    def done(_batch: SubmittedBatch, _executed: Executed) -> None:
        raise AssertionError("nothing is executed here")

    return SubmittedBatch([], done, waves=waves)


class Sleeper:
    """A worker whose task takes one batch after another."""

    def __init__(self, queue: TaskQueue) -> None:
        self.had: list[SubmittedBatch] = []
        self.begun: list[SubmittedBatch] = []
        self._queue = queue
        self.task = asyncio.get_running_loop().create_task(self._work())

    def begin(self, batch: SubmittedBatch, *, looks: bool = False) -> None:
        self.begun.append(batch)

    async def _work(self) -> None:
        while (one := await self._queue.get(self)) is not None:
            self.had.append(one)


async def settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_the_task_that_has_waited_longest_gets_the_next_batch() -> None:
    queue, batches = TaskQueue(), [batch() for _ in range(3)]
    queue.put(batches[0])
    first, second = Sleeper(queue), Sleeper(queue)
    await settled()
    assert first.had == batches[:1]
    queue.put(batches[1])
    queue.put(batches[2])
    await settled()
    assert {*map(id, first.had + second.had)} == {*map(id, batches)}
    assert len(second.had) == 1
    queue.put(None)
    queue.put(None)
    await asyncio.gather(first.task, second.task)


async def test_a_borrowed_worker_sleeps_until_it_gets_something_of_another_kind() -> None:
    queue = TaskQueue()
    assert queue.borrow() is None
    sleeper = Sleeper(queue)
    await settled()
    assert queue.borrow() is sleeper
    assert queue.borrow() is None
    meta = meta_of_one(Tensor("x", DataType.BOOL, (), b"1"), "y")
    head = wave_head(b"p" * 15, 1, b"g-1", meta, rows=1, signature=7, level=0, accepted_ns=1)
    waves, requests = batch(unpack_wave(head + b"1")), batch()
    queue.put(waves)
    queue.put(requests)
    await settled()
    assert (sleeper.begun, sleeper.had) == ([], [])
    queue.give_back(sleeper)
    await settled()
    assert (sleeper.begun, sleeper.had) == ([waves], [])
    queue.give_back(sleeper)
    await settled()
    assert (sleeper.begun, sleeper.had) == ([waves], [requests])
    assert queue.borrow() is sleeper
    queue.put(None)
    queue.give_back(sleeper)
    await sleeper.task


async def test_what_was_begun_is_left_to_the_task() -> None:
    queue = TaskQueue()
    sleeper = Sleeper(queue)
    await settled()
    assert queue.borrow() is sleeper
    left = batch()
    queue.hand(sleeper, left)
    await settled()
    assert sleeper.had == [left]
    queue.put(None)
    await sleeper.task


async def test_batches_are_taken_back_and_ends_stay() -> None:
    queue, batches = TaskQueue(), [batch(), batch()]
    for one in (batches[0], None, batches[1]):
        queue.put(one)
    assert queue.take_all() == batches
    assert queue.take_all() == []
    await Sleeper(queue).task
