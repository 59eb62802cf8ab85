"""The example model behind a server: texts, streams, many at once, and its process killed in the middle of a stream."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from e2e_server import Server, serving

PATH = "/v2/models/smollm2/generate"
CHAT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def server(model: Any, conversions: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flag = f"--backend-config=llm,charonia.conversions={conversions}"
    with serving(model.repository, tmp_path_factory.mktemp("state"), flag) as running:
        yield running


def body(prompt: str, **said: Any) -> dict[str, Any]:
    sampling = {"temperature": 0.8, "seed": 4, "max_tokens": 48, "ignore_eos": True} | said
    return {"text_input": prompt, "exclude_input_in_output": True, "sampling_parameters": json.dumps(sampling)}


def generate(server: Server, prompt: str, **said: Any) -> str:
    status, answer = server.request("POST", PATH, json.dumps(body(prompt, **said)).encode())
    assert status == 200, answer
    return str(json.loads(answer)["text_output"])


def stream(server: Server, prompt: str, **said: Any) -> Iterator[str]:
    content = json.dumps(body(prompt, **said) | {"stream": True}).encode()
    with urlopen(f"http://{server.http}{PATH}_stream", content, timeout=120) as lines:
        for line in lines:
            if line.startswith(b"data:"):
                event = json.loads(line[5:])
                assert "error" not in event, event
                yield event["text_output"]


def test_it_answers(server: Server) -> None:
    text = generate(server, CHAT, temperature=0, ignore_eos=False)
    assert text.startswith("The capital of France is Paris")


def test_a_stream_is_the_text_in_parts(server: Server) -> None:
    parts = list(stream(server, "Once upon a time"))
    assert len(parts) > 10
    assert "".join(parts) == generate(server, "Once upon a time")


def test_what_is_wrong_is_said(server: Server) -> None:
    for said, reason in (({"temperature": -1}, "temperature"), ({"lora_name": "none"}, "LoRA")):
        status, answer = server.request("POST", PATH, json.dumps(body("text", **said)).encode())
        assert status == 400
        assert reason in json.loads(answer)["error"]


def test_the_loaded_configuration_names_text_assets_in_the_log(server: Server) -> None:
    from charonia import keys
    from charonia.generation.text_assets import TextAssets, digest_of

    config = json.loads(server.get("/v2/models/smollm2/config")[1])
    assert config["model_transaction_policy"] == {"decoupled": True}
    digest = config["parameters"]["charonia.text_assets"]["string_value"]
    blob = server.log_client().get(keys.blob(digest))
    assert digest_of(blob) == digest
    assert "<|im_start|>" in TextAssets.unpack(blob).chat_template


def test_streams_outlive_the_process_of_their_model(server: Server) -> None:
    """Killed with eight streams at work: each goes on, and is what it is without that."""
    prompts = [f"A story about the number {number}:" for number in range(8)]
    undisturbed = [generate(server, prompt, seed=at, max_tokens=64) for at, prompt in enumerate(prompts)]
    told: list[list[str]] = [[] for _ in prompts]
    all_began = threading.Barrier(len(prompts) + 1)

    def read(at: int) -> None:
        for part in stream(server, prompts[at], seed=at, max_tokens=64):
            told[at].append(part)
            if len(told[at]) == 3:
                all_began.wait(60)

    threads = [threading.Thread(target=read, args=(at,)) for at in range(len(prompts))]
    for thread in threads:
        thread.start()
    all_began.wait(60)
    os.kill(model_process(server), signal.SIGKILL)
    for thread in threads:
        thread.join(120)
    assert ["".join(parts) for parts in told] == undisturbed


def test_its_engine_is_on_the_page_of_metrics(server: Server) -> None:
    generate(server, "A prompt of its own:", max_tokens=5)
    page = server.scrape()
    found = {
        line.partition("{")[0]: float(line.rpartition(" ")[2])
        for line in page.splitlines()
        if 'model="smollm2"' in line
    }
    assert found["vllm:generation_tokens_total"] >= 5
    assert found["vllm:time_to_first_token_seconds_count"] >= 1
    assert found["vllm:inter_token_latency_seconds_count"] >= 4
    assert found["charonia_llm_steps_total"] >= 5
    assert found["charonia_llm_kv_blocks"] > found["charonia_llm_kv_blocks_used"] == 0


def model_process(server: Server) -> int:
    """The process that runs the model: the executor's child with the blocks of keys and values."""
    parents = {int(path.name): path for path in Path("/proc").iterdir() if path.name.isdecimal()}
    ours, found = {server.process.pid}, []
    for _ in range(4):
        ours |= {pid for pid, path in parents.items() if _parent(path) in ours}
    for pid in ours:
        words = (Path("/proc") / str(pid) / "cmdline").read_bytes()
        if b"isolation" in words:
            found.append(pid)
    (only,) = found
    return only


def _parent(path: Path) -> int:
    try:
        return int((path / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1
