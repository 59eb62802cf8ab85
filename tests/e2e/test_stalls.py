"""Large messages of every kind, and whether an event loop stood still for them: by the reports of `--debug-stalls`.

What is asserted is not how long a caller waited, which depends on the machine, but that no loop's thread worked for
longer than the limit in one go. Before such messages were converted elsewhere, each of these was reported.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import ssl
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from certificates import HAS_OPENSSL, authority, certificate
from e2e_asking import client, infer_json, inputs, until
from e2e_models import WIDTH, echoing, python, scaling, scaling_graph, strings
from e2e_server import serving, start
from stall_reports import own_work, reports
from tritonclient.grpc import service_pb2

pytestmark = pytest.mark.long

REPORTED_MS = 50
LIMIT_MS = 6 * REPORTED_MS
"""Below the 500 to 1000 ms that each of these messages took in one go before, and above what a sound loop is reported
for: a host of tests that takes processor time away inflates what is counted as such about four times. How long a loop
works exactly is measured by benchmarks (docs/benchmarks.md).
"""
LARGE_BYTES = 60_000_000
COUNTING = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.last = 0

    def execute(self, requests):
        answers = []
        for request in requests:
            count = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy().size
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([[self.last]], np.int32))]))
            self.last = count
        return answers
"""
"""Says how many elements the request before had."""
COUNTING_CONFIG = """
max_batch_size: 1
sequence_batching { max_sequence_idle_microseconds: 60000000 }
input [ { name: "INPUT0" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
DECOUPLED = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            value = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            for _ in range(2):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", value)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
DECOUPLED_CONFIG = """
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1, -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1, -1 ] } ]
model_transaction_policy { decoupled: true }
"""
COUNT = 600_000
"""Elements: about a second in the loop, for most kinds."""
BOMB_BYTES = 256 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("stalls")
    models = directory / "models"
    echoing(models, "echo")
    strings(models, "strings")
    scaling(models, "scale", 2)
    python(models, "counting", COUNTING, COUNTING_CONFIG)
    python(models, "decoupled", DECOUPLED, DECOUPLED_CONFIG)
    flags = (
        f"--debug-stalls={REPORTED_MS}",
        "--model-control-mode=explicit",
        "--load-model=*",
        "--allow-client-shm=true",
    )
    with serving(models, directory / "state", *flags) as running:
        infer_json(running, "scale", {"inputs": [_small()]})  # what is loaded by the first request is
        yield running


def _small() -> dict[str, Any]:
    return {"name": "INPUT0", "shape": [1, WIDTH], "datatype": "FP32", "data": [1.0] * WIDTH}


@pytest.fixture(autouse=True)
def _no_loop_stands_still(server: Any) -> Iterator[None]:
    """A neighbour is answered all the while, and no report names what the message took."""
    before = len(server.log())
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(_ask, server, stop)
        try:
            yield
        finally:
            stop.set()
        assert asking.result(120) > 0
    named = own_work(server.log()[before:], LIMIT_MS)
    assert not named, "\n\n".join(f"{one.pid}: {one.on_processor_ms} ms\n" + "\n".join(one.stack) for one in named)


def _ask(server: Any, stop: threading.Event) -> int:
    answered = 0
    with client("http", server) as asking:
        while not stop.is_set() or not answered:
            value = np.full((1, WIDTH), answered, np.float32)
            assert (asking.infer("scale", inputs("http", INPUT0=value)).as_numpy("OUTPUT0") == 2 * value).all()
            answered += 1
    return answered


def _json(datatype: str, value: str, *, binary: bool, **more: Any) -> bytes:
    data = ",".join([value] * COUNT)
    rest = json.dumps({"parameters": {"binary_data_output": binary}, **more})[1:]
    head = f'{{"inputs":[{{"name":"INPUT0","shape":[1,{COUNT}],"datatype":"{datatype}","data":[{data}]}}],'
    return (head + rest).encode()


def _binary(datatype: str, raw: bytes, **more: Any) -> tuple[bytes, dict[str, str]]:
    tensor = {
        "name": "INPUT0",
        "shape": [1, COUNT],
        "datatype": datatype,
        "parameters": {"binary_data_size": len(raw)},
    }
    head = json.dumps({"inputs": [tensor], **more}).encode()
    return head + raw, {"Inference-Header-Content-Length": str(len(head))}


def _infer(server: Any, model: str, body: bytes, headers: dict[str, str] | None = None) -> bytes:
    status, answer = server.request("POST", f"/v2/models/{model}/infer", body, headers)
    assert status == 200, answer[:300]
    return bytes(answer)


def _call(server: Any, message: Any, *, gzip: bool = False) -> Any:
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    compression = grpc.Compression.Gzip if gzip else None
    with grpc.insecure_channel(server.grpc, options=options) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelInferResponse.FromString,
        )
        return call(message, timeout=120, compression=compression)


def _typed(model: str, datatype: str, field: str, value: Any) -> Any:
    message = service_pb2.ModelInferRequest(model_name=model)
    tensor = message.inputs.add(name="INPUT0", datatype=datatype, shape=[1, COUNT])
    getattr(tensor.contents, field).extend([value] * COUNT)
    return message


def test_json_numbers(server: Any) -> None:
    answer = _infer(server, "echo", _json("FP32", "0.125", binary=True))
    assert answer.endswith(np.full(COUNT, 0.125, np.float32).tobytes())


def test_json_strings(server: Any) -> None:
    answer = _infer(server, "strings", _json("BYTES", '"ab"', binary=True))
    assert answer.endswith(b"\2\0\0\0ab" * COUNT)


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_strings_in_a_region(server: Any, kind: str) -> None:
    raw = b"\1\0\0\0a\2\0\0\0bc" * (COUNT // 2)
    size = len(raw)
    handle = shm.create_shared_memory_region("strings", f"/strings-{kind}-{os.getpid()}", size)
    try:
        shm.set_shared_memory_region(handle, [np.frombuffer(raw, np.uint8)])
        with client(kind, server) as asking:
            asking.register_system_shared_memory("strings", f"/strings-{kind}-{os.getpid()}", size)
            tensor = (httpclient if kind == "http" else grpcclient).InferInput("INPUT0", [1, COUNT], "BYTES")
            tensor.set_shared_memory("strings", size)
            assert asking.infer("strings", [tensor]).as_numpy("OUTPUT0").size == COUNT
            asking.unregister_system_shared_memory("strings")
    finally:
        shm.destroy_shared_memory_region(handle)


def test_json_that_is_wrong_at_its_end(server: Any) -> None:
    status, answer = server.request("POST", "/v2/models/echo/infer", _json("FP32", "1", binary=True)[:-1])
    assert status >= 400
    assert b"failed to parse the request JSON buffer" in answer


def test_numbers_as_json(server: Any) -> None:
    raw = np.random.default_rng(1).random(COUNT, np.float32)
    answer = json.loads(_infer(server, "echo", *_binary("FP32", raw.tobytes())))
    assert np.array_equal(np.array(answer["outputs"][0]["data"], np.float32), raw)


def test_strings_both_ways(server: Any) -> None:
    # of two lengths, so that they have to be followed one by one
    answer = json.loads(_infer(server, "strings", *_binary("BYTES", b"\1\0\0\0a\2\0\0\0bc" * (COUNT // 2))))
    assert answer["outputs"][0]["data"] == ["a", "bc"] * (COUNT // 2)


def test_strings_that_are_cut_short(server: Any) -> None:
    body, headers = _binary("BYTES", b"\1\0\0\0a\2\0\0\0bc" * (COUNT // 2 - 1) + b"\1\0\0\0a\3\0\0\0bc")
    status, answer = server.request("POST", "/v2/models/strings/infer", body, headers)
    assert status == 400
    assert b"incomplete string data" in answer


def test_classification(server: Any) -> None:
    wanted = [{"name": "OUTPUT0", "parameters": {"classification": COUNT}}]
    raw = np.arange(COUNT, dtype=np.float32).tobytes()
    answer = json.loads(_infer(server, "echo", *_binary("FP32", raw, outputs=wanted)))
    assert answer["outputs"][0]["data"][0] == f"{COUNT - 1:.6f}:{COUNT - 1}"


def test_generate(server: Any) -> None:
    body = b'{"INPUT0":[' + b",".join([b"1"] * COUNT) + b"]}"
    status, answer = server.request("POST", "/v2/models/echo/generate", body)
    assert status == 200
    assert json.loads(answer)["OUTPUT0"] == [1.0] * COUNT


@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
def test_generate_strings(endpoint: str, server: Any) -> None:
    body = b'{"INPUT0":[' + b",".join([b'"ab"', b'"c"'] * (COUNT // 2)) + b"]}"
    status, answer = server.request("POST", f"/v2/models/strings/{endpoint}", body)
    assert status == 200
    assert json.loads(answer.removeprefix(b"data: "))["OUTPUT0"] == ["ab", "c"] * (COUNT // 2)


def test_a_job(server: Any) -> None:
    status, answer = server.request(
        "POST", "/v2/models/echo/infer", _json("FP32", "1", binary=False), {"Prefer": "respond-async"}
    )
    assert status == 202
    status, answer = server.get(f"/v2/jobs/{json.loads(answer)['id']}/result?wait=60")
    assert (status, json.loads(answer)["outputs"][0]["data"]) == (200, [1.0] * COUNT)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_both_ways(encoding: str, server: Any) -> None:
    body, headers = _binary("FP32", bytes(4 * COUNT), parameters={"binary_data_output": True})
    packer = zlib.compressobj(6, zlib.DEFLATED, 31 if encoding == "gzip" else 15)
    more = {"Content-Encoding": encoding, "Accept-Encoding": encoding}
    answer = _infer(server, "echo", packer.compress(body) + packer.flush(), {**headers, **more})
    assert zlib.decompress(answer, 47).endswith(bytes(4 * COUNT))


def test_bombs(server: Any) -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join([*(packer.compress(bytes(1 << 20)) for _ in range(BOMB_BYTES >> 20)), packer.flush()])
    for _ in range(3):
        status, answer = server.request("POST", "/v2/models/echo/infer", bomb, {"Content-Encoding": "gzip"})
        assert status == 413, answer


@pytest.mark.parametrize(
    ("model", "datatype", "field", "value"),
    [("strings", "BYTES", "bytes_contents", b""), ("echo", "FP32", "fp32_contents", 1.5)],
)
def test_typed_contents(model: str, datatype: str, field: str, value: Any, server: Any) -> None:
    answer = _call(server, _typed(model, datatype, field, value))
    assert answer.raw_output_contents[0] == (bytes(4 * COUNT) if value == b"" else np.full(COUNT, 1.5, "<f4").tobytes())


def test_too_few_typed_contents(server: Any) -> None:
    message = _typed("strings", "BYTES", "bytes_contents", b"a")
    message.inputs[0].shape[1] += 1
    with pytest.raises(grpc.RpcError) as refused:
        _call(server, message)
    assert f"expected {COUNT + 1} string elements" in refused.value.details()
    assert "[request id: <id_unknown>]" in refused.value.details()


def test_typed_contents_in_a_stream(server: Any) -> None:
    with grpc.insecure_channel(server.grpc, options=[("grpc.max_receive_message_length", -1)]) as channel:
        call = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )
        small = service_pb2.ModelInferRequest(model_name="scale", id="small")
        small.inputs.add(name="INPUT0", datatype="FP32", shape=[1, WIDTH])
        small.raw_input_contents.append(bytes(4 * WIDTH))
        wrong = _typed("echo", "FP32", "int_contents", 1)
        large = _typed("strings", "BYTES", "bytes_contents", b"")
        answers = list(call(iter([large, small, wrong]), timeout=120))
    assert answers[0].infer_response.raw_output_contents[0] == bytes(4 * COUNT)
    assert answers[1].infer_response.id == "small"
    assert "unexpected explicit tensor data" in answers[2].error_message


def test_classification_over_grpc(server: Any) -> None:
    message = service_pb2.ModelInferRequest(model_name="echo")
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[1, COUNT])
    message.raw_input_contents.append(np.arange(COUNT, dtype=np.float32).tobytes())
    message.outputs.add(name="OUTPUT0").parameters["classification"].int64_param = COUNT
    best = f"{COUNT - 1:.6f}:{COUNT - 1}".encode()
    assert _call(server, message).raw_output_contents[0][4 : 4 + len(best)] == best


def test_compressed_messages(server: Any) -> None:
    message = service_pb2.ModelInferRequest(model_name="echo")
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 4 * COUNT])
    message.raw_input_contents.append(bytes(16 * COUNT))
    assert _call(server, message, gzip=True).raw_output_contents[0] == bytes(16 * COUNT)


def test_incompressible_bodies(server: Any) -> None:
    raw = np.random.default_rng(2).bytes(4 * COUNT)
    body, headers = _binary("FP32", raw, parameters={"binary_data_output": True})
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    answer = _infer(server, "echo", packer.compress(body) + packer.flush(), {**headers, "Content-Encoding": "gzip"})
    assert answer.endswith(raw)


@pytest.mark.parametrize(
    "path",
    [
        "logging",
        "trace/setting",
        "models/echo/trace/setting",
        "repository/index",
        "repository/models/none/unload",
        "systemsharedmemory/region/none/register",
    ],
)
def test_control_requests_are_small(path: str, server: Any) -> None:
    body = b'{"trace_rate":["1"],"x":[' + b"1," * 400_000 + b"1]}"
    # a connection that is to stay open: one that ends with its answer may end while the body is still being sent
    with contextlib.closing(http.client.HTTPConnection(server.http, timeout=120)) as connection:
        connection.request("POST", f"/v2/{path}", body)
        answer = connection.getresponse()
        text = answer.read()
    assert (answer.status, b"exceeds the maximum of 65536 bytes at this endpoint" in text) == (400, True)


def test_control_messages_are_small(server: Any) -> None:
    settings = {"trace_level": service_pb2.TraceSettingRequest.SettingValue(value=["OFF"] * 4_000_000)}
    for method, message in (
        ("TraceSetting", service_pb2.TraceSettingRequest(settings=settings)),
        ("SystemSharedMemoryStatus", service_pb2.SystemSharedMemoryStatusRequest(name="n" * LARGE_BYTES)),
    ):
        with grpc.insecure_channel(server.grpc, options=[("grpc.max_send_message_length", -1)]) as channel:
            call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
            with pytest.raises(grpc.RpcError) as refused:
                call(message.SerializeToString(), timeout=120)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "larger than max" in refused.value.details()


def test_long_parameters(server: Any) -> None:
    text = "t" * LARGE_BYTES
    status, answer = infer_json(server, "scale", {"inputs": [_small()], "parameters": {"text": text}})
    assert (status, "names and parameters" in answer["error"]) == (400, True)
    message = service_pb2.ModelInferRequest(model_name="scale")
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[1, WIDTH])
    message.raw_input_contents.append(bytes(4 * WIDTH))
    message.parameters["text"].string_param = text
    with pytest.raises(grpc.RpcError) as refused:
        _call(server, message)
    assert "names and parameters" in refused.value.details()


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_loads_with_large_files(kind: str, server: Any) -> None:
    config = (
        f'{{"backend": "onnxruntime", "max_batch_size": 8, "input": [{_IO % "INPUT0"}], "output": [{_IO % "OUTPUT0"}]}}'
    )
    with client(kind, server) as asking:
        files = {"file:1/model.onnx": scaling_graph(3), "file:1/more": np.random.default_rng(3).bytes(40_000_000)}
        asking.load_model(f"loaded-{kind}", config=config, files=files)
        value = np.ones((1, WIDTH), np.float32)
        answer = asking.infer(f"loaded-{kind}", inputs(kind, INPUT0=value))
        assert (answer.as_numpy("OUTPUT0") == 3 * value).all()


_IO = f'{{"name": "%s", "data_type": "TYPE_FP32", "dims": [{WIDTH}]}}'


def test_an_idempotency_key_of_a_large_request(server: Any) -> None:
    value = np.zeros((1, LARGE_BYTES // 4), np.float32)
    head = {
        "name": "INPUT0",
        "shape": value.shape,
        "datatype": "FP32",
        "parameters": {"binary_data_size": value.nbytes},
    }
    text = json.dumps({"inputs": [head], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(text)), "Idempotency-Key": "large"}
    answers = [_infer(server, "echo", text + value.tobytes(), headers) for _ in range(2)]
    assert answers[0] == answers[1]
    value[0, -1] = 1
    status, _ = server.request("POST", "/v2/models/echo/infer", text + value.tobytes(), headers)
    assert status == 422


def test_large_responses_of_a_stream(server: Any) -> None:
    message = service_pb2.ModelInferRequest(model_name="echo")
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[1, LARGE_BYTES // 4])
    message.raw_input_contents.append(bytes(LARGE_BYTES))
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(server.grpc, options=options) as channel:
        call = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )
        answers = list(call(iter([message, message]), timeout=120))
    assert [answer.infer_response.raw_output_contents[0] for answer in answers] == [bytes(LARGE_BYTES)] * 2


def test_responses_of_a_job(server: Any) -> None:
    body, headers = _binary("FP32", np.full(COUNT, 0.5, np.float32).tobytes())
    status, answer = server.request("POST", "/v2/models/decoupled/infer", body, {**headers, "Prefer": "respond-async"})
    assert status == 202, answer
    job = json.loads(answer)["id"]
    status, answer = server.get(f"/v2/jobs/{job}/result?wait=60")
    assert [one["outputs"][0]["data"] for one in json.loads(answer)] == [[0.5] * COUNT] * 2
    status, answer = server.get(f"/v2/jobs/{job}/events")
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith(b"data: ")]
    told = [event["response"]["outputs"][0]["data"] for event in events if "response" in event]
    assert told == [[0.5] * COUNT] * 2


def test_a_sequence_in_a_region(server: Any) -> None:
    """Strings are counted elsewhere, and what follows in the sequence comes after them."""
    raw = b"\1\0\0\0a\2\0\0\0bc" * (COUNT // 2)
    name = f"sequence-{os.getpid()}"
    handle = shm.create_shared_memory_region(name, f"/{name}", len(raw))
    answers: queue.Queue[Any] = queue.Queue()
    try:
        shm.set_shared_memory_region(handle, [np.frombuffer(raw, np.uint8)])
        with client("grpc", server) as asking:
            asking.register_system_shared_memory(name, f"/{name}", len(raw))
            asking.start_stream(lambda result, error: answers.put(error or result.as_numpy("OUTPUT0").item()))
            large = grpcclient.InferInput("INPUT0", [1, COUNT], "BYTES")
            large.set_shared_memory(name, len(raw))
            for at in range(4):
                small = inputs("grpc", INPUT0=np.array([[b"x"] * (at + 1)], np.object_))
                for step, tensors in enumerate(([large], small)):
                    ends = {"sequence_start": not at and not step, "sequence_end": at == 3 and step == 1}
                    asking.async_stream_infer("counting", tensors, sequence_id=7, **ends)
            asking.stop_stream()
            asking.unregister_system_shared_memory(name)
    finally:
        shm.destroy_shared_memory_region(handle)
    told = [answers.get_nowait() for _ in range(8)]
    assert told[1:] == [COUNT, 1, COUNT, 2, COUNT, 3, COUNT]


@pytest.mark.skipif(not HAS_OPENSSL, reason="openssl makes the certificates")
def test_large_bodies_over_tls(tmp_path: Path) -> None:
    echoing(tmp_path / "models", "echo")
    authority(tmp_path, "ours")
    certificate(tmp_path, "server", "ours")
    files = (f"--http-server-cert={tmp_path}/server.crt", f"--http-server-key={tmp_path}/server.key")
    server = start(
        tmp_path / "models", tmp_path / "state", f"--debug-stalls={REPORTED_MS}", "--http-use-ssl=true", *files
    )
    trust = ssl.create_default_context(cafile=str(tmp_path / "ours.crt"))

    def ask(method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        server.read_endpoints()
        port = int(server.http.rpartition(":")[2])
        connection = http.client.HTTPSConnection("localhost", port, context=trust, timeout=120)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def is_ready() -> bool:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return ask("GET", "/v2/health/ready")[0] == 200
        return False

    try:
        until("it is ready", is_ready)
        raw = np.random.default_rng(4).bytes(LARGE_BYTES)
        head = {"name": "INPUT0", "shape": [1, LARGE_BYTES // 4], "datatype": "FP32"}
        text = json.dumps(
            {
                "inputs": [{**head, "parameters": {"binary_data_size": len(raw)}}],
                "parameters": {"binary_data_output": True},
            }
        ).encode()
        headers = {"Inference-Header-Content-Length": str(len(text))}
        for more in ({}, {"Connection": "close"}):
            status, answer = ask("POST", "/v2/models/echo/infer", text + raw, {**headers, **more})
            assert (status, answer[-len(raw) :] == raw) == (200, True)
    finally:
        server.stop()
    assert not own_work(server.log(), LIMIT_MS), server.log()


def test_reports_are_read(server: Any) -> None:
    """That nothing is reported above means nothing if reports are not found where there are some."""
    line = (
        "W2026-01-01 00:00:00,000 7 charonia.stalls] the event loop stood still for 80 ms (70 ms of it on a processor, "
    )
    times = "5 ms other threads, 0 ms collecting garbage"
    log = f"{line}{times}) in\n    a.py:1 f\n    b.py:2 g\n    beside: c.py:3 h\nI2026 next\n"
    (one,) = reports(log)
    assert (one.pid, one.length_ms, one.on_processor_ms, one.stack) == (7, 80, 70, ("a.py:1 f", "b.py:2 g"))
    assert own_work(log, 70) == [one]
    assert own_work(log, 71) == []
