"""Simulated runs lose nothing, keep the order of a level, and never run more batches than there are instances."""

from __future__ import annotations

from collections.abc import Sequence

from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.models.interface import ModelInterface
from charonia.models.scheduling import DynamicBatching, QueuePolicy, TimeoutAction
from charonia.simulation.machine_pauses import Pause
from charonia.simulation.processor_shares import ProcessorShares
from charonia.simulation.recorded_requests import Outcome, RecordedRequest, batches_of
from charonia.simulation.service_times import Fit, ServiceFit, SizeFit, WayFit
from charonia.simulation.simulated_run import Setting, SimulatedRun
from charonia.simulation.what_if import at_rate

MS = 1_000_000
MAX_ROWS = 8

requests = st.builds(
    RecordedRequest,
    arrived_ns=st.integers(1, 40 * MS),
    rows=st.integers(1, 3),
    level=st.integers(0, 3),
    tenant=st.sampled_from(["", "", "one", "two"]),
    timeout_us=st.sampled_from([0, 0, 0, 2000]),
)
policies = st.builds(
    QueuePolicy,
    timeout_action=st.sampled_from(TimeoutAction),
    default_timeout_us=st.sampled_from([0, 0, 5000]),
    allow_timeout_override=st.booleans(),
    max_queue_size=st.sampled_from([0, 0, 5]),
)
blocks = st.builds(
    DynamicBatching,
    preferred_batch_sizes=st.sampled_from([(), (4,), (2, 6)]),
    max_queue_delay_us=st.sampled_from([0, 1000, 5000]),
    preserve_ordering=st.booleans(),
    priority_levels=st.just(3),
    default_priority_level=st.integers(1, 3),
    default_queue_policy=policies,
)
ways = st.builds(
    WayFit,
    lead_ns=st.lists(st.integers(0, MS), min_size=1, max_size=3).map(tuple),
    turn_ns=st.lists(st.integers(0, MS), min_size=1, max_size=3).map(tuple),
    tail_ns=st.lists(st.integers(0, MS), min_size=1, max_size=3).map(tuple),
)
deviations = st.lists(st.floats(-0.9, 4.0), min_size=1, max_size=4).map(tuple)
extras = st.lists(st.integers(0, 50 * MS), min_size=1, max_size=3).map(lambda ns: tuple(sorted(ns, reverse=True)))
pauses = st.lists(st.builds(Pause, st.integers(0, 100 * MS), extras, st.booleans()), max_size=3).map(
    lambda found: tuple(sorted(found, key=lambda one: one.at_ns))
)


def fit_of(base: int, row: int, deviations: tuple[float, ...], pauses: tuple[Pause, ...], way: WayFit) -> Fit:
    typical = float(base + row)
    size = SizeFit(1, 50, typical, typical, typical)
    return Fit(ServiceFit((size,), float(base), float(row), 1.0, 1.0, deviations), way, 0, 100 * MS, pauses)


fits = st.builds(fit_of, st.integers(1000, 10 * MS), st.integers(0, MS), deviations, pauses, ways)
executions = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 1), st.sampled_from([0.0, 0.7, 1.0, 2.0]))
machines = st.lists(
    st.builds(
        ProcessorShares, st.just("a"), st.sampled_from([1.0, 2.0]), st.sampled_from([0.0, 0.5, 9.0]),
        st.sampled_from([0.0, 0.3, 1.0, 1.5]), st.sampled_from([0.0, 0.1 * MS, 5.0 * MS]),
    ),
    max_size=2,
).map(tuple)  # fmt: skip


def running_at_once(found: Sequence[RecordedRequest], executor: str) -> int:
    marks = []
    for batch in batches_of([one for one in found if one.executor == executor]):
        marks += [(batch.started_ns, 1), (batch.computed_ns, -1)]
    most = running = 0
    for _, step in sorted(marks):  # an end before a beginning at the same time
        running += step
        most = max(most, running)
    return most


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(requests, min_size=1, max_size=40), st.none() | blocks, fits, executions, machines, st.integers(0, 3))
def test_a_simulated_run(
    arrivals: list[RecordedRequest],
    block: DynamicBatching | None,
    fit: Fit,
    place: tuple[int, int, int, float],
    on: tuple[ProcessorShares, ...],
    seed: int,
) -> None:
    arrivals.sort(key=lambda one: one.arrived_ns)
    executors, instances, prefetch, cores = place
    interface = ModelInterface("m", "", "", MAX_ROWS, {}, {}, dynamic_batching=block)
    setting = Setting(interface, executors, instances, prefetch, cores=cores, machines=on)
    run = SimulatedRun(arrivals, setting, fit, seed)
    found = run.run()

    # every request ends, once, and is what it was
    assert [one.arrived_ns for one in found] == [one.arrived_ns for one in arrivals]
    assert all(one.outcome in (Outcome.ANSWERED, Outcome.REFUSED) for one in found)
    assert all(one.ended_ns >= one.arrived_ns for one in found)
    for one in found:
        if one.outcome is Outcome.ANSWERED:
            assert one.arrived_ns <= one.started_ns < one.computed_ns <= one.ended_ns
        else:
            assert not one.batch

    # never more under way than there are instances, nor larger batches than the model takes
    assert all(count <= instances for count in run.most_running.values())
    for executor in {one.executor for one in found if one.executor}:
        assert running_at_once(found, executor) <= instances
    assert all(batch.rows <= (MAX_ROWS if block is not None else 3) for batch in batches_of(found))

    # first come, first dispatched, among those of one level and tenant that nothing delayed
    last: dict[tuple[int, str], int] = {}
    for one in found:
        if (
            one.outcome is not Outcome.ANSWERED
            or one.timeout_us
            or (block and block.default_queue_policy.default_timeout_us)
        ):
            continue
        queue = (block.level(one.level) if block is not None else 0, one.tenant)
        number = int(one.batch.rpartition("-")[2])
        assert number >= last.get(queue, 0)
        last[queue] = number

    # the same again with the same seed
    assert SimulatedRun(arrivals, setting, fit, seed).run() == found


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=30), st.floats(0.1, 100.0))
def test_another_rate_keeps_the_pattern(times: list[int], factor: float) -> None:
    times.sort()
    found = at_rate([RecordedRequest(at) for at in times], factor)
    assert found[0].arrived_ns == times[0]
    for one, at in zip(found, times, strict=True):
        assert abs((one.arrived_ns - times[0]) * factor - (at - times[0])) <= factor
