"""Bodies are read without their encoding, answers compared, and differences explained by the names of calls."""

from __future__ import annotations

import gzip
import http.server
import re
import socket
import threading
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from loadtest.bench.servers import Endpoints
from loadtest.model import LoadTestError
from loadtest.peers import likeness
from loadtest.peers.compared_calls import Call, GrpcCall, HttpCall, calls


@pytest.mark.parametrize(
    ("data", "headers", "found"),
    [
        (b'{"b":1}', {}, {"b": 1}),
        (gzip.compress(b"[1]", mtime=0), {"content-encoding": "gzip"}, [1]),
        (b'{"a":1}\x00\xff', {"inference-header-content-length": "7"}, [{"a": 1}, "00ff"]),
        (b'data: {"a":1}\n\ndata: {"a":2}\n\n', {}, [{"a": 1}, {"a": 2}]),
        (b"", {}, ""),
    ],
)
def test_bodies(data: bytes, headers: dict[str, str], found: Any) -> None:
    assert likeness.read_body(data, headers) == found


def test_every_reason_is_of_some_call() -> None:
    names = [call.name for call in calls()]
    assert [pattern for pattern, _ in likeness.ACCEPTED if not any(re.fullmatch(pattern, n) for n in names)] == []


def test_what_is_answered_otherwise_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    silence = f'"{likeness.NO_ANSWER}"'
    told = {"a": ["1", "2", "3", silence], "b": ["1", "x", "y", silence]}
    monkeypatch.setattr(likeness, "answers", lambda endpoints, _: iter(told[endpoints.http]))
    asked = [HttpCall(name, "/", b"") for name in ("same", "other", "generate chain: raise error", "silent")]
    found = likeness.differences(Endpoints("a"), Endpoints("b"), asked)
    assert [(one.name, one.triton, one.charonia, bool(one.reason)) for one in found] == [
        ("other", "2", "x", False),
        ("generate chain: raise error", "3", "y", True),
        ("silent", silence, silence, False),
    ]


REQUEST = service_pb2.ModelInferRequest()


@pytest.mark.parametrize("call", [HttpCall("one", "/v2", b""), GrpcCall("one", (REQUEST,), streamed=False)])
def test_a_server_that_is_gone_is_like_no_other(call: Call) -> None:
    with socket.socket() as bound:  # it does not listen, and no other program gets its port
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        gone = Endpoints(address, address)
        with pytest.raises(LoadTestError, match=r"the server.* is gone"):
            likeness.differences(gone, gone, [call])


@pytest.mark.parametrize("call", [HttpCall("one", "/v2", b""), GrpcCall("one", (REQUEST,), streamed=False)])
def test_the_silence_of_two_servers_is_no_answer(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(likeness, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listening:  # it accepts nothing
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        silent = Endpoints(address, address)
        (found,) = likeness.differences(silent, silent, [call])
    assert likeness.NO_ANSWER in found.triton
    assert not found.reason


class _Drops(http.server.BaseHTTPRequestHandler):
    """Ends the connection without an answer, but where it is asked whether it is live."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        self.close_connection = True

    def log_message(self, *_: object) -> None: ...


def test_two_servers_that_end_a_connection_are_alike() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Drops) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            live = Endpoints(f"127.0.0.1:{server.server_port}", "127.0.0.1:1")
            assert likeness.differences(live, live, [HttpCall("one", "/v2", b"")]) == []
        finally:
            server.shutdown()
            serving.join()
