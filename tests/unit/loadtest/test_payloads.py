"""Bodies fit their shapes, differ from one another, and wrong answers are told from right ones."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from charonia.analyzer.http1_lane import Head
from loadtest.grpc_driver import GrpcAnswers, GrpcRequests
from loadtest.http_driver import HttpAnswers, HttpRequests
from loadtest.model import ELEMENT_SIZES, LoadTestError, Model, TensorSpec
from loadtest.payloads import make_bodies

IDENTITY = Model("identity", "", (TensorSpec("INPUT0", "FP32", (1, 16)),), ("OUTPUT0",))


@pytest.mark.parametrize("datatype", sorted(ELEMENT_SIZES))
@pytest.mark.parametrize("kind", ["zero", "random"])
def test_every_datatype_has_its_size(datatype: str, kind: str) -> None:
    model = Model("m", "", (TensorSpec("A", datatype, (2, 3)),), ())
    assert len(make_bodies(model, kind, 1, serials=True).pool[0][0]) == 6 * ELEMENT_SIZES[datatype]


def test_strings_carry_their_lengths() -> None:
    content = make_bodies(Model("m", "", (TensorSpec("A", "BYTES", (2,)),), ()), "random", 1, serials=True).pool[0][0]
    assert content[:4] == content[20:24] == b"\x10\0\0\0"
    assert len(content) == 40


def test_requests_with_serials_never_repeat() -> None:
    bodies = make_bodies(IDENTITY, "random", 8, serials=True)
    requests = iter(HttpRequests(IDENTITY, bodies, "h", 1))
    tensors = [tensors for _, tensors in itertools.islice(requests, 10_000)]
    assert len(set(tensors)) == 10_000
    assert np.frombuffer(tensors[7], "<f4")[0] == 7


def test_http_request_says_what_it_holds() -> None:
    bodies = make_bodies(IDENTITY, "random", 1, serials=False)
    message, tensors = next(iter(HttpRequests(IDENTITY, bodies, "h", 1, [("X-A", "b")])))
    head, _, body = message.partition(b"\r\n\r\n")
    lines = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:])
    assert head.startswith(b"POST /v2/models/identity/infer HTTP/1.1\r\n")
    assert lines[b"X-A"] == b"b"
    assert int(lines[b"Content-Length"]) == len(body)
    length = int(lines[b"Inference-Header-Content-Length"])
    assert json.loads(body[:length])["inputs"][0]["parameters"] == {"binary_data_size": 64}
    assert body[length:] == tensors


def test_grpc_requests_are_messages() -> None:
    model = Model("m", "3", (TensorSpec("A", "INT64", (40,)), TensorSpec("B", "BOOL", (2,))), ("X", "Y"))
    bodies = make_bodies(model, "random", 1, serials=True)
    message, tail = GrpcRequests(model, bodies).numbered(5)
    request = service_pb2.ModelInferRequest.FromString(message)
    assert (request.model_name, request.model_version) == ("m", "3")
    assert [(t.name, t.datatype, list(t.shape)) for t in request.inputs] == [("A", "INT64", [40]), ("B", "BOOL", [2])]
    assert [len(content) for content in request.raw_input_contents] == [320, 2]
    assert np.frombuffer(request.raw_input_contents[0], "<i8")[0] == 5
    answer = service_pb2.ModelInferResponse.FromString(tail)
    assert answer.raw_output_contents == request.raw_input_contents


def _grpc_answer(content: bytes, name: str = "OUTPUT0", shape: tuple[int, ...] = (1, 16)) -> bytes:
    answer = service_pb2.ModelInferResponse(model_name="identity", raw_output_contents=[content])
    answer.outputs.add(name=name, datatype="FP32", shape=shape)
    return answer.SerializeToString()


def test_grpc_answers_are_told_apart() -> None:
    requests = GrpcRequests(IDENTITY, make_bodies(IDENTITY, "random", 1, serials=True))
    answers = GrpcAnswers(IDENTITY.outputs)
    for number in range(3):
        tail = requests.numbered(number)[1]
        mine, other = tail[2:], requests.numbered(number + 1)[1][2:]
        assert answers.fault(_grpc_answer(mine), tail) is None
        assert answers.fault(_grpc_answer(mine), None) is None
        assert answers.fault(_grpc_answer(other), None) is None
        assert "differ" in (answers.fault(_grpc_answer(other), tail) or "")
        assert "64 bytes" in (answers.fault(_grpc_answer(mine, shape=(2, 16)), tail) or "")
        assert "not the model's" in (answers.fault(_grpc_answer(mine, name="Z"), tail) or "")
        # An answer that holds another content before the expected one must not pass for its end.
        doubled = _grpc_answer(other) + tail
        assert answers.fault(doubled, tail) is not None


def _http_answer(content: bytes, shape: tuple[int, ...] = (1, 16), size: int = 64) -> tuple[Head, bytes]:
    tensor = {"name": "OUTPUT0", "datatype": "FP32", "shape": shape, "parameters": {"binary_data_size": size}}
    part = json.dumps({"outputs": [tensor]}).encode()
    lengths = f"Content-Length: {len(part) + len(content)}\r\nInference-Header-Content-Length: {len(part)}"
    return Head(f"HTTP/1.1 200 OK\r\n{lengths}".encode()), part + content


def test_http_answers_are_told_apart() -> None:
    answers = HttpAnswers(IDENTITY.outputs)
    mine, other = b"a" * 64, b"b" * 64
    for _ in range(2):  # the second time from the cache
        assert answers.fault(*_http_answer(mine), mine) is None
        assert answers.fault(*_http_answer(mine), None) is None
        assert "differ" in (answers.fault(*_http_answer(other), mine) or "")
        assert "63 tensor bytes, declares 64" in (answers.fault(*_http_answer(mine[:63]), mine) or "")
        assert "for shape" in (answers.fault(*_http_answer(mine, shape=(2, 16)), mine) or "")
    assert answers.fault(Head(b"HTTP/1.1 503 Full\r\nContent-Length: 0"), b'{"error":"full"}', mine) == "HTTP 503: full"


def test_bodies_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "in.json"
    path.write_text(json.dumps({"data": [{"INPUT0": [[i] * 16]} for i in range(3)]}))
    pool = make_bodies(IDENTITY, str(path), 1, serials=True).pool
    assert [np.frombuffer(body[0], "<f4")[0] for body in pool] == [0, 1, 2]
    array = tmp_path / "in.npy"
    np.save(array, np.arange(16, dtype=np.float64))
    assert np.frombuffer(make_bodies(IDENTITY, str(array), 1, serials=False).pool[0][0], "<f4").tolist() == [*range(16)]


@pytest.mark.parametrize(
    ("text", "words"),
    [("[]", "no request"), ("[{}]", "needs values"), ('{"INPUT0": [1]}', "1 elements"), ("{", "cannot read")],
)
def test_files_that_do_not_fit(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "in.json"
    path.write_text(text)
    with pytest.raises(LoadTestError, match=words):
        make_bodies(IDENTITY, str(path), 1, serials=False)
