"""A short recording in which the machine stood still once: arrivals stopped too, and came all at once afterwards."""

from __future__ import annotations

import random

import pytest

from charonia.models.interface import ModelInterface
from charonia.simulation.recorded_requests import Outcome, RecordedRequest, Recording, recording
from charonia.simulation.simulated_run import Setting
from charonia.simulation.simulation_document import model_document
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
    document = model_document(paused(seed, before=before), setting, [what_if("rate=x0.5")], 0)
    assert abs(document["error_percent"]["p99_us"]) < 15
    assert not document["notes"]
