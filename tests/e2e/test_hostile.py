"""Hostile requests against a running server.

Each attack runs while a well-behaved client asks on; its answers must all come and be its own. The attacker gets a
typed refusal or a closed connection, and memory stays within bounds.
"""

from __future__ import annotations

import base64
import json
import re
import socket
import struct
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from e2e_asking import client, infer_json, inputs, on_the_page, post, statistics, until
from e2e_models import WIDTH
from hostile_bench import MAX_INPUT_BYTES, Connection, asked, attacked, exchange, head, neighbour_asks, scale_body

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with attacked(tmp_path_factory) as server:
        yield server


@pytest.fixture(autouse=True)
def _neighbour(server: Any) -> Iterator[None]:
    with neighbour_asks(server):
        yield


# -- bodies ------------------------------------------------------------------------------------------------------------


def test_h1_tiny_chunks_are_counted(server: Any) -> None:
    with Connection(server) as connection:
        connection.send(head(Transfer_Encoding="chunked"))
        connection.send(b"1\r\n \r\n" * 70_000)
        status, answer = connection.answer()
        assert status == 400
        assert b"chunks" in answer
        assert connection.is_closed()
    # chunks in measure are fine
    body = json.dumps(scale_body()).encode()
    chunked = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    assert exchange(server, head(Transfer_Encoding="chunked") + chunked)[0] == 200


def test_h1_a_chunked_body_may_not_grow_for_ever(server: Any) -> None:
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    with Connection(server) as connection:
        connection.send(head(Transfer_Encoding="chunked"))
        for _ in range(64):
            connection.send(chunk)
        status, answer = connection.answer()
    assert status in (400, 413), answer
    assert b"exceeds the maximum allowed" in answer


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_h2_a_bomb_is_stopped_while_it_unfolds(encoding: str, server: Any) -> None:
    compressor = zlib.compressobj(9, zlib.DEFLATED, 31 if encoding == "gzip" else 15)
    zeros = bytes(1 << 20)
    bomb = b"".join([*(compressor.compress(zeros) for _ in range(512)), compressor.flush()])
    assert len(bomb) < MAX_INPUT_BYTES
    status, answer = server.request("POST", "/v2/models/scale/infer", bomb, {"Content-Encoding": encoding})
    assert status in (400, 413)
    assert b"exceeds the maximum allowed" in answer


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "gzip\t,deflate"])
def test_h2_unknown_and_nested_encodings_are_refused(encoding: str, server: Any) -> None:
    status, answer = server.request("POST", "/v2/models/scale/infer", b"x" * 100, {"Content-Encoding": encoding})
    assert (status, json.loads(answer)) == (501, {"error": "Unsupported compression type"})
    status, _ = server.request("POST", "/v2/models/scale/infer", b"no gzip at all", {"Content-Encoding": "gzip"})
    assert status == 400


@pytest.mark.parametrize(
    "headers",
    [
        {"Content_Length": str(10**15)},
        {"Content_Length": "9" * 30},
        {"Content_Length": "-1"},
        {"Content_Length": "1e3"},
        {"Content_Length": "2\r\nContent-Length: 3"},
        {"Content_Length": "2", "Transfer_Encoding": "chunked"},
        {"Transfer_Encoding": "gzip, chunked, identity"},
    ],
)
def test_h3_lying_lengths_end_the_connection(headers: dict[str, str], server: Any) -> None:
    with Connection(server) as connection:
        connection.send(head(**headers) + b"{}")
        status, answer = connection.answer()
        # no body, or none that ends: the raw-binary form of nothing is refused as well
        assert status in (0, 400, 411, 413), answer
        connection.socket.shutdown(socket.SHUT_WR)
        assert connection.is_closed()


@pytest.mark.parametrize("length", ["-1", "9" * 30, "x12", "1" * 12, "-0x10", "", "100000"])
def test_h3_lying_header_lengths_are_refused(length: str, server: Any) -> None:
    body = json.dumps(scale_body()).encode()
    headers = {"Inference-Header-Content-Length": length}
    status, answer = server.request("POST", "/v2/models/scale/infer", body, headers)
    assert status == 400, answer
    assert "error" in json.loads(answer)


def test_h3_binary_sizes_must_add_up(server: Any) -> None:
    for size, sent in ((16, 8), (8, 16), (16, 17), (-16, 16), (2**62, 16), (2**64, 16), ("16", 16), (1.5, 16)):
        tensor = {"name": "INPUT0", "shape": [1, WIDTH], "datatype": "FP32", "parameters": {"binary_data_size": size}}
        text = json.dumps({"inputs": [tensor]}).encode()
        headers = {"Inference-Header-Content-Length": str(len(text))}
        status, answer = server.request("POST", "/v2/models/scale/infer", text + bytes(sent), headers)
        assert status in (400, 500), (size, sent, answer)
        assert "error" in json.loads(answer)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"inputs":' + "[" * 101 + "]" * 101 + "}",
        '{"inputs":[{"name":"INPUT0","shape":[1,4],"datatype":"FP32","data":' + "[" * 5000 + "]" * 5000 + "}]}",
        '{"inputs":[{"name":"INPUT0","shape":[1' + "0" * 10_000 + '],"datatype":"FP32","data":[1]}]}',
        '{"inputs":[{"name":"\\ud800","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}]}',
        '{"inputs":[{"name":"INPUT0","shape":[1,4],"datatype":"FP32","data":["NaN",2,3,4]}]}',
        '{"inputs":[{"name":"INPUT0","shape":NaN,"datatype":"FP32","data":[1,2,3,4]}]}',
        '{"inputs":{"name":"INPUT0"}}',
        '{"inputs":[[]]}',
        "null",
        '"' + "a" * 500_000,
        "\ufeff{}",
        "{}" * 1000,
    ],
    ids=range(14),
)
def test_h4_hostile_json_is_refused(text: str, server: Any) -> None:
    status, answer = server.request("POST", "/v2/models/scale/infer", text.encode())
    assert status in (400, 500), answer[:200]
    error = json.loads(answer)["error"]
    assert len(error) < 4096
    assert "Traceback" not in error
    assert "/" not in error or "v2" in error or "'" in error


def test_h4_huge_and_odd_numbers_stay_the_clients_own(server: Any) -> None:
    for data in ([1e308] * 4, [-1e999] * 4, [10**400] * 4):
        status, _ = infer_json(server, "scale", scale_body(data=data))
        assert status in (200, 400, 500)
    status, answer = server.request(
        "POST",
        "/v2/models/scale/infer",
        b'{"inputs":[{"name":"INPUT0","shape":[1,4],"datatype":"FP32","data":[NaN,Infinity,-Infinity,1]}]}',
    )
    assert status == 200
    assert json.loads(answer)["outputs"][0]["data"][1:] == [float("inf"), float("-inf"), 2.0]


TWICE = (
    ('"shape":[1,4]', '"shape":[-1],"shape":[1,4]'),
    ('"data"', '"data":[[]],"data"'),
    ('"datatype"', '"datatype":"BYTES","datatype"'),
)


def test_h4_of_a_member_that_comes_twice_the_last_counts(server: Any) -> None:
    good = '{"name":"INPUT0","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}'
    inputs = [good.replace(old, new) for old, new in TWICE]
    for members in ['"inputs":[{"name":"x"}],' + f'"inputs":[{good}]', *(f'"inputs":[{one}]' for one in inputs)]:
        for _ in range(3):  # also as one that was seen before
            text = f'{{"id":"a","id":"b",{members}}}'
            status, answer = server.request("POST", "/v2/models/scale/infer", text.encode())
            assert status == 200, (text, answer)
            assert json.loads(answer)["outputs"][0]["data"] == [2.0, 4.0, 6.0, 8.0]
            assert json.loads(answer)["id"] == "b"
    text = '{"inputs":[' + good.replace('"shape":[1,4]', '"shape":[1,4],"shape":[-1]') + "]}"
    assert server.request("POST", "/v2/models/scale/infer", text.encode())[0] in (400, 500)


def test_h4_a_string_without_end_is_not_read(server: Any) -> None:
    beginning = b'{"inputs":"' + b"a" * 65_536
    with Connection(server) as connection:
        connection.send(head(Content_Length=str(1 << 30)) + beginning)
        status, answer = connection.answer()
        assert status == 400, answer
        assert b"exceeds the maximum allowed" in answer
        assert connection.is_closed()
    text = b'{"inputs":"' + b"a" * (MAX_INPUT_BYTES - 100) + b'"}'
    status, answer = server.request("POST", "/v2/models/scale/infer", text)
    assert status in (400, 500), answer[:200]
    assert len(answer) < 4096


# -- tensors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        [-1, WIDTH],
        [1, -4],
        [0, WIDTH],
        [2**63, WIDTH],
        [2**64, WIDTH],
        [2**62, 4],
        [2**32, 2**32],
        [1] * 1000 + [WIDTH],
        [],
        [1.5, 4],
        ["1", "4"],
        [True, 4],
        None,
        {},
        [[1, 4]],
        [9, WIDTH],
        [1, WIDTH, 1],
    ],
)
def test_h5_impossible_shapes_are_refused(shape: Any, server: Any) -> None:
    before = statistics(server, "scale")["inference_stats"]["fail"]["count"]
    status, answer = infer_json(server, "scale", scale_body(shape=shape))
    assert status in (400, 500), answer
    assert answer["error"]
    assert statistics(server, "scale")["inference_stats"]["fail"]["count"] - before in (0, 1)


def test_h6_data_that_is_not_the_shape_reaches_nobody(server: Any) -> None:
    """Attackers' rows are 666; the neighbour checks every number it gets, in batches of up to 8 rows with them."""
    stop = threading.Event()

    def attack(number: int) -> int:
        refused = 0
        kind = ["json", "binary", "grpc"][number % 3]
        lengths = [0, 1, 3, 5, 7, 9, 4096]
        with client("grpc", server) as over_grpc:
            while not stop.is_set():
                count = lengths[refused % len(lengths)]
                data = np.full(count, 666, np.float32)
                if kind == "json":
                    status, _ = infer_json(server, "scale", scale_body(data=data.tolist()))
                    assert status in (400, 500)
                elif kind == "binary":
                    parameters = {"binary_data_size": data.nbytes}
                    tensor = {"name": "INPUT0", "shape": [1, WIDTH], "datatype": "FP32", "parameters": parameters}
                    text = json.dumps({"inputs": [tensor]}).encode()
                    headers = {"Inference-Header-Content-Length": str(len(text))}
                    status, _ = server.request("POST", "/v2/models/scale/infer", text + data.tobytes(), headers)
                    assert status == 400
                else:
                    tensor = inputs("grpc", INPUT0=np.zeros((1, WIDTH), np.float32))[0]
                    tensor._raw_content = data.tobytes()
                    with pytest.raises(Exception, match="INVALID_ARGUMENT"):
                        over_grpc.infer("scale", [tensor])
                refused += 1
        return refused

    with ThreadPoolExecutor(9) as pool:
        attackers = [pool.submit(attack, number) for number in range(6)]
        neighbours = [pool.submit(asked, server, 60) for _ in range(3)]
        try:
            assert [neighbour.result(120) for neighbour in neighbours] == [60] * 3
        finally:
            stop.set()
        assert all(attacker.result(60) > 0 for attacker in attackers)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"\xff\xff\xff\xff" + b"x" * 20, "incomplete string data for inference input 'IN' for model 'echo'"),
        (b"\x05\0\0", "incomplete string length indicator for inference input 'IN' for model 'echo'"),
        (struct.pack("<I", 3) + b"ab", "expecting string of length 3 but only 2 bytes available"),
        (struct.pack("<I", 1) + b"a", "expected 2 string elements for inference input 'IN' for model 'echo', got 1"),
        (
            3 * (struct.pack("<I", 1) + b"a"),
            "unexpected number of string elements 3 for inference input 'IN' for model 'echo', expecting 2",
        ),
        (b"", "expected 2 string elements for inference input 'IN' for model 'echo', got 0"),
    ],
)
def test_h7_string_lengths_are_checked(raw: bytes, text: str, server: Any) -> None:
    tensor = {"name": "IN", "shape": [1, 2], "datatype": "BYTES", "parameters": {"binary_data_size": len(raw)}}
    body = json.dumps({"inputs": [tensor]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(body))}
    status, answer = server.request("POST", "/v2/models/echo/infer", body + raw, headers)
    assert status == 400
    assert text in json.loads(answer)["error"]


def test_h8_h9_names_types_and_doubles(server: Any) -> None:
    good = scale_body()["inputs"][0]
    for bodies, text in (
        ([{**good, "name": "NOPE"}], "unexpected inference input 'NOPE' for model 'scale'"),
        ([good, good], "input 'INPUT0' already exists in request"),
        ([{**good, "datatype": "OBJECT"}], None),
        ([{**good, "datatype": "pickle"}], None),
        (
            [{**good, "datatype": "INT32", "data": [1] * WIDTH}],
            "data-type is 'INT32', but model 'scale' expects 'FP32'",
        ),
        ([], "missing required input(s) ['INPUT0']"),
        ([{**good, "name": f"I{number}"} for number in range(5_000)], "expected 1 inputs but got 5000 inputs"),
    ):
        status, answer = infer_json(server, "scale", {"inputs": bodies})
        assert status == 400, answer
        assert text is None or text in answer["error"]
    for outputs, text in (
        ([{"name": "OUTPUT0"}, {"name": "OUTPUT0"}], "output 'OUTPUT0' already exists in request"),
        ([{"name": "X"}], "unexpected inference output 'X' for model 'scale'"),
        ([{"name": "OUTPUT0", "parameters": {"classification": 10**18}}], None),
        ([{"name": "OUTPUT0", "parameters": {"classification": -1}}], "Unable to set 'classification'"),
    ):
        status, answer = infer_json(server, "scale", {**scale_body(), "outputs": outputs})
        if text is None:
            assert status in (200, 400), answer
        else:
            assert (status, answer) == (400, {"error": text}) or text in answer["error"]


NAMES = ["..%2f..%2fetc", "%2e%2e", "..%5cx", "%00", "sc%00ale", "%ff%fe", "scal%D0%B5", "x" * 20_000, "%0d%0aX:%20y"]


# -- names and control -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_h10_odd_names_are_nobodys(name: str, server: Any) -> None:
    for path in (f"/v2/models/{name}/ready", f"/v2/models/{name}/config", f"/v2/models/{name}/stats"):
        assert server.get(path)[0] in (400, 404, 414), path
    assert server.request("POST", f"/v2/models/{name}/infer", b"{}")[0] in (400, 404, 414)
    for action in ("load", "unload"):
        status, answer = server.request("POST", f"/v2/repository/models/{name}/{action}", b"")
        assert status in ((400, 404, 500) if action == "load" else (200, 400, 404)), answer
        assert len(answer) < 70_000
    from urllib.parse import unquote_to_bytes

    with client("grpc", server) as asking:
        text = unquote_to_bytes(name).decode("utf-8", "replace")
        assert not asking.is_model_ready(text)
        with pytest.raises(Exception, match=r"INVALID_ARGUMENT|INTERNAL|NOT_FOUND"):
            asking.load_model(text)


def test_h10_versions_are_numbers(server: Any) -> None:
    for version in ("0", "-1", "01x", "9" * 40, "%2e%2e", "1.0"):
        status, _ = server.request("POST", f"/v2/models/scale/versions/{version}/infer", b"{}")
        assert status in (400, 404), version


def test_h10_names_inside_configurations_stay_inside(server: Any) -> None:
    for field, value in (
        ("backend", "../../evil"),
        ("backend", "os"),
        ("default_model_filename", "../../../../etc/passwd"),
        ("default_model_filename", "/etc/passwd"),
        ("name", "../evil"),
        ("runtime", "../../x.so"),
    ):
        config = {
            "backend": "onnxruntime",
            "max_batch_size": 8,
            "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [WIDTH]}],
            "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [WIDTH]}],
            field: value,
        }
        body = {"parameters": {"config": json.dumps(config)}}
        status, answer = post(server, "/v2/repository/models/scale/load", body)
        assert status in (400, 500), (field, value)
        assert "root:" not in answer["error"]


def test_h14_control_bodies_are_bounded(server: Any) -> None:
    content = base64.b64encode(bytes(2 * MAX_INPUT_BYTES)).decode()
    body = json.dumps({"parameters": {"config": "{}", "file:1/model.onnx": content}}).encode()
    # a client that sends more than it may still reads why
    request = f"POST /v2/repository/models/scale/load HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    status, answer = exchange(server, request.encode() + body)
    assert status in (400, 413), answer
    assert b"exceeds the maximum allowed" in answer
    status, _ = server.request("POST", "/v2/repository/index", b"[" * 500_000)
    assert status in (400, 500)
    status, answer = server.request(
        "POST", "/v2/repository/models/scale/load", b'{"parameters":{"config":"{}","file:1/model.onnx":"%%%"}}'
    )
    assert status in (400, 500)


# -- what stands beside the request ------------------------------------------------------------------------------------


def test_h20_multipart_is_no_request(server: Any) -> None:
    for boundary in ("x", "x" * 60_000):
        body = f'--{boundary}\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--{boundary}--\r\n'.encode()
        kind = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        status, answer = server.request("POST", "/v2/models/scale/infer", body, kind)
        assert status in (400, 500), answer
        assert b"failed to parse the request JSON buffer" in answer


@pytest.mark.parametrize("key", ["", "x" * 500_000, "a\nb", 5])
def test_h22_keys_that_are_none(key: Any, server: Any) -> None:
    body = {**scale_body(), "parameters": {"charonia_idempotency_key": key}}
    status, answer = post(server, "/v2/models/scale/infer", body)
    assert status == 400, answer
    assert len(answer["error"]) < 500
    assert "key" in answer["error"].lower()


@pytest.mark.parametrize("timeout", ["-1", "1e3", "nan", "9" * 30, "", str(2**53)])
def test_h23_timeouts_that_are_none(timeout: str, server: Any) -> None:
    body = json.dumps(scale_body()).encode()
    status, answer = server.request("POST", "/v2/models/scale/infer", body, {"Charonia-Timeout-Ms": timeout})
    assert status == 400, answer
    assert b"whole number" in answer


def test_h23_times_far_away_and_priorities_that_are_none(server: Any) -> None:
    body = json.dumps(scale_body()).encode()
    headers = {"Charonia-Timeout-Ms": str(2**53 - 1)}
    status, answer = server.request("POST", "/v2/models/scale/infer", body, headers)
    assert status == 400, answer
    assert b"more than 366 days ahead" in answer
    for parameters in ({"timeout": -1}, {"timeout": 2**64}, {"priority": -1}, {"priority": 2**64}, {"priority": True}):
        status, answer = post(server, "/v2/models/scale/infer", {**scale_body(), "parameters": parameters})
        assert status in (400, 500), (parameters, answer)
        assert f"Unable to parse '{next(iter(parameters))}'" in answer["error"]
    status, answer = post(server, "/v2/models/scale/infer", {**scale_body(), "parameters": {"priority": 2**64 - 1}})
    assert status == 200, answer  # a model without levels has one


def test_h25_names_of_strangers_are_no_labels_and_no_log_lines(server: Any) -> None:
    on_the_page(server, "nv_inference_request_success{", "nv_inference_count{", "nv_inference_pending_request_count{")
    before = _labels(server)
    for number in range(200):
        assert server.request("POST", f"/v2/models/stranger{number}/infer", b"{}")[0] in (400, 404)
    forged = "%0AE1122%2000:00:00,000%201%20gateway.app%5D%20forged%1b%5B2J"
    for path in (f"/v2/models/x{forged}/infer", f"/v2/repository/models/x{forged}/load"):
        assert server.request("POST", path, b"{}")[0] in (400, 404, 500)
    until("the page has all parts, and no more names", lambda: _labels(server) == before)
    log = server.log()
    assert "\nE1122 00:00:00,000" not in log
    assert "\x1b[2J" not in log


def _labels(server: Any) -> set[str]:
    return set(re.findall(r'model="([^"]*)"', server.scrape()))
