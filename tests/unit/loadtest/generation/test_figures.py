"""Ratios are of runs of one round; a way without the one it is compared with has none."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from loadtest.generation.chart import svg
from loadtest.generation.figures import document, rows_of, table
from loadtest.generation.loops import Run

ENGINE = [Run(100.0, [0.1], [0.01]), Run(50.0, [0.2], [0.02]), Run(200.0, [0.1, 0.3], [0.01, 0.03])]
SERVED = [Run(90.0, [0.11], [0.01]), Run(50.0, [0.21], [0.03]), Run(100.0, [0.4], [0.02])]


def test_a_ratio_is_of_one_round() -> None:
    engine, served = rows_of(16, {"engine": ENGINE, "generate": SERVED})
    assert (engine.rate, engine.first_ms, engine.against, engine.rate_ratio) == (100.0, pytest.approx(200.0), "", None)
    assert served.rate_ratio is not None
    assert (served.rate_ratio.median, served.rate_ratio.least, served.rate_ratio.most) == (0.9, 0.5, 1.0)
    assert served.between_ratio is not None
    assert served.between_ratio.median == pytest.approx(1.0)
    assert served.first_more_ms is not None
    assert served.first_more_ms.most == pytest.approx(200.0)


def test_the_table_and_the_document_have_every_row() -> None:
    rows = rows_of(1, {"engine": ENGINE, "grpc": SERVED})
    lines = table(rows).splitlines()
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    assert "0.90 (0.50 to 1.00) engine" in lines[-1]
    made = json.loads(json.dumps(document(rows, load=["1.0"])))
    assert [row["way"] for row in made["rows"]] == ["engine", "grpc"]
    assert made["load"] == ["1.0"]


def test_the_chart_has_a_line_for_each_way_in_both_panels() -> None:
    rows = [row for streams in (1, 16) for row in rows_of(streams, {"engine": ENGINE, "openai": SERVED})]
    root = ElementTree.fromstring(svg(rows, "load <1>"))
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [2, 2, 2, 2]
    assert any(text.text == "load <1>" for text in root.findall("{http://www.w3.org/2000/svg}text"))
