from __future__ import annotations

import threading
from collections import Counter
from queue import Queue

import pytest

from executors.batches.accounting import Executed
from executors.running.handover import Handover, Seat
from executors.running.job import Job


def job() -> Job:
    def done(_job: Job, _executed: Executed) -> None:
        raise AssertionError("nothing is executed here")

    return Job([], done)


def test_batches_come_in_order_and_ends_stay_when_they_are_taken_back() -> None:
    handover, seat = Handover(), Seat()
    jobs = [job() for _ in range(4)]
    for one in (jobs[0], jobs[1], None, jobs[2], jobs[3]):
        handover.put(one)
    assert handover.get(seat) is jobs[0]
    assert handover.take_all() == jobs[1:]
    assert handover.take_all() == []
    assert handover.get(seat) is None


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_each_batch_is_had_once_whoever_waits(threads: int) -> None:
    handover: Handover = Handover()
    had: Queue[tuple[int, Job]] = Queue()

    def work(number: int) -> None:
        seat = Seat()
        while (one := handover.get(seat)) is not None:
            had.put((number, one))

    workers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(threads)]
    for worker in workers:
        worker.start()
    jobs = [job() for _ in range(500)]
    for one in jobs[:250]:
        handover.put(one)
    first = [had.get(timeout=30) for _ in range(250)]
    for one in jobs[250:]:  # one at a time: each finds them waiting
        handover.put(one)
        first.append(had.get(timeout=30))
    for _ in workers:
        handover.put(None)
    for worker in workers:
        worker.join(30)
        assert not worker.is_alive()
    assert Counter(id(one) for _, one in first) == Counter(id(one) for one in jobs)
    assert had.empty()


def test_the_thread_that_waited_last_is_woken() -> None:
    handover = Handover()
    seats = [Seat(), Seat()]
    taken: list[tuple[int, Job | None]] = []
    began = [threading.Event(), threading.Event()]

    class Telling(Seat):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def wait(self) -> Job | None:
            began[self.number].set()
            return super().wait()

    seats = [Telling(0), Telling(1)]

    def work(number: int) -> None:
        taken.append((number, handover.get(seats[number])))

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in (0, 1)]
    for number, thread in enumerate(threads):
        thread.start()
        assert began[number].wait(30)
    first, second = job(), job()
    handover.put(first)
    threads[1].join(30)
    handover.put(second)
    threads[0].join(30)
    assert taken == [(1, first), (0, second)]
