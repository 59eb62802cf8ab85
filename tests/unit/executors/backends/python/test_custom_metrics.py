"""Custom metrics: boards of several processes become one page."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from charonia.backend import ModelSource
from executors.backends.python.custom_metrics import Board, CustomMetrics
from executors.backends.python.protocol import metric_board
from executors.backends.python.protocol.metric_board import COUNTER, GAUGE, HISTOGRAM, BoardFull, BoardWriter, Slot
from protos.model_config_pb2 import ModelConfig


def source(name: str = "m") -> ModelSource:
    return ModelSource(name, 1, Path("/none"), ModelConfig(name=name))


@pytest.fixture
def metrics() -> Iterator[CustomMetrics]:
    made = CustomMetrics()
    yield made
    for board in list(made._boards):
        board.close(died=False)


def counter(board: Board | BoardWriter, value: float, name: str = "hits", **labels: str) -> Slot:
    writer = board if isinstance(board, BoardWriter) else BoardWriter(board.descriptor)
    slot = writer.add(COUNTER, 1, [name, "what", labels, ()])
    slot.values[0] = value
    return slot


def values(metrics: CustomMetrics) -> dict[str, float]:
    page = metrics.render().decode()
    return {
        sample.name + "".join(f" {k}={v}" for k, v in sample.labels.items()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_the_page_is_an_exposition(metrics: CustomMetrics) -> None:
    writer = BoardWriter(metrics.open(source()).descriptor)
    counter(writer, 3, "requests_seen", kind='a"\\\n')
    histogram = writer.add(HISTOGRAM, 4, ["sizes", "how large\nthey are", {}, (1.0, 2.5)])
    histogram.values[:] = memoryview(struct.pack("4d", 2, 1, 4, 31.5)).cast("d")
    gauge = writer.add(GAUGE, 3, ["level", "", {}, ()])
    gauge.values[0], gauge.values[1], gauge.values[2] = 1.5, 1, 1
    assert metrics.render().decode() == (
        '# HELP requests_seen what\n# TYPE requests_seen counter\nrequests_seen{kind="a\\"\\\\\\n"} 3\n'
        "# HELP sizes how large\\nthey are\n# TYPE sizes histogram\n"
        'sizes_bucket{le="1"} 2\nsizes_bucket{le="2.5"} 3\nsizes_bucket{le="+Inf"} 7\nsizes_sum 31.5\nsizes_count 7\n'
        "# HELP level \n# TYPE level gauge\nlevel 2.5\n"
    )
    assert list(text_string_to_metric_families(metrics.render().decode()))


def test_counters_of_instances_add_up_and_never_go_back(metrics: CustomMetrics) -> None:
    one, two = metrics.open(source()), metrics.open(source())
    counter(one, 3)
    counter(two, 4)
    assert values(metrics) == {"hits_total": 7.0} or values(metrics) == {"hits": 7.0}
    one.close(died=True)
    assert list(values(metrics).values()) == [7]
    again = metrics.open(source())
    counter(again, 1)
    assert list(values(metrics).values()) == [8]
    two.close(died=False)
    assert list(values(metrics).values()) == [8], "another instance of it lives"
    again.close(died=False)
    assert metrics.render() == b""


def test_a_replacement_goes_on_where_the_only_instance_died(metrics: CustomMetrics) -> None:
    board = metrics.open(source())
    counter(board, 5)
    board.close(died=True)
    board.close(died=True)
    assert list(values(metrics).values()) == [5]
    counter(metrics.open(source()), 2)
    assert list(values(metrics).values()) == [7]


def test_of_a_gauge_the_last_set_counts_and_additions_add_up(metrics: CustomMetrics) -> None:
    slots = []
    for _ in range(3):
        slots.append(BoardWriter(metrics.open(source()).descriptor).add(GAUGE, 3, ["level", "", {}, ()]))
    for slot, added in zip(slots, (1, 2, 3), strict=True):
        slot.values[2] = added
    assert values(metrics) == {"level": 6}
    slots[0].values[0], slots[0].values[1], slots[0].values[2] = 10, 100, 0
    assert values(metrics) == {"level": 15}
    slots[1].values[0], slots[1].values[1], slots[1].values[2] = 20, 200, 0
    assert values(metrics) == {"level": 23}, "and what the third added, who never set it"


def test_models_that_disagree_about_a_family(metrics: CustomMetrics, caplog: pytest.LogCaptureFixture) -> None:
    counter(metrics.open(source("first")), 3, model="first")
    BoardWriter(metrics.open(source("second")).descriptor).add(GAUGE, 3, ["hits", "what", {"model": "second"}, ()])
    for _ in range(2):
        assert list(values(metrics).values()) == [3]
    assert len(caplog.records) == 1
    assert "disagree about the kind, description or buckets of 'hits'" in caplog.text


def test_a_dropped_series_goes_and_its_room_is_used_again(metrics: CustomMetrics) -> None:
    writer = BoardWriter(metrics.open(source()).descriptor)
    for count in range(20_000):
        slot = counter(writer, count, "hits", number=f"{count:05}")
        assert list(values(metrics).values()) == [count] or count % 1000
        writer.drop(slot)
    assert metrics.render() == b""


def test_a_full_board_says_so() -> None:
    writer = BoardWriter(-1)

    def fill() -> None:
        for number in range(100_000):
            counter(writer, 1, "hits", number=str(number))

    with pytest.raises(BoardFull, match="no room for another series"):
        fill()


@given(st.data())
def test_whatever_a_process_writes_there_the_page_can_be_read(data: st.DataObject) -> None:
    metrics = CustomMetrics()
    board = metrics.open(source())
    writer = BoardWriter(board.descriptor)
    counter(writer, 1, "hits", a="b")
    writer.add(HISTOGRAM, 4, ["sizes", "", {}, (1.0, 2.5)])
    for _ in range(data.draw(st.integers(1, 4))):
        os.pwrite(board.descriptor, data.draw(st.binary(min_size=1, max_size=8)), data.draw(st.integers(0, 160)))
    assert list(text_string_to_metric_families(metrics.render().decode())) is not None
    board.close(died=True)
    metrics.render()


def test_names_of_the_server_are_not_the_models() -> None:
    assert metric_board.names_are_valid("vllm:tokens_total", ["model_name"])
    for family in ("charonia_x", "nv_inference_count", "1a", "", "a b", "ä"):
        assert not metric_board.names_are_valid(family, [])
    for label in ("le", "__name__", "a:b", "", "1"):
        assert not metric_board.names_are_valid("x", [label])


def test_a_board_that_was_cut_short_is_empty() -> None:
    descriptor = metric_board.create()
    counter(BoardWriter(descriptor), 1)
    os.ftruncate(descriptor, 0)
    assert metric_board.read(descriptor) == []
    os.close(descriptor)
