"""Several generator processes that start together; each runs its share of the lanes and hands its tally back whole.

A worker is this same command with `--worker INDEX/COUNT`. It writes "ready" when connected, starts when its standard
input says "go", and then writes one JSON line and its latencies as little-endian 8-byte integers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from collections import Counter
from typing import IO

from .closed_loop import Driver
from .measurement import Tally, merge
from .model import LoadTestError


def encode(tally: Tally) -> bytes:
    """A tally as a worker writes it."""
    latencies = array("q", tally.latencies_ns)
    if sys.byteorder == "big":
        latencies.byteswap()
    raw = latencies.tobytes()
    head = {
        "errors": tally.errors,
        "completed_total": tally.completed_total,
        "window_ns": tally.window_ns,
        "cpu_ns": tally.cpu_ns,
        "latency_bytes": len(raw),
    }
    return json.dumps(head).encode() + b"\n" + raw


def decode(stream: IO[bytes]) -> Tally:
    """Reads what `encode` wrote. Raises ValueError when the stream ends early."""
    head = json.loads(stream.readline() or b"null")
    if not isinstance(head, dict):
        raise ValueError("no report")
    raw = stream.read(head["latency_bytes"])
    if len(raw) != head["latency_bytes"]:
        raise ValueError("half a report")
    latencies = array("q")
    latencies.frombytes(raw)
    if sys.byteorder == "big":
        latencies.byteswap()
    return Tally(latencies, Counter(head["errors"]), head["completed_total"], head["window_ns"], head["cpu_ns"])


def answer_parent(driver: Driver) -> Tally:
    """The worker's side, from connected to reported."""
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.buffer.flush()
    if sys.stdin.readline() != "go\n":
        raise LoadTestError("the parent of this worker went away")
    tally = driver.run(None)
    sys.stdout.buffer.write(encode(tally))
    sys.stdout.buffer.flush()
    return tally


def run_fleet(arguments: list[str], count: int) -> Tally:
    """Runs `count` workers with the given command line. Raises LoadTestError when one of them cannot run."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "loadtest", *arguments, "--worker", f"{index}/{count}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for index in range(count)
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None
            if worker.stdout.readline() != b"ready\n":
                raise LoadTestError("a generator process could not start; its own message is above")
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write(b"go\n")
            worker.stdin.flush()
        tallies = []
        for worker in workers:
            assert worker.stdout is not None
            try:
                tallies.append(decode(worker.stdout))
            except (ValueError, KeyError) as error:
                raise LoadTestError(f"a generator process ended without its report: {error}") from None
        return merge(tallies)
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.terminate()
            worker.communicate()
