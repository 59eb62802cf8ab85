"""What the examples of Triton's client repository ask, with the stock client, of the models that they name.

`python -m loadtest.clients examples` runs those examples themselves from a checkout; this needs none.
"""

from __future__ import annotations

import base64
import io
import json
import queue
from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from e2e_server import serving
from PIL import Image
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from loadtest.clients import models

KINDS = ("http", "grpc")
MODULES: dict[str, Any] = {"http": httpclient, "grpc": grpcclient}
VALUES = [11, 7, 5, 3, 2, 0, 1]
FIRST = np.arange(16, dtype=np.int32).reshape(1, 16)
ONES = np.ones((1, 16), np.int32)
TRITONS_OPTIONS = (
    "--id=triton", "--exit-timeout-secs=30", "--strict-readiness=true", "--model-load-thread-count=4",
    "--pinned-memory-pool-byte-size=268435456", "--buffer-manager-thread-count=0", "--enable-peer-access=true",
    "--http-thread-count=8", "--http-max-input-size=67108864", "--reuse-http-port=false",
    "--grpc-infer-thread-count=4", "--grpc-infer-allocation-pool-size=16", "--grpc-max-response-pool-size=100",
    "--grpc-infer-response-compression-level=low", "--grpc-keepalive-time=7200000", "--metrics-interval-ms=2000",
    "--model-namespacing=false", "--log-info=1", "--allow-client-shm=true",
)  # fmt: skip
"""What a script that starts `tritonserver` says (V1, V2, G32)."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    repository = tmp_path_factory.mktemp("models")
    models.write_simple(repository)
    models.write_one_more(repository)
    models.write_others(repository)
    with serving(repository, tmp_path_factory.mktemp("state"), *TRITONS_OPTIONS) as running:
        yield running


def _client(kind: str, server: Any) -> Any:
    return MODULES[kind].InferenceServerClient(getattr(server, kind))


def _tensors(kind: str, **arrays: np.ndarray) -> list[Any]:
    found = []
    for name, array in arrays.items():
        tensor = MODULES[kind].InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        found.append(tensor)
    return found


def _texts(numbers: np.ndarray) -> np.ndarray:
    return np.array([str(number).encode() for number in numbers.flat], np.object_).reshape(numbers.shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["simple", "simple_int8", "simple_string"])
def test_sums_and_differences(model: str, kind: str, server: Any) -> None:
    given = {"simple": FIRST, "simple_int8": FIRST.astype(np.int8), "simple_string": _texts(FIRST)}[model]
    ones = {"simple": ONES, "simple_int8": ONES.astype(np.int8), "simple_string": _texts(ONES)}[model]
    with _client(kind, server) as client:
        answer = client.infer(model, _tensors(kind, INPUT0=given, INPUT1=ones))
        counted = client.get_inference_statistics(model)
        (row,) = counted["model_stats"] if kind == "http" else counted.model_stats
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0").astype(np.int32), FIRST + 1)
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT1").astype(np.int32), FIRST - 1)
    assert answer.as_numpy("OUTPUT0").dtype == given.dtype
    memory = row["memory_usage"] if kind == "http" else row.memory_usage
    assert list(memory) == [], "X7: these graphs have no weights"


@pytest.mark.parametrize("datatype", ["INT8", "INT32", "BYTES"])
def test_typed_contents(datatype: str, server: Any) -> None:
    """The generated stubs alone, as `grpc_explicit_*_content_client.py` uses them (G5, G35)."""
    model = {"INT8": "simple_int8", "INT32": "simple", "BYTES": "simple_string"}[datatype]
    request = pb.ModelInferRequest(model_name=model)
    for name, numbers in (("INPUT0", range(16)), ("INPUT1", [1] * 16)):
        tensor = request.inputs.add(name=name, datatype=datatype, shape=[1, 16])
        if datatype == "BYTES":
            tensor.contents.bytes_contents.extend(str(number).encode() for number in numbers)
        else:
            tensor.contents.int_contents.extend(numbers)
    with grpc.insecure_channel(server.grpc) as channel:
        answer = grpcclient.InferResult(service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request))
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0").astype(np.int32), FIRST + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_strings_of_any_length_come_back(kind: str, server: Any) -> None:
    texts = np.array([[b"", b"\0", "größe".encode(), b"x" * 70_000]], np.object_)
    with _client(kind, server) as client:
        answer = client.infer("simple_identity", _tensors(kind, INPUT0=texts)).as_numpy("OUTPUT0")
    np.testing.assert_array_equal(answer, texts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("model", "sequence", "first", "last", "sums"),
    [
        ("simple_sequence", 1000, 1, 0, False),
        ("simple_sequence", "4f1c-uuid", 1, 0, False),
        ("simple_dyna_sequence", 1001, 1, 1001, False),
        ("simple_string_dyna_sequence", "1002", 0, 1002, True),
    ],
)
def test_sequences(model: str, sequence: int | str, first: int, last: int, sums: bool, kind: str, server: Any) -> None:
    """Plus 1 at the start, plus the id at the end; a model of string ids keeps the sum."""
    before, values = 0, [20, *VALUES]
    with _client(kind, server) as client:
        for at, value in enumerate(values):
            tensors = _tensors(kind, INPUT=np.full((1, 1), value, np.int32))
            flags = {"sequence_start": at == 0, "sequence_end": at == len(values) - 1}
            got = int(client.infer(model, tensors, sequence_id=sequence, **flags).as_numpy("OUTPUT")[0, 0])
            before = value + (before if sums else 0)
            assert got == before + (first if at == 0 else 0) + (last if flags["sequence_end"] else 0)


def test_a_decoupled_model_answers_in_a_stream(server: Any) -> None:
    count, found = 5, queue.SimpleQueue[Any]()
    tensors = _tensors(
        "grpc",
        IN=np.arange(100, 100 + count, dtype=np.int32),
        DELAY=np.ones(count, np.uint32),
        WAIT=np.ones(1, np.uint32),
    )
    with _client("grpc", server) as client:
        client.start_stream(callback=partial(lambda answers, result, error: answers.put(error or result), found))
        client.async_stream_infer("repeat_int32", tensors, outputs=[grpcclient.InferRequestedOutput("OUT")])
        answers = [found.get(timeout=60) for _ in range(count)]
    assert [int(answer.as_numpy("OUT")[0]) for answer in answers] == list(range(100, 100 + count))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_objects_with_and_without_shared_memory(kind: str, server: Any) -> None:
    """As `reuse_infer_objects_client.py` and `simple_*_shm_client.py` do."""
    module, size = MODULES[kind], FIRST.nbytes
    regions = {}
    with _client(kind, server) as client:
        client.unregister_system_shared_memory()
        client.unregister_cuda_shared_memory()
        for name, data in (("in0", FIRST), ("in1", ONES), ("out0", None), ("out1", None)):
            regions[name] = shm.create_shared_memory_region(name, f"/charonia_example_{kind}_{name}", size)
            if data is not None:
                shm.set_shared_memory_region(regions[name], [data])
            client.register_system_shared_memory(name, f"/charonia_example_{kind}_{name}", size)
        try:
            tensors = [module.InferInput(f"INPUT{at}", [1, 16], "INT32") for at in range(2)]
            outputs = [module.InferRequestedOutput(f"OUTPUT{at}") for at in range(2)]
            for at in range(2):
                tensors[at].set_shared_memory(f"in{at}", size)
                outputs[at].set_shared_memory(f"out{at}", size)
            client.infer("simple", tensors, outputs=outputs)
            for at, expected in enumerate((FIRST + 1, FIRST - 1)):
                np.testing.assert_array_equal(
                    shm.get_contents_as_numpy(regions[f"out{at}"], np.int32, [1, 16]), expected
                )
            for at, data in enumerate((FIRST, ONES)):
                tensors[at].set_data_from_numpy(data * 2)
                outputs[at].unset_shared_memory()
            answer = client.infer("simple", tensors, outputs=outputs)
            np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), 2 * (FIRST + 1))
            assert len(client.get_system_shared_memory_status(as_json=True) if kind == "grpc" else "x") == 1
            client.unregister_system_shared_memory()
        finally:
            for region in regions.values():
                shm.destroy_shared_memory_region(region)


@pytest.mark.parametrize("kind", KINDS)
def test_health_and_metadata(kind: str, server: Any) -> None:
    with _client(kind, server) as client:
        assert client.is_server_live(headers={"test": "1"})
        assert client.is_server_ready()
        assert client.is_model_ready("simple")
        metadata = client.get_model_metadata("simple")
        assert (metadata["name"] if kind == "http" else metadata.name) == "simple"
        with pytest.raises(InferenceServerException, match="Request for unknown model"):
            client.get_model_metadata("wrong_model_name")


def _picture() -> bytes:
    file = io.BytesIO()
    Image.linear_gradient("L").convert("RGB").save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("kind", KINDS)
def test_an_ensemble_classifies_pictures(kind: str, server: Any) -> None:
    pictures = np.array([[_picture()]] * 2, np.object_)
    wanted = [MODULES[kind].InferRequestedOutput("OUTPUT", class_count=3)]
    with _client(kind, server) as client:
        answer = client.infer("preprocess_inception_ensemble", _tensors(kind, INPUT=pictures), outputs=wanted)
        best = answer.as_numpy("OUTPUT")
        assert best.shape == (2, 3)
        for text in best[0]:
            value, place, label = text.decode().split(":")
            assert label == f"class {place}"
            float(value)
        picture = np.zeros((3, 224, 224), np.float32)
        plain = client.infer("densenet_onnx", _tensors(kind, data_0=picture)).as_numpy("fc6_1")
        assert plain.shape == (1000,)


def test_parameters_of_policy_and_metrics_of_load(server: Any) -> None:
    """H52: priority and timeout are parameters. H38: a wish for load metrics adds nothing where no model makes them."""
    body: dict[str, Any] = {
        "parameters": {"priority": 1, "timeout": 1_000_000},
        "inputs": [
            {"name": name, "shape": [1, 16], "datatype": "INT32", "data": data.tolist()}
            for name, data in (("INPUT0", FIRST), ("INPUT1", ONES))
        ],
    }
    headers = {"endpoint-load-metrics-format": "json", "Content-Type": "application/json"}
    status, raw = server.request("POST", "/v2/models/simple/infer", json.dumps(body).encode(), headers)
    assert status == 200
    assert json.loads(raw)["outputs"][0]["data"] == (FIRST + 1)[0].tolist()
    text = base64.b64encode(_picture()).decode()
    prompt = json.dumps({"INPUT0": text}).encode()
    status, raw = server.request("POST", "/v2/models/simple_identity/generate", prompt, headers)
    assert (status, json.loads(raw)["OUTPUT0"]) == (200, text)


def test_only_the_second_version_of_the_api_is_served(server: Any) -> None:
    assert server.get("/api/status")[0] == 404
    assert server.get("/v1/models/simple")[0] == 404
