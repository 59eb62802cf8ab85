"""Amounts by hour: their names in the log, their sums, and receipts."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from charonia.facts.usage import (
    AMOUNTS,
    DAY_S,
    FAILURES,
    HOUR_S,
    HOURS,
    INSTANCE_NS,
    MOST_STEPS,
    REQUESTS,
    SHARE_PPM,
    Steps,
    as_document,
    hour_of,
    increments,
    nothing,
    receipt,
    rows_of,
    total,
)

TENANTS = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=12)
AMOUNT = st.integers(0, 2**62)
BY_TENANT = st.dictionaries(TENANTS, st.lists(AMOUNT, min_size=len(AMOUNTS), max_size=len(AMOUNTS)), max_size=4)


@given(st.integers(0, HOURS - 1), st.integers(0, 30_000), BY_TENANT)
def test_what_is_written_is_read_again(hour: int, day: int, by_tenant: dict[str, list[int]]) -> None:
    rows = rows_of("m", day, increments(hour, by_tenant))
    assert {row.tenant: list(row.amounts) for row in rows} == {
        tenant: amounts for tenant, amounts in by_tenant.items() if any(amounts)
    }
    assert all(row.start_s == day * DAY_S + hour * HOUR_S for row in rows)


def test_hours_and_tenants_are_kept_apart() -> None:
    kept = increments(7, {"": [1] * 10, "07nacme": [2] * 10}) | increments(23, {"": [3] * 10})
    found = [(row.start_s // HOUR_S, row.tenant, row.amounts[REQUESTS]) for row in rows_of("m", 0, kept)]
    assert found == [(7, "", 1), (7, "07nacme", 2), (23, "", 3)]


def test_names_of_a_newer_release_are_skipped() -> None:
    assert rows_of("m", 0, {"07zacme": 1, "24n": 1, "n": 1, "": 1, "xxn": 1, "٠٧n": 1}) == []


def test_an_hour_ends_where_the_next_begins() -> None:
    assert hour_of((3 * DAY_S + 2 * HOUR_S) * 10**9 - 1) == (3, 1)
    assert hour_of((3 * DAY_S + 2 * HOUR_S) * 10**9) == (3, 2)


def test_amounts_as_a_document() -> None:
    amounts = nothing()
    assert as_document(amounts)["batch_share"] is None
    amounts[REQUESTS], amounts[SHARE_PPM], amounts[INSTANCE_NS], amounts[FAILURES] = 4, 1_000_000, 1_500_000_000, 2
    document = as_document(amounts)
    assert (document["batch_share"], document["instance_s"], document["failures"]) == (0.25, 1.5, 2)
    assert total([]) == nothing()


def test_a_receipt() -> None:
    amounts = [1, 0, 2, 250_000, 3_000_000, 1_000_000, 128, 64, 9, 0]
    assert json.loads(receipt(amounts, 2, 8, "acme", "e-1", "b-1", 2)) == {
        "rows": 2,
        "instance_s": 0.003,
        "queue_s": 0.001,
        "input_bytes": 128,
        "output_bytes": 64,
        "tokens": 9,
        "batch_share": 0.25,
        "batch_rows": 8,
        "executor": "e-1",
        "batch": "b-1",
        "attempt": 2,
        "tenant": "acme",
    }
    assert "tenant" not in json.loads(receipt(amounts, 2, 8, "", "e-1", "b-1", 2))


def test_a_receipt_of_a_failed_request() -> None:
    amounts = [0, 1, 0, 0, 0, 1_000_000, 128, 0, 0, 3_000_000]
    told = json.loads(receipt(amounts, 2, 8, "", "e-1", "b-1", 1))
    assert (told["failed"], told["rows"], told["instance_s"], told["batch_share"]) == (True, 2, 0.003, 0.25)
    assert "failed_instance_s" not in told
    assert json.loads(receipt(amounts, 2, 0, "", "e-1", "b-1", 1))["batch_share"] is None


def test_a_receipt_of_steps_is_their_sum_and_names_them() -> None:
    step = receipt([1, 0, 2, 250_000, 3_000_000, 1_000_000, 128, 64, 9, 0], 2, 8, "acme", "e-1", "b-1", 1)
    inner = Steps()
    inner.add("leaf", 1, step)
    steps = Steps()
    steps.add("first", 1, step)
    steps.add("nested", 3, inner.receipt(2, "acme", 1, failed=False))
    for broken in (None, 7, "{", "[]"):
        steps.add("strange", 1, broken)
    told = json.loads(steps.receipt(2, "acme", 1, failed=False))
    assert {name: told[name] for name in ("rows", "instance_s", "queue_s", "input_bytes", "tokens", "tenant")} == {
        "rows": 2,
        "instance_s": 0.006,
        "queue_s": 0.002,
        "input_bytes": 256,
        "tokens": 18,
        "tenant": "acme",
    }
    assert [(one["model"], one["version"]) for one in told["steps"]] == [("first", 1), ("nested", 3)]
    assert told["steps"][1]["steps"][0]["executor"] == "e-1"
    assert "steps_left_out" not in told


def test_of_a_step_that_is_a_large_ensemble_the_sums_are_kept() -> None:
    step = receipt([1, 0, 1, 1_000_000, 1_000_000, 0, 0, 0, 0, 0], 1, 1, "", "e-1" * 200, "b-1", 1)
    inner = Steps()
    for number in range(MOST_STEPS):
        inner.add(f"m{number}", 1, step)
    steps = Steps()
    steps.add("nested", 1, inner.receipt(1, "", 1, failed=False))
    told = json.loads(steps.receipt(1, "", 1, failed=False))
    assert (told["instance_s"], told["steps"][0]["instance_s"], "steps" in told["steps"][0]) == (0.1, 0.1, False)


def test_a_receipt_names_no_more_steps_than_fit() -> None:
    step = receipt([1, 0, 1, 1_000_000, 1_000_000, 0, 0, 0, 0, 0], 1, 1, "", "e-1", "b-1", 1)
    steps = Steps()
    for number in range(MOST_STEPS + 50):
        steps.add(f"m{number}", 1, step)
    told = json.loads(steps.receipt(1, "", 1, failed=False))
    assert (len(told["steps"]), told["steps_left_out"], told["instance_s"]) == (MOST_STEPS, 50, 0.15)
    failed = json.loads(steps.receipt(1, "", 1, failed=True))
    assert [one["model"] for one in failed["steps"]] == ["m148", "m149"]
    assert (failed["steps_left_out"], failed["instance_s"]) == (148, 0.15)
    steps.add("long" * 400, 1, step)
    text = steps.receipt(1, "", 1, failed=True)  # becomes a header
    assert len(text) <= 1500
    assert json.loads(text)["steps"] == []
