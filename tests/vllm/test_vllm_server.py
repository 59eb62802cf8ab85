"""The `vllm` backend with a real engine behind `charonia serve` (`make test-vllm`): Triton's surface, and more."""

from __future__ import annotations

import json
import math
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from e2e_server import Server
from vllm_calls import (
    engine_pids,
    events,
    gauge,
    generate,
    grpc_responses,
    is_ready,
    next_event,
    open_stream,
    text_of,
    wait_until,
)

FRANCE = "The capital of France is"
GREEDY = {"temperature": 0, "max_tokens": 16}


def test_the_configuration_is_completed_as_tritons(server: Server) -> None:
    config = json.loads(server.get("/v2/models/smol/config")[1])
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert config["max_batch_size"] == 0
    assert [(group["kind"], group["count"]) for group in config["instance_group"]] == [("KIND_MODEL", 1)]
    assert config["parameters"]["charonia.isolation"] == {"string_value": "process"}
    inputs = {item["name"]: (item["data_type"], item["dims"]) for item in config["input"]}
    assert inputs["text_input"] == ("TYPE_STRING", [1])
    assert {"stream", "sampling_parameters", "exclude_input_in_output", "image", "embedding_request"} < inputs.keys()
    assert [item["name"] for item in config["output"]][:3] == ["text_output", "finish_reason", "cumulative_logprob"]


def test_it_generates(server: Server) -> None:
    code, answer = generate(server, FRANCE, parameters={"stream": False, **GREEDY})
    assert code == 200, answer
    assert answer["text_output"].startswith(FRANCE), "the prompt comes before the text unless it is excluded"
    assert "Paris" in answer["text_output"]
    code, answer = generate(
        server,
        FRANCE,
        exclude_input_in_output=True,
        return_finish_reason=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
        return_token_ids=True,
        temperature="0",  # clients write parameters as they like
        max_tokens="5",
    )
    assert code == 200, answer
    assert not answer["text_output"].startswith(FRANCE)
    assert (answer["finish_reason"], answer["num_input_tokens"], answer["num_output_tokens"]) == ("length", 5, 5)
    assert len(answer["token_ids"]) == 5


def test_a_stream_is_the_same_text_in_pieces(server: Server) -> None:
    whole = text_of(server, FRANCE, **GREEDY)
    pieces = events(
        server,
        FRANCE,
        **GREEDY,
        logprobs=1,
        return_finish_reason=True,
        return_logprobs=True,
        return_cumulative_logprob=True,
        return_num_output_tokens=True,
        return_token_ids=True,
    )
    assert len(pieces) > 3
    assert "".join(piece["text_output"] for piece in pieces) == whole
    assert [piece["finish_reason"] for piece in pieces] == ["None"] * (len(pieces) - 1) + ["length"]
    total = 0.0
    for piece in pieces:
        logprobs = json.loads(piece["logprobs"])
        ids = piece["token_ids"] if isinstance(piece["token_ids"], list) else [piece["token_ids"]]
        assert len(logprobs) == len(ids) == piece["num_output_tokens"]
        for token, candidates in zip(ids, logprobs, strict=True):
            assert min(one["rank"] for one in candidates.values()) == 1
            total += candidates[str(token)]["logprob"]
        assert math.isclose(piece["cumulative_logprob"], total, rel_tol=1e-4)


def test_token_ids_are_a_prompt_too(server: Server) -> None:
    given = {"stream": False, "exclude_input_in_output": True, "sampling_parameters": json.dumps(GREEDY)}
    (of_text,) = grpc_responses(server, {"text_input": FRANCE, **given, "return_token_ids": True})
    ids = [504, 3575, 282, 4649, 314]
    (of_ids,) = grpc_responses(server, {"prompt_token_ids": ids, **given, "return_num_input_tokens": True})
    assert of_ids.as_numpy("num_input_tokens").tolist() == [5]
    assert of_ids.as_numpy("text_output")[0] == of_text.as_numpy("text_output")[0]
    assert of_text.as_numpy("token_ids").shape == (16,)
    assert of_ids.as_numpy("token_ids") is None, "it did not ask for them"


def test_token_ids_that_the_model_does_not_have(server: Server) -> None:
    given = {"stream": False, "exclude_input_in_output": True, "sampling_parameters": json.dumps(GREEDY)}
    (last,) = grpc_responses(server, {"prompt_token_ids": [49_151], **given})
    assert last.as_numpy("text_output").size == 1
    for ids in ([49_152], [-1], [504, -5]):
        (refused,) = grpc_responses(server, {"prompt_token_ids": ids, **given})
        assert "token" in str(refused).lower()
    assert "Paris" in text_of(server, FRANCE, **GREEDY), "the engine goes on"


def test_sampling_parameters_are_heeded(server: Server) -> None:
    seeded = [text_of(server, FRANCE, temperature=1.5, seed=7, max_tokens=12) for _ in range(2)]
    assert seeded[0] == seeded[1] != text_of(server, FRANCE, temperature=1.5, seed=8, max_tokens=12)
    code, answer = generate(server, FRANCE, **GREEDY, stop=" Paris", exclude_input_in_output=True)
    assert (code, "Paris" in answer["text_output"]) == (200, False)
    choice = {**GREEDY, "structured_outputs": {"choice": ["green", "blue"]}}
    assert text_of(server, "The sky is", sampling_parameters=json.dumps(choice)) in ("green", "blue")
    as_text = {**GREEDY, "structured_outputs": json.dumps({"regex": "[0-9]{4}"})}
    assert text_of(server, "The year is", sampling_parameters=json.dumps(as_text)).isdecimal()
    code, answer = generate(server, FRANCE, n=3, temperature=1.0, seed=1, max_tokens=4, exclude_input_in_output=True)
    assert (code, len(answer["text_output"])) == (200, 3)
    banned = text_of(server, FRANCE, **GREEDY, sampling_parameters=json.dumps({**GREEDY, "logit_bias": {"7042": -100}}))
    assert "Paris" not in banned


def test_requests_run_side_by_side(server: Server) -> None:
    prompts = [f"{number} plus {number} is" for number in range(12)]
    alone = [text_of(server, prompt, **GREEDY) for prompt in prompts]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda prompt: text_of(server, prompt, **GREEDY), prompts))
    assert together == alone


def test_adapters_run_in_one_batch(server: Server) -> None:
    names: list[str] = ["", "one", "two"] * 2

    def asked(name: str) -> str:
        return text_of(server, FRANCE, **GREEDY, **({"lora_name": name} if name else {}))

    alone = [asked(name) for name in names[:3]]
    assert len(set(alone)) == 3, "each adapter says something else"
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(asked, names)) == alone * 2
    code, answer = generate(server, FRANCE, lora_name="three")
    assert (code, answer["error"]) == (400, "LoRA three is not supported, we currently support ['one', 'two']")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"stream": True, "exclude_input_in_output": False}, "When streaming, `exclude_input_in_output` = False is"),
        ({"temperature": -1}, "temperature must be non-negative, got -1.0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"temperature": "hot"}, "'temperature' must be of type float, got 'hot'"),
        ({"wings": 2}, "Unexpected keyword argument 'wings'"),
        ({"n": 10**9}, "n must be at most"),
        ({"sampling_parameters": "{"}, "'sampling_parameters' is not valid JSON"),
        ({"sampling_parameters": '{"structured_outputs": {"json": ""}}'}, ""),
        ({"sampling_parameters": '{"structured_outputs": {"regex": "("}}'}, ""),
        ({"embedding_request": '{"input": "a"}'}, "Model smol does not support 'embed' request"),
        ({"text_input": "word " * 600}, ""),
    ],
)
def test_what_cannot_be_done_is_the_clients_error_and_harms_no_other(
    server: Server, given: dict[str, Any], text: str
) -> None:
    code, answer = generate(server, "x", **{"max_tokens": 4, **given})
    assert code == 400, answer
    assert answer["error"].startswith(f"Error generating stream: {text}")
    assert "Paris" in text_of(server, FRANCE, **GREEDY)


def test_a_client_that_leaves_frees_its_place(server: Server) -> None:
    connections = [open_stream(server, FRANCE, temperature=0, max_tokens=480, ignore_eos=True) for _ in range(3)]
    for _, response in connections:
        assert next_event(response) is not None
    wait_until(lambda: gauge(server, "num_requests_running") == 3, "three run")
    for connection, response in connections:
        response.close()
        connection.close()
    # the engine's last step that reports anything may be that of the cancel: another request makes it step again
    wait_until(
        lambda: text_of(server, "x", max_tokens=1) is not None and gauge(server, "num_requests_running") <= 1, ""
    )
    assert "Paris" in text_of(server, FRANCE, **GREEDY)


def test_metrics_have_tritons_names(server: Server) -> None:
    before = gauge(server, "generation_tokens_total")
    text_of(server, FRANCE, temperature=0, max_tokens=9, ignore_eos=True)
    wait_until(lambda: gauge(server, "generation_tokens_total") >= before + 9, "9 tokens are counted")
    page = server.scrape()
    for family in (
        "prompt_tokens_total",
        "time_to_first_token_seconds_count",
        "time_per_output_token_seconds_bucket",
        "e2e_request_latency_seconds_sum",
        "request_prompt_tokens_count",
        "request_generation_tokens_count",
        "request_params_n_bucket",
        "kv_cache_usage_perc",
    ):
        assert f"vllm:{family}{{" in page, family
    assert 'vllm:generation_tokens_total{model="smol",version="1"}' in page


def test_a_killed_engine_is_made_again_without_a_request(server: Server) -> None:
    (pid,) = engine_pids(server)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_ready(server), "a dead engine is not ready")
    wait_until(lambda: is_ready(server), "a new engine")
    assert engine_pids(server) != [pid]
    assert "Paris" in text_of(server, FRANCE, **GREEDY)


def killed_in_the_middle(server: Server, after: int, **given: Any) -> list[dict[str, Any]]:
    """The events of a stream whose engine is killed when so many of them are read."""
    connection, response = open_stream(server, FRANCE, **given)
    try:
        first = [next_event(response) for _ in range(after)]
        for pid in engine_pids(server):
            os.kill(pid, signal.SIGKILL)
        return [*(one for one in first if one is not None), *iter(lambda: next_event(response), None)]
    finally:
        connection.close()


def test_a_stream_goes_on_when_its_engine_is_killed_and_so_do_those_beside_it(server: Server) -> None:
    given = {"temperature": 0, "max_tokens": 120, "ignore_eos": True}
    whole = text_of(server, FRANCE, **given)
    with ThreadPoolExecutor(2) as pool:
        unseen = pool.submit(text_of, server, FRANCE, **given)
        wait_until(lambda: gauge(server, "num_requests_running") >= 1, "it runs")
        found = killed_in_the_middle(server, 20, **given, return_token_ids=True, return_num_input_tokens=True)
        assert unseen.result(timeout=300) == whole
    assert "".join(one["text_output"] for one in found) == whole
    ids = [one["token_ids"] for one in found]
    assert sum(len(one) if isinstance(one, list) else 1 for one in ids) == 120
    assert {one["num_input_tokens"] for one in found} == {5}


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 1.2, "seed": 11, "max_tokens": 60, "ignore_eos": True},
        {"temperature": 0, "max_tokens": 60, "logprobs": 1, "return_logprobs": True, "ignore_eos": True},
        {
            "sampling_parameters": json.dumps(
                {"temperature": 0.8, "seed": 5, "max_tokens": 60, "structured_outputs": {"regex": "[a-z ]{50}"}}
            )
        },
    ],
    ids=["seeded", "logprobs", "structured"],
)
def test_what_cannot_be_continued_is_run_again_and_agrees_or_ends(server: Server, given: dict[str, Any]) -> None:
    wait_until(lambda: is_ready(server), "the engine")
    whole = events(server, FRANCE, **given)
    found = killed_in_the_middle(server, 12, **given)
    text = "".join(one["text_output"] for one in found if "text_output" in one)
    expected = "".join(one["text_output"] for one in whole)
    print("ended" if "error" in found[-1] else "went on")
    if "error" in found[-1]:
        assert found[-1]["error"].startswith("STREAM_INTERRUPTED: ")
        assert expected.startswith(text), "what was given was of one run"
    else:
        assert text == expected
        if "return_logprobs" in given:
            assert sum(len(json.loads(one["logprobs"])) for one in found) == 60
