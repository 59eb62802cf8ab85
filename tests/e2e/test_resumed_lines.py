"""The lines of a batch file whose executor is killed go on where they were: what was generated is not generated again.

The decoder has no model, and stops in the middle of the lines until the test has killed its process.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import openai
import pytest
import text_backend
from e2e_asking import until
from e2e_parts import GATEWAY_FLAGS, Part, log_of

from charonia.eventlog.redis import open_log
from charonia.facts.jobs import parse_public_id
from charonia.generation.parameters import parse_sampling
from executors.generation.engine import GenerationRequest
from executors.generation.progress_codec import unpack_progress

pytestmark = pytest.mark.e2e

MODEL = "near"
LONG, SHORT = 150, 3
HELD_AFTER, IN_THE_MIDDLE = 140, 64
"""Steps, and tokens that are in the log then. No long line has ended. The first of them has all steps but those that
short ones had before it, 12 at most, and less than a part of 32 of it waits: parts are longer where the executor is
late.
"""


def sampling_of(number: int) -> dict[str, Any]:
    """Greedy and seeded texts, and at the end of the file short ones."""
    sampling: dict[str, Any] = {"max_tokens": LONG if number < 6 else SHORT, "ignore_eos": True, "seed": number}
    return {**sampling, "temperature": float(number % 2)}


def undisturbed(number: int) -> str:
    """The text of a line, by an engine here."""
    engine = text_backend.make_text_engine()
    prompt = text_backend.byte_level().encode(f"line {number}", special=True)
    parameters = parse_sampling(sampling_of(number), context=engine.context, prompt_tokens=len(prompt), seed=lambda: 0)
    engine.admit(GenerationRequest(b"a", prompt, parameters))
    text = finish = ""
    while not finish:
        for event in engine.step():
            text, finish = text + event.text, event.finish
    return text


def recorded(gateway: Part, log_url: str) -> int:
    """How many tokens of jobs that run another attempt would be given."""
    jobs = json.loads(gateway.get(f"/v2/jobs?model={MODEL}&limit=100")[1])["jobs"]
    ids = [found[1] for job in jobs if (found := parse_public_id(job["id"])) is not None]

    async def read() -> int:
        log = open_log(log_url)
        await log.open()
        try:
            found = await log.progress(MODEL, ids)
            return sum(len(unpack_progress(bytes(record)).tokens) for records in found for record in records)
        finally:
            await log.close()

    return asyncio.run(read())


def test_lines_go_on_where_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = text_backend.install(tmp_path / "plugin")
    text_backend.write_model(tmp_path / "models", MODEL, 0)
    counts, gate = tmp_path / "counts", tmp_path / "gate"
    counts.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([path, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("STUBTEXT_COUNTS", str(counts))
    monkeypatch.setenv("STUBTEXT_HOLD", f"{HELD_AFTER}:{gate}")
    lines = [
        {
            "custom_id": f"id-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": MODEL, "prompt": f"line {number}", **sampling_of(number)},
        }
        for number in range(10)
    ]
    parts: list[Part] = []
    with log_of(tmp_path) as log_url:

        def start(role: str, name: str, *flags: str) -> Part:
            parts.append(Part(role, name, tmp_path, log_url, *flags))
            return parts[-1]

        try:
            start("batcher", "batcher")
            # executors that a busy machine holds up are not lost: what they had under way would be generated twice
            repository = f"--model-repository={tmp_path / 'models'}"
            doomed = start("executor", "doomed", repository, "--heartbeat-ttl-secs=10")
            gateway = start("gateway", "gateway", *GATEWAY_FLAGS, "--openai-on-http-port=true")
            gateway.learn_addresses()
            gateway.wait_ready()
            doomed.until_says("executor is up")
            with openai.OpenAI(base_url=f"http://{gateway.http}/v1", api_key="none", max_retries=0) as asking:
                content = "".join(json.dumps(line) + "\n" for line in lines).encode()
                file = asking.files.create(file=("in.jsonl", content), purpose="batch")
                made = asking.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
                until("a line is in its middle", lambda: recorded(gateway, log_url) >= IN_THE_MIDDLE)
                done_before = asking.batches.retrieve(made.id).request_counts.completed
                kept = recorded(gateway, log_url)
                doomed.process.send_signal(signal.SIGKILL)
                doomed.process.wait()
                gate.touch()
                second = start("executor", "second", repository, "--heartbeat-ttl-secs=60")

                def ended() -> Any:
                    batch = asking.batches.retrieve(made.id)
                    return batch if batch.status in ("completed", "failed") else None

                done = until("the batch ends", ended)
                answers = [json.loads(line) for line in asking.files.content(done.output_file_id).read().splitlines()]
            assert (done.status, done.error_file_id) == ("completed", None)
            assert sorted(line["custom_id"] for line in answers) == [f"id-{number}" for number in range(10)]
            texts = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in answers}
            assert texts == {f"id-{number}": undisturbed(number) for number in range(10)}
            total = sum(sampling_of(number)["max_tokens"] for number in range(10))
            assert done.usage.output_tokens == total
            generated = json.loads((counts / f"{second.process.pid}.json").read_text())["generated_tokens"]
            assert generated <= total - kept - SHORT * done_before
        finally:
            codes = {part.name: part.stop() for part in parts if part.process.poll() is None}
    assert set(codes.values()) <= {0}, codes
