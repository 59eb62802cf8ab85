"""Levels, lazy removal and due times."""

from __future__ import annotations

from batcher.scheduling.observations import RequestQueued, RequestState
from batcher.scheduling.queues.fair_sharing import TurnRules
from batcher.scheduling.queues.ledger import DueTimes
from batcher.scheduling.queues.queueing import QueueRules, VersionQueue
from charonia.models.interface import ModelInterface
from charonia.models.scheduling import DynamicBatching, QueuePolicy

HUGE = 2**64 - 1


def request(order: int, level: int = 0, rows: int = 1, deadline_ns: int = 0) -> RequestQueued:
    made = RequestQueued(order.to_bytes(16, "little"), 1, level, rows, 7, 0, deadline_ns, 0)
    made.order = order
    made.queue_level = level
    return made


def orders(queue: VersionQueue) -> list[int]:
    return [item.order for item in queue]


def test_lower_levels_first_and_arrival_order_within() -> None:
    queue = VersionQueue(TurnRules({}))
    for order, level in enumerate((HUGE, 2, 1, 2, HUGE)):
        queue.append(request(order, level))
    assert orders(queue) == [2, 1, 3, 0, 4]
    assert [item.order for item in queue.take(3)] == [2, 1, 3]
    assert (orders(queue), queue.size, queue.rows) == ([0, 4], 2, 2)


def test_only_levels_in_use_exist() -> None:
    queue = VersionQueue(TurnRules({}))
    items = [request(order, HUGE - order) for order in range(50)]
    for item in items:
        queue.append(item)
    for item in items:
        queue.remove(item, RequestState.ENDED)
    assert not queue._levels
    assert not queue._descending


def test_append_tells_whether_the_request_is_served_last() -> None:
    queue = VersionQueue(TurnRules({}))
    first = request(0, 2)
    assert queue.append(first)
    assert not queue.append(request(1, 1))
    assert queue.append(request(2, 2))
    queue.delay(first)
    assert not queue.append(request(3, 2))


def test_delayed_requests_follow_their_level_but_precede_the_next() -> None:
    queue = VersionQueue(TurnRules({}))
    items = [request(0, 1), request(1, 1), request(2, 2)]
    for item in items:
        queue.append(item)
    queue.delay(items[0])
    queue.append(request(3, 1))
    assert orders(queue) == [1, 3, 0, 2]
    assert [item.order for item in queue.take(4)] == [1, 3, 0, 2]


def test_requests_put_back_come_first_in_their_old_order() -> None:
    queue = VersionQueue(TurnRules({}))
    for order in range(6):
        queue.append(request(order))
    early, late = queue.take(2), queue.take(2)
    for item in reversed(early):
        queue.put_back(item)
    for item in reversed(late):
        queue.put_back(item)
    assert orders(queue) == [0, 1, 2, 3, 4, 5]


def test_removed_requests_do_not_pile_up() -> None:
    """A queue that nobody serves, through which requests pass and are cancelled, holds no more than it has."""
    queue = VersionQueue(TurnRules({}))
    stays = request(0)
    queue.append(stays)
    for order in range(1, 5000):
        passing = request(order)
        queue.append(passing)
        queue.remove(passing, RequestState.ENDED)
    assert orders(queue) == [0]
    assert len(queue._levels[0].live) < 200


def test_due_times_come_in_order_and_stale_ones_are_skipped() -> None:
    due = DueTimes()
    late, early = request(0, deadline_ns=20), request(1, deadline_ns=10)
    due.arm(late)
    due.arm(early)
    assert due.next_ns() == 10
    due.disarm(early)
    assert due.next_ns() == 20
    assert due.pop(19) is None
    assert due.pop(20) is late
    assert due.next_ns() == 0


def test_due_times_do_not_pile_up() -> None:
    due = DueTimes()
    for order in range(5000):
        passing = request(order, deadline_ns=10**15 + order)
        due.arm(passing)
        due.disarm(passing)
    assert len(due._heap) < 200


def test_the_same_due_time_twice_counts_once() -> None:
    due = DueTimes()
    item = request(0, deadline_ns=10)
    for _ in range(3):
        due.arm(item)
        due.disarm(item)
    due.arm(item)
    assert due.pop(10) is item
    assert due.pop(10) is None


def test_levels_and_policies_of_a_configuration() -> None:
    special = QueuePolicy(max_queue_size=3)
    block = DynamicBatching(priority_levels=HUGE, default_priority_level=5, priority_queue_policies={2: special})
    interface = ModelInterface(
        name="m", backend="", platform="", max_batch_size=1, inputs={}, outputs={}, dynamic_batching=block
    )
    rules = QueueRules.of(interface)
    assert rules.place(0) == (5, QueuePolicy())
    assert rules.place(2) == (2, special)
    assert rules.place(HUGE + 9)[0] == 5
    assert QueueRules.of(None).place(4) == (0, QueuePolicy())
