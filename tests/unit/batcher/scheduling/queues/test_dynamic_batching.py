"""Batch formation, one table row for each sentence of S1-S5."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batcher.scheduling.observations import RequestQueued
from batcher.scheduling.queues.dynamic_batching import NOTHING, BatchRules, form_batch
from charonia.batch_strategies import Joins
from charonia.datatypes import DataType
from charonia.models.interface import ModelInterface
from charonia.models.scheduling import DynamicBatching
from charonia.tensors import Tensor
from charonia.wire import request_meta


def rules(
    max_batch_size: int = 8, preferred: tuple[int, ...] = (), delay_us: int = 0, *, dynamic: bool = True
) -> BatchRules:
    block = DynamicBatching(preferred_batch_sizes=preferred, max_queue_delay_us=delay_us) if dynamic else None
    return BatchRules.of(
        ModelInterface(
            name="m",
            backend="",
            platform="",
            max_batch_size=max_batch_size,
            inputs={},
            outputs={},
            dynamic_batching=block,
        )
    )


def queue(*rows: int, signatures: tuple[int, ...] = (), enqueued_us: int = 0) -> list[RequestQueued]:
    requests = []
    for index, size in enumerate(rows):
        signature = signatures[index] if signatures else 7
        request = RequestQueued(bytes([index]) * 16, 1, 0, size, signature, 0, 0, enqueued_us * 1000)
        request.order = index
        requests.append(request)
    return requests


@pytest.mark.parametrize(
    ("preferred", "delay_us", "rows", "now_us", "size"),
    [
        pytest.param((), 0, (1,), 0, 1, id="no delay: nothing waits"),
        pytest.param((), 0, (3, 3), 0, 2, id="no delay: all that is pending"),
        pytest.param((), 0, (3, 3, 3), 0, 2, id="never over the maximum, never split"),
        pytest.param((), 0, (5, 4, 1), 0, 1, id="never reordered: a small one does not overtake"),
        pytest.param((), 10, (3, 3), 0, 0, id="delay: waits for the maximum"),
        pytest.param((), 10, (4, 4), 0, 2, id="maximum reached"),
        pytest.param((), 10, (4, 5), 0, 1, id="the next does not fit: stop and send"),
        pytest.param((), 10, (3, 3), 10, 2, id="delay passed: all, at an odd size"),
        pytest.param((4,), 0, (1, 1, 1), 0, 3, id="below preferred, no delay"),
        pytest.param((4,), 10, (1, 1, 1), 0, 0, id="below preferred, delay"),
        pytest.param((4,), 10, (2, 2), 0, 2, id="preferred hit: at once"),
        pytest.param((4,), 0, (2, 2, 2), 0, 2, id="preferred hit, more pending, no delay: the preferred size"),
        pytest.param((4,), 10, (2, 2, 2), 0, 2, id="preferred hit, more pending: the preferred size"),
        pytest.param((4,), 10, (2, 2, 2), 10, 3, id="delay passed: everything, not the preferred size"),
        pytest.param((4,), 10, (2, 2, 4, 4), 10, 3, id="delay passed: up to the maximum"),
        pytest.param((2, 4), 10, (1, 1, 1, 1), 0, 4, id="a later, larger preferred size wins"),
        pytest.param((2, 6), 10, (1, 1, 1), 0, 2, id="the smaller one when the larger is not reached"),
        pytest.param((4,), 10, (3, 3), 0, 1, id="passing the largest without a hit: as it was before"),
        pytest.param((4,), 10, (3, 3), 10, 2, id="passing the largest, delay passed: all"),
        pytest.param((4,), 10, (6,), 0, 1, id="one request beyond the largest preferred"),
        pytest.param((4,), 10, (3, 6), 0, 1, id="the next fits no preferred size and not the maximum"),
    ],
)
def test_sizes(preferred: tuple[int, ...], delay_us: int, rows: tuple[int, ...], now_us: int, size: int) -> None:
    assert form_batch(queue(*rows), rules(8, preferred, delay_us), now_us * 1000).size == size


def test_the_delay_counts_from_the_oldest_pending_request() -> None:
    requests = queue(1, 1)
    requests[1].enqueued_ns = 9_000
    verdict = form_batch(requests, rules(delay_us=10), 9_000)
    assert (verdict.size, verdict.until_ns) == (0, 10_000)
    assert form_batch(requests, rules(delay_us=10), 10_000).size == 2


def test_waiting_ends_early_at_the_next_preferred_size() -> None:
    assert form_batch(queue(1, 2), rules(8, (2, 6), 10), 0).until_rows == 6
    assert form_batch(queue(1), rules(8, (2, 6), 10), 0).until_rows == 2
    assert form_batch(queue(1), rules(8, (), 10), 0).until_rows == 8


def test_another_signature_closes_the_batch_at_once() -> None:
    verdict = form_batch(queue(1, 1, 1, signatures=(7, 7, 9)), rules(delay_us=10), 0)
    assert (verdict.size, verdict.saturated) == (2, True)
    # and does not let a later one of the same signature overtake
    assert form_batch(queue(1, 1, 1, signatures=(7, 9, 7)), rules(), 0).size == 1


def test_a_preferred_size_before_another_signature_goes_first() -> None:
    assert form_batch(queue(2, 1, 1, signatures=(7, 7, 9)), rules(8, (2,), 10), 0).size == 1


@pytest.mark.parametrize(
    ("rows", "saturated"),
    [((4,), False), ((4, 4), True), ((7, 2), True), ((3,), False)],
)
def test_saturated_means_no_arrival_can_change_the_batch(rows: tuple[int, ...], saturated: bool) -> None:
    assert form_batch(queue(*rows), rules(8, (4, 8)), 0).saturated is saturated


def test_the_default_scheduler_runs_one_request_at_a_time() -> None:
    verdict = form_batch(queue(1, 1), rules(8, dynamic=False), 0)
    assert (verdict.size, verdict.saturated) == (1, True)


def test_an_empty_queue_makes_no_batch() -> None:
    assert form_batch([], rules(), 0) is NOTHING


def test_a_model_without_batch_dimension_runs_one_request_at_a_time() -> None:
    assert form_batch(queue(1, 1), rules(0, delay_us=10), 0).size == 1


def test_a_batch_ends_at_the_boundary() -> None:
    verdict = form_batch(queue(1, 1, 1), rules(delay_us=10), 0, boundary=1)
    assert (verdict.size, verdict.saturated) == (2, True)


class EveryThird:
    """Lets two join, however large they are, and forgets them with the batch."""

    def begin(self) -> Joins:
        asked = iter([True, True, False])
        return lambda _candidate: next(asked)


def of_meta(*rows: int) -> list[RequestQueued]:
    requests = queue(*rows)
    for request in requests:
        request.meta = request_meta(1, "", [Tensor("x", DataType.INT8, (request.rows,), bytes(request.rows))], (), {})
    return requests


@pytest.mark.parametrize(
    ("preferred", "delay_us", "rows", "size"),
    [
        pytest.param((), 10, (1, 1), 0, id="all join: it waits as without"),
        pytest.param((), 10, (1, 1, 1), 2, id="one does not: stop and send"),
        pytest.param((), 0, (1, 1, 1), 2, id="the same without a delay"),
        pytest.param((), 0, (8, 1, 1), 1, id="never over the maximum"),
        pytest.param((1,), 10, (1, 1, 1), 1, id="of those who join, the preferred size"),
    ],
)
def test_a_strategy_ends_a_batch(preferred: tuple[int, ...], delay_us: int, rows: tuple[int, ...], size: int) -> None:
    asked = replace(rules(8, preferred, delay_us), strategy=EveryThird())
    requests = of_meta(*rows)
    formation = form_batch(requests, asked, 0)
    assert formation.size == size
    assert formation.saturated is (size > 0)
    # whoever comes may end it: every arrival is looked at
    assert formation.until_rows == 0
    assert form_batch(requests, asked, 0) == formation
