"""Trace files become recorded requests: attributes where there are any, equal times of execution otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from charonia.errors import InvalidArgument
from charonia.facts.processor_use import ProcessorUse
from charonia.simulation.processor_shares import shares_of
from charonia.simulation.recorded_requests import Outcome, batches_of
from charonia.simulation.trace_recording import trace_recordings


def traced(number: int, at: int, run: tuple[int, int] | None, about: dict[str, Any] | None = None) -> list[Any]:
    stamps = {"REQUEST_START": at - 5, "QUEUE_START": at, "REQUEST_END": (run or (at, at))[1] + 50}
    if run is not None:
        stamps |= {"COMPUTE_START": run[0], "COMPUTE_END": run[1]}
    named = {"id": number, "model_name": "m", "model_version": 1, "request_id": ""}
    if about:
        named["attributes"] = about
    return [named, {"id": number, "timestamps": [{"name": name, "ns": ns} for name, ns in stamps.items()]}]


def test_attributes_name_batch_rows_priority_and_tenant() -> None:
    about = {
        "charonia.executor": "e-1", "charonia.batch_id": "b-1", "charonia.rows": 3, "charonia.priority": 2,
        "charonia.timeout_us": 500, "charonia.tenant": "t",
    }  # fmt: skip
    (found,) = trace_recordings([[*traced(1, 100, (1000, 2000), about)]], ()).values()
    (one,) = found.requests
    assert (one.arrived_ns, one.started_ns, one.computed_ns, one.ended_ns) == (100, 1000, 2000, 2050)
    assert (one.rows, one.level, one.timeout_us, one.tenant, one.executor) == (3, 2, 500, "t", "e-1")
    assert (one.outcome, found.executors, one.journalled) == (Outcome.ANSWERED, 1, False)
    (found,) = trace_recordings([traced(1, 100, (1000, 2000), {**about, "charonia.journalled": 1})], ()).values()
    assert found.requests[0].journalled


def test_one_of_a_batch_says_what_the_processors_did() -> None:
    use = ProcessorUse("h", 2.0, 1, 1, 2, 3, 4, 5, 6)
    about = {"charonia.executor": "e-1", "charonia.batch_id": "b-1"}
    objects = traced(1, 100, (1000, 2000), {**about, "charonia.processor_use": use.text()})
    (found,) = trace_recordings([[*objects, *traced(2, 100, (1000, 2000), about)]], ()).values()
    assert found.said == (("e-1", use),)
    with pytest.raises(InvalidArgument, match="no trace file: no use of processors"):
        trace_recordings([traced(1, 100, (1000, 2000), {**about, "charonia.processor_use": "h 2"})], ())


def test_a_recorded_machine_that_starts_again_is_one() -> None:
    """An executor of this release, then of an earlier one beside it, a reboot, and the first one again."""
    second = 1_000_000_000
    objects = []
    starts = [("e-1", "b", 1, 8), ("e-0", "b", 2, 0), ("e-2", "b", 1, 9)]
    for number, (executor, host, tree, shared) in enumerate(starts):
        for beat in range(11):
            at_ns = (20 * (executor == "e-2") + beat) * second
            used = beat * second // 2
            use = ProcessorUse(host, 2.0, tree, at_ns, 2 * used, used, used, used, 10 * beat, shared)
            name = f"b-{number}-{beat}"
            about = {"charonia.executor": executor, "charonia.batch_id": name, "charonia.processor_use": use.text()}
            objects += traced(len(objects) + 1, at_ns + 1, (at_ns + 2, at_ns + 3), about)
    (found,) = trace_recordings([objects], ()).values()
    assert len(found.said) == 33
    (machine,) = shares_of(found.said)
    assert (machine.host, machine.processors, machine.others, machine.share) == ("b", 2.0, 0.0, 1.0)


def test_without_attributes_equal_times_are_a_batch() -> None:
    objects = [*traced(1, 100, (1000, 2000)), *traced(2, 50, (1000, 2000)), *traced(3, 200, (2000, 3000))]
    (found,) = trace_recordings([objects, traced(1, 300, (1000, 2000))], ()).values()
    assert [one.arrived_ns for one in found.requests] == [50, 100, 200, 300]
    assert [(batch.rows, batch.arrivals) for batch in batches_of(found.requests)] == [
        (2, (50, 100)), (1, (300,)), (1, (200,)),
    ]  # fmt: skip


def test_a_request_that_never_ran_was_refused_and_a_model_that_never_ran_is_no_recording() -> None:
    (found,) = trace_recordings([[*traced(1, 100, None), *traced(2, 100, (150, 200))]], ()).values()
    assert [one.outcome for one in found.requests] == [Outcome.REFUSED, Outcome.ANSWERED]
    assert trace_recordings([traced(1, 100, None)], ()) == {}


def test_a_recording_is_cut_by_arrival() -> None:
    objects = [one for number in range(5) for one in traced(number, 100 * (number + 1), (10_000, 20_000))]
    (found,) = trace_recordings([objects], ("m",)).values()
    assert [one.arrived_ns for one in found.cut(100, 200).requests] == [200, 300]
    assert len(found.cut(0, 0).requests) == 5


@pytest.mark.parametrize("objects", [[1], [{"no": "id"}], [{"id": 1, "timestamps": [{"name": "x"}]}]])
def test_other_files_are_refused(objects: list[Any]) -> None:
    with pytest.raises(InvalidArgument, match="no trace file"):
        trace_recordings([objects], ())
