"""Responses of a batch in the order of its requests."""

from __future__ import annotations

from executors.running.response_order import ResponseOrder


def test_the_first_open_request_streams_and_others_wait() -> None:
    order: ResponseOrder[str] = ResponseOrder(4)
    assert order.put(0, "a0", 1, final=False) == ["a0"]
    assert order.put(2, "c0", 5, final=False) == []
    assert order.put(1, "b0", 7, final=False) == []
    assert order.put(1, "b1", 7, final=True) == []
    assert (order.held_bytes, order.holds_back(0), order.holds_back(1)) == (19, False, True)
    assert order.put(0, "a1", 1, final=True) == ["a1", "b0", "b1", "c0"]
    assert (order.held_bytes, order.holds_back(2)) == (0, False)
    assert order.put(3, "d0", 1, final=True) == []
    assert order.put(2, "c1", 1, final=True) == ["c1", "d0"]


def test_what_is_dropped_is_not_held() -> None:
    order: ResponseOrder[str] = ResponseOrder(2)
    assert order.put(1, "b0", 3, final=False) == order.put(1, "b1", 4, final=False) == []
    assert order.drop(1) == 2
    assert order.held_bytes == 0
    assert order.put(1, "error", 1, final=True) == []
    assert order.put(0, "a", 1, final=True) == ["a", "error"]
