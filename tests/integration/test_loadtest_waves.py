"""Waves against real echo servers: every answer is compared, and a server that errs is found out."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.bench.cases import CASES
from loadtest.bench.servers import stop
from loadtest.bench.waves import send_waves
from loadtest.model import LoadTestError

RIGS = Path(__file__).resolve().parents[1] / "rigs"


@pytest.fixture(params=["http", "grpc"])
def echo(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """Protocol and address of an echo server."""
    script = RIGS / f"echo_{request.param}.py"
    process = subprocess.Popen([sys.executable, str(script), "--port", "0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        word, _, address = process.stdout.readline().strip().partition(" ")
        assert word == "listening"
        yield request.param, address
        stop(process)


@pytest.mark.parametrize("in_flight", [1, 64])
def test_whole_waves_are_answered(echo: tuple[str, str], in_flight: int) -> None:
    protocol, address = echo
    send_waves(address, CASES["identity"], protocol, in_flight, 640)


def test_a_wrong_answer_is_found_out() -> None:
    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        with pytest.raises(LoadTestError, match="a wrong answer, HTTP 200"):
            send_waves(f"127.0.0.1:{listener.getsockname()[1]}", CASES["identity"], "http", 1, 1)
        thread.join()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_no_server_is_one_sentence(protocol: str) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: refused
        with pytest.raises(LoadTestError, match="cannot connect"):
            send_waves(f"127.0.0.1:{closed.getsockname()[1]}", CASES["identity"], protocol, 1, 1)
