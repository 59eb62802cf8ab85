"""The queue of threads; and batches of quick models that run in the event loop, and leave it when one takes long."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
from instance_pool import BROKEN, DEADLY, Doubling, Pool
from memory_log.log import MemoryLog
from wave_senders import meta_of_one

from charonia.backend import InstanceSpec, Interrupted
from charonia.eventlog.payloads import PayloadDirectory
from charonia.tensors import Tensor
from charonia.wire import Wave, unpack_wave, unpack_wave_reply, wave_head
from executors.batches.batch_payloads import BatchPayloads
from executors.batches.batch_results import Executed, Execution
from executors.batches.wave_execution import ExecutedWaves
from executors.configuration.time_parameters import DEFAULT_MAX_EXECUTION_S
from executors.host import watchdog
from executors.running import instance_pool, thread_queue
from executors.running.instance_pool import Pace
from executors.running.submitted_batch import SubmittedBatch
from executors.running.thread_queue import Interrupter, ThreadQueue, WaitingThread

SLOW = 7.0
"""`Interruptible` does not end a batch with this value in the event loop before it is interrupted."""


class Interruptible(Doubling):
    def __init__(self) -> None:
        super().__init__()
        self.home = threading.get_ident()
        self.stop = threading.Event()
        self.interrupted = 0

    def execute(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> Mapping[str, Any]:
        self.stop.clear()
        if threading.get_ident() == self.home and (inputs["x"] == SLOW).any():
            assert self.stop.wait(30), "it is not interrupted"
            raise Interrupted("stop")
        return super().execute(inputs, outputs)

    def interrupt(self) -> None:
        self.interrupted += 1
        self.stop.set()


class Uninterruptible(Interruptible):
    """Its `interrupt` fails at first."""

    def interrupt(self) -> None:
        self.interrupted += 1
        if self.interrupted < 3:
            raise RuntimeError("not now")
        self.stop.set()


class Answers:
    """Notes the threads in which waves are answered."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def answer(self, batch: SubmittedBatch, executed: ExecutedWaves) -> None:
        self.threads.append(threading.get_ident())


def wave(value: float, count: int = 1) -> Wave:
    tensor = Tensor.of("x", np.full((1, 1), value, np.float32))
    meta = meta_of_one(tensor, "y")
    head = wave_head(
        *(b"p" * 15, count, b"g-1", meta), rows=1, signature=7, level=0, accepted_ns=1, reply_by_reference=True
    )
    return unpack_wave(head + bytes(tensor.data) * count)


class Quick:
    """A pool of one instance that was seen to be quick."""

    def __init__(self, *instances: Doubling, create: Any = None, **fields: Any) -> None:
        self.answers = Answers()
        self.under = Pool(*instances, create=create, **fields)
        self.pool = self.under.pool
        self.pool._pace.is_quick = True
        while len(self.pool._blocking._idle) < len(instances):  # the threads are about to wait
            time.sleep(0)

    async def run(self, value: float) -> tuple[Executed, float | None]:
        """A wave of one request: what was executed, and the answer."""
        _, future = self.under.run_batch((), waves=[wave(value)], settler=self.answers)
        executed = await asyncio.wait_for(future, 30)
        answer = executed.answers[0]
        return executed, float(np.frombuffer(unpack_wave_reply(answer).columns[0], "<f4")[0]) if answer else None


def seen(pace: Pace, *took_ns: int) -> bool:
    for took in took_ns:
        third = took // 3
        pace.seen(Executed([b""], [Execution((0,), 1, 0, took, third, took - 2 * third, third)]))
    return pace.is_quick


async def test_waves_of_a_quick_model_run_and_are_answered_in_the_event_loop() -> None:
    instance = Interruptible()
    quick = Quick(instance)
    for value in (1.0, 2.0, 3.0):
        assert (await quick.run(value))[1] == 2 * value
    home = threading.get_ident()
    assert instance.threads == {home}
    assert quick.answers.threads == [home] * 3
    await quick.pool.close()
    assert instance.closed


async def test_a_model_runs_there_once_its_batches_were_quick() -> None:
    instance = Interruptible()
    quick = Quick(instance)
    quick.pool._pace = Pace()
    for _ in range(4):
        await quick.run(1.0)
        assert threading.get_ident() not in instance.threads
    assert seen(quick.pool._pace, 1000, 1000, 1000, 1000)
    while not quick.pool._blocking._idle:  # the thread has answered, and is about to wait
        await asyncio.sleep(0)
    await quick.run(1.0)
    assert threading.get_ident() in instance.threads
    await quick.pool.close()


async def test_single_requests_run_in_the_instances_thread() -> None:
    instance = Interruptible()
    quick = Quick(instance)
    await quick.under.submit(1.0)
    assert threading.get_ident() not in instance.threads
    await quick.pool.close()


@pytest.mark.parametrize(("limit_bytes", "is_here"), [(16, True), (15, False)])
async def test_a_batch_with_many_bytes_runs_in_the_instances_thread(
    monkeypatch: pytest.MonkeyPatch, limit_bytes: int, is_here: bool
) -> None:
    """A model is quick with small batches; a large one of it would hold up all that the event loop does."""
    monkeypatch.setattr(instance_pool, "_QUICK_BYTES", limit_bytes)
    instance = Interruptible()
    quick = Quick(instance)
    _, future = quick.under.run_batch((), waves=[wave(1.0, 3), wave(2.0)], settler=quick.answers)
    await asyncio.wait_for(future, 30)
    assert (threading.get_ident() in instance.threads) == is_here
    await quick.pool.close()


async def test_an_instance_that_cannot_be_interrupted_runs_in_its_thread() -> None:
    instance = Doubling()
    quick = Quick(instance)
    assert (await quick.run(4.0))[1] == 8.0
    assert threading.get_ident() not in instance.threads
    await quick.pool.close()


@pytest.mark.parametrize(
    ("ceiling_s", "is_here"), [(60.0, False), (watchdog.LIMIT_S, True), (DEFAULT_MAX_EXECUTION_S, True), (0.0, True)]
)
async def test_a_model_with_a_ceiling_that_only_a_thread_keeps_runs_in_its_thread(
    ceiling_s: float, is_here: bool
) -> None:
    instance = Interruptible()
    quick = Quick(instance, ceiling_s=ceiling_s)
    assert (await quick.run(4.0))[1] == 8.0
    assert (threading.get_ident() in instance.threads) == is_here
    await quick.pool.close()


async def test_a_batch_behind_another_waits_for_the_instances_thread() -> None:
    gate = threading.Event()
    instance = Interruptible()
    instance.gate = gate
    quick = Quick(instance)
    single = quick.under.run(1.0)
    behind = asyncio.ensure_future(quick.run(2.0))
    await asyncio.sleep(0)
    gate.set()
    await single
    assert (await behind)[1] == 4.0
    assert threading.get_ident() not in instance.threads
    await quick.pool.close()


async def test_a_batch_that_takes_long_is_interrupted_and_runs_in_the_thread() -> None:
    instance = Interruptible()
    quick = Quick(instance)
    assert (await quick.run(SLOW))[1] == 2 * SLOW
    assert instance.interrupted
    assert threading.get_ident() not in instance.threads
    assert quick.answers.threads != [threading.get_ident()]
    assert not seen(quick.pool._pace, *[1000] * 8), "it stays in its threads for a while"
    await quick.run(1.0)
    assert threading.get_ident() not in instance.threads
    await quick.pool.close()


async def test_what_was_stored_before_an_interruption_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executors.batches.wave_execution.BY_REFERENCE_BYTES", 1)
    gateway, executor = (PayloadDirectory(str(tmp_path), name) for name in ("g-1", "e-1"))
    gateway.open()
    executor.open()
    payloads = BatchPayloads(MemoryLog(), executor)
    instance = Interruptible()
    quick = Quick(instance)
    waves = [wave(1.0, 4), wave(2.0, 4), wave(SLOW)]  # three executions, as four rows are the most for one
    fields = {"settler": quick.answers, "put_columns": payloads.put_columns, "take_back": payloads.take_back}
    _, future = quick.under.run_batch((), waves=waves, **fields)
    executed = await asyncio.wait_for(future, 30)
    assert instance.interrupted
    assert executor.slots is not None
    assert executor.slots.outstanding == 3
    for reply, value in zip(executed.answers, (2.0, 4.0, 2 * SLOW), strict=True):
        reference = unpack_wave_reply(reply).reference
        assert reference is not None
        assert set(np.frombuffer(gateway.read(reference, takes=True), "<f4")) == {value}
    await quick.pool.close()
    gateway.close()
    executor.close()
    assert executor.slots.outstanding == 0


async def test_errors_are_the_batches_own() -> None:
    instance = Interruptible()
    quick = Quick(instance)
    executed, _ = await quick.run(BROKEN)
    assert executed.failures
    assert (await quick.run(1.0))[1] == 2.0
    await quick.pool.close()


async def test_an_instance_that_dies_is_replaced_before_the_next_batch() -> None:
    made: list[Interruptible] = []

    async def create(_spec: InstanceSpec) -> Interruptible:
        made.append(Interruptible())
        return made[-1]

    first = Interruptible()
    quick = Quick(first, create=create)
    executed, answer = await quick.run(DEADLY)
    assert executed.death is not None
    assert answer is None
    assert (await quick.run(3.0))[1] == 6.0
    assert first.closed
    assert len(made) == 1
    await quick.pool.close()


def test_a_model_is_as_quick_as_the_least_of_its_times() -> None:
    pace = Pace()
    assert not seen(pace, 1000, 1000, 1000)
    assert seen(pace, 1000)
    assert seen(pace, 900_000, 900_000, 900_000, 100_000), "a busy machine adds to single times"
    assert not seen(pace, 900_000, 900_000, 900_000, 900_000)
    assert seen(pace, 1000, 1000, 1000, 1000)


def test_each_interruption_closes_the_loop_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000_000_000_000
    monkeypatch.setattr(instance_pool, "monotonic_ns", lambda: now)
    pace = Pace()
    quick = [1000] * 4
    for seconds in (1, 2, 4, 8, 16, 32, 60, 60):
        assert seen(pace, *quick)
        pace.interrupted()
        assert not seen(pace, *quick)
        now += seconds * 1_000_000_000 - 1
        assert not seen(pace, *quick)
        now += 1
        assert seen(pace, *quick)
    now += 61_000_000_000
    pace.interrupted()
    now += 1_000_000_000
    assert seen(pace, *quick), "after a good minute it begins with a second"


def test_the_interrupters_thread_ends_when_nothing_runs_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_queue, "_LOOK_S", 0.0001)
    interrupter = Interrupter()
    instance = Interruptible()
    others = set(threading.enumerate())
    for _ in range(5):
        instance.stop.clear()
        interrupter.begin(instance)
        assert instance.stop.wait(30)
        interrupter.end()
        for thread in set(threading.enumerate()) - others:
            thread.join(30)
            assert not thread.is_alive()


def test_the_interrupter_goes_on_where_an_instance_cannot_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_queue, "_LOOK_S", 0.0001)
    interrupter, instance = Interrupter(), Uninterruptible()
    interrupter.begin(instance)
    assert instance.stop.wait(30)
    interrupter.end()


def idle_batch() -> SubmittedBatch:
    def done(_batch: SubmittedBatch, _executed: Executed) -> None:
        raise AssertionError("nothing is executed here")

    return SubmittedBatch([], done)


def test_batches_come_in_order_and_ends_stay_when_they_are_taken_back() -> None:
    queue, waiting = ThreadQueue(), WaitingThread()
    batches = [idle_batch() for _ in range(4)]
    for one in (batches[0], batches[1], None, batches[2], batches[3]):
        queue.put(one)
    assert queue.get(waiting) is batches[0]
    assert queue.take_all() == batches[1:]
    assert queue.take_all() == []
    assert queue.get(waiting) is None


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_each_batch_is_had_once_whoever_waits(threads: int) -> None:
    queue: ThreadQueue = ThreadQueue()
    had: Queue[tuple[int, SubmittedBatch]] = Queue()

    def work(number: int) -> None:
        waiting = WaitingThread()
        while (one := queue.get(waiting)) is not None:
            had.put((number, one))

    workers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(threads)]
    for worker in workers:
        worker.start()
    batches = [idle_batch() for _ in range(500)]
    for one in batches[:250]:
        queue.put(one)
    first = [had.get(timeout=30) for _ in range(250)]
    for one in batches[250:]:  # one at a time: each finds them waiting
        queue.put(one)
        first.append(had.get(timeout=30))
    for _ in workers:
        queue.put(None)
    for worker in workers:
        worker.join(30)
        assert not worker.is_alive()
    assert Counter(id(one) for _, one in first) == Counter(id(one) for one in batches)
    assert had.empty()


def test_the_thread_that_waited_last_is_woken() -> None:
    queue = ThreadQueue()
    waiting_threads = [WaitingThread(), WaitingThread()]
    taken: list[tuple[int, SubmittedBatch | None]] = []
    began = [threading.Event(), threading.Event()]

    class Telling(WaitingThread):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def wait(self) -> SubmittedBatch | None:
            began[self.number].set()
            return super().wait()

    waiting_threads = [Telling(0), Telling(1)]

    def work(number: int) -> None:
        taken.append((number, queue.get(waiting_threads[number])))

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in (0, 1)]
    for number, thread in enumerate(threads):
        thread.start()
        assert began[number].wait(30)
    first, second = idle_batch(), idle_batch()
    queue.put(first)
    threads[1].join(30)
    queue.put(second)
    threads[0].join(30)
    assert taken == [(1, first), (0, second)]
