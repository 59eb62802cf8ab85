"""What the OpenAI API counts, of calls that end early as well."""

from __future__ import annotations

import pytest

from gateway.openai.shapes.text_answers import TextDelta
from gateway.openai.text_metrics import MAX_TENANTS, OTHERS, Histogram, TextCounts


def test_buckets_are_cumulative() -> None:
    found = Histogram((0.1, 1.0))
    for value_s in (0.05, 0.1, 0.5, 7.0):
        found.observe(value_s)
    found.observe(0.5, 2)
    assert found.buckets == [("0.1", 2.0), ("1.0", 5.0), ("+Inf", 6.0)]
    assert found.sum_s == pytest.approx(8.65)


def test_what_was_generated_counts_however_a_call_ends() -> None:
    counts = TextCounts()
    for error in (None, ValueError(), GeneratorExit()):
        try:
            with counts.call("chat", "m", "acme", 5) as call:
                call.add(0, TextDelta("a", (1,), 1))
                call.add(0, TextDelta("bc", (2, 3), 2))
                if error is not None:
                    raise error
        except (ValueError, GeneratorExit):
            pass
    assert counts.calls == {("chat", "m", outcome): 1 for outcome in ("finished", "failed", "cancelled")}
    assert counts.tokens == {("m", "acme", "prompt"): 15, ("m", "acme", "completion"): 9}
    assert counts.first_token["m"].buckets[-1] == ("+Inf", 3.0)
    assert counts.between_tokens["m"].buckets[-1] == ("+Inf", 6.0)


def test_a_model_that_counts_its_prompt_is_believed() -> None:
    counts = TextCounts()
    with counts.call("chat", "m", "", 0) as call:
        call.add(0, TextDelta("a", count=1, prompt_tokens=7))
    assert counts.tokens["m", "", "prompt"] == 7


def test_tenants_are_bounded() -> None:
    counts = TextCounts()
    for number in range(MAX_TENANTS + 3):
        counts.count("chat", "m", f"t{number}", "finished", 1, 0)
    counts.count("chat", "m", "t0", "finished", 1, 0)
    assert counts.tokens["m", OTHERS, "prompt"] == 3
    assert counts.tokens["m", "t0", "prompt"] == 2
    names = {family.name for family in counts.collect()}
    assert "charonia_openai_tokens" in names
