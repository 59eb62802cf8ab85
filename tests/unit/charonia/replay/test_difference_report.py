"""The figures and the verdict of a replay."""

from __future__ import annotations

import json
import math

import pytest

from charonia.releases.answer_differences import ERROR, EXTRA, VALUES, Comparison
from charonia.replay.difference_report import DIFFERENT, NOT_RUN, SAME, DifferenceReport, report_text
from charonia.replay.replay_lines import EXPIRED, Recorded
from charonia.wire.recorded_calls import RecordedStep


def recorded(number: int, version: int = 2, **more: str) -> Recorded:
    return Recorded(number.to_bytes(16, "big"), number, version, **more)


ALIKE = Comparison("y", elements=4, worst_absolute=0.25, worst_relative=0.5)


def apart(absolute: float, relative: float = 0.0, output: str = "y") -> Comparison:
    return Comparison(output, VALUES, "1 of 4 elements differ", 4, 1, absolute, relative)


@pytest.mark.parametrize(
    ("same", "different", "unanswered", "allowed", "least", "verdict"),
    [
        (10, 0, 0, 0.0, 1, SAME),
        (9, 1, 0, 0.0, 1, DIFFERENT),
        (9, 1, 0, 10.0, 1, SAME),
        (9, 1, 0, 9.9, 1, DIFFERENT),
        (10, 0, 1, 0.0, 1, NOT_RUN),
        (9, 1, 1, 0.0, 1, DIFFERENT),
        (10, 0, 0, 0.0, 11, NOT_RUN),
        (0, 0, 0, 100.0, 1, NOT_RUN),
        (0, 1, 0, 0.0, 11, DIFFERENT),
    ],
)
def test_verdicts(same: int, different: int, unanswered: int, allowed: float, least: int, verdict: int) -> None:
    report = DifferenceReport("m", 3, allowed, least)
    for number in range(same):
        report.add(recorded(number), [ALIKE])
    for number in range(different):
        report.add(recorded(100 + number), [apart(1)])
    for number in range(unanswered):
        report.unanswered(recorded(200 + number), "no answer in time")
    assert report.verdict == verdict
    assert report.document()["verdict"] == ("same", "different", "not run")[verdict]


def test_the_document_names_outputs_and_the_worst_requests() -> None:
    report = DifferenceReport("m", 3, worst_shown=2)
    report.add(recorded(1), [ALIKE])
    for number in range(2, 9):
        report.add(recorded(number, client_id=f"c-{number}"), [apart(number, number / 10), apart(0.0, output="words")])
    report.add(recorded(9, version=1), [Comparison("", ERROR, "recorded was an answer")])
    report.add(recorded(10), [apart(math.inf), Comparison("new", EXTRA)])
    report.unreplayable(recorded(11), EXPIRED)
    document = json.loads(json.dumps(report.document(), allow_nan=False))
    assert (document["compared"], document["same"], document["different"]) == (10, 1, 9)
    assert document["answered_by"] == {"1": 1, "2": 9}
    assert document["answers"] == {ERROR: 1}
    new, words, y = document["outputs"][0], document["outputs"][1], document["outputs"][2]
    assert (new["name"], new["kinds"], words["kinds"]) == ("new", {EXTRA: 1}, {VALUES: 7})
    assert (y["compared"], y["different"], y["worst_absolute"], y["worst_relative"]) == (9, 8, "inf", 0.8)
    assert (y["worst_absolute_id"], y["worst_relative_id"]) == (recorded(10).name, recorded(8).name)
    assert [one["request_id"] for one in document["worst"]] == ["c-8", "c-7"]
    assert document["unreplayable"] == [{"reason": EXPIRED, "count": 1, "ids": [recorded(11).name]}]
    text = report_text(document)
    assert "m:3: different: of 10 requests compared 1 are the same and 9 differ (90%, allowed 0%)" in text
    assert f"unreplayable: 1: {EXPIRED} ({recorded(11).name})" in text
    assert f"{recorded(8).name} (id 'c-8') y: values: 1 of 4 elements differ" in text


def test_words_of_clients_are_escaped_for_the_terminal() -> None:
    report = DifferenceReport("m", 3)
    report.add(recorded(1, client_id="a\x1b[2J"), [Comparison("", ERROR, "INTERNAL: b\nc")])
    report.unanswered(recorded(2), "d\x1b")
    text = report_text(report.document())
    assert "(id 'a\\x1b[2J') error: INTERNAL: b\\nc\n" in text
    assert "unanswered: 1: d\\x1b (" in text


def test_of_equal_differences_the_first_recorded_are_named() -> None:
    report = DifferenceReport("m", 3, worst_shown=3)
    step = RecordedStep("seven", start=True, end=False)
    for number in range(20):
        report.add(Recorded(number.to_bytes(16, "big"), number, 2, sequence=step), [apart(1)])
    worst = report.document()["worst"]
    assert [(one["recorded_us"], one["sequence"]) for one in worst] == [(0, "seven"), (1, "seven"), (2, "seven")]
