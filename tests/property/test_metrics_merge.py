"""The joint metrics page is the sum of its parts, series by series."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from charonia.metrics.exposition import counters, merge

FAMILIES = ["nv_a", "nv_b", "charonia_c"]
LABELS = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
SERIES = st.dictionaries(st.tuples(st.sampled_from(FAMILIES), LABELS), st.integers(0, 2**50), max_size=6)


def page(series: dict[tuple[str, str], int]) -> str:
    class Part(Collector):
        def collect(self) -> list[GaugeMetricFamily]:
            found = []
            for name in FAMILIES:
                family = GaugeMetricFamily(name, f"what {name} is", labels=["model"])
                for (of, label), value in series.items():
                    if of == name:
                        family.add_metric([label], value)
                found.append(family)
            return found

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Part())
    return generate_latest(registry).decode()


def read(text: str) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels["model"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@given(st.lists(SERIES, max_size=4))
def test_the_sum_of_the_parts(parts: list[dict[tuple[str, str], int]]) -> None:
    total: Counter[tuple[str, str]] = Counter()
    for part in parts:
        for key, value in part.items():
            total[key] += value
    joint = merge([page(part) for part in parts]).decode()
    assert {key: value for key, value in read(joint).items() if value} == {k: v for k, v in total.items() if v}
    for name in FAMILIES if parts else ():
        assert joint.count(f"# TYPE {name} gauge") == 1
        assert joint.count(f"# HELP {name} ") == 1


def test_a_bad_line_costs_only_itself() -> None:
    head = "# TYPE a gauge\n"
    joint = merge([head + 'a 1\nnonsense here\n# free comment\na{l="x y"} 2\n', head + 'a 3\na{l="x y"} 2.5\n'])
    assert joint == b'# TYPE a gauge\na 4\na{l="x y"} 4.5\n'


def test_infinities_are_written_as_prometheus_reads_them() -> None:
    assert merge(["a +Inf\nb -Inf\nc NaN\nd 0.5\n"]) == b"a +Inf\nb -Inf\nc NaN\nd 0.5\n"


def test_what_only_grows() -> None:
    page = """# TYPE c_total counter
c_total{model="a b"} 2
# TYPE g gauge
g 5
# TYPE h histogram
h_count 3
h_bucket{le="1"} 3
# TYPE s summary
s_count{model="m"} 4
s_sum{model="m"} 40
s{model="m",quantile="0.5"} 9
s_within{model="m",range="3"} 4
unknown 7
"""
    assert counters(page) == {
        'c_total{model="a b"}': 2,
        "h_count": 3,
        'h_bucket{le="1"}': 3,
        's_count{model="m"}': 4,
        's_sum{model="m"}': 40,
    }


def test_earlier_counts_are_added_to_what_is_still_there() -> None:
    head = "# TYPE c counter\n"
    joint = merge([head + 'c{m="a"} 1\n', head + 'c{m="a"} 2\n'], earlier={'c{m="a"}': 10, 'c{m="gone"}': 5})
    assert joint == b'# TYPE c counter\nc{m="a"} 13\n'
