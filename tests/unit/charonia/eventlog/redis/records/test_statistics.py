"""Statistics of runs travel and rest packed, and read as if they did not."""

from __future__ import annotations

import numpy as np
import pytest

from charonia.eventlog.redis.records.statistics import amounts_of, statistics_of
from charonia.tensors import Tensor
from charonia.wire import RequestRecord, pack_request, request_meta, unpack_request
from executors.batches.accounting import Executed, Execution
from executors.settling.settlement import increments


def of_a_run(rows: int = 3, start_ns: int = 5_000_000) -> dict[str, int]:
    """What executors really add for a batch that was one execution."""
    tensor = Tensor.of("x", np.zeros((rows, 1), np.float32))
    meta = request_meta(1, "", [tensor], (), {})
    packed = pack_request(
        bytes(16), b"", b"", meta, [tensor.data], rows=rows, signature=0, level=0, accepted_ns=1_000_000
    )
    record: RequestRecord = unpack_request(packed)
    return increments([record], Executed([b""], [Execution((0,), rows, start_ns, start_ns + 90, 20, 30, 40)], []))


def test_what_an_execution_adds_is_one_field() -> None:
    added = of_a_run()
    kind, (field, packed) = amounts_of(added)

    assert (kind, field) == (b"run", b"run:3")
    assert isinstance(packed, bytes)
    assert statistics_of([b"run:3", packed]) == added
    assert list(statistics_of([b"run:3", packed])) == list(added)


def test_runs_are_added_to_what_stands_beside_them() -> None:
    three, seven = of_a_run(), of_a_run(rows=7, start_ns=9_000_000)
    raw = [b"success_ns", b"11", b"last_inference_ms", b"7", b"b3_count", b"2", b"fail_count", b"1"]
    for one in (three, seven):
        _, (field, packed) = amounts_of(one)
        assert isinstance(field, bytes)
        assert isinstance(packed, bytes)
        raw += [field, packed]
    found = statistics_of(raw)

    assert found["success_ns"] == 11 + three["success_ns"] + seven["success_ns"]
    assert found["last_inference_ms"] == 9
    assert (found["b3_count"], found["b7_count"], found["fail_count"]) == (3, 1, 1)
    assert found["inference_count"] == 10


@pytest.mark.parametrize(
    "change",
    [
        {"success_ns": 2**52 + 1},
        {"queue_ns": -1},
        {"fail_count": 1},
        {"last_other_ms": 1},
    ],
)
def test_all_else_goes_name_by_name(change: dict[str, int]) -> None:
    added = of_a_run() | change
    kind, arguments = amounts_of(added)

    sums = {name: value for name, value in added.items() if value and not name.startswith("last_")}
    latest = {name: value for name, value in added.items() if name.startswith("last_")}
    assert kind == len(sums)
    assert arguments == [*sums, *latest, *sums.values(), *latest.values()]


@pytest.mark.parametrize("rows", ["", "x", "²", "1_0"])
def test_names_that_only_look_like_a_runs_are_none(rows: str) -> None:
    added = {name.replace("b3_", f"b{rows}_"): value for name, value in of_a_run().items()}
    assert amounts_of(added)[0] != b"run"
    assert amounts_of(dict(reversed(of_a_run().items())))[0] != b"run"
