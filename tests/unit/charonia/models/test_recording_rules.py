"""What a configuration may say about recording requests, and that wrong words keep a model from loading."""

from __future__ import annotations

import pytest

from charonia.models.config_forms import parse
from charonia.models.recording_rules import DEFAULT_BYTES, RecordingRules, recording_rules
from executors.configuration.config import InstanceError, normalise, validate_instances

MODEL = (
    "name: 'm' backend: 'python' input { name: 'a' data_type: TYPE_FP32 dims: [3] } "
    "output { name: 'b' data_type: TYPE_FP32 dims: [3] } "
)
WEEK_S = 7 * 86_400


def parameter(name: str, value: str) -> str:
    return f"parameters {{ key: 'charonia.{name}' value {{ string_value: '{value}' }} }} "


HALF = parameter("record_share", "0.5")


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("", None),
        (parameter("record_share", "1"), RecordingRules(1.0, WEEK_S, DEFAULT_BYTES, frozenset())),
        (HALF, RecordingRules(0.5, WEEK_S)),
        (HALF + parameter("record_days", "0.25"), RecordingRules(0.5, 21_600)),
        (HALF + parameter("record_bytes", "1000"), RecordingRules(0.5, WEEK_S, 1000)),
        (HALF + parameter("record_tenants", " a b, c,,"), RecordingRules(0.5, WEEK_S, tenants=frozenset({"a b", "c"}))),
    ],
)
def test_rules(text: str, rules: RecordingRules | None) -> None:
    assert recording_rules(parse(MODEL + text)) == rules


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        *(
            (
                parameter("record_share", wrong),
                f"parameter 'charonia.record_share' must be a number above 0 and at most 1, got '{wrong}'",
            )
            for wrong in ("", "0", "1.1", "-0.1", "nan", "1e-3", "50%", "٣")
        ),
        (
            HALF + parameter("record_days", "91"),
            "parameter 'charonia.record_days' must be a number above 0 and at most 90, got '91'",
        ),
        (
            HALF + parameter("record_bytes", "0"),
            "parameter 'charonia.record_bytes' must be a whole number between 1 and 68719476736, got '0'",
        ),
        (
            parameter("record_days", "1"),
            "parameter 'charonia.record_days' needs 'charonia.record_share', without which nothing is recorded",
        ),
    ],
)
def test_wrong_words_keep_a_model_from_loading(text: str, sentence: str) -> None:
    with pytest.raises(InstanceError) as raised:
        validate_instances(normalise(parse(MODEL + text)))
    assert str(raised.value) == sentence


@pytest.mark.parametrize(
    ("named", "tenant", "may"),
    [("", "", True), ("", "a", False), ("a", "a", True), ("a", "b", False), ("*", "b", True)],
)
def test_tenants_have_to_agree(named: str, tenant: str, may: bool) -> None:
    rules = recording_rules(parse(MODEL + HALF + parameter("record_tenants", named)))
    assert rules is not None
    assert rules.may_record(tenant) is may
