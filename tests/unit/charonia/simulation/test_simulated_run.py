"""The real scheduler under a made-up clock: when batches begin and end, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from charonia.errors import InvalidArgument
from charonia.models.interface import ModelInterface
from charonia.models.scheduling import DynamicBatching, QueuePolicy
from charonia.simulation.machine_pauses import Pause
from charonia.simulation.processor_shares import ProcessorShares
from charonia.simulation.recorded_requests import Outcome, RecordedRequest
from charonia.simulation.service_times import Fit, ServiceFit, SizeFit, WayFit
from charonia.simulation.simulated_run import Setting, rearranged, simulated

MS = 1_000_000
FIT = Fit(ServiceFit((SizeFit(1, 1, 10.0 * MS, 10.0 * MS, 10.0 * MS),), 10.0 * MS, 0.0, 1.0, 1.0, (0.0,)), WayFit())


def run(
    at_ms: Sequence[float], block: DynamicBatching, *, executors: int = 1, instances: int = 1, prefetch: int = 0,
    cores: float = 0.0, fit: Fit = FIT, requests: Sequence[RecordedRequest] | None = None,
    machines: tuple[ProcessorShares, ...] = (),
) -> list[RecordedRequest]:  # fmt: skip
    interface = ModelInterface(
        "m", "", "", 4, {}, {}, scheduling="dynamic_batching", dynamic_batching=block
    )  # fmt: skip
    arrivals = requests or [RecordedRequest(round(at * MS)) for at in at_ms]
    setting = Setting(interface, executors, instances, prefetch, cores=cores, machines=machines)
    return simulated(arrivals, setting, fit, 0)


def times(found: Sequence[RecordedRequest]) -> list[tuple[float, float]]:
    return [(one.started_ns / MS, one.ended_ns / MS) for one in found]


def test_what_waits_goes_together() -> None:
    assert times(run((1, 2, 3, 20), DynamicBatching())) == [(1, 11), (11, 21), (11, 21), (21, 31)]


def test_a_delay_holds_the_first_back_until_it_is_over_or_the_batch_full() -> None:
    block = DynamicBatching(max_queue_delay_us=5000)
    assert times(run((1, 2, 3, 3.5, 30), block)) == [(3.5, 13.5)] * 4 + [(35, 45)]


def test_instances_and_executors_run_at_once() -> None:
    assert times(run((1, 2, 3), DynamicBatching(), instances=2)) == [(1, 11), (2, 12), (11, 21)]
    assert times(run((1, 2, 3), DynamicBatching(), executors=3)) == [(1, 11), (2, 12), (3, 13)]


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        (3.0, [(0, 10), (4, 14), (6, 16)]),
        # a core each for 6 and 2 ms, two thirds of one until the first has done its 4 ms left, then a core each
        (2.0, [(0, 12), (4, 16), (6, 18)]),
        # 4 ms alone, half of it each for 2 ms, then a third of it each, and the last one alone for 1 ms
        (1.0, [(0, 21), (4, 29), (6, 30)]),
    ],
)
@pytest.mark.parametrize(("executors", "instances"), [(1, 3), (3, 1)])
def test_instances_share_cores(
    executors: int, instances: int, cores: float, expected: list[tuple[float, float]]
) -> None:
    found = run((0, 4, 6), DynamicBatching(), executors=executors, instances=instances, cores=cores)
    assert [(start, round(end, 3)) for start, end in times(found)] == expected


def test_a_pause_of_the_machine_is_no_work_to_share() -> None:
    fit = Fit(FIT.service, FIT.way, 0, 50 * MS, (Pause(5 * MS, (200 * MS,)),))
    found = run((0, 0.5, 50), DynamicBatching(preferred_batch_sizes=(1,)), instances=2, cores=1.0, fit=fit)
    assert [end for _, end in times(found)[:2]] == [219.5, 220]


def test_half_a_core_takes_twice_as_long() -> None:
    assert times(run((1, 2), DynamicBatching(), cores=0.5)) == [(1, 21), (21, 41)]


TWO = ProcessorShares("a", 2.0)


@pytest.mark.parametrize(
    ("machines", "expected"),
    [
        # as above: a core each for 6 and 2 ms, two thirds until the first has done its 4 left
        ((TWO,), [(0, 12), (4, 16), (6, 18)]),
        # others use one of them
        ((ProcessorShares("a", 2.0, others=1.0),), [(0, 21), (4, 29), (6, 30)]),
        # 5 ms of 10 are a processor's: the first two share it for 2 ms, the last two for 8
        ((ProcessorShares("a", 1.0, share=0.5),), [(0, 11), (4, 19), (6, 20)]),
        # each keeps two of two busy
        ((ProcessorShares("a", 2.0, share=2.0),), [(0, 21), (4, 29), (6, 30)]),
        # the third executor is on the first machine again
        ((ProcessorShares("a", 1.0), ProcessorShares("b", 1.0)), [(0, 14), (4, 14), (6, 20)]),
    ],
)
def test_executors_share_the_processors_of_their_machine(
    machines: tuple[ProcessorShares, ...], expected: list[tuple[float, float]]
) -> None:
    found = run((0, 4, 6), DynamicBatching(), executors=3, machines=machines)
    assert [(start, round(end, 3)) for start, end in times(found)] == expected


def test_the_server_works_for_a_batch_when_it_is_answered() -> None:
    machine = ProcessorShares("a", 1.0, batch_ns=4.0 * MS)
    # 4 ms for the first batch slow the second, which has 6 ms to go when it is alone
    assert times(run((0, 8), DynamicBatching(), instances=2, machines=(machine,))) == [(0, 12), (8, 24)]


def test_the_way_takes_longer_where_processors_are_short() -> None:
    fit = Fit(FIT.service, WayFit((4 * MS,), (0,), (2 * MS,)))
    # half of 6 ms on the way is work: 2 ms of the lead, 1 ms of the tail
    machine = ProcessorShares("a", 1.0, batch_ns=3.0 * MS)
    assert times(run((0,), DynamicBatching(), fit=fit, machines=(machine,))) == [(4, 16)]
    # the second one's lead meets the first one's execution: 2 ms of work in 4
    found = run((0, 5), DynamicBatching(), instances=2, fit=fit, machines=(machine,))
    assert times(found)[1][0] == 11


@pytest.mark.parametrize(
    ("batch_ms", "expected"),
    [
        (0.0, [(0, 10), (1, 11)]),
        # the executor ran 6 ms of 10, and used no processor: the other 4 are work, shared after 1
        (4.0, [(0, 13), (1, 14)]),
        # the server used no more than 2
        (2.0, [(0, 11), (1, 12)]),
    ],
)
def test_what_of_an_execution_is_on_the_way_is_work_of_the_server(
    batch_ms: float, expected: list[tuple[float, float]]
) -> None:
    machine = ProcessorShares("a", 1.0, share=0.0, batch_ns=batch_ms * MS, run_ns=6.0 * MS)
    assert times(run((0, 1), DynamicBatching(), instances=2, machines=(machine,))) == expected


def test_a_batch_ahead_waits_at_its_executor() -> None:
    found = run((1, 2, 2, 2, 2, 3), DynamicBatching(), prefetch=1)
    assert times(found) == [(1, 11), *[(11, 21)] * 4, (21, 31)]


def test_the_way_takes_its_time() -> None:
    fit = Fit(FIT.service, WayFit((MS,), (2 * MS,), (4 * MS,)))
    found = run((1, 2), DynamicBatching(), fit=fit)
    # 1 ms to the scheduler, 1 ms to the instance; 1 ms until the end is known and 1 ms to the instance again
    assert times(found) == [(3, 17), (15, 29)]


WAY = WayFit((4 * MS,), (8 * MS,), (0,))
MACHINE = ProcessorShares("a", 2.0, batch_ns=10.0 * MS, run_ns=10.0 * MS)


@pytest.mark.parametrize(
    ("prefetches", "expected"),
    [
        # 8 ms from an arrival to the beginning of a batch: 2 more for the order, and for the report before the next
        ((0, 1), ([(10, 20), (32, 42)], 12.5)), ((0, 0), ([(8, 18), (26, 36)], 10.0)), ((1, 2), ([(8, 18)], 10.0)),
        ((1, 0), ([(6.4, 16.4), (21.2, 31.2)], 8.0)),
    ],
)  # fmt: skip
def test_a_batcher_of_its_own_is_further_away(
    prefetches: tuple[int, int], expected: tuple[list[tuple[float, float]], float]
) -> None:
    interface = ModelInterface("m", "", "", 4, {}, {}, dynamic_batching=DynamicBatching())
    before, after = (Setting(interface, 1, 1, prefetch, machines=(MACHINE,)) for prefetch in prefetches)
    setting, fit = rearranged(before, after, Fit(FIT.service, WAY, journalled=1.0))
    assert [one.batch_ns / MS for one in setting.machines] == [expected[1]]
    alone = replace(setting, machines=())  # on the way nothing waits for processors here
    found = simulated([RecordedRequest(0), RecordedRequest(MS)], alone, fit, 0)
    assert times(found)[: len(expected[0])] == [pytest.approx(one) for one in expected[0]]


def test_priorities_tenants_and_time_outs_count() -> None:
    block = DynamicBatching(
        preferred_batch_sizes=(1,), priority_levels=2, default_priority_level=2,
        default_queue_policy=QueuePolicy(default_timeout_us=15_000, allow_timeout_override=True),
    )  # fmt: skip
    requests = [
        RecordedRequest(MS), RecordedRequest(2 * MS, level=2), RecordedRequest(3 * MS, level=1),
        RecordedRequest(4 * MS, timeout_us=3000),
    ]  # fmt: skip
    found = run((), block, requests=requests)
    assert [one.outcome for one in found] == [Outcome.ANSWERED, Outcome.REFUSED, Outcome.ANSWERED, Outcome.REFUSED]
    assert [one.ended_ns / MS for one in found] == [11, 17, 21, 7]


def test_a_full_queue_refuses() -> None:
    block = DynamicBatching(default_queue_policy=QueuePolicy(max_queue_size=1))
    found = run((1, 2, 3), block)
    assert [one.outcome for one in found] == [Outcome.ANSWERED, Outcome.ANSWERED, Outcome.REFUSED]


def test_answers_in_order_wait_for_those_before() -> None:
    slow = SizeFit(2, 1, 30.0 * MS, 30.0 * MS, 30.0 * MS)
    fit = Fit(ServiceFit((FIT.service.sizes[0], slow), 0.0, 0.0, 1.0, 1.0, (0.0,)), WayFit())
    requests = [RecordedRequest(MS, rows=2), RecordedRequest(2 * MS)]
    found = run((), DynamicBatching(preserve_ordering=True), instances=2, fit=fit, requests=requests)
    assert times(found) == [(1, 31), (2, 31)]


@pytest.mark.parametrize("scheduling", ["sequence_batching", "ensemble_scheduling"])
def test_sequences_and_ensembles_are_refused(scheduling: str) -> None:
    interface = ModelInterface("m", "", "", 4, {}, {}, scheduling=scheduling)
    with pytest.raises(InvalidArgument, match="only models without them"):
        simulated([RecordedRequest(1)], Setting(interface, 1, 1), FIT, 0)
