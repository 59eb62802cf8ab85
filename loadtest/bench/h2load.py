"""Runs `h2load`, the load generator of nghttp2, and reads its log of requests; one thread, both protocols.

gRPC: HTTP/2 with prior knowledge, at most 8 connections. HTTP/1.1: one connection for each request in flight.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loadtest.model import LoadTestError

from .messages import Message

MAX_GRPC_CONNECTIONS = 8
MISSING = "h2load is not on PATH: install Debian's package nghttp2-client (apt-get install nghttp2-client)"
_DATA = re.compile(r"\((\d+)\) data")


@dataclass(frozen=True)
class Sample:
    """One answered request: wall-clock start and duration in microseconds, and whether its HTTP status was 200."""

    start_us: int
    latency_us: int
    ok: bool


@dataclass(frozen=True)
class Outcome:
    """What h2load saw after its warm-up: every answer, and the mean size of an answer's body in bytes."""

    samples: list[Sample]
    answer_bytes: float
    text: str = ""


def require() -> str:
    """The path of h2load. Raises LoadTestError with the package to install when it is missing."""
    program = shutil.which("h2load")
    if program is None:
        raise LoadTestError(MISSING)
    return program


def parse_log(text: str) -> list[Sample]:
    """The lines of `--log-file`: start, HTTP status, duration; others are ignored."""
    samples = []
    for line in text.splitlines():
        words = line.split()
        if len(words) == 3 and words[0].isdigit() and words[2].isdigit():
            samples.append(Sample(int(words[0]), int(words[2]), words[1] == "200"))
    return samples


def command(
    program: str, message: Message, address: str, in_flight: int, seconds: tuple[float, float], files: Path
) -> list[str]:
    """The command line; `seconds` are the warm-up and the measured time."""
    http1 = message.protocol == "http"
    connections = in_flight if http1 else min(MAX_GRPC_CONNECTIONS, in_flight)
    words = [
        program, "-t", "1", "-c", str(connections), "-m", str(max(1, in_flight // connections)),
        "--warm-up-time", f"{seconds[0] * 1000:.0f}ms", "-D", f"{seconds[1] * 1000:.0f}ms",
        "-d", str(files / "body"), "--log-file", str(files / "log"),
    ]  # fmt: skip
    words += ["--h1"] if http1 else []
    for name, value in message.headers.items():
        words += ["-H", f"{name}: {value}"]
    return [*words, f"http://{address}{message.path}"]


class Running:
    """One run of h2load: its process id while it runs, and its outcome after it."""

    def __init__(self, process: subprocess.Popen[str], words: list[str], files: Path) -> None:
        self._process = process
        self._words = words
        self._files = files
        self.pid = process.pid

    def wait_started(self) -> None:
        """Returns when requests leave: our own generator says so, after its imports; h2load needs no time."""
        mark = self._files / "log.started"
        while self._words[0] == sys.executable and self.alive and not mark.exists():
            time.sleep(0.005)

    @property
    def alive(self) -> bool:
        """Whether the generator still runs."""
        return self._process.poll() is None

    def outcome(self, timeout_s: float) -> Outcome:
        """Waits for the end of the run. Raises LoadTestError when nothing was answered."""
        try:
            text, _ = self._process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise LoadTestError(f"h2load did not end within {timeout_s:g} s of its time") from None
        samples = parse_log((self._files / "log").read_text())
        if not samples:
            raise LoadTestError(f"the load generator got no answer: {text[-300:].strip()}")
        data = _DATA.search(text)
        return Outcome(samples, int(data[1]) / len(samples) if data else 0.0, text)


@contextmanager
def load(message: Message, address: str, in_flight: int, warm_s: float, measured_s: float) -> Iterator[Running]:
    """Runs the load of a message against a server; on leaving, the process has ended and its files are gone.

    A message without a body is the mixed trace, which a generator of our own sends.
    """
    with tempfile.TemporaryDirectory(prefix="loadtest-h2load-") as home:
        files = Path(home)
        (files / "body").write_bytes(message.body)
        (files / "log").touch()
        words = command(require(), message, address, in_flight, (warm_s, measured_s), files)
        if not message.body:
            words = [
                sys.executable, "-m", "loadtest.bench.mixed", "--protocol", message.protocol, "--url", address,
                "--in-flight", str(in_flight), "--duration", f"{warm_s + measured_s}", "--log-file", str(files / "log"),
            ]  # fmt: skip
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            yield Running(process, words, files)
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()


def send(message: Message, address: str, in_flight: int, requests: int) -> None:
    """Sends exactly so many requests. Raises LoadTestError when not all of them were answered."""
    with tempfile.TemporaryDirectory(prefix="loadtest-h2load-") as home:
        (Path(home) / "body").write_bytes(message.body)
        words = command(require(), message, address, in_flight, (0, 0), Path(home))
        start = words.index("--warm-up-time")
        words[start : start + 4] = ["-n", str(requests)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if f" {requests} succeeded" not in done.stdout:
            raise LoadTestError(f"not all of {requests} requests were answered: {done.stdout[-600:].strip()}")
