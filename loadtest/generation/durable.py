"""`python -m loadtest.generation.durable`: tokens a second that the log takes, of an engine that computes nothing.

    python -m loadtest.generation.durable --streams 64 --tokens 1500 --rounds 3

Requests go into the log of a `charonia serve`, and a reader that only counts takes the place of the gateway. Resumable
models and others, in the executor and in a process of their own, in turns. Processor time is that of the executor (with
the batcher), of the model's process, and of the log server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from charonia import keys
from charonia.clock import wall_ns
from charonia.eventlog.port import Entry, Limits
from charonia.eventlog.redis import open_log
from charonia.tensors import Tensor
from charonia.wire import FIELD_RECORD, pack_request, records_of, request_meta
from loadtest.bench.servers import Charonia
from loadtest.measurement import median

from .token_source import install, write_model

ROOT = Path(__file__).resolve().parents[2]
GATEWAY = "counting"
PATIENCE_S = 120.0
_ROLES = ("executor+batcher", "instance", "redis", "valkey")
"""Whose processor time is told; the log server is one of the last two."""
_SCRIPTS = "scripts"
MODELS: Mapping[str, Mapping[str, str]] = {
    "plain": {"charonia.isolation": "none"},
    "durable": {"charonia.isolation": "none", "charonia.resumable": "true"},
    "durable_isolated": {"charonia.isolation": "process", "charonia.resumable": "true"},
}


class Reader:
    """Counts the responses that come for the gateway."""

    def __init__(self, log: Any) -> None:
        self.responses = self.entries = 0
        self._came = asyncio.Event()
        self._reader = log.reader()
        self._reader.start(self._take)
        self._reader.add(keys.replies(GATEWAY), consume=True)

    def _take(self, _stream: bytes, entries: list[Entry]) -> None:
        self.entries += len(entries)
        self.responses += sum(sum(1 for _ in records_of(entry.fields)) for entry in entries)
        self._came.set()

    async def until(self, count: int) -> None:
        """Wait for so many responses. Raises `TimeoutError` when none comes any more."""
        while self.responses < count:
            self._came.clear()
            await asyncio.wait_for(self._came.wait(), PATIENCE_S)

    async def close(self) -> None:
        await self._reader.close()


async def measure(server: Charonia, streams: int, tokens: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Figures of each model in each round; the first, which warms up, is left out."""
    log = open_log(str(server.endpoints.log_url))
    await log.open()
    await log.beat("gateway", GATEWAY, 3_600_000)
    reader = Reader(log)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in MODELS}
    serial = 0
    names = list(MODELS)
    try:
        for number in range(rounds + 1):
            for at in range(len(names)):
                name = names[(at + number) % len(names)]
                before, entries = await _spent(server, log), reader.entries
                began, goal = time.monotonic(), reader.responses + streams * tokens
                for _ in range(streams):
                    serial += 1
                    await _ask(log, name, serial, tokens)
                await reader.until(goal)
                took_s = time.monotonic() - began
                after = await _spent(server, log)
                count = streams * tokens
                spent = {key: value - before.get(key, 0.0) for key, value in after.items()}
                figures = {role: spent[role] / count * 1e6 for role in _ROLES if role in spent}
                figures |= {"tokens/s": count / took_s, "entries": float(reader.entries - entries)}
                figures["scripts"] = spent[_SCRIPTS]
                if number:
                    found[name].append(figures)
    finally:
        await reader.close()
        await log.close()
    return found


async def _ask(log: Any, model: str, serial: int, tokens: int) -> None:
    request_id = serial.to_bytes(16, "big")
    tensors = [Tensor.of("COUNT", np.array([tokens], np.int32))]
    meta = request_meta(1, "", tensors, (), {})
    data = [one.data for one in tensors]
    where = (request_id, GATEWAY.encode(), b"")
    record = pack_request(*where, meta, data, rows=1, signature=0, level=0, accepted_ns=wall_ns(), flags=0)
    await log.accept(model, 0, 0, [(request_id, len(record))], [FIELD_RECORD, record], Limits())


async def _spent(server: Charonia, log: Any) -> dict[str, float]:
    """Processor seconds by role; and how many scripts the log server has run, as `_SCRIPTS`."""
    spent = await asyncio.to_thread(_processor_s, Path(str(server.endpoints.processes_file)))
    statistics = (await log.connection.execute("INFO", "commandstats")).decode()
    calls = re.search(r"cmdstat_evalsha:calls=(\d+)", statistics)
    return {**spent, _SCRIPTS: float(calls.group(1)) if calls else 0.0}


def _processor_s(processes: Path) -> dict[str, float]:
    spent: dict[str, float] = {}
    for process in json.loads(processes.read_bytes()):
        role = process["role"].partition(":")[0]
        if role in _ROLES:
            fields = Path(f"/proc/{process['pid']}/stat").read_text().rpartition(")")[2].split()
            spent[role] = spent.get(role, 0.0) + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return spent


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.generation.durable",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1500, help="for each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=int, default=0, help="what a step takes; 0: as fast as the log takes them")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        installed = install(Path(directory) / "installed")
        for name, parameters in MODELS.items():
            write_model(Path(directory) / "models", name, **parameters, step_ms=str(arguments.step_ms))
        print(f"load {_load()}; {arguments.streams} streams of {arguments.tokens} tokens, {arguments.rounds} rounds")
        with Charonia(Path(directory) / "models", checkout=ROOT, environment={"PYTHONPATH": str(installed)}) as server:
            found = asyncio.run(measure(server, arguments.streams, arguments.tokens, arguments.rounds))
        for name, rounds in found.items():
            _print(name, rounds, arguments.tokens)
    print(f"load {_load()}")
    return 0


def _print(name: str, rounds: Sequence[dict[str, float]], tokens: int) -> None:
    rates = sorted(one["tokens/s"] for one in rounds)
    per_token = ", ".join(
        f"{role} {median(one[role] for one in rounds):.1f} us" for role in _ROLES if role in rounds[0]
    )
    steps = tokens / 1000
    scripts, entries = (median(one[key] for one in rounds) / steps for key in ("scripts", "entries"))
    print(
        f"{name:17} {median(rates):8.0f} tokens/s ({rates[0]:.0f} to {rates[-1]:.0f}); of a token {per_token}; "
        f"per 1,000 steps {scripts:.0f} scripts, {entries:.0f} reply entries"
    )


def _load() -> str:
    return "/".join(f"{one:.1f}" for one in os.getloadavg())


if __name__ == "__main__":
    raise SystemExit(main())
