"""TensorRT-LLM's tensors over a language model, asked by the stock client and by plain HTTP.

The language model is the real engine over a decoder without weights, so that words, seeds and log probabilities are
those of a real sampler. `tests/llm/test_trtllm_real.py` asks the same of a real model.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import text_backend
import tritonclient.http as httpclient
from e2e_asking import until
from e2e_server import Server, serving
from small_tokenizers import byte_level
from trtllm_configs import engine_config, ensemble_config
from trtllm_models import BACKENDS, WHOLE, Asker, Refusal, tensors, write_example

from charonia.errors import ErrorCode

BLS, IDS, ENSEMBLE = "tensorrt_llm_bls", "tensorrt_llm", "ensemble"
FILLED = "their_tensorrt_llm"
"""The configuration of their template."""
ACCUMULATING = "tensorrt_llm_bls_accumulating"
PROMPT = "The capital of France is"
PLAIN = {"text_input": PROMPT, "max_tokens": 24}
LETTERS = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[a-z]{1,4}( [a-z]{2,5}){20}"}
"""Texts whose characters are single bytes: what is cut into tokens can be detokenised alone."""
OWN = {"exclude_input_in_output": True}


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("counts")


@pytest.fixture(scope="module")
def server(counts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("trtllm")
    search = os.pathsep.join([text_backend.install(directory / "plugin"), os.environ.get("PYTHONPATH", "")])
    tokenizer = directory / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_bytes(byte_level().assets.tokenizer_json)
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    models = directory / "models"
    text_backend.write_model(models, "text", 2)
    write_example(models, "text", tokenizer)
    older = models / WHOLE / "config.pbtxt"  # with the names of older releases
    older.write_text(older.read_text().replace('"min_tokens"', '"min_length"').replace('"seed"', '"random_seed"'))
    accumulating = (models / BLS / "config.pbtxt").read_text()
    accumulating += 'parameters { key: "accumulate_tokens" value { string_value: "true" } }'
    (models / ACCUMULATING / "1").mkdir(parents=True)
    (models / ACCUMULATING / "config.pbtxt").write_text(accumulating)
    for name, config in ((FILLED, engine_config(language_model="text")), ("their_ensemble", ensemble_config())):
        (models / name / "1").mkdir(parents=True)
        config = config.replace('name: "ensemble"', f'name: "{name}"').replace('"tensorrt_llm"', f'"{FILLED}"')
        (models / name / "config.pbtxt").write_text(config)
    environment = {"PYTHONPATH": search, "STUBTEXT_COUNTS": str(counts)}
    with serving(models, directory / "state", f"--backend-directory={BACKENDS}", environment=environment) as running:
        yield running


@pytest.fixture
def asker(server: Server) -> Iterator[Asker]:
    made = Asker(server.grpc)
    yield made
    made.close()


def encode(text: str) -> list[int]:
    return list(byte_level().encode(text, special=True))


def infer(server: Server, **values: Any) -> Any:
    """By the stock client over HTTP."""
    with httpclient.InferenceServerClient(server.http) as client:
        return client.infer(WHOLE, tensors(httpclient, values))


def generate(server: Server, model: str, **body: Any) -> dict[str, Any]:
    status, answer = server.request("POST", f"/v2/models/{model}/generate", json.dumps(body).encode())
    assert status == 200, answer
    return dict(json.loads(answer))


def generate_stream(server: Server, model: str, **body: Any) -> list[dict[str, Any]]:
    status, answer = server.request("POST", f"/v2/models/{model}/generate_stream", json.dumps(body).encode())
    assert status == 200, answer
    return [json.loads(line.removeprefix("data: ")) for line in answer.decode().split("\n\n") if line]


def test_every_way_of_asking_gives_one_text(server: Server, asker: Asker) -> None:
    asked = PLAIN | LETTERS
    whole = infer(server, **asked).as_numpy("text_output")
    assert whole.shape == (1,)
    text = whole[0].decode()
    assert text.startswith(PROMPT)
    assert len(text) > len(PROMPT) + 20
    for model in (BLS, ENSEMBLE):
        assert asker.texts(model, **asked) == [text]
        assert generate(server, model, **asked)["text_output"] == text
        parts = asker.texts(model, **asked, stream=True)
        assert len(parts) > 3
        assert PROMPT + "".join(parts) == text
        events = generate_stream(server, model, **asked, stream=True)
        assert PROMPT + "".join(event["text_output"] for event in events) == text
    assert asker.texts(BLS, **asked, **OWN) == [text.removeprefix(PROMPT)]


def test_texts_accumulate_where_the_configuration_says_so(asker: Asker) -> None:
    asked = PLAIN | LETTERS
    parts = asker.texts(BLS, **asked, stream=True)
    whole = asker.texts(ACCUMULATING, **asked, stream=True)
    assert len(whole) > 3
    assert whole[-1] == "".join(parts)
    assert all(after.startswith(before) for before, after in itertools.pairwise(whole))
    assert asker.texts(ACCUMULATING, **asked) == asker.texts(BLS, **asked)


def test_token_ids_of_a_stream_are_those_of_the_whole(asker: Asker) -> None:
    ids = encode(PROMPT)
    asked = {"input_ids": [*ids, 7, 7], "input_lengths": len(ids), "request_output_len": 12}
    whole = asker.ask(IDS, **asked)[0]
    assert whole.as_numpy("output_ids").shape == (1, 1, len(ids) + 12)
    assert whole.as_numpy("output_ids")[0, 0, : len(ids)].tolist() == ids
    assert whole.as_numpy("sequence_length").tolist() == [[len(ids) + 12]]
    parts = asker.ask(IDS, **asked, streaming=True)
    streamed = [token for part in parts for token in part.as_numpy("output_ids")[0, 0].tolist()]
    assert streamed == whole.as_numpy("output_ids")[0, 0, len(ids) :].tolist()
    assert sum(part.as_numpy("sequence_length").item() for part in parts) == 12


@pytest.mark.parametrize("model", [BLS, ENSEMBLE])
def test_a_stop_word_ends_the_text_and_is_part_of_it(asker: Asker, model: str) -> None:
    asked = PLAIN | LETTERS | OWN
    text = asker.texts(model, **asked)[0]
    word = text[9:14]
    assert text.index(word) > 0
    stopped = asker.texts(model, **asked, stop_words=[word, "never"])[0]
    assert stopped.startswith(text[: text.index(word) + len(word)])
    assert len(stopped) < len(text)
    if model == BLS:
        assert stopped.endswith(word)
        assert "".join(asker.texts(model, **asked, stop_words=[word], stream=True)) == stopped


@pytest.mark.parametrize("model", [BLS, ENSEMBLE])
def test_a_bad_word_does_not_come(asker: Asker, model: str) -> None:
    asked = PLAIN | LETTERS | OWN
    text = asker.texts(model, **asked)[0]
    word = byte_level().token_bytes(encode(text)[3]).decode()
    assert word in text
    assert asker.texts(model, **asked, bad_words=[word])[0] != text


def test_tokens_as_words(asker: Asker) -> None:
    ids = encode(PROMPT)
    asked = {"input_ids": ids, "input_lengths": len(ids), "request_output_len": 16, **OWN}
    tokens = asker.ask(IDS, **asked)[0].as_numpy("output_ids")[0, 0].tolist()
    stop = [[[tokens[4]], [1]]]
    stopped = asker.ask(IDS, **asked, stop_words_list=stop)[0].as_numpy("output_ids")[0, 0].tolist()
    assert stopped == tokens[: tokens.index(tokens[4]) + 1]
    without = asker.ask(IDS, **asked, bad_words_list=stop)[0].as_numpy("output_ids")[0, 0].tolist()
    assert tokens[4] not in without
    assert asker.ask(IDS, **asked, end_id=tokens[4])[0].as_numpy("output_ids")[0, 0].tolist() == stopped
    bias = np.zeros(byte_level().vocabulary, np.float32)
    bias[tokens[4]] = -100.0
    assert asker.ask(IDS, **asked, embedding_bias=bias)[0].as_numpy("output_ids")[0, 0].tolist() == without


@pytest.mark.parametrize("model", [BLS, ENSEMBLE])
def test_words_can_be_made_likely(asker: Asker, model: str) -> None:
    asked = {"text_input": PROMPT, "max_tokens": 3, **OWN}
    word = byte_level().token_bytes(encode("Paris")[0]).decode()
    liked = {"embedding_bias_words": [word], "embedding_bias_weights": [100.0]}
    assert asker.texts(model, **asked, **liked) == [word * 3]


def test_texts_are_greedy_unless_asked_otherwise_and_seeds_repeat(server: Server, asker: Asker) -> None:
    asked = PLAIN | OWN
    greedy = asker.texts(BLS, **asked)
    assert asker.texts(BLS, **asked, top_k=1) == greedy
    assert asker.texts(BLS, **asked, top_k=0, top_p=0.0, temperature=0.7, seed=9) == greedy
    drawn = {"top_k": 50, "temperature": 2.0}
    seeds = [asker.texts(BLS, **asked, **drawn, seed=seed)[0] for seed in (0, 7, 2**64 - 1)]
    assert len({*seeds, *greedy}) == 4
    assert [asker.texts(BLS, **asked, **drawn, seed=seed)[0] for seed in (0, 7, 2**64 - 1)] == seeds
    assert asker.texts(BLS, **asked, **drawn) == seeds[:1], "TensorRT-LLM's default is the seed 0"
    assert asker.texts(BLS, **asked, top_p=0.99, temperature=2.0, seed=7) != greedy
    inputs = tensors(httpclient, asked | drawn | {"seed": 7})
    inputs[-1]._name = "random_seed"
    with httpclient.InferenceServerClient(server.http) as client:
        assert client.infer(WHOLE, inputs).as_numpy("text_output")[0].decode() == seeds[1]


@pytest.mark.parametrize("model", [BLS, ENSEMBLE])
def test_log_probabilities_and_counts_have_their_shapes(asker: Asker, model: str) -> None:
    wanted = {"return_log_probs": True, "return_num_input_tokens": True, "return_num_output_tokens": True}
    asked = PLAIN | LETTERS | wanted
    whole = asker.ask(model, **asked)[0]
    count = whole.as_numpy("num_output_tokens").item()
    assert whole.as_numpy("num_input_tokens").tolist() == [[len(encode(PROMPT))]]
    assert whole.as_numpy("num_output_tokens").shape == (1, 1)
    each = whole.as_numpy("output_log_probs")
    assert each.shape == (1, 1, count)
    assert (each <= 0).all()
    assert whole.as_numpy("cum_log_probs").shape == (1, 1)
    assert whole.as_numpy("cum_log_probs").item() == pytest.approx(each.sum(), rel=1e-4)
    parts = asker.ask(model, **asked, stream=True)
    streamed = np.concatenate([part.as_numpy("output_log_probs")[0, 0] for part in parts])
    assert streamed == pytest.approx(each[0, 0])
    assert parts[-1].as_numpy("cum_log_probs").item() == pytest.approx(each.sum(), rel=1e-4)
    without = asker.ask(model, **PLAIN)[0]
    assert [output.name for output in without.get_response().outputs] == ["text_output"]


def test_rows_and_sequences_say_which_they_are(asker: Asker) -> None:
    drawn = {"top_k": 50, "temperature": 2.0, **OWN}
    seeds = [asker.texts(BLS, **PLAIN, **drawn, seed=seed)[0] for seed in (3, 4)]
    found = asker.ask(BLS, **PLAIN, **drawn, seed=3, num_return_sequences=2)
    by_sequence = {one.as_numpy("sequence_index").item(): one.as_numpy("text_output")[0].decode() for one in found}
    assert by_sequence == dict(enumerate(seeds))
    column = np.array([[PROMPT], ["Another prompt"]], np.object_)
    rows = {"text_input": column, "max_tokens": np.array([[24], [24]]), "exclude_input_in_output": [[True], [True]]}
    found = asker.ask(BLS, **rows)
    by_row = {one.as_numpy("batch_index").item(): one.as_numpy("text_output")[0].decode() for one in found}
    alone = [asker.texts(BLS, text_input=text, max_tokens=24, **OWN)[0] for text in (PROMPT, "Another prompt")]
    assert by_row == dict(enumerate(alone))


def test_one_wrong_row_does_not_end_the_others(asker: Asker) -> None:
    rows = {"text_input": np.array([["x " * 5000], [PROMPT]], np.object_), "max_tokens": np.array([[4], [4]])}
    asker.begin(BLS, **rows)
    result, final = asker.next()
    assert not final
    assert result.as_numpy("batch_index").item() == 1
    with pytest.raises(Refusal, match="10000 tokens, but at most 4000"):
        asker.next()


RUNNING = 'charonia_batcher_running_requests{model="text"} 1'


def engine(counts: Path) -> dict[str, int]:
    found = list(counts.glob("*.json"))
    return dict(json.loads(found[0].read_text())) if found else {"requests": 0}


@pytest.mark.parametrize("way", ["stream", "whole", "stop"])
def test_a_cancel_frees_the_engine(server: Server, counts: Path, way: str) -> None:
    asker = Asker(server.grpc)
    before = engine(counts)["requests"]
    ids = encode(PROMPT)
    asked = {"input_ids": ids, "input_lengths": len(ids), "request_output_len": 3900}  # of 2 ms each
    asker.begin(IDS, "mine", **asked, streaming=way != "whole")
    if way == "whole":
        until("it is under way", lambda: RUNNING in server.scrape())
    else:
        asker.next()
    if way == "stop":
        other = Asker(server.grpc)
        other.begin(IDS, "mine", **asked, stop=True)
        assert other.next()[1]
        other.close()
        while not asker.next()[1]:
            pass
    else:
        asker.client.stop_stream(cancel_requests=True)
    counted = until("the engine has ended it", lambda: (now := engine(counts))["requests"] > before and now)
    assert counted is not None
    assert counted["running"] == counted["waiting"] == 0
    asker.client.close()


REFUSED: dict[str, tuple[Any, str]] = {
    "beam_width": (4, "tensor 'beam_width' is 4, expected 1: there is no beam search"),
    "max_tokens": (0, "max_tokens must be a single value > 0"),
    "num_draft_tokens": (3, "tensor 'num_draft_tokens' is 3, expected 0: draft tokens are not taken"),
    "use_draft_logits": (True, "tensor 'use_draft_logits' is True, expected False"),
    "return_context_logits": (True, "tensor 'return_context_logits' is True, expected False: logits are not given"),
    "return_generation_logits": (True, "tensor 'return_generation_logits' is True, expected False"),
    "return_perf_metrics": (True, "tensor 'return_perf_metrics' is True, expected False: the metrics page"),
    "prompt_embedding_table": (np.zeros((1, 2, 4)), "tensor 'prompt_embedding_table' is not supported, expected none"),
    "prompt_vocab_size": (2, "tensor 'prompt_vocab_size' is not supported, expected none: prompt tuning"),
    "prompt_table_extra_id": (2, "tensor 'prompt_table_extra_id' is not supported"),
    "lora_weights": (np.zeros((1, 2, 4)), "tensor 'lora_weights' is not supported, expected none: adapters are files"),
    "lora_config": (np.zeros((1, 2, 3)), "tensor 'lora_config' is not supported"),
    "lora_task_id": (5, "LoRA"),
    "decoder_text_input": ("x", "tensor 'decoder_text_input' is not supported, expected none: encoder-decoder"),
    "image_url_input": ("x", "tensor 'image_url_input' is not supported, expected none: this model takes texts"),
    "image_input": (np.zeros((1, 1, 3, 2, 2)), "tensor 'image_input' is not supported"),
    "guided_decoding_guide_type": ("xml", "tensor 'guided_decoding_guide_type' is 'xml', expected one of json, json_"),
    "guided_decoding_guide": ("x", "tensor 'guided_decoding_guide' has no type, expected 'guided_decoding_guide_type'"),
    "embedding_bias_words": (["x"], "Embedding bias words must have same dimension as embedding bias weights"),
    "num_return_sequences": (0, "tensor 'num_return_sequences' is 0, expected 1 to 128"),
    "stop_words": ([b"\xff"], "tensor 'stop_words' is not UTF-8"),
    "top_p": (1.5, "top_p must be in (0, 1]"),
    "temperature": (-1.0, "temperature must be in [0, 2]"),
}
REFUSED_IDS: dict[str, tuple[Any, str]] = {
    "input_lengths": (99, "tensor 'input_lengths' is 99, expected 1 to 3, the length of 'input_ids'"),
    "draft_input_ids": ([1, 2], "tensor 'draft_input_ids' is not supported, expected none: draft tokens"),
    "draft_logits": (np.zeros((1, 1, 4)), "tensor 'draft_logits' is not supported"),
    "decoder_input_ids": ([1, 2], "tensor 'decoder_input_ids' is not supported, expected none: encoder-decoder"),
    "runtime_top_p_decay": (0.5, "tensor 'runtime_top_p_decay' is 0.5, expected 1.0: top_p does not change"),
    "stop_words_list": ([[[1, 2], [3, 1]]], "tensor 'stop_words_list' has words that end at [3, 1], expected rising"),
    "request_output_len": (0, "max_tokens must be a single value > 0"),
    "stop": (True, "A request id must be provided for request cancellation"),
}


def test_what_has_no_counterpart_is_refused_by_name(asker: Asker) -> None:
    told = {}
    for model, table in ((BLS, REFUSED), (IDS, REFUSED_IDS)):
        plain = PLAIN if model == BLS else {"input_ids": [1, 2, 3], "input_lengths": 3, "request_output_len": 4}
        needed = {"top_p": {"top_k": 5}, "temperature": {"top_k": 5}}
        for name, (value, expected) in table.items():
            with pytest.raises(Refusal) as refused:
                asker.ask(model, **(plain | needed.get(name, {}) | {name: value}))
            if expected not in str(refused.value):
                told[name] = str(refused.value)
    assert told == {}


NAN = float("nan")
HOSTILE: list[tuple[str, str, Any, str]] = [
    (BLS, "temperature", NAN, "tensor 'temperature' is nan, expected a finite number"),
    (BLS, "top_p", NAN, "tensor 'top_p' is nan, expected a finite number"),
    (BLS, "presence_penalty", float("-inf"), "tensor 'presence_penalty' is -inf, expected a finite number"),
    (BLS, "embedding_bias_weights", [NAN], "tensor 'embedding_bias_weights' has values that are no finite numbers"),
    (BLS, "num_return_sequences", 2**31 - 1, "tensor 'num_return_sequences' is 2147483647, expected 1 to 128"),
    (IDS, "embedding_bias", [1.0, NAN], "tensor 'embedding_bias' has values that are no finite numbers"),
    (IDS, "stop_words_list", [[[-5, 6], [2, -1]]], "tensor 'stop_words_list' has the token -5, expected 0 or more"),
    (IDS, "bad_words_list", [[[5, -6], [2, -1]]], "tensor 'bad_words_list' has the token -6, expected 0 or more"),
    (ENSEMBLE, "text_input", [b"\xff"], "in ensemble 'ensemble', tensor 'QUERY' is not UTF-8"),
    (ENSEMBLE, "stop_words", [b"\xff"], "in ensemble 'ensemble', tensor 'STOP_WORDS_DICT' is not UTF-8"),
]


@pytest.mark.parametrize(("model", "name", "value", "expected"), HOSTILE)
def test_hostile_values_are_refused_by_name(asker: Asker, model: str, name: str, value: Any, expected: str) -> None:
    plain = {"input_ids": [1, 2, 3], "input_lengths": 3, "request_output_len": 4} if model == IDS else PLAIN
    needed = {"temperature": {"top_k": 5}, "embedding_bias_weights": {"embedding_bias_words": ["x"]}}
    with pytest.raises(Refusal, match=f"^{re.escape(expected)}"):
        asker.ask(model, **(plain | needed.get(name, {}) | {name: value}))


def test_refusals_are_the_clients_fault(server: Server) -> None:
    body = json.dumps(PLAIN | {"beam_width": 4}).encode()
    status, answer = server.request("POST", f"/v2/models/{BLS}/generate", body)
    assert (status, ErrorCode.INVALID_ARG.name) == (400, "INVALID_ARG"), answer
    status, answer = server.request("POST", f"/v2/models/{ENSEMBLE}/generate", body)
    assert status == 400
    assert "in ensemble 'ensemble', tensor 'beam_width' is 4, expected 1" in json.loads(answer)["error"]


def test_a_model_that_is_not_decoupled_gives_one_text(server: Server) -> None:
    with pytest.raises(Exception, match=r"Streaming is only supported in decoupled mode\."):
        infer(server, **PLAIN, stream=True)
    with pytest.raises(Exception, match="2 texts are asked for in one request, expected 1"):
        infer(server, **PLAIN, num_return_sequences=2)


def test_what_preprocessing_always_sends_is_no_refusal(asker: Asker) -> None:
    """TensorRT-LLM's own step fills tensors in that mean nothing for such models."""
    asked = {"input_ids": [1, 2, 3], "input_lengths": 3, "request_output_len": 4}
    filled = {"decoder_input_ids": [2], "decoder_input_lengths": 1, "pad_id": 2, "len_penalty": 1.0}
    empty = {"embedding_bias": np.zeros((1, 0)), "stop_words_list": np.zeros((1, 2, 0)), "beam_width": 1}
    plain = asker.ask(IDS, **asked)[0].as_numpy("output_ids").tolist()
    assert asker.ask(IDS, **asked, **filled, **empty)[0].as_numpy("output_ids").tolist() == plain


def test_a_configuration_of_tensorrt_llm_is_served_as_it_is(server: Server, asker: Asker) -> None:
    """All its tensors, dynamic batching and parameters, and one parameter more."""
    asked = {"input_ids": [1, 2, 3], "input_lengths": 3, "request_output_len": 4}
    ours = asker.ask(IDS, **asked, **OWN)[0].as_numpy("output_ids").tolist()
    theirs = asker.ask(FILLED, **asked)[0].as_numpy("output_ids").tolist()
    assert theirs == ours, "its parameter exclude_input_in_output is true"
    for name, value in {"retention_decode_priority": 3, "lookahead_window_size": 3}.items():
        with pytest.raises(Refusal, match=f"tensor '{name}' is not supported, expected none: "):
            asker.ask(FILLED, **asked, **{name: value})
    with pytest.raises(Refusal, match=r"'stop_words_list' has a word of 2 tokens, expected one .* 'tokenizer_dir'"):
        asker.ask(FILLED, **asked, stop_words_list=[[[5, 6], [2, -1]]])
    said = [line for line in server.log().splitlines() if "have no effect here" in line and f"'{FILLED}'" in line]
    assert any("kv_cache_free_gpu_mem_fraction" in line and "${" not in line for line in said), server.log()
    whole = asker.ask("their_ensemble", input_ids=[1, 2, 3], input_lengths=3, max_tokens=4)
    assert whole[0].as_numpy("output_ids").tolist() == ours
