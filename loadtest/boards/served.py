"""Models and load for the boards: something of everything that a panel shows, by two tenants, from threads here."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from loadtest.stack.models import numbers, write_features

TENANTS = ("acme", "north")
FLAGS = (
    "--openai-on-http-port=true",
    "--cache-config=local,size=16777216",
    "--metrics-config=summary_latencies=true",
    "--debug-stalls=50",
    "--webhook-allow=127.0.0.0/8",
    "--webhook-retry-secs=1",
)
_PAUSE_S = 0.02
_TIMEOUT_S = 60

_WORK = """
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.003)
        responses = []
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            if values[0, 0] < 0:
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("a negative value")))
            else:
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", values)]))
        return responses
"""
_WORK_CONFIG = """backend: "python"
max_batch_size: 8
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
dynamic_batching { }
"""
_TEXT = """
import json
import time
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            stream = self.value(request, "stream", False)
            count = int(json.loads(self.value(request, "sampling_parameters", b"{}")).get("max_tokens", 4))
            for index in range(count if stream else 1):
                time.sleep(0.005)
                made = range(index, index + 1) if stream else range(count)
                self.send(sender, list(made), index == count - 1 or not stream)

    def value(self, request, name, default):
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        return default if tensor is None else tensor.as_numpy().ravel()[0]

    def send(self, sender, tokens, last):
        words = {"text_output": "word " * len(tokens), "finish_reason": "length" if last else "null"}
        tensors = [pb_utils.Tensor(name, np.array([word.encode()], np.object_)) for name, word in words.items()]
        tensors.append(pb_utils.Tensor("num_input_tokens", np.array([3], np.uint32)))
        tensors.append(pb_utils.Tensor("num_output_tokens", np.array([len(tokens)], np.uint32)))
        tensors.append(pb_utils.Tensor("token_ids", np.array(tokens, np.int32)))
        sender.send(pb_utils.InferenceResponse(tensors), flags=FINAL if last else 0)
"""
_TEXT_CONFIG = """backend: "python"
model_transaction_policy { decoupled: true }
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true },
  { name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] optional: true }
]
output [
  { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "finish_reason" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "num_input_tokens" data_type: TYPE_UINT32 dims: [ -1 ] },
  { name: "num_output_tokens" data_type: TYPE_UINT32 dims: [ -1 ] },
  { name: "token_ids" data_type: TYPE_INT32 dims: [ -1 ] }
]
"""


def write_models(repository: Path) -> None:
    """The stack test's models, and a batched one as it is, with a cache and with a latency target, and one of text."""
    repository.mkdir()
    write_features(repository)
    target = 'parameters { key: "charonia.target_p99_ms" value { string_value: "200" } }'
    for name, more in (("work", ""), ("kept", "response_cache { enable: true }"), ("hurried", target)):
        _write(repository / name, _WORK, _WORK_CONFIG + more)
    _write(repository / "text", _TEXT, _TEXT_CONFIG)


def _write(model: Path, source: str, config: str) -> None:
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").write_text(source)
    (model / "config.pbtxt").write_text(config)


def write_keys(file: Path) -> None:
    """The file of API keys of `TENANTS`."""
    file.write_text("".join(f'[tenants.{name}]\nkeys = ["key of {name}"]\n' for name in TENANTS))


class _Taker(BaseHTTPRequestHandler):
    """Takes webhooks."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@contextlib.contextmanager
def loading(address: str) -> Iterator[None]:
    """Asks the server at `address` (host:port) for everything, again and again, while the block runs."""
    taker = ThreadingHTTPServer(("127.0.0.1", 0), _Taker)
    threads = [threading.Thread(target=taker.serve_forever, daemon=True)]
    load = _Load(address, f"http://127.0.0.1:{taker.server_port}/ended")
    threads += [threading.Thread(target=load.repeat, args=(one,), daemon=True) for one in load.kinds()]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        load.ended.set()
        taker.shutdown()
        for thread in threads:
            thread.join(_TIMEOUT_S)
        taker.server_close()


class _Load:
    """The kinds of requests; each is repeated by a thread of its own with a connection of its own."""

    def __init__(self, address: str, webhook: str) -> None:
        self._address = address
        self._webhook = webhook
        self.ended = threading.Event()
        self._turns = itertools.count(1)

    def kinds(self) -> list[Callable[[http.client.HTTPConnection], None]]:
        """Two threads ask for batched work, so that there are batches."""
        return [self.work, self.work, self.failures, self.cached, self.features, self.jobs, self.large, self.texts]

    def repeat(self, one: Callable[[http.client.HTTPConnection], None]) -> None:
        while not self.ended.is_set():
            connection = http.client.HTTPConnection(self._address, timeout=_TIMEOUT_S)
            with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
                while not self.ended.wait(_PAUSE_S):
                    one(connection)

    def _ask(
        self, connection: http.client.HTTPConnection, path: str, body: object, tenant: str = TENANTS[0], **headers: str
    ) -> bytes:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("POST", path, json.dumps(body), {"x-api-key": f"key of {tenant}", **named})
        return connection.getresponse().read()

    def work(self, connection: http.client.HTTPConnection) -> None:
        for model in ("work", "hurried"):
            self._ask(connection, f"/v2/models/{model}/infer", numbers("IN", [2, 1], [1.0, 2.0]))

    def failures(self, connection: http.client.HTTPConnection) -> None:
        path = "/v2/models/work/infer"
        self._ask(connection, path, numbers("IN", [1, 1], [-1.0]))
        self._ask(connection, path, numbers("IN", [1, 1], [1.0]), Charonia_Timeout_Ms="1")

    def cached(self, connection: http.client.HTTPConnection) -> None:
        """Every fourth request is a new one."""
        self._ask(connection, "/v2/models/kept/infer", numbers("IN", [1, 1], [float(next(self._turns) // 4)]))

    def features(self, connection: http.client.HTTPConnection) -> None:
        self._ask(connection, "/v2/models/pipeline/infer", numbers("X", [1, 1], [1.0]))
        ends = {"sequence_id": next(self._turns), "sequence_start": True, "sequence_end": False}
        self._ask(connection, "/v2/models/sums/infer", {**numbers("X", [1, 1], [1.0]), "parameters": ends})

    def jobs(self, connection: http.client.HTTPConnection) -> None:
        key = f"job {next(self._turns)}"
        headers = {"Prefer": "respond-async", "Idempotency_Key": key, "Charonia_Webhook": self._webhook}
        for _ in range(2):
            made = self._ask(connection, "/v2/models/work/infer", numbers("IN", [1, 1], [1.0]), **headers)
        path = f"/v2/jobs/{json.loads(made)['id']}"
        connection.request("DELETE", path, headers={"x-api-key": f"key of {TENANTS[0]}"})
        connection.getresponse().read()

    def large(self, connection: http.client.HTTPConnection) -> None:
        """JSON that is read beside the event loop."""
        self._ask(connection, "/v2/models/work/infer", numbers("IN", [1, 50_000], [1.5] * 50_000))
        self.ended.wait(0.5)

    def texts(self, connection: http.client.HTTPConnection) -> None:
        turn = next(self._turns)
        body = {"model": "text", "messages": [{"role": "user", "content": "a word"}], "max_tokens": 2 + turn % 5}
        self._ask(connection, "/v1/chat/completions", {**body, "stream": bool(turn % 2)}, TENANTS[turn % 3 == 0])
