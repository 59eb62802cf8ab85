"""Schedulers decide what the histories beside this say. `pytest tests/replay --accept` writes what they decide now."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest
import step_histories
from histories import Recorder, replay
from scheduler_bench import interface

from batcher.scheduling.observations import BatchDied, PolicyChanged, RequestCancelled, RequestQueued, VersionServed
from charonia.generation.prompt_keys import route_of_tokens
from charonia.models.scheduling import DynamicBatching
from charonia.wire import RequestMeta

FILES = sorted(Path(__file__).parent.glob("*/*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_decisions_are_those_of_the_history(path: Path, request: pytest.FixtureRequest) -> None:
    kept = path.read_text()
    replayed = (step_histories.replay if path.parent.name == "steps" else replay)(kept)
    if request.config.getoption("--accept", default=False):
        path.write_text(replayed)
    changes = "\n".join(difflib.unified_diff(kept.splitlines(), replayed.splitlines(), "kept", "now", lineterm=""))
    assert replayed in (kept, path.read_text()), f"{changes}\nto accept: python -m pytest tests/replay --accept"


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_history_says_what_it_shows_and_is_short(path: Path) -> None:
    text = path.read_text()
    assert re.match(r"# [A-Z].{60,}", text)
    assert text.count("\n") <= 90


def test_there_are_histories_of_each_scheduler_and_of_its_faults() -> None:
    """Of `texts`, the stateless scheduler of models that generate text, and of `steps`, what their engine computes."""
    at_least = {"stateless": (9, 12), "texts": (6, 3), "sequences": (5, 9), "ensembles": (3, 4), "steps": (1, 8)}
    assert {path.parent.name for path in FILES} == set(at_least)
    for scheduler, (faults, features) in at_least.items():
        names = [path.stem for path in FILES if path.parent.name == scheduler]
        assert sum(name.startswith("fault_") for name in names) >= faults
        assert sum(not name.startswith("fault_") for name in names) >= features


def test_a_recorded_request_for_text_replays() -> None:
    route = route_of_tokens(range(100), max_tokens=7)
    recorder = Recorder('ModelScheduler("p")')
    meta = RequestMeta(1, "", (), (), {}, b"", route)
    recorder.observe(RequestQueued(b"r" * 16, 1, 0, 1, 7, 0, 0, 0, meta=meta), 0)
    text = recorder.text(heading="A request for text.")
    assert f'prompt=PromptRoute(100, 7, "{route.keys.hex()}")' in text
    assert replay(text) == text


def test_what_a_recorder_wrote_replays() -> None:
    recorder = Recorder('ModelScheduler("p", prefetch=1)')
    recorder.observe(PolicyChanged(interface(4, DynamicBatching(max_queue_delay_us=100))), 0)
    first, second = (RequestQueued(bytes(range(n, n + 16)), 1, 0, 1, 7, 0, 0, 50, carrier=object()) for n in (1, 2))
    recorder.observe_all([first, second], 1000)
    recorder.observe(VersionServed("a", 1, "h1", 2), 1000)
    (batch,) = recorder.advance(100_050)
    recorder.observe(BatchDied(batch.batch_id, "a", frozenset((first.id, second.id)), 'it said "no"'), 200_000)
    recorder.observe(RequestCancelled(second.id), 300_000)
    assert recorder.find(second.id) is second, "it is asked like the scheduler"
    text = recorder.text(heading="Two of a batch that died.")
    assert text.splitlines()[2:] == [
        "",
        "0us     PolicyChanged(ModelInterface(max_batch_size=4, dynamic_batching="
        "DynamicBatching(max_queue_delay_us=100)))",
        "1us     RequestQueued(r1_16, signature=7, enqueued_ns=50)",
        "        + RequestQueued(r2_17, signature=7, enqueued_ns=50)",
        '1us     VersionServed("a", content_hash="h1", slots=2)',
        "        ~ wake at 100050ns",
        "100050ns advance",
        '        -> DispatchBatch("p-1", "a", content_hash="h1", requests=[r1_16, r2_17])',
        "        ~ no wake",
        '200us   BatchDied("p-1", "a", ids={r1_16, r2_17}, reason="it said \\"no\\"")',
        '        -> DispatchBatch("p-2", "a", content_hash="h1", requests=[r1_16], attempts=(2,), suspects="group")',
        '        -> DispatchBatch("p-3", "a", content_hash="h1", requests=[r2_17], attempts=(2,), suspects="group")',
        "300us   RequestCancelled(r2_17)",
        '        -> RejectRequest(r2_17, code=ErrorCode.CANCELLED, message="", reason="CANCELED")',
        '        -> StopExecution(r2_17, "p-3", "a")',
    ]
    assert replay(text) == text
