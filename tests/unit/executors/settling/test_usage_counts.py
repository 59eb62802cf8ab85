"""What requests have used: their shares of executions, what counts, and that waves count as their requests do."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from charonia.errors import InternalError
from charonia.facts.usage import (
    AMOUNTS,
    FAILED_INSTANCE_NS,
    FAILURES,
    INSTANCE_NS,
    MOST_TENANTS,
    OTHERS,
    OUTPUT_BYTES,
    PPM,
    QUEUE_NS,
    REQUESTS,
    SHARE_PPM,
    TOKENS,
    Amounts,
    rows_of,
)
from charonia.inference import RECEIPT
from charonia.tensors import Tensor
from charonia.wire import (
    BatchHeader,
    RequestRecord,
    Wave,
    pack_failure,
    pack_request,
    pack_response,
    request_meta,
    unpack_request,
    unpack_response,
    unpack_wave,
    wave_head,
)
from executors.batches.batch_results import BACKEND, Executed, Execution, Failure
from executors.batches.wave_execution import ExecutedWaves
from executors.metrics import OTHER_TENANTS, ExecutorMetrics
from executors.settling.usage_counts import UsageCounts, amounts_of, with_receipts
from executors.settling.wave_settler import WaveCounts

HOUR_NS = 3_600_000_000_000
OUTPUT = Tensor.of("y", np.zeros((1, 2), np.float32))
HEADER = BatchHeader("b-1", "m", 1, "", 1, (1, 2), b"")


def record(tenant: str = "", rows: int = 1, accepted_ns: int = 1000, **parameters: bool) -> RequestRecord:
    tensor = Tensor.of("x", np.zeros((rows, 1), np.float32))
    meta = request_meta(1, "", [tensor], (), dict(parameters)).of_tenant(tenant)
    about = {"rows": rows, "signature": 0, "level": 0, "accepted_ns": accepted_ns}
    return unpack_request(pack_request(bytes(16), b"", b"", meta, [tensor.data], **about))  # type: ignore[arg-type]


def answer() -> bytes:
    return pack_response(bytes(16), "m", 1, [OUTPUT], {})


def test_a_request_has_its_share_of_its_batch() -> None:
    records = [record("acme", 1), record("acme", 3, 5000), record("", 1)]
    executed = Executed(
        [answer(), answer(), b""],
        [Execution((0, 1), 5, 3000, 9000, 10, 80, 10)],
        [Failure(2, InternalError("no"), BACKEND, 9000, 6000, 5)],
    )
    found = amounts_of(records, executed)
    assert found[0] == [1, 0, 1, 200_000, 20, 2000, 4, 8, 0, 0]
    assert found[1] == [1, 0, 3, 600_000, 60, 0, 12, 8, 0, 0]  # clocks of two machines differ
    assert found[2] == [0, 1, 0, 0, 0, 2000, 4, 0, 0, 1200]


def test_earlier_responses_and_tokens_belong_to_their_request() -> None:
    executed = Executed([answer()], [Execution((0,), 1, 3000, 9000, 1, 1, 1)], tokens={0: 12}, sent_bytes={0: 100})
    (amounts,) = amounts_of([record()], executed).values()
    assert (amounts[TOKENS], amounts[OUTPUT_BYTES]) == (12, 108)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(0, 10**12), st.integers(0, 5))
def test_no_batch_is_charged_for_more_than_it_took(rows: list[int], spent_ns: int, empty: int) -> None:
    records = [record(f"t{at % 3}", count) for at, count in enumerate(rows)]
    execution = Execution(tuple(range(len(rows))), sum(rows) + empty, 3000, 9000, 0, spent_ns, 0)
    found = amounts_of(records, Executed([answer()] * len(rows), [execution])).values()
    charged = sum(amounts[INSTANCE_NS] for amounts in found)
    whole = spent_ns * sum(rows) // (sum(rows) + empty)
    assert whole - len(rows) <= charged <= whole  # each share is rounded down
    assert sum(amounts[SHARE_PPM] for amounts in found) <= PPM


def test_what_another_settlement_has_ended_does_not_count() -> None:
    counts = UsageCounts(ExecutorMetrics())
    begun: list[int] = []
    counts.on_first = lambda: begun.append(1)
    records = [record("acme"), record("wind"), record("wind")]
    executed = Executed([answer()] * 3, [Execution((0, 1, 2), 3, 3000, 9000, 0, 9, 0)])
    counts.add_batch("m", 1, records, executed, [False, True, False])
    counts.add_batch("m", 1, records, executed, {0: True, 2: True})
    counts.add_batch("m", 2, records, executed, {})
    taken = counts.take(25 * HOUR_NS)
    assert len(begun) == 1
    assert counts.take(25 * HOUR_NS) == []
    ((model, day, key, added),) = taken
    assert (model, day, key) == ("m", 1, b"us:{m}:1")
    assert {row.tenant: (row.start_s, row.amounts[REQUESTS]) for row in rows_of("m", day, added)} == {
        "acme": (25 * 3600, 1),
        "wind": (25 * 3600, 2),
    }


@given(st.lists(st.tuples(st.sampled_from(["", "acme"]), st.integers(1, 4)), min_size=1, max_size=5))
def test_waves_count_as_their_requests_do(kinds: list[tuple[str, int]]) -> None:
    waves = [wave(tenant, count, at) for at, (tenant, count) in enumerate(kinds)]
    rows = sum(count for _, count in kinds)
    execution = Execution(tuple(range(len(waves))), rows, 3000, 9000, 0, 10 * rows, 0)
    counted = WaveCounts()
    counted.executed(execution, waves, {})
    requests = [one for every in waves for one in every.requests()]
    whole = Execution(tuple(range(rows)), rows, 3000, 9000, 0, 10 * rows, 0)
    expected: dict[str, Amounts] = {}
    for index, amounts in amounts_of(requests, Executed([b""] * rows, [whole])).items():
        known = expected.setdefault(requests[index].meta.tenant, [0] * len(amounts))
        expected[requests[index].meta.tenant] = [a + b for a, b in zip(known, amounts, strict=True)]
    for tenant, amounts in counted.used.items():
        for at in (REQUESTS, FAILURES, INSTANCE_NS, QUEUE_NS):
            assert amounts[at] == expected[tenant][at]
        assert 0 <= amounts[SHARE_PPM] - expected[tenant][SHARE_PPM] <= rows  # rounded once for each wave
    assert counted.used.keys() == expected.keys()


def wave(tenant: str, count: int, at: int) -> Wave:
    tensor = Tensor.of("x", np.zeros((1, 1), np.float32))
    meta = request_meta(1, "", [tensor], (), {}).of_tenant(tenant)
    head = wave_head(bytes([at]) * 15, count, b"g", meta, rows=1, signature=1, level=0, accepted_ns=1000)
    return unpack_wave(head + bytes(4 * count))


def test_waves_that_run_again_do_not_count() -> None:
    waves = [wave("acme", 2, 0), wave("wind", 3, 1), wave("", 1, 2)]
    executed = ExecutedWaves([answer(), b"", b""], singly={2: [answer()]})
    assert list(executed.left()) == [1]
    counted = WaveCounts()
    counted.executed(Execution((0, 1, 2), 6, 3000, 9000, 0, 60, 0), waves, {}, None, executed.left())
    assert {tenant: amounts[REQUESTS] for tenant, amounts in counted.used.items()} == {"acme": 2, "": 1}
    assert counted.increments()["success_count"] == 3
    assert [executed.succeeded(0, index, wave.count) for index, wave in enumerate(waves)] == [2, 0, 1]
    assert list(ExecutedWaves([answer()]).left()) == []


def test_a_day_names_a_bounded_number_of_tenants() -> None:
    counts = UsageCounts(ExecutorMetrics())

    def requests_of(tenants: list[str], hour: int) -> dict[str, int]:
        counts.add("m", 1, {tenant: [1] + [0] * (len(AMOUNTS) - 1) for tenant in tenants})
        ((model, day, _, added),) = counts.take(hour * HOUR_NS)
        return {row.tenant: row.amounts[REQUESTS] for row in rows_of(model, day, added)}

    names = [f"t{number}" for number in range(MOST_TENANTS + 5)]
    assert requests_of(names[: MOST_TENANTS - 1], 0) == dict.fromkeys(names[: MOST_TENANTS - 1], 1)
    late = requests_of(["t0", *names[MOST_TENANTS - 1 :]], 1)
    assert late == {"t0": 1, names[MOST_TENANTS - 1]: 1, OTHERS: 5}
    assert requests_of(names[-2:], 24) == dict.fromkeys(names[-2:], 1)


def test_those_that_ask_get_a_receipt() -> None:
    records = [record("acme", 1, charonia_receipt=True), record("acme", 3)]
    executed = Executed([answer(), answer()], [Execution((0, 1), 4, 3000, 9000, 10, 80, 10)])
    told, other = with_receipts("e-1", HEADER, records, executed)
    assert other == executed.answers[1]
    assert executed.answers[0] == answer()
    found = unpack_response(told)
    document = json.loads(str(found.parameters[RECEIPT]))
    assert (document["instance_s"], document["batch_rows"], document["batch_share"]) == (25e-9, 4, 0.25)
    assert (document["tenant"], document["executor"], document["attempt"]) == ("acme", "e-1", 1)
    assert found.outputs == unpack_response(answer()).outputs
    assert with_receipts("e-1", HEADER, records[1:], Executed([answer()])) == [answer()]


def test_a_failed_request_gets_a_receipt_as_well() -> None:
    records = [record("acme", 2, charonia_receipt=True), record("acme", 2)]
    failed = pack_failure(records[0].id, "m", 1, InternalError("no"))
    failures = [Failure(at, InternalError("no"), BACKEND, 9000, 800, 4) for at in (0, 1)]
    executed = Executed([failed, failed], failures=failures)
    told, other = with_receipts("e-1", HEADER, records, executed)
    assert other == failed
    error = unpack_response(told).error
    assert isinstance(error, InternalError)
    assert error.message == "no"
    document = json.loads(error.receipt)
    assert (document["failed"], document["instance_s"], document["batch_share"]) == (True, 400e-9, 0.5)
    assert (document["rows"], document["executor"], document["attempt"]) == (2, "e-1", 1)
    assert json.loads(error.again().receipt) == document
    assert unpack_response(failed).error.receipt == ""  # type: ignore[union-attr]


def test_failures_of_waves_count_what_they_ran() -> None:
    waves = [wave("acme", 2, 0)]
    counted = WaveCounts()
    counted.failed([Failure(0, InternalError("no"), BACKEND, 9000, 3000, 6)] * 2, waves)
    amounts = counted.used["acme"]
    assert (amounts[FAILURES], amounts[FAILED_INSTANCE_NS], amounts[QUEUE_NS]) == (2, 1000, 10_000)


def test_metrics_name_a_bounded_number_of_tenants() -> None:
    metrics = ExecutorMetrics()
    for number in range(300):
        metrics.used("m", 1, f"t{number}", [1] * len(AMOUNTS))
    metrics.used("m", 1, "t7", [1] * len(AMOUNTS))
    text = metrics.render().decode()
    series = [line for line in text.splitlines() if line.startswith("charonia_usage_requests_total")]
    assert len(series) == 257
    assert 'charonia_usage_requests_total{model="m",tenant="t7",version="1"} 2.0' in series
    assert f'charonia_usage_requests_total{{model="m",tenant="{OTHER_TENANTS}",version="1"}} 44.0' in series


def test_metrics_have_a_bounded_number_of_series() -> None:
    metrics = ExecutorMetrics()
    for version in range(1, 41):
        for number in range(200):
            metrics.used("m", version, f"t{number}", [1] * len(AMOUNTS))
    assert 4096 <= len(metrics._usage) <= 4096 + 40
    assert sum(amounts[REQUESTS] for amounts in metrics._usage.values()) == 40 * 200
