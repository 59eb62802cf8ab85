"""The names of a model's counters are the same in Python and Lua, and waves count under the names of one execution."""

from __future__ import annotations

import re
from pathlib import Path

from charonia.eventlog.redis import scripts
from charonia.eventlog.redis.stored_records import amounts_of
from charonia.facts.counters import LATEST, OF_RUN, add, of_execution, of_failures
from executors.settling.wave_settler import WaveCounts


def test_the_script_moves_the_counters_under_these_names() -> None:
    text = (Path(scripts.__file__).parents[1] / "scripts" / "fold_statistics.lua").read_text()
    (names,) = re.findall(r"local names = \{(.*?)\}", text, re.DOTALL)
    moved = [name if place < 12 else f"b7{name}" for place, name in enumerate(re.findall(r"'(\w+)'", names))]
    assert (*moved, LATEST) == of_execution(7)


def test_a_run_is_counted_apart_from_its_requests() -> None:
    assert of_execution(4)[OF_RUN] == ("execution_count", "b4_count", "b4_input_ns", "b4_infer_ns", "b4_output_ns")


def test_waves_of_one_size_are_packed_as_an_execution_is() -> None:
    counts = WaveCounts(count=6, rows=6, queued_ns=30, whole_ns=90, executions=2, last_ms=5, sizes={3: (2, 1, 2, 3)})
    kind, (field, _) = amounts_of(counts.increments())
    assert (kind, field) == (b"run", b"run:3")


def test_increments_are_added_up() -> None:
    totals = {LATEST: 9}
    add(totals, of_failures(2, 7, "BACKEND"))
    add(totals, {LATEST: 8, "fail_count": 1})
    assert totals == {LATEST: 9, "fail_count": 3, "fail_ns": 7, "fail_BACKEND": 2}
    assert of_failures(1, -5, "OTHER")["fail_ns"] == 0
