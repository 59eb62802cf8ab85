"""Release order of finished batches (S6)."""

from __future__ import annotations

from batcher.scheduling.queues.dynamic_batching import NO_BOUNDARY, ReleaseOrder


def opened(*firsts: int) -> ReleaseOrder:
    order = ReleaseOrder()
    for first in firsts:
        order.open(first, f"b{first}")
    return order


def test_batches_are_released_in_order_of_their_first_request() -> None:
    order = opened(0, 4, 8)
    order.finish(8)
    assert order.release(NO_BOUNDARY) == []
    order.finish(0)
    assert order.release(NO_BOUNDARY) == ["b0"]
    order.finish(4)
    assert order.release(NO_BOUNDARY) == ["b4", "b8"]
    assert not order.firsts


def test_an_earlier_queued_request_holds_them_back() -> None:
    order = opened(4)
    order.finish(4)
    assert order.release(2) == []
    assert order.release(9) == ["b4"]


def test_a_lost_batch_holds_nothing_back_by_itself() -> None:
    order = opened(0, 4)
    order.finish(4)
    order.lose(0)
    assert order.release(NO_BOUNDARY) == ["b4"]


def test_a_rerun_may_reach_to_the_next_open_batch() -> None:
    order = opened(4, 8)
    assert order.boundary(0) == 4
    assert order.boundary(5) == 8
    assert order.boundary(9) == NO_BOUNDARY
