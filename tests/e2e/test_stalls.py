"""Large messages of every kind, and whether an event loop stood still for them: by the reports of `--debug-stalls`.

What is asserted is not how long a caller waited, which depends on the machine, but that no loop's thread worked for
longer than the limit in one go. Before such messages were converted elsewhere, each of these was reported.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from e2e_asking import client, infer_json, inputs
from e2e_models import WIDTH, echoing, scaling, strings
from e2e_server import serving
from stall_reports import own_work, reports
from tritonclient.grpc import service_pb2

LIMIT_MS = 50
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
    flags = (f"--debug-stalls={LIMIT_MS}", "--model-control-mode=explicit", "--load-model=*", "--allow-client-shm=true")
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


def test_reports_are_read(server: Any) -> None:
    """That nothing is reported above means nothing if reports are not found where there are some."""
    line = (
        "W2026-01-01 00:00:00,000 7 charonia.stalls] the event loop stood still for 80 ms (70 ms of it on a processor, "
    )
    log = line + "0 ms collecting garbage) in\n    a.py:1 f\n    b.py:2 g\n    beside: c.py:3 h\nI2026 next\n"
    (one,) = reports(log)
    assert (one.pid, one.length_ms, one.on_processor_ms, one.stack) == (7, 80, 70, ("a.py:1 f", "b.py:2 g"))
    assert own_work(log, 70) == [one]
    assert own_work(log, 71) == []
