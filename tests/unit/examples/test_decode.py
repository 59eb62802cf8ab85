"""Reading answers: segments, greedy CTC, boxes, labels."""

from __future__ import annotations

from pathlib import Path

import decode
import numpy as np
import pytest

W = decode.WINDOW_S


@pytest.mark.parametrize(
    ("voiced", "segments"),
    [
        ("", []),
        ("....", []),
        ("####", [(0, 4)]),
        (".##...#", [(1, 7)]),
        (".##....#", [(1, 3), (7, 8)]),
        ("#......###..##......#", [(0, 1), (7, 14), (20, 21)]),
    ],
)
def test_speech_segments(voiced: str, segments: list[tuple[int, int]]) -> None:
    probabilities = np.array([0.9 if mark == "#" else 0.1 for mark in voiced], dtype=np.float32)
    found = decode.speech_segments(probabilities)
    assert found == [pytest.approx((begin * W, end * W)) for begin, end in segments]


def test_timeline_has_one_mark_for_each_window() -> None:
    assert decode.timeline(np.array([0, 0.5, 1, 1.0001], dtype=np.float32)) == "_▄██"


def test_text_drops_repetitions_and_blanks() -> None:
    labels = ["<blank>", "l", "o", " "]
    steps = [1, 1, 0, 1, 2, 2, 3, 0, 0, 2]
    scores = np.eye(4, dtype=np.float32)[steps] * 0.75
    assert decode.read_text(scores, labels) == ("llo o", 0.75)
    assert decode.read_text(np.eye(4, dtype=np.float32)[[0, 0]], labels) == ("", 0.0)


def test_boxes_grow_and_stay_on_the_page() -> None:
    page = np.zeros((64, 200), dtype=np.float32)
    page[2:12, 5:105] = 0.9
    page[40:50, 20:60] = 0.8
    page[30:32, 150:152] = 0.9  # too small
    page[50:60, 100:140] = 0.4  # too faint
    first, second = decode.text_boxes(page)
    grow = round(1.6 * 10 * 100 / 220)
    assert first == (0, 0, 105 + grow, 12 + grow)
    grow = round(1.6 * 10 * 40 / 100)
    assert second == (20 - grow, 40 - grow, 60 + grow, 50 + grow)
    assert decode.text_boxes(np.zeros((8, 8), dtype=np.float32)) == []


def test_labels_are_parted_by_line_feeds_only(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_bytes("<blank>\n\u3000\n\u2028\n \n".encode())
    assert decode.read_labels(tmp_path / "labels.txt") == ["<blank>", "\u3000", "\u2028", " "]


def test_scores_and_classification_strings_read_the_same(tmp_path: Path) -> None:
    (tmp_path / "magika").mkdir()
    (tmp_path / "magika" / "labels.txt").write_text("c\npython\nrust\nzig\n")
    scores = np.array([[0.02, 0.9, 0.07, 0.01]], dtype=np.float32)
    strings = np.array([[b"0.900000:1:python", b"0.070000:2:rust", b"0.020000:0:c"]], dtype=np.object_)
    said = decode.describe("magika", {"target_label": scores}, tmp_path)
    assert said == "90.0000%  python\n 7.0000%  rust\n 2.0000%  c"
    assert decode.describe("magika", {"target_label": strings}, tmp_path) == said
