"""`python -m loadtest.walk`: the files, functions and calls that one warm request passes in every process of a server.

A real `charonia serve` counts its own Python calls (`loadtest.bench.calls`) while one caller asks, one request after
the other: an inference of the identity model (`--kind infer`), the same as a job whose result is fetched (`job`), or
one request of a gRPC stream to a decoupled model that answers three times (`stream`). A function is on the walk when it
was called at least once for every second request, beyond what an idle server calls: heartbeats and housekeeping are off
it. `--list` prints every function.

The model of the stream takes 20 ms for each response, so that each is sent by itself, and the first before the request
has ended. A request whose responses are sent together with its end passes one file less (`charonia/facts/events.py`),
as no `ResponsesBegun` is written; how many are depends on the machine's speed.
What is done for several requests at once (waves are settled every 10 ms at most) counts where it comes for every second
one: on a slow machine for each, and then an inference passes up to three files more.
"""

from __future__ import annotations

import argparse
import http.client
import json
import queue
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import grpc
from tritonclient.grpc import service_pb2  # type: ignore[import-untyped]

from loadtest.bench import calls
from loadtest.bench.calls import ask, counted
from loadtest.bench.cases import find, write_repository
from loadtest.bench.report import table
from loadtest.bench.servers import Endpoints
from loadtest.model import LoadTestError

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("charonia", "gateway", "batcher", "executors", "protos")
ON_THE_WALK = 0.5
_WARM = 50
_TIMEOUT_S = 30
_STREAM_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"

_STREAMED = "streamed"
_STREAMED_CONFIG = """name: "streamed" backend: "python" max_batch_size: 0
model_transaction_policy { decoupled: true }
input { name: "INPUT0" data_type: TYPE_FP32 dims: 16 }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 16 }
"""
_STREAMED_MODEL = '''"""Answers three times."""

import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            tensor = pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())
            sender = request.get_response_sender()
            for _ in range(3):
                time.sleep(0.02)
                sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''


def on_the_walk(by_role: Mapping[str, Mapping[str, float]]) -> dict[tuple[str, calls.Function], float]:
    """The functions of the walk by role: calls per request."""
    return {
        (role, calls.function(name)): count
        for role, functions in by_role.items()
        for name, count in functions.items()
        if count >= ON_THE_WALK
    }


def print_walk(walk: Mapping[tuple[str, calls.Function], float], every: bool) -> None:
    """A table of files, functions and calls by package, and with `every` the functions themselves."""
    rows = [["package", "files", "functions", "calls"]]
    by_package: dict[str, dict[calls.Function, float]] = {}
    for (_, one), count in walk.items():
        functions = by_package.setdefault(calls.package_of(one.file, PACKAGES), {})
        functions[one] = functions.get(one, 0.0) + count
    own: dict[calls.Function, float] = {}
    for package in sorted(by_package, key=lambda name: (name not in PACKAGES, name)):
        functions = by_package[package]
        own |= functions if package in PACKAGES else {}
        rows.append([package, *_counts(functions)])
    rows.insert(1 + sum(name in PACKAGES for name in by_package), ["all of Charonia", *_counts(own)])
    print(table(rows))
    if every:
        for (role, one), count in sorted(walk.items(), key=lambda item: (item[0][0], item[0][1].file, item[0][1].line)):
            print(f"{role}  {count:5.1f}  {one.file}:{one.line} {one.name}")


def _counts(functions: Mapping[calls.Function, float]) -> list[str]:
    return [str(len({one.file for one in functions})), str(len(functions)), f"{sum(functions.values()):.0f}"]


def ask_jobs(endpoints: Endpoints, requests: int) -> None:
    """Submits jobs of the identity model one after the other, and fetches each result. Raises LoadTestError."""
    connection = http.client.HTTPConnection(endpoints.http, timeout=_TIMEOUT_S)
    body = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 16], "data": [1.5] * 16}]}
    try:
        for _ in range(requests):
            headers = {"Prefer": "respond-async", "Content-Type": "application/json"}
            accepted = _said(connection, "POST", "/v2/models/identity/infer", 202, json.dumps(body), headers)
            result = _said(connection, "GET", f"{accepted['location']}/result?wait=30", 200)
            if result["outputs"][0]["data"] != [1.5] * 16:
                raise LoadTestError(f"a job answered {result}")
    finally:
        connection.close()


def _said(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    expected: int,
    body: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> dict[str, object]:
    content = (body or "").encode()
    connection.putrequest(method, path, skip_accept_encoding=True)  # as tritonclient's requests
    for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
        connection.putheader(name, value)
    connection.endheaders(content or None)
    answer = connection.getresponse()
    text = answer.read()
    if answer.status != expected:
        raise LoadTestError(f"{method} {path}: expected {expected}, got {answer.status} {text[:200]!r}")
    found: dict[str, object] = json.loads(text)
    return found


def ask_stream(endpoints: Endpoints, requests: int) -> None:
    """Sends requests on one stream, each when the one before has had its three answers. Raises LoadTestError."""
    message = service_pb2.ModelInferRequest(model_name=_STREAMED)
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[16])
    message.raw_input_contents.append(bytes(64))
    outgoing: queue.Queue[bytes | None] = queue.Queue()

    def sent() -> Iterator[bytes]:
        while (one := outgoing.get()) is not None:
            yield one

    with grpc.insecure_channel(endpoints.grpc) as channel:
        call = channel.stream_stream(_STREAM_METHOD)
        answers = call(sent(), timeout=_TIMEOUT_S + requests)
        for _ in range(requests):
            outgoing.put(message.SerializeToString())
            for _ in range(3):
                answer = service_pb2.ModelStreamInferResponse.FromString(next(answers))
                if answer.error_message or answer.infer_response.raw_output_contents != [bytes(64)]:
                    raise LoadTestError(f"a stream answered {answer}")
        outgoing.put(None)
        for _ in answers:
            raise LoadTestError("a stream answered more often than three times")


def _write_streamed(repository: Path) -> None:
    home = repository / _STREAMED
    (home / "1").mkdir(parents=True)
    (home / "1" / "model.py").write_text(_STREAMED_MODEL)
    (home / "config.pbtxt").write_text(_STREAMED_CONFIG)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 2 when the walk could not be counted."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.walk", description=__doc__.split("\n\n")[0])
    parser.add_argument("--kind", choices=["infer", "job", "stream"], default="infer")
    parser.add_argument("--protocol", choices=["http", "grpc"], default="http", help="of --kind infer")
    parser.add_argument("--model", choices=["identity", "identity_py"], default="identity")
    parser.add_argument("--requests", type=int, default=300, metavar="N")
    parser.add_argument("--checkout", type=Path, metavar="DIR", help="source tree to serve from")
    parser.add_argument("--list", action="store_true", help="print every function with its calls per request")
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="loadtest-models-") as home:
            names = options.model if options.kind == "infer" else "identity"
            write_repository(Path(home), find(names), ROOT / "examples" / "models")
            _write_streamed(Path(home))
            checkout = options.checkout.resolve() if options.checkout else None
            with counted(Path(home), (names,), checkout) as server:
                load: dict[str, Callable[[int], None]] = {
                    "infer": lambda count: ask(server.endpoints, names, options.protocol, 1, count),
                    "job": lambda count: ask_jobs(server.endpoints, count),
                    "stream": lambda count: ask_stream(server.endpoints, count),
                }
                load[options.kind](_WARM)
                by_role = server.count(lambda: load[options.kind](options.requests), options.requests)
    except (LoadTestError, OSError, grpc.RpcError) as error:
        print(f"loadtest.walk: {error}", file=sys.stderr)
        return 2
    print_walk(on_the_walk(by_role), options.list)
    return 0


if __name__ == "__main__":
    sys.exit(main())
