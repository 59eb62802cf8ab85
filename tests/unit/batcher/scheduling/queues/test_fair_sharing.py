"""Turns of lanes: new ones first, then round robin by rows."""

from __future__ import annotations

from batcher.scheduling.observations import RequestQueued, RequestState
from batcher.scheduling.queues.fair_sharing import TurnRules, Turns
from batcher.scheduling.queues.queueing import VersionQueue


def rules(quantum_rows: int, weights: dict[int, int] | None = None) -> TurnRules:
    made = TurnRules(weights or {})
    made.quantum_rows = quantum_rows
    return made


def request(number: int, lane: int, rows: int = 1) -> RequestQueued:
    made = RequestQueued(number.to_bytes(16, "little"), 1, 0, rows, 7, 0, 0, 0, lane=lane)
    made.queue_level, made.order = 0, number
    return made


def served(queue: VersionQueue) -> list[int]:
    return [int.from_bytes(r.id, "little") for r in queue]


def test_lanes_take_turns_and_looking_ahead_takes_nothing() -> None:
    queue = VersionQueue(rules(2))
    for number in range(1, 6):
        queue.append(request(number, lane=1))
    for number in range(6, 9):
        queue.append(request(number, lane=2))
    expected = [6, 1, 2, 7, 8, 3, 4, 5]
    assert served(queue) == served(queue) == expected
    taken = [r for count in (3, 1, 4) for r in queue.take(count)]
    assert [int.from_bytes(r.id, "little") for r in taken] == expected
    assert (queue.size, queue.rows, served(queue)) == (0, 0, [])


def test_a_request_that_left_its_lane_is_passed_over() -> None:
    queue = VersionQueue(rules(4))
    mine, other = request(1, 1), request(2, 2)
    queue.append(mine)
    queue.append(other)
    queue.remove(other, RequestState.ENDED)
    assert served(queue) == [1]
    queue.append(request(3, 2))
    assert served(queue) == [3, 1]
    assert queue.earliest_order(99) == 1


def test_the_delayed_of_all_lanes_come_last_and_what_returns_first_in_its_lane() -> None:
    queue = VersionQueue(rules(1))
    late, later = request(1, 1), request(2, 2)
    for item in (late, later, request(3, 1), request(4, 2)):
        queue.append(item)
    for item in (late, later):
        item.delayed = True
        queue.delay(item)
    assert sorted(served(queue)[:2]) == [3, 4]
    assert served(queue)[2:] == [1, 2]
    (first,) = queue.take(1)
    queue.put_back(first)
    assert queue.size == 4
    queue.remove(later, RequestState.ENDED)
    assert served(queue)[-1] == 1
    queue.sweep()
    assert [r.order for r in queue.drain()] == [3, 4, 1]


def test_large_requests_pay_with_their_next_turns() -> None:
    queue = VersionQueue(rules(2))
    queue.append(request(1, 1, rows=6))
    for number in range(2, 5):
        queue.append(request(number, 1, rows=6))
    for number in range(5, 11):
        queue.append(request(number, 2, rows=2))
    assert served(queue) == [5, 1, 6, 7, 8, 2, 9, 10, 3, 4]


def test_a_forgotten_lane_is_new_again_only_after_the_others() -> None:
    turns = Turns(rules(1))
    turns.begin(1)
    turns.join(2)
    assert turns.current() == 2
    turns.spend(2, request(1, lane=2))
    turns.join(2)
    assert turns.current() == 1
    turns.spend(1, request(2, lane=1))
    assert turns.current() == 2
    assert turns.pass_on(2) is True
    assert turns.current() == 1
