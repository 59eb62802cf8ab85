"""How a run is shared among workers, when it is given up, and what signals do."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from charonia.analyzer import benching
from charonia.analyzer.bench_options import parsed
from charonia.analyzer.bench_report import Run
from charonia.analyzer.benching import Bench, interrupted_by_signals, processes_of
from charonia.analyzer.input_data import ModelView, model_view
from charonia.analyzer.window_figures import Tally
from charonia.errors import InvalidArgument


def described(line: str, *, sequences: bool = False) -> Run:
    config: dict[str, Any] = {"sequence_batching": {}} if sequences else {}
    view: ModelView = model_view("simple", "", {"inputs": [], "outputs": []}, config, {})
    return Run(parsed(["bench", "-m", "simple", *line.split()]), view, 1, "", [])


class FakeWorkers:
    """Workers that send at once what they are to, if they have lanes, and are answered but for `lost` requests."""

    def __init__(self, number: int, lost: int = 0) -> None:
        self._number, self._lost = number, lost
        self.commands: list[Mapping[str, Any]] = []

    def __len__(self) -> int:
        return self._number

    def ask_each(self, commands: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        self.commands = list(commands)
        return [{} for _ in commands]

    def ask(self, command: Mapping[str, Any]) -> list[dict[str, Any]]:
        ended = [sent["limit"] if sent.get("lanes", 1) else 0 for sent in self.commands]
        ended[0] -= self._lost
        if command["do"] == "count":
            return [{"ended": number} for number in ended]
        tallies = [Tally(0, 0) for _ in ended]
        for tally, number in zip(tallies, ended, strict=True):
            for _ in range(number):
                tally.latencies.append(1000)
            tally.finish(1_000_000, 1_000)
        return [tally.packed(is_open=False) for tally in tallies]


class NoStatistics:
    def statistics(self, model: str, version: str) -> Any:
        raise InvalidArgument("none here")


def bench(line: str, workers: FakeWorkers) -> Bench:
    return Bench(described(line), workers, NoStatistics())  # type: ignore[arg-type]


@pytest.mark.parametrize(("level", "shares"), [(1, [7, 0, 0]), (2, [4, 3, 0]), (5, [3, 2, 2])])
def test_requests_are_shared_among_workers_that_have_lanes(
    level: int, shares: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benching, "_STALLED_S", 0.0)
    workers = FakeWorkers(3)
    result = bench(f"--concurrency-range {level} --request-count 7 --measurement-interval 1", workers).measure(level)
    assert [command["limit"] for command in workers.commands] == shares
    assert (result.figures.completed, result.is_stable) == (7, True)


def test_a_level_whose_requests_do_not_end_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benching, "_STALLED_S", 0.0)
    result = bench("--request-count 7 --measurement-interval 1", FakeWorkers(1, lost=2)).measure(1)
    assert (result.figures.completed, result.is_stable) == (5, False)
    assert "5 of 7 requests ended" in capsys.readouterr().err


@pytest.mark.parametrize(("threshold_ms", "lost", "within"), [("5", 7, False), ("5", 0, True), ("0.0001", 0, False)])
def test_a_level_without_answers_is_not_within_the_threshold(
    threshold_ms: str, lost: int, within: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benching, "_STALLED_S", 0.0)
    line = f"--request-count 7 --measurement-interval 1 --latency-threshold {threshold_ms}"
    assert bench(line, FakeWorkers(1, lost=lost)).measure(1).within_threshold is within


@pytest.mark.parametrize(
    ("line", "sequences", "processes"),
    [
        ("--request-rate-range 10 --max-threads 8 --num-of-sequences 3", True, 3),
        ("--request-rate-range 10 --max-threads 8 --num-of-sequences 3", False, 8),
        ("--concurrency-range 2 --max-threads 8", False, 2),
        ("--concurrency-range 1:0 --latency-threshold 5 --max-threads 8", False, 8),
    ],
)
def test_no_process_is_without_work(line: str, sequences: bool, processes: int) -> None:
    run = described(line, sequences=sequences)
    assert processes_of(run.options, run.view) == processes


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_end_a_run_as_interrupts_do(number: signal.Signals) -> None:
    given = signal.signal(number, signal.SIG_DFL)
    try:
        with interrupted_by_signals():
            handler = signal.getsignal(number)
            assert callable(handler)
            with pytest.raises(KeyboardInterrupt):
                handler(number, None)
        assert signal.getsignal(number) == signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)  # as nohup has it
        with interrupted_by_signals():
            assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, given)
