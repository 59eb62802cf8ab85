"""The generator against real echo servers: counts are exact, and wrong servers are found out."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.bench.servers import stop

ROOT = Path(__file__).resolve().parents[2]


class Echo:
    """One of the echo servers (`echo_http`, `echo_grpc`); a context manager with its `address`."""

    def __init__(self, module: str) -> None:
        script = ROOT / "tests" / "rigs" / f"{module}.py"
        self._process = subprocess.Popen([sys.executable, str(script), "--port", "0"], stdout=subprocess.PIPE)
        self.address = ""

    def __enter__(self) -> Echo:
        assert self._process.stdout is not None
        word, _, self.address = self._process.stdout.readline().decode().strip().partition(" ")
        assert word == "listening", "an echo server did not start; its own message is above"
        return self

    def __exit__(self, *_: object) -> None:
        stop(self._process)
        if self._process.stdout is not None:
            self._process.stdout.close()


@pytest.fixture(scope="module", params=["http", "grpc"])
def echo(request: pytest.FixtureRequest) -> Iterator[tuple[str, Echo]]:
    with Echo(f"echo_{request.param}") as server:
        yield request.param, server


def _loadtest(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loadtest", "--model", "identity", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def _report(*arguments: str) -> dict[str, Any]:
    done = _loadtest("--json", *arguments)
    assert done.returncode == 0, done.stderr + done.stdout
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.mark.parametrize("extra", [(), ("--processes", "2"), ("--batch", "3")])
def test_a_number_of_requests_is_answered_exactly(echo: tuple[str, Echo], extra: tuple[str, ...]) -> None:
    protocol, server = echo
    where = ("--protocol", protocol, "--url", server.address)
    report = _report(*where, "--concurrency", "8", "--requests", "301", "--verify", "identity", *extra)
    assert report["requests"] == report["completed_total"] == 301
    assert report["errors"] == {}
    latency = report["latency_us"]
    assert 0 < latency["p50"] <= latency["p90"] <= latency["p95"] <= latency["p99"] <= latency["max"]
    assert report["window_s"] * 1e6 >= latency["max"]


def test_a_duration_counts_the_window_and_all(echo: tuple[str, Echo]) -> None:
    protocol, server = echo
    report = _report("--protocol", protocol, "--url", server.address, "--duration", "0.8", "--warmup", "0.8")
    assert report["window_s"] == 0.8
    assert 0 < report["requests"] < report["completed_total"]
    assert report["throughput_per_s"] == pytest.approx(report["requests"] / 0.8)


def test_the_text_report_names_its_figures(echo: tuple[str, Echo]) -> None:
    protocol, server = echo
    done = _loadtest("--protocol", protocol, "--url", server.address, "--requests", "20", "--header", "x-a: b")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("requests    20 in ")
    assert "p99 " in done.stdout


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_no_server_is_one_sentence(protocol: str) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: refused
        done = _loadtest("--protocol", protocol, "--url", f"127.0.0.1:{closed.getsockname()[1]}", "--requests", "1")
    assert done.returncode == 2
    assert done.stderr.startswith("loadtest: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--concurrency", "0"), "--concurrency must be at least 1"),
        (("--concurrency", "2", "--connections", "1"), "--connections must equal"),
        (("--shape", "1,15"), "does not fit"),
        (("--verify", "identity", "--input-data", "zero"), "distinct values"),
    ],
)
def test_options_that_do_not_fit(arguments: tuple[str, ...], words: str) -> None:
    with Echo("echo_http") as server:
        done = _loadtest("--url", server.address, *arguments)
    assert done.returncode == 2
    assert words in done.stderr


def _liar(listener: socket.socket, answers: list[bytes]) -> None:
    """Serves one connection per answer: metadata first; an empty answer hangs up without a word."""
    for answer in answers:
        connection, _ = listener.accept()
        with connection:
            if connection.recv(65536) and answer:
                connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + answer)


def test_wrong_answers_are_counted_by_text() -> None:
    tensor = {"name": "A", "datatype": "FP32", "shape": [1, 1]}
    metadata = json.dumps({"inputs": [tensor], "outputs": [{**tensor, "name": "B"}]}).encode()
    part = json.dumps({"outputs": [{**tensor, "name": "B", "parameters": {"binary_data_size": 4}}]}).encode()
    sizes = b"Content-Length: %d\r\nInference-Header-Content-Length: %d\r\n\r\n" % (len(part) + 4, len(part))
    answers = [
        b"Content-Length: %d\r\n\r\n%s" % (len(metadata), metadata),
        sizes + part + b"\xff\xff\xff\xff",
        b"Content-Length: 2\r\n\r\n{}",
        b"",
        b"no header\r\n\r\n",
    ]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_liar, args=(listener, answers), daemon=True)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        done = _loadtest("--url", address, "--requests", "4", "--verify", "identity", "--json")
        thread.join(timeout=10)
    assert done.returncode == 1
    errors = json.loads(done.stdout)["errors"]
    assert errors.pop("output bytes differ from the bytes of the request") == 1
    assert errors.pop("answer without Inference-Header-Content-Length") == 1
    assert errors.pop("connection closed by the server") == 1
    assert errors.pop("protocol error: not a header: b'no header'") == 1
    assert errors == {}


def test_a_server_that_never_answers_times_out() -> None:
    tensor = {"name": "A", "datatype": "FP32", "shape": [1, 1]}
    metadata = json.dumps({"inputs": [tensor], "outputs": []}).encode()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(
            target=_liar,
            args=(listener, [b"Content-Length: %d\r\n\r\n%s" % (len(metadata), metadata)]),
            daemon=True,
        )
        thread.start()  # later connections are accepted by the backlog and stay silent
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        done = _loadtest("--url", address, "--requests", "1", "--timeout", "0.2", "--json")
        thread.join(timeout=10)
    assert json.loads(done.stdout)["errors"] == {"no answer within 0.2 s": 1}
