"""`metric_tags` and `model_metrics` (C13, C26)."""

from __future__ import annotations

import pytest

from charonia.models.config_errors import StructureError
from charonia.models.config_forms import parse
from charonia.models.metric_control import check_metrics, first_response_buckets, tag_labels, unknown_families

FAMILY = 'metric_identifier { family: "nv_inference_first_response_histogram_ms" }'
OTHER = 'metric_identifier { family: "other" } histogram_options { buckets: [ 7 ] }'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model_metrics { metric_control { } }", "metric control must specify 'metric_identifier'"),
        (
            "model_metrics { metric_control { metric_identifier { } } }",
            "metric identifier must specify non-empty 'family'",
        ),
        (f"model_metrics {{ metric_control {{ {FAMILY} }} }}", "metric control must specify 'histogram_options'"),
        (
            f"model_metrics {{ metric_control {{ {FAMILY} histogram_options {{ }} }} }}",
            "histogram options must specify non-empty 'buckets'",
        ),
        (
            f"model_metrics {{ metric_control {{ {FAMILY} histogram_options {{ buckets: [ 1, 1 ] }} }} }}",
            "histogram options must specify 'buckets' in increasing order for m",
        ),
        ("metric_tags { key: 'a-b' value: '' }", "metric tag 'a-b' cannot be a label of the metrics of m"),
        ("metric_tags { key: '' value: 'x' }", "metric tag '' cannot be a label of the metrics of m"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(StructureError) as refused:
        check_metrics(parse(text), "m")
    assert refused.value.message == message


def test_buckets() -> None:
    assert first_response_buckets(parse("")) == (100, 500, 2000, 5000)
    chosen = parse(
        f"model_metrics {{ metric_control: [ {{ {FAMILY} histogram_options {{ buckets: [ -1, 0.0, 2.5 ] }} }}, "
        f"{{ {OTHER} }} ] }} metric_tags {{ key: '_a1' value: 'x' }}"
    )
    check_metrics(chosen, "m")
    assert first_response_buckets(chosen) == (-1, 0, 2.5)
    assert unknown_families(chosen) == ["other"]


def test_labels_of_tags_begin_with_a_line_below() -> None:
    """As Triton's: so a tag may have the name of a label that the series have."""
    tagged = parse("metric_tags { key: 'version' value: 'x' } metric_tags { key: '1a' value: 'y' }")
    check_metrics(tagged, "m")
    assert tag_labels(tagged) == {"_1a": "y", "_version": "x"}
