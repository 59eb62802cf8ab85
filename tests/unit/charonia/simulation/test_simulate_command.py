"""`charonia simulate` over trace files: what it prints, and what it refuses; and journals of a log."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from catalog_facts import catalog, joined, loaded, scanned
from memory_log.log import MemoryLog

from charonia import keys
from charonia.cli import main
from charonia.eventlog.port import START
from charonia.facts.journal import FIELD, pack_accepted, pack_batched, pack_ended
from charonia.facts.processor_use import BATCHER_APART, BATCHER_HERE, ProcessorUse
from charonia.models.interface import ModelInterface
from charonia.simulation.recorded_requests import RecordedRequest, recording
from charonia.simulation.simulate_command import journal_of, served_setting, traced_setting
from charonia.simulation.what_if import settings_text

MS = 1_000_000
CONFIG = """
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
instance_group { count: 2 kind: KIND_CPU }
dynamic_batching { max_queue_delay_microseconds: 1000 }
"""


def recorded(
    path: Path, model: str = "m", *, service_ms: int = 10, count: int = 200, lead_ms: float = 0.1,
    use: ProcessorUse | None = None,
) -> str:  # fmt: skip
    """A server with one instance that takes one request after the other, as a trace file."""
    chance = random.Random(3)
    objects: list[dict[str, object]] = []
    free = 0
    at = MS
    for number in range(1, count + 1):
        at += round(chance.expovariate(1 / 15) * MS)
        start = max(at, free) + round(lead_ms * MS)
        free = start + service_ms * MS
        stamps = {"QUEUE_START": at, "COMPUTE_START": start, "COMPUTE_END": free, "REQUEST_END": free + MS // 5}
        about = {} if use is None else {"charonia.processor_use": use.text()}
        objects.append({"id": number, "model_name": model, "model_version": 1, "request_id": "", "attributes": about})
        objects.append({"id": number, "timestamps": [{"name": name, "ns": ns} for name, ns in stamps.items()]})
    path.write_text(json.dumps(objects))
    return str(path)


def test_baseline_error_and_questions_in_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = recorded(tmp_path / "t")
    words = ["simulate", file, "--recorded", "policy=none", "--instances", "2", "--what-if", "rate=x0.5 delay=0ms"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("m: 200 requests of ")
    assert lines[0].endswith("from trace files, executors=1 instances=1 max-batch=0 policy=none")
    named = {line[:22].strip(): line for line in lines[2:9]}
    assert list(named)[1:] == ["recorded", "simulated as recorded", "error", "instances=2", "rate=x0.5 delay=0ms"]
    assert "service time, median by rows (batches): 1: 10.00 ms (200)" in lines


def test_the_baseline_is_near_what_was_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", recorded(tmp_path / "t"), "--recorded", "policy=none", "--rate", "x1.2", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["models"]
    assert all(abs(percent) < 5 for percent in found["error_percent"].values())
    (after,) = found["what_ifs"]
    assert after["figures"]["rate"] == pytest.approx(1.2 * found["recorded"]["rate"], rel=0.05)
    assert after["figures"]["p99_us"] > found["baseline"]["p99_us"]
    (note,) = found["notes"]  # made up here, as by a release that did not ask the processors
    assert note.startswith("the recording does not say what the processors did")


def test_a_measured_run_says_how_wrong_the_last_question_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = recorded(tmp_path / "t")
    words = ["simulate", file, "--recorded", "policy=none", "--what-if", "instances=1", "--measured", file, "--json"]
    assert main(words) == 0
    (found,) = json.loads(capsys.readouterr().out)["models"]
    assert found["what_ifs"][0]["measured"] == found["recorded"]
    assert found["what_ifs"][0]["error_percent"] == found["error_percent"]


def test_configurations_of_a_repository_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "models" / "m").mkdir(parents=True)
    (tmp_path / "models" / "m" / "config.pbtxt").write_text(CONFIG)
    page = tmp_path / "report.html"
    words = ["simulate", recorded(tmp_path / "t"), "--model-repository", str(tmp_path / "models"), "--html", str(page)]
    assert main([*words, "--max-batch", "8", "--take", "1s", "--what-if", "m:policy=max-queue:1 rate=x4"]) == 0
    assert "executors=1 instances=2 max-batch=4 delay=1000us" in capsys.readouterr().out
    text = page.read_text()
    for part in (
        "simulated as recorded", "max-batch=8", "rate=x4", "Latency by percentile", "Service time by rows",
        "<br>line ",
    ):  # fmt: skip
        assert part in text
    assert "<script" not in text
    assert "http://" not in text.replace("http://www.w3.org", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "a trace file does not hold configurations"),
        (["--recorded", "policy=none", "--delay", "fast"], "delay 'fast' is no time"),
        (["--recorded", "policy=none", "--what-if", "n:delay=1ms"], "'n', of which nothing was recorded"),
        (
            ["--recorded", "policy=none other:delay=1ms"],
            "'policy=none other:delay=1ms' is about 'other', of which nothing was recorded: there is 'm'",
        ),
        (["--recorded", "policy=none", "-m", "n"], "nothing that ran was recorded of these models"),
        (["--recorded", "policy=none", "--measured", "t"], "--measured is a run under a question"),
        (["--model-repository", "/nowhere"], "cannot be read"),
        (["--recorded", "policy=none cores=2"], "--recorded takes no cores: what sharing them cost"),
        (["--recorded", "policy=none rate=x2"], "--recorded takes no rate: it is that of the recorded arrivals"),
        (["--recorded", "policy=none m:rate=x2"], "--recorded takes no rate"),
        (["--recorded", "policy=none", "--skip", "1h"], "--skip '1h' is no time"),
    ],
)
def test_what_is_refused(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", recorded(tmp_path / "t"), *words]) == 1
    assert message in capsys.readouterr().err


def test_an_empty_journal_says_what_records_requests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def none(*_: object) -> list[object]:
        return []

    monkeypatch.setattr("charonia.simulation.simulate_command._of_journals", none)
    assert main(["simulate", "--log-url", "redis://nowhere", "-m", "m"]) == 1
    assert "in the journal of these models: it has only jobs unless the server runs with --journal all" in (
        capsys.readouterr().err
    )


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t").write_text("{}")
    assert main(["simulate", str(tmp_path / "t")]) == 1
    assert "must be a JSON array" in capsys.readouterr().err
    assert main(["simulate", str(tmp_path / "none")]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_completion_offers_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion"]) == 0
    out = capsys.readouterr().out
    assert "simulate) COMPREPLY" in out
    assert "--what-if" in out


async def test_a_journal_of_a_log() -> None:
    log = MemoryLog()
    ids = [number.to_bytes(16, "big") for number in range(4)]
    stream = keys.journal("m")
    await log.append(stream, [FIELD, pack_accepted(ids)])
    await log.append(stream, [FIELD, pack_batched(ids[:2], 1, "e", "b-1")])
    await log.append(stream, [FIELD, pack_ended(ids[:2], [1, 1], b"s", ("e", "b-1"))])
    found = await journal_of(log, "m", START)
    assert [one.batch for one in found.requests] == ["b-1", "b-1", "", ""]
    assert found.executors == 1


def test_how_a_model_is_served_now() -> None:
    served = catalog(joined("e"), joined("f"), scanned("e"), scanned("f"), loaded("e"), loaded("f"))
    setting = served_setting(served, "m")
    assert setting is not None
    assert settings_text(setting) == "executors=2 instances=2 max-batch=0 policy=none"
    assert setting.prefetch == 1
    assert served_setting(served, "other") is None


@pytest.mark.parametrize(
    ("executors", "batcher", "prefetch"),
    [
        (1, 0, 0), (2, 0, 1),  # as `serve` has it
        (1, BATCHER_HERE, 0), (1, BATCHER_APART, 1), (2, BATCHER_APART, 1),
    ],
)  # fmt: skip
def test_an_executor_says_whether_the_batcher_is_in_its_process(executors: int, batcher: int, prefetch: int) -> None:
    said = [("e-0", ProcessorUse("h", 1.0, 1, 2, 3, 4, 5, 6, 7, 8, batcher))]
    requests = [RecordedRequest(at, executor=f"e-{at}") for at in range(executors)]
    found = traced_setting(recording("m", requests, "test", 1000, said=said), ModelInterface("m", "", "", 0, {}, {}))
    assert (found.executors, found.prefetch) == (executors, prefetch)


@pytest.mark.parametrize(("trees", "apart"), [((1, 2), True), ((1, 1), False)])
def test_executors_that_were_started_apart_have_their_batcher_apart(trees: tuple[int, int], apart: bool) -> None:
    said = [
        (f"e-{at}", ProcessorUse("h", 1.0, tree, 2, 3, 4, 5, 6, 7, 8, BATCHER_APART)) for at, tree in enumerate(trees)
    ]
    requests = [RecordedRequest(at, executor=f"e-{at}") for at in range(2)]
    found = traced_setting(recording("m", requests, "test", 1000, said=said), ModelInterface("m", "", "", 0, {}, {}))
    assert found.keeps_apart is apart


@pytest.mark.parametrize(("batcher", "more"), [(BATCHER_HERE, True), (BATCHER_APART, False)])
def test_a_second_executor_makes_the_way_longer_where_it_takes_the_batcher_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], batcher: int, more: bool
) -> None:
    file = recorded(tmp_path / "t", lead_ms=4, use=ProcessorUse("h", 64.0, 1, 2, 3, 4, 5, 6, 7, 8, batcher))
    assert main(["simulate", file, "--recorded", "policy=none", "--executors", "+1", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["models"]
    (asked,) = found["what_ifs"]
    # a batch of one request takes 10 ms, and 0.2 ms back
    assert asked["figures"]["p50_us"] == pytest.approx(14_200 + 2000 * more, rel=0.02)
