"""`python -m loadtest.generation.beside`: chats while a batch file is answered, and each of its lines once under kills.

    python -m loadtest.generation.beside --lines 1000 --kills 8

Chats come one after the other: first alone, then beside a batch of so many lines, then beside a second batch of the
same lines, under which the model's process and the executor with the batcher are killed in turns. Asked is: the first
token of a chat beside the undisturbed batch, 95th percentile, within twice the time alone and two steps; each line once
in both batches, and its text the same. Chats have the higher of two priority levels. A step is what a chat beside the
batch waits between two tokens, in the median.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from executors.backends.llm.conversion import converted, default_directory
from loadtest.bench.servers import Charonia
from loadtest.measurement import median
from loadtest.model import LoadTestError

from . import served
from .loops import random_prompts

ROOT = Path(__file__).resolve().parents[2]
MODEL = "smollm2"
CONFIG = """name: "{name}"
backend: "llm"
dynamic_batching {{ priority_levels: 2 default_priority_level: 1 }}
parameters {{ key: "max_num_seqs" value {{ string_value: "{slots}" }} }}
parameters {{ key: "max_num_batched_tokens" value {{ string_value: "{budget}" }} }}
"""
PROMPT_TOKENS, CHAT_TOKENS = 24, 8
_ROLES = ("instance", "executor")
_TIMEOUT_S = 600.0
_WARM_UPS = 5


class Chats:
    """Chats of one client after the other: seconds to the first token, and between tokens."""

    def __init__(self, address: str) -> None:
        self._stream = served.openai(address, MODEL)
        self._number = 0
        self.first_s: list[float] = []
        self.gaps_s: list[float] = []
        self.failed = 0

    def one(self) -> None:
        """Ask once, with a prompt of its own. A stream that ends with an error is counted."""
        self._number += 1
        (prompt,) = random_prompts(1, PROMPT_TOKENS, 9_000_000 + self._number)
        try:
            run = served.run(self._stream, [prompt], CHAT_TOKENS)
        except LoadTestError:
            self.failed += 1
            return
        self.first_s += run.first_s
        self.gaps_s += run.gaps_s

    def take(self) -> tuple[list[float], list[float], int]:
        """What was noted since the last call."""
        taken = self.first_s, self.gaps_s, self.failed
        self.first_s, self.gaps_s, self.failed = [], [], 0
        return taken


def batch_file(lines: int) -> bytes:
    """Completions of 8 to 24 tokens after prompts of their own, greedy."""
    drawn = np.random.default_rng(7)
    made = []
    for number, prompt in enumerate(random_prompts(lines, PROMPT_TOKENS, 8_000_000)):
        wanted = int(drawn.integers(8, 25))
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": wanted, "ignore_eos": True}
        made.append({"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body})
    return b"".join(json.dumps(line).encode() + b"\n" for line in made)


def begin(address: str, content: bytes) -> str:
    """Upload a file and begin its batch; returns the batch's id."""
    border = "a-border-of-parts"
    parts = (
        f'--{border}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{border}\r\nContent-Disposition: form-data; name="file"; filename="lines.jsonl"\r\n\r\n'
    )
    form = parts.encode() + content + f"\r\n--{border}--\r\n".encode()
    file = json.loads(_ask(address, "POST", "/v1/files", form, f"multipart/form-data; boundary={border}"))
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    return str(json.loads(_ask(address, "POST", "/v1/batches", json.dumps(body).encode()))["id"])


def texts_of(address: str, batch: dict[str, Any], lines: int) -> dict[str, str]:
    """The text of each line by its id. Raises `LoadTestError` unless each has one, once."""
    if batch["status"] != "completed" or batch["error_file_id"]:
        raise LoadTestError(f"the batch is {batch['status']}, its counts {batch['request_counts']}")
    found: dict[str, str] = {}
    for line in _ask(address, "GET", f"/v1/files/{batch['output_file_id']}/content").splitlines():
        result = json.loads(line)
        if result["custom_id"] in found:
            raise LoadTestError(f"{result['custom_id']} has two results")
        found[result["custom_id"]] = result["response"]["body"]["choices"][0]["text"]
    if len(found) != lines:
        raise LoadTestError(f"{len(found)} of {lines} lines have a result")
    return found


def beside(address: str, chats: Chats, content: bytes, each: Callable[[int], None]) -> tuple[dict[str, Any], float]:
    """Chats until a batch has ended; its document and seconds. `each` gets the number of lines done after each chat."""
    began = time.monotonic()
    batch_id = begin(address, content)
    while True:
        chats.one()
        batch = json.loads(_ask(address, "GET", f"/v1/batches/{batch_id}"))
        if batch["status"] not in ("validating", "in_progress", "finalizing"):
            return batch, time.monotonic() - began
        if time.monotonic() - began > _TIMEOUT_S:
            raise LoadTestError(f"the batch has not ended: {batch['request_counts']}")
        each(batch["request_counts"]["completed"])


class Kills:
    """Kills a process, of the model and of the executor in turns, each time so many more lines are done."""

    def __init__(self, processes: Path, count: int, lines: int) -> None:
        self._processes = processes
        self._at: Iterator[int] = iter([lines * (number + 1) // (count + 1) for number in range(count)])
        self._next = next(self._at, None)
        self.killed: list[str] = []

    def __call__(self, done: int) -> None:
        if self._next is None or done < self._next:
            return
        role = _ROLES[len(self.killed) % len(_ROLES)]
        for process in json.loads(self._processes.read_bytes()):
            if process["role"].partition(":")[0].partition("+")[0] == role:
                os.kill(process["pid"], signal.SIGKILL)
                self.killed.append(role)
                self._next = next(self._at, None)
                return


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.generation.beside",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--repository", type=Path, default=ROOT / "examples" / "models_llm", metavar="DIR")
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=8, help="0: without the second batch")
    parser.add_argument("--alone", type=int, default=40, metavar="N", help="chats without a batch (default 40)")
    parser.add_argument(
        "--slots", type=int, default=40, help="max_num_seqs of the model (default 40: 32 lines and chats)"
    )
    parser.add_argument("--step-tokens", type=int, default=64, help="its max_num_batched_tokens (default 64)")
    arguments = parser.parse_args()
    made = converted(arguments.repository / MODEL / "1" / "model.gguf", default_directory())
    with tempfile.TemporaryDirectory() as directory:
        version = Path(directory) / MODEL / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(
            CONFIG.format(name=MODEL, slots=arguments.slots, budget=arguments.step_tokens)
        )
        for file in made.iterdir():
            shutil.copy(file, version / file.name)
        with Charonia(Path(directory), ["--openai-on-http-port=true"], checkout=ROOT) as server:
            return _measure(server, arguments)


def _measure(server: Charonia, arguments: argparse.Namespace) -> int:
    address, content = str(server.endpoints.http), batch_file(arguments.lines)
    chats = Chats(address)
    for number in range(_WARM_UPS + arguments.alone):
        if number == _WARM_UPS:
            chats.take()
        chats.one()
    alone, _, _ = chats.take()
    print(f"load {_load()}; alone {_times(alone)}", flush=True)
    batch, took_s = beside(address, chats, content, lambda done: None)
    texts = texts_of(address, batch, arguments.lines)
    first, gaps, failed = chats.take()
    step_s = median(gaps)
    bound_s = 2 * _p95(alone) + 2 * step_s
    print(f"load {_load()}; beside {arguments.lines} lines in {took_s:.0f} s: {_times(first)}; {failed} failed")
    print(
        f"p95 {_p95(first) * 1e3:.0f} ms, at most {bound_s * 1e3:.0f} (twice {_p95(alone) * 1e3:.0f} ms and 2 steps of "
        f"{step_s * 1e3:.0f} ms)",
        flush=True,
    )
    if not arguments.kills:
        return int(_p95(first) > bound_s)
    kills = Kills(Path(str(server.endpoints.processes_file)), arguments.kills, arguments.lines)
    batch, took_s = beside(address, chats, content, kills)
    again = texts_of(address, batch, arguments.lines)
    first, _, failed = chats.take()
    differ = sum(again[name] != text for name, text in texts.items())
    print(
        f"load {_load()}; killed {', '.join(kills.killed)}: {arguments.lines} lines in {took_s:.0f} s, each once, "
        f"{differ} with another text; chats: {_times(first)}, {failed} failed"
    )
    return int(differ > 0)


def _ask(address: str, method: str, path: str, body: bytes | None = None, kind: str = "application/json") -> bytes:
    connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
    try:
        connection.request(method, path, body, {"Content-Type": kind})
        response = connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise LoadTestError(f"{path}: {response.status} {content[:500]!r}")
        return content
    finally:
        connection.close()


def _p95(seconds: list[float]) -> float:
    return float(np.percentile(seconds, 95))


def _times(seconds: list[float]) -> str:
    return f"{len(seconds)} chats, first token p50 {median(seconds) * 1e3:.0f} ms, p95 {_p95(seconds) * 1e3:.0f} ms"


def _load() -> str:
    return "/".join(f"{one:.1f}" for one in os.getloadavg())


if __name__ == "__main__":
    raise SystemExit(main())
