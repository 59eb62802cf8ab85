from __future__ import annotations

import threading
from collections import Counter
from queue import Queue

import pytest

from executors.batches.batch_results import Executed
from executors.running.submitted_batch import SubmittedBatch
from executors.running.thread_queue import ThreadQueue, WaitingThread


def batch() -> SubmittedBatch:
    def done(_batch: SubmittedBatch, _executed: Executed) -> None:
        raise AssertionError("nothing is executed here")

    return SubmittedBatch([], done)


def test_batches_come_in_order_and_ends_stay_when_they_are_taken_back() -> None:
    queue, waiting = ThreadQueue(), WaitingThread()
    batches = [batch() for _ in range(4)]
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
    batches = [batch() for _ in range(500)]
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
    first, second = batch(), batch()
    queue.put(first)
    threads[1].join(30)
    queue.put(second)
    threads[0].join(30)
    assert taken == [(1, first), (0, second)]
