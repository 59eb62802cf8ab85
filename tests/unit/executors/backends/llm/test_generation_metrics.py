"""What an engine does is on the board of its process, and on the page of its executor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from generation_bench import TOKENIZER, make_engine, make_request
from stub_decoder import StubDecoder
from text_calls import ask

from executors.backends.engine_families import OWNED
from executors.backends.llm.generation_metrics import GenerationMetrics
from executors.backends.python.api import metrics
from executors.backends.python.custom_metrics import Board, CustomMetrics
from executors.backends.python.protocol.metric_board import BoardWriter
from executors.generation.generating_instance import GeneratingInstance, InstanceSettings

LABELS = {"model": "m", "version": "1"}
PAGE = '{model="m",version="1"}'


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[CustomMetrics]:
    made = CustomMetrics(OWNED)
    board = made.open(_source())
    monkeypatch.setattr(metrics, "_board", BoardWriter(board.descriptor))
    monkeypatch.setattr(metrics, "_families", {})
    yield made
    board.close(died=False)


def _source() -> Any:
    return SimpleNamespace(name="m", version=1)


def values(pages: CustomMetrics) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in pages.render().decode().splitlines() if not line.startswith("#")]
    return {name.removesuffix(PAGE): float(value) for name, _, value in lines}


def step(engine: Any, *observers: GenerationMetrics) -> list[Any]:
    events = engine.step()
    for observer in observers:
        observer.stepped(events, engine.load())
    return list(events)


def test_counts_follow_the_engine(pages: CustomMetrics) -> None:
    engine = make_engine(StubDecoder(vocabulary=TOKENIZER.vocabulary, blocks=50), max_num_seqs=2)
    observer = GenerationMetrics(engine, LABELS)
    assert values(pages)["charonia_llm_kv_blocks"] == 50
    requests = [make_request(name, "the quick brown fox", max_tokens=6) for name in "abc"]
    for request in requests:
        observer.arrived(request.key)
        observer.admitted(request.key, len(request.prompt))
        engine.admit(request)
    finished = 0
    while finished < 3:
        finished += sum(bool(event.finish) for event in step(engine, observer))
        found = values(pages)
        load = engine.load()
        assert found["vllm:num_requests_running"] == load.running
        assert found["vllm:num_requests_waiting"] == load.waiting
        assert found["charonia_llm_kv_blocks_used"] == 50 - load.free_blocks
        assert found["vllm:kv_cache_usage_perc"] == pytest.approx((50 - load.free_blocks) / 50)
    found = values(pages)
    assert found["vllm:prompt_tokens_total"] == sum(len(request.prompt) for request in requests)
    assert found["vllm:generation_tokens_total"] == 18
    assert found["vllm:time_to_first_token_seconds_count"] == 3
    assert found["vllm:inter_token_latency_seconds_count"] == found["vllm:time_per_output_token_seconds_count"] == 15
    assert found["vllm:e2e_request_latency_seconds_count"] == 3
    assert found['vllm:request_success_total{finished_reason="length",model="m",version="1"}'] == 3
    assert found['vllm:request_success_total{finished_reason="stop",model="m",version="1"}'] == 0
    assert (found["vllm:request_generation_tokens_count"], found["vllm:request_generation_tokens_sum"]) == (3, 18)
    assert (found["vllm:request_prompt_tokens_count"], found["vllm:request_prompt_tokens_sum"]) == (
        3,
        sum(len(request.prompt) for request in requests),
    )
    assert (found["vllm:request_params_n_count"], found["vllm:request_params_n_sum"]) == (3, 3)
    assert found["charonia_llm_steps_total"] == engine.counters.steps
    assert 0 < found["vllm:prefix_cache_hits_total"] < found["vllm:prefix_cache_queries_total"]
    observer.closed()
    assert values(pages)["charonia_llm_kv_blocks"] == 0


def test_what_an_earlier_attempt_gave_is_no_first_token(pages: CustomMetrics) -> None:
    engine = make_engine()
    observer = GenerationMetrics(engine, LABELS)
    request = make_request("a", "hello", max_tokens=4, emitted=[5, 6])
    observer.arrived(request.key)
    engine.admit(request)
    step(engine, observer)
    step(engine, observer)
    found = values(pages)
    assert found["vllm:time_to_first_token_seconds_count"] == 0
    assert found["vllm:inter_token_latency_seconds_count"] == 1
    assert (found["vllm:request_generation_tokens_count"], found["vllm:request_generation_tokens_sum"]) == (1, 4)


def test_preemptions_and_adapters(pages: CustomMetrics, tmp_path: Path) -> None:
    stub = StubDecoder(vocabulary=TOKENIZER.vocabulary, blocks=12, adapter_slots=3)
    engine = make_engine(stub, adapters={"red": str(tmp_path)}, max_num_seqs=8)
    observer = GenerationMetrics(engine, LABELS)
    for number in range(6):
        engine.admit(make_request(f"r{number}", "abcdefgh" * 2, max_tokens=12, adapter="red" if number % 2 else ""))
    while engine.load().running or engine.load().waiting:
        step(engine, observer)
    found = values(pages)
    assert found["vllm:num_preemptions_total"] == engine.counters.preemptions > 0
    assert (found["charonia_llm_adapter_slots"], found["charonia_llm_adapters_loaded"]) == (3, 1)
    assert found["charonia_llm_adapter_loads_total"] == 1


def test_gauges_of_two_instances_add_up(pages: CustomMetrics) -> None:
    engines = [
        make_engine(StubDecoder(vocabulary=TOKENIZER.vocabulary, context=64, blocks=blocks)) for blocks in (20, 30)
    ]
    observers = [GenerationMetrics(engine, LABELS) for engine in engines]
    assert values(pages)["charonia_llm_kv_blocks"] == 50
    observers[0].closed()
    assert values(pages)["charonia_llm_kv_blocks"] == 30


async def test_an_instance_reports_and_forgets_its_requests(pages: CustomMetrics) -> None:
    engine = make_engine()
    observer = GenerationMetrics(engine, LABELS)
    instance = GeneratingInstance(engine, TOKENIZER, InstanceSettings(engine.context), observer)
    try:
        await ask(instance, "hello", ignore_eos=True)
        found = values(pages)
        assert found["vllm:time_to_first_token_seconds_count"] == 1
        assert found["vllm:request_generation_tokens_sum"] == 8
        assert found["vllm:request_prompt_tokens_sum"] == len(TOKENIZER.encode("hello", special=True))
        assert not observer._requests
    finally:
        await instance.close_instance()


async def test_an_engine_outlives_what_counts_it(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(GenerationMetrics):
        def stepped(self, events: Any, load: Any) -> None:
            raise ValueError("no space")

    engine = make_engine()
    instance = GeneratingInstance(engine, TOKENIZER, InstanceSettings(engine.context), Broken(engine, LABELS))
    try:
        for _ in range(2):
            assert (await ask(instance, "hello", ignore_eos=True)).error is None
    finally:
        await instance.close_instance()
    assert caplog.text.count("metrics failed") == 1


def test_what_a_board_has_is_kept_when_its_process_dies() -> None:
    made = CustomMetrics(OWNED)
    board: Board = made.open(_source())
    writer = BoardWriter(board.descriptor)
    slot = writer.add(0, 1, [f"{OWNED}steps_total", "Steps.", LABELS, []])
    slot.values[0] = 7
    board.close(died=True)
    assert values(made) == {"charonia_llm_steps_total": 7}
