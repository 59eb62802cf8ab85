"""The tables of an executor's start (R30)."""

from __future__ import annotations

from executors.service import report


def test_each_kind_has_its_table() -> None:
    text = report(
        [("checksum", "built in")],
        [("onnxruntime", "/a/onnxruntime.py", "{}")],
        [("simple", 1, "READY"), ("broken", None, "UNAVAILABLE: Internal: two\nlines")],
    )
    assert (
        text
        == """
+------------------+----------+
| Repository Agent | Path     |
+------------------+----------+
| checksum         | built in |
+------------------+----------+

+-------------+-------------------+--------+
| Backend     | Path              | Config |
+-------------+-------------------+--------+
| onnxruntime | /a/onnxruntime.py | {}     |
+-------------+-------------------+--------+

+--------+---------+----------------------------------+
| Model  | Version | Status                           |
+--------+---------+----------------------------------+
| simple | 1       | READY                            |
| broken |         | UNAVAILABLE: Internal: two lines |
+--------+---------+----------------------------------+
"""
    )


def test_nothing_is_an_empty_table() -> None:
    assert report([], [], []).count("| Model | Version | Status |\n+-------+---------+--------+\n+-------+") == 1
