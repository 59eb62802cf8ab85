"""Recordings in which the machine stood still: arrivals stopped too, and came all at once afterwards."""

from __future__ import annotations

import random

import pytest

from charonia.facts.processor_use import ProcessorUse
from charonia.models.interface import ModelInterface
from charonia.simulation.machine_pauses import placed
from charonia.simulation.recorded_requests import Outcome, RecordedRequest, Recording, recording
from charonia.simulation.service_times import fitted
from charonia.simulation.simulated_run import Setting, simulated
from charonia.simulation.simulation_document import document_text, model_document
from charonia.simulation.what_if import what_if

MS = 1_000_000
PAUSE_MS = 400.0


def paused(seed: int, *, before: bool = False, count: int = 200, ms_between: float = 10.0) -> Recording:
    """One instance takes one request after the other, 3 to 4 ms each; at half of the time all stands still, in an
    execution or `before` one."""
    chance = random.Random(seed)
    free = at = 0.0
    pause_at = count * ms_between / 2
    requests = []
    for number in range(count):
        at += chance.expovariate(1 / ms_between)
        came = pause_at + PAUSE_MS if pause_at <= at < pause_at + PAUSE_MS else at
        start = max(came, free) + 0.2
        end = start + 3 + chance.random()
        if start < pause_at + PAUSE_MS and end > pause_at:  # what runs when it stands still
            start, end = (start + PAUSE_MS if before else start), end + PAUSE_MS
        free = end
        requests.append(
            RecordedRequest(
                round((1000 + came) * MS), batch=f"b-{number}", executor="e", started_ns=round((1000 + start) * MS),
                computed_ns=round((1000 + end) * MS), ended_ns=round((1000 + end + 0.2) * MS), outcome=Outcome.ANSWERED,
            )
        )  # fmt: skip
    return recording("m", requests, "test", 1000)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_simulation_of_what_was_recorded_has_its_high_percentile(seed: int, before: bool) -> None:
    setting = Setting(ModelInterface("m", "", "", 0, {}, {}), 1, 1)
    document = model_document(paused(seed, before=before), setting, [what_if("rate=x0.5 cores=1")], 0)
    assert abs(document["error_percent"]["p99_us"]) < 15
    assert not document["notes"]


@pytest.mark.parametrize(
    ("question", "others", "expected_ms", "notes"),
    [
        ("instances=1", None, 3.5, 1),
        # five requests come together every 100 ms
        ("instances=5", None, 3.5, 1),
        ("instances=5", 0.0, 5 / 2 * 3.5, 0),
        ("instances=5", 1.0, 5 * 3.5, 0),
        ("instances=5 cores=5", 1.0, 3.5, 0),
    ],
)
def test_what_the_processors_did_slows_instances(
    question: str, others: float | None, expected_ms: float, notes: int
) -> None:
    requests = []
    for number in range(150):
        arrived_ns = (1000 + 100 * (number // 5)) * MS
        start_ns = arrived_ns + 7 * MS * (number % 5) // 2  # one after the other
        end_ns = start_ns + 7 * MS // 2
        requests.append(
            RecordedRequest(
                arrived_ns, batch=f"b-{number}", executor="e", started_ns=start_ns, computed_ns=end_ns,
                ended_ns=end_ns, outcome=Outcome.ANSWERED,
            )
        )  # fmt: skip
    second = 1_000_000_000
    use = ProcessorUse("h", 2.0, 1, 0, 0, 0, 0, 0, 0)
    later = ProcessorUse("h", 2.0, 1, 2 * second, round((1 + 2 * (others or 0)) * second), second, second, second, 100)
    said = () if others is None else (("e", use), ("e", later))
    setting = Setting(ModelInterface("m", "", "", 0, {}, {}), 1, 1)
    document = model_document(recording("m", requests, "test", 1000, said=said), setting, [what_if(question)], 0)
    assert document["error_percent"]["p99_us"] == pytest.approx(0, abs=2)
    (found,) = document["what_ifs"]
    assert found["figures"]["p50_us"] / 1000 == pytest.approx(expected_ms if "5" in question else 10.5, abs=0.1)
    assert sum("what the processors did" in note for note in document["notes"]) == notes
    assert ("2 processors of h, of which others used" in document_text({"models": [document]})) == (others is not None)


INSTANCES = 4
PAUSES_AT_MS = (1000.0, 2500.0)


def paused_together(seed: int, *, alone: bool = False) -> list[RecordedRequest]:
    """2,000 requests at four instances, 8 to 9 ms each; twice all stand still at once, or with `alone` the first."""
    chance = random.Random(seed)
    free = [0.0] * INSTANCES
    at = 0.0
    requests = []
    for number in range(2000):
        at += chance.expovariate(1 / 2.6)
        came = at
        for pause_at in () if alone else PAUSES_AT_MS:
            came = pause_at + PAUSE_MS if pause_at <= came < pause_at + PAUSE_MS else came
        instance = min(range(INSTANCES), key=lambda one: free[one])
        start = max(came, free[instance]) + 0.2
        end = start + 8 + chance.random()
        for pause_at in PAUSES_AT_MS if instance == 0 or not alone else ():
            if start < pause_at + PAUSE_MS and end > pause_at:
                start, end = (start if start < pause_at else start + PAUSE_MS), end + PAUSE_MS
        free[instance] = end
        requests.append(
            RecordedRequest(
                round((1000 + came) * MS), batch=f"b-{number}", executor="e", started_ns=round((1000 + start) * MS),
                computed_ns=round((1000 + end) * MS), ended_ns=round((1000 + end + 0.2) * MS), outcome=Outcome.ANSWERED,
            )
        )  # fmt: skip
    return requests


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_pause_of_several_instances_is_one(seed: int, alone: bool) -> None:
    recorded = recording("m", paused_together(seed, alone=alone), "test", 1000)
    setting = Setting(ModelInterface("m", "", "", 0, {}, {}), 1, INSTANCES)
    document = model_document(recorded, setting, [], 0)
    assert abs(document["error_percent"]["p99_us"]) < 15
    assert not document["notes"]
    run = simulated(recorded.requests, setting, fitted(recorded, setting.interface, INSTANCES), 0)
    took = [sorted(one.computed_ns - one.started_ns for one in requests) for requests in (recorded.requests, run)]
    assert took[1][-1] == pytest.approx(took[0][-1], rel=0.15)
    met = [sum(ns > PAUSE_MS * MS / 2 for ns in ascending) for ascending in took]
    assert met[0] - 1 <= met[1] <= met[0] + 1


def test_requests_without_an_end_do_not_move_pauses() -> None:
    requests = paused_together(0)
    lost = [RecordedRequest(requests[-1].arrived_ns + number * MS) for number in range(1, 5000)]
    fit = fitted(recording("m", [*requests, *lost], "test", 1000), ModelInterface("m", "", "", 0, {}, {}), INSTANCES)
    assert len(fit.pauses) == len(PAUSES_AT_MS)
    arrivals = [one.arrived_ns for one in requests]
    at_their_times = placed(fit.pauses, (fit.first_ns, fit.last_ns), (min(arrivals), max(arrivals)))
    assert tuple(at_their_times) == fit.pauses
