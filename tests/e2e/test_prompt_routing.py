"""Three executors with a decoder that has no model: requests go where their prompt was computed, while that lives."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
import text_backend
from e2e_asking import until
from e2e_server import Server, serving

pytestmark = pytest.mark.e2e

PREFIXES, ROUNDS = 4, 6
TOKENS = 12


def ask(server: Server, prefix: int, number: int) -> None:
    """One request, which shares its first 352 tokens with all others of its prefix."""
    sampling = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    prompt = f"{prefix} is what it begins with, ".ljust(352, "abcdefgh"[prefix]) + f"and {number} is its end"
    body = {"text_input": prompt, "stream": True, "sampling_parameters": json.dumps(sampling), "return_token_ids": True}
    status, answer = server.request("POST", "/v2/models/text/generate_stream", json.dumps(body).encode())
    events = [json.loads(line.removeprefix(b"data: ")) for line in answer.splitlines() if line.startswith(b"data: ")]
    assert status == 200
    assert "error" not in events[-1], events[-1]


def outcomes(server: Server) -> dict[str, int]:
    found = re.findall(
        r'charonia_routed_requests_total\{model="text",outcome="(\w+)",version="1"\} (\d+)', server.scrape()
    )
    return {outcome: int(count) for outcome, count in found}


def test_prompts_meet_what_was_computed_of_them(tmp_path: Path) -> None:
    path = text_backend.install(tmp_path / "plugin")
    text_backend.write_model(tmp_path / "models", "text", 0)
    (tmp_path / "counts").mkdir()
    search = os.pathsep.join([path, os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": search, "STUBTEXT_COUNTS": str(tmp_path / "counts")}
    with serving(tmp_path / "models", tmp_path / "state", "--executors=3", environment=environment) as server:
        loaded = re.compile(r'charonia_executor_loaded_instances\{[^}]*model="text"[^}]*\} 3\b')
        until("all executors serve the model", lambda: loaded.search(server.scrape()))  # ready is when one does
        for number in range(PREFIXES * ROUNDS):
            ask(server, number % PREFIXES, number)
        until("all are counted", lambda: sum(outcomes(server).values()) >= PREFIXES * ROUNDS)
        counted = until("the page has all parts", lambda: (found := outcomes(server)) and "warm" in found and found)
        # in turns each executor would compute each beginning: 12 would be warm
        assert counted["warm"] >= PREFIXES * ROUNDS - 9
        found = [json.loads(file.read_text()) for file in (tmp_path / "counts").glob("*.json")]
        assert len(found) == 3, "an executor was given nothing"
        assert sum(one["requests"] for one in found) >= PREFIXES * ROUNDS
        assert sum(one["warm"] for one in found) >= PREFIXES * ROUNDS - 9
        os.kill(server.pids("executor")[0], signal.SIGKILL)
        for number in range(PREFIXES):  # what one of them wants is gone
            ask(server, number, number)
