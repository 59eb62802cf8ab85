"""The trace file is a whole JSON array at any time; a log frequency parts it (N2, N3)."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from charonia.traces.contexts import TIMESTAMPS, Context
from charonia.traces.reports import Report, ReportedTensor
from gateway.tracing import writer as writing
from gateway.tracing.trace import Finished
from gateway.tracing.writer import TraceWriter, TritonFile


def trace(request_id: str, log_frequency: int = 0, series: int = 0) -> Finished:
    report = Report(b"12345678", "m", 1, request_id, (("QUEUE_START", 5),))
    front = (("HTTP_RECV_START", 3), ("HTTP_SEND_END", 9))
    return Finished(
        Context(TIMESTAMPS, bytes(16), bytes(8)), b"87654321", None, report, front, "", log_frequency, series
    )


def named(path: Path) -> list[str]:
    return [entry["request_id"] for entry in json.loads(path.read_text()) if "request_id" in entry]


def test_the_file_is_complete_after_every_write(tmp_path: Path) -> None:
    path = tmp_path / "traces.json"
    path.write_text("of an earlier start")
    file = TritonFile(str(path))
    assert path.read_text() == "of an earlier start"
    file.write([trace("a"), trace("b")])
    assert named(path) == ["a", "b"]
    file.write([trace("c")])
    assert named(path) == ["a", "b", "c"]
    file.close()
    entries = json.loads(path.read_text())
    assert entries[-1] == {
        "id": 3,
        "timestamps": [
            {"name": "HTTP_RECV_START", "ns": 3}, {"name": "QUEUE_START", "ns": 5}, {"name": "HTTP_SEND_END", "ns": 9},
        ],
    }  # fmt: skip


def test_a_log_frequency_parts_it_and_other_settings_begin_anew(tmp_path: Path) -> None:
    file = TritonFile(str(tmp_path / "t"))
    file.write([trace(name, 2, 1) for name in "abc"])
    assert [named(tmp_path / f"t.{part}") for part in range(2)] == [["a", "b"], ["c"]]
    file.write([trace("d", 2, 2), trace("e"), trace("f", 2, 2), trace("g", 2, 2)])
    file.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t", "t.0", "t.1", "t.2", "t.3"]
    assert [named(tmp_path / f"t.{part}") for part in range(2, 4)] == [["d", "f"], ["g"]]
    assert named(tmp_path / "t") == ["e"]


def test_a_file_that_cannot_be_written_loses_traces_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = TraceWriter(TritonFile(str(tmp_path / "none" / "t")))
    for name in "abc":
        writer.put(trace(name))
    writer.close()
    assert (writer.written, writer.dropped) == (0, 3)
    assert caplog.text.count("traces cannot be written: FileNotFoundError") == 1


def test_a_trace_that_cannot_be_told_takes_no_other_with_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = ReportedTensor("TENSOR_QUEUE_INPUT", "x", None, (1,), b"1", 1)  # type: ignore[arg-type]
    bad = replace(trace("b"), report=replace(trace("b").report, tensors=(broken,)))
    file = TritonFile(str(tmp_path / "t"))
    file.write([trace("a"), bad, trace("c")])
    file.close()
    assert (named(tmp_path / "t"), file.dropped) == (["a", "c"], 1)
    assert "a trace of model 'm' cannot be written" in caplog.text


class Slow:
    """A sink that writes nothing until it may."""

    dropped = 0

    def __init__(self) -> None:
        self.may = threading.Event()
        self.began = threading.Event()
        self.traces = 0

    def write(self, traces: Sequence[Finished]) -> None:
        self.began.set()
        assert self.may.wait(30)
        self.traces += len(traces)

    def close(self) -> None: ...


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MAX_WAITING", 3)
    sink = Slow()
    writer = TraceWriter(sink)
    writer.put(trace("a"))
    assert sink.began.wait(30)
    for name in "bcdef":
        writer.put(trace(name))
    assert writer.dropped == 2
    sink.may.set()
    writer.close()
    assert (sink.traces, writer.written, writer.dropped) == (4, 4, 2)


def test_a_writer_that_wrote_nothing_has_nothing_to_close(tmp_path: Path) -> None:
    TraceWriter(TritonFile(str(tmp_path / "t"))).close()
    assert not (tmp_path / "t").exists()
