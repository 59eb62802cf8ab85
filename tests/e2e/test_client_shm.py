"""Client shared memory with the stock clients: tensors in and out by region, errors, and clients that mean no good."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from e2e_asking import Gate, client, inputs, pending, until
from e2e_models import WIDTH, gated, python, scaling
from e2e_server import serving
from fake_cuda import FakeCuda, cuda
from gpu_checks.regions import through_regions
from memory_objects import objects
from tritonclient.utils import InferenceServerException, np_to_triton_dtype, serialize_byte_tensor

__all__ = ["cuda", "objects"]
KINDS = ("http", "grpc")
ECHO = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            tensors = [t.as_numpy() for t in request.inputs()]
            answers.append(pb_utils.InferenceResponse(
                [pb_utils.Tensor(f"OUTPUT{at}", tensor) for at, tensor in enumerate(tensors)]
            ))
        return answers
"""
STREAM = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for value in request.inputs()[0].as_numpy()[0]:
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([[value]], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def config(datatype: str, count: int, rest: str = "max_batch_size: 8") -> str:
    return rest + "".join(
        f' {way} [ {{ name: "{way.upper()}{at}" data_type: TYPE_{datatype} dims: [ -1 ] }} ]'
        for at in range(count)
        for way in ("input", "output")
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("models")
    python(repository, "numbers", ECHO, config("INT32", 2))
    scaling(repository, "double", 2)
    python(repository, "texts", ECHO, config("STRING", 1))
    python(
        repository, "stream", STREAM,
        config("INT32", 1) + " model_transaction_policy { decoupled: true }",
    )  # fmt: skip
    gated(repository, "gated", "max_batch_size: 1 instance_group [ { count: 1 kind: KIND_CPU } ]")
    return repository


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with serving(models, tmp_path_factory.mktemp("state"), "--allow-client-shm=true", "--gateways=2") as running:
        yield running


class Region:
    """A region of a client: the object, and the name it is registered by."""

    def __init__(self, size: int, values: np.ndarray[Any, Any] | None = None) -> None:
        self.name = f"region-{secrets.token_hex(6)}"
        self.key = f"/{self.name}"
        self.size = size
        self.handle = shm.create_shared_memory_region(self.name, self.key, size)
        if values is not None:
            shm.set_shared_memory_region(self.handle, [values])

    @property
    def path(self) -> Path:
        return Path("/dev/shm") / self.name

    def read(self, dtype: Any, shape: Any, offset: int = 0) -> Any:
        return shm.get_contents_as_numpy(self.handle, dtype, shape, offset).copy()


@pytest.fixture
def region(server: Any) -> Iterator[Callable[..., Region]]:
    """`region(size, values)`: a registered region."""
    made: list[Region] = []

    def make(size: int, values: np.ndarray[Any, Any] | None = None) -> Region:
        one = Region(size, values)
        made.append(one)
        with client("http", server) as asking:
            asking.register_system_shared_memory(one.name, one.key, one.size)
        return one

    yield make
    with client("http", server) as asking:
        asking.unregister_system_shared_memory()
    for one in made:
        with contextlib.suppress(FileNotFoundError):
            shm.destroy_shared_memory_region(one.handle)


def given(kind: str, name: str, array: np.ndarray[Any, Any], region: Region, size: int, offset: int = 0) -> Any:
    module = httpclient if kind == "http" else grpcclient
    tensor = module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    tensor.set_shared_memory(region.name, size, offset)
    return tensor


def wanted(kind: str, name: str, region: Region, size: int, offset: int = 0) -> Any:
    module = httpclient if kind == "http" else grpcclient
    output = module.InferRequestedOutput(name)
    output.set_shared_memory(region.name, size, offset)
    return output


def refusal(ask: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as caught:
        ask()
    return str(caught.value.status()), str(caught.value.message())


class TestInference:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("size", [16, 1_000_000], ids=["small", "large"])
    def test_numbers_in_and_out(self, kind: str, size: int, server: Any, region: Callable[..., Region]) -> None:
        values = np.arange(2 * size, dtype=np.int32).reshape(2, size)
        source, target = region(values.nbytes + 64, values), region(2 * values.nbytes)
        half = values.nbytes // 2
        with client(kind, server) as asking:
            result = asking.infer(
                "numbers",
                [given(kind, f"INPUT{at}", values[at : at + 1], source, half, at * half) for at in range(2)],
                outputs=[
                    wanted(kind, "OUTPUT1", target, half + 8, 64),
                    wanted(kind, "OUTPUT0", target, half, values.nbytes),
                ],
                request_id="r",
            )
        answer = result.get_response()
        if kind == "http":
            described = [(o["name"], o["datatype"], o["shape"], set(o)) for o in answer["outputs"]]
            assert described == [
                (name, "INT32", [1, size], {"name", "datatype", "shape"}) for name in ("OUTPUT0", "OUTPUT1")
            ]
        else:
            assert [(o.name, o.datatype, list(o.shape), dict(o.parameters)) for o in answer.outputs] == [
                (name, "INT32", [1, size], {}) for name in ("OUTPUT0", "OUTPUT1")
            ]
            assert list(answer.raw_output_contents) == [b"", b""]
        np.testing.assert_array_equal(target.read(np.int32, (1, size), 64), values[1:])
        np.testing.assert_array_equal(target.read(np.int32, (1, size), values.nbytes), values[:1])

    @pytest.mark.parametrize("kind", KINDS)
    def test_texts(self, kind: str, server: Any, region: Callable[..., Region]) -> None:
        values = np.array([[b"", b"one", b"\xff\x00" * 5000]], dtype=object)
        packed = serialize_byte_tensor(values)
        size = len(packed.item())
        source, target = region(size, packed), region(size)
        with client(kind, server) as asking:
            for _ in range(2):
                tensor, output = given(kind, "INPUT0", values, source, size), wanted(kind, "OUTPUT0", target, size)
                asking.infer("texts", [tensor], outputs=[output])
                np.testing.assert_array_equal(target.read(np.object_, (1, 3)), values)
            source.path.write_bytes(b"\xff" * size)
            status, text = refusal(lambda: asking.infer("texts", [given(kind, "INPUT0", values, source, size)]))
        assert status in ("400", "StatusCode.INVALID_ARGUMENT")
        assert "incomplete string data for inference input 'INPUT0' for model 'texts'" in text

    @pytest.mark.parametrize("kind", KINDS)
    def test_beside_tensors_that_travel(self, kind: str, server: Any, region: Callable[..., Region]) -> None:
        target = region(64)
        with client(kind, server) as asking:
            for number in range(3):
                values = np.full((1, 16), number, np.int32)
                source = inputs(kind, INPUT0=values, INPUT1=-values)
                shown = (httpclient if kind == "http" else grpcclient).InferRequestedOutput("OUTPUT1")
                result = asking.infer("numbers", source, outputs=[wanted(kind, "OUTPUT0", target, 64), shown])
                np.testing.assert_array_equal(target.read(np.int32, (1, 16)), values)
                np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), -values)

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_express_lane_recognises_none_of_them(
        self, kind: str, server: Any, region: Callable[..., Region]
    ) -> None:
        """Requests alike but for their values, to a model that is served in waves."""
        target = region(4 * WIDTH)
        with client(kind, server) as asking:
            for number in range(20):
                values = np.full((1, WIDTH), number, np.float32)
                asked = inputs(kind, INPUT0=values)
                result = asking.infer("double", asked, outputs=[wanted(kind, "OUTPUT0", target, 4 * WIDTH)])
                np.testing.assert_array_equal(target.read(np.float32, (1, WIDTH)), 2 * values)
                assert result.get_output("OUTPUT0") is not None

    def test_a_stream_writes_each_response(self, server: Any, region: Callable[..., Region]) -> None:
        values = np.arange(5, dtype=np.int32).reshape(1, 5)
        source, target = region(20, values), region(4)
        seen: list[Any] = []
        with grpcclient.InferenceServerClient(server.grpc) as asking:
            asking.start_stream(lambda result, error: seen.append((result, error)))
            tensor, output = given("grpc", "INPUT0", values, source, 20), wanted("grpc", "OUTPUT0", target, 4)
            asking.async_stream_infer("stream", [tensor], outputs=[output], enable_empty_final_response=True)
            until("all responses", lambda: len(seen) == 6)
            asking.stop_stream()
        assert [error for _, error in seen] == [None] * 6
        assert target.read(np.int32, (1,)) == [4]


class TestControl:
    @pytest.mark.parametrize("kind", KINDS)
    def test_registering(self, kind: str, server: Any) -> None:
        with client(kind, server) as asking, contextlib.ExitStack() as ending:
            made = [Region(64), Region(64)]
            for one in made:
                ending.callback(shm.destroy_shared_memory_region, one.handle)
            ending.callback(asking.unregister_system_shared_memory)
            asking.register_system_shared_memory(made[0].name, made[0].key, 64)
            asking.register_system_shared_memory(made[1].name, made[1].key, 32, 32)
            asked = asking.get_system_shared_memory_status()
            if kind == "http":
                regions = {row["name"]: (row["key"], row["offset"], row["byte_size"]) for row in asked}
            else:
                regions = {name: (row.key, row.offset, row.byte_size) for name, row in asked.regions.items()}
            assert regions == {made[0].name: (made[0].key, 0, 64), made[1].name: (made[1].key, 32, 32)}
            assert refusal(lambda: asking.register_system_shared_memory(made[0].name, made[0].key, 64)) == (
                "400" if kind == "http" else "StatusCode.ALREADY_EXISTS",
                f"shared memory region '{made[0].name}' already in manager",
            )
            asking.unregister_system_shared_memory(made[0].name)
            asking.unregister_system_shared_memory(made[0].name)
            assert refusal(lambda: asking.get_system_shared_memory_status(made[0].name))[1] == (
                f"Unable to find system shared memory region: '{made[0].name}'"
            )
            assert asking.get_system_shared_memory_status(made[1].name)
            asking.unregister_system_shared_memory()
            left = asking.get_system_shared_memory_status()
            assert not (left if kind == "http" else left.regions)

    @pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a GPU")
    @pytest.mark.parametrize("kind", KINDS)
    def test_no_gpu(self, kind: str, server: Any) -> None:
        handle = b"A" * 88
        with client(kind, server) as asking:
            status, text = refusal(lambda: asking.register_cuda_shared_memory("r", handle, 0, 64))
            assert status in ("400", "StatusCode.INVALID_ARGUMENT")
            assert text == "failed to register CUDA shared memory region: 'r', GPUs not supported"
            asking.unregister_cuda_shared_memory("r")
            asking.unregister_cuda_shared_memory()
            left = asking.get_cuda_shared_memory_status()
            assert not (left if kind == "http" else left.regions)

    def test_bodies_of_registrations(self, server: Any) -> None:
        path = "/v2/systemsharedmemory/region/r/register"
        for body, status, text in (
            (b"", 400, "Shared memory register request has no 'key' field"),
            (b"[]", 400, "Shared memory register request has no 'key' field"),
            (b'{"key": "/k"}', 400, "Shared memory register request has no 'byte_size' field"),
            (b'{"key": 1}', 500, "attempt to access JSON non-string as string"),
            *(
                (body % value, 500, "attempt to access JSON non-unsigned-integer as unsigned-integer")
                for body in (b'{"key": "/k", "byte_size": %s}', b'{"key": "/k", "byte_size": 1, "offset": %s}')
                for value in (b"-1", b"1.5", b'"1"', b"true", b"null", b"18446744073709551616", b"1e3")
            ),
            (b'{"key": "/charonia-x", "byte_size": 1}', 400,
             "cannot register shared memory region 'r' with key '/charonia-x' as the key contains the reserved prefix "
             "'charonia-'"),
        ):  # fmt: skip
            found, answer = server.request("POST", path, body)
            assert (found, json.loads(answer)) == (status, {"error": text}), body
        found, answer = server.request("POST", "/v2/systemsharedmemory/register", b"{}")
        assert (found, json.loads(answer)["error"]) == (
            400, "'region name' is necessary to register system shared memory region",
        )  # fmt: skip
        assert server.request("GET", path)[0] == 405
        assert server.request("POST", path, b"{")[0] in (400, 500)

    @pytest.mark.parametrize("kind", KINDS)
    def test_it_is_off_by_default(self, kind: str, models: Path, serve: Any) -> None:
        server = serve(models)
        disabled = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
        values = np.zeros((1, 16), np.int32)
        with client(kind, server) as asking:
            for change in (
                lambda: asking.register_system_shared_memory("r", "/k", 64),
                lambda: asking.unregister_system_shared_memory("r"),
                lambda: asking.unregister_system_shared_memory(),
                lambda: asking.register_cuda_shared_memory("r", b"A" * 88, 0, 64),
                lambda: asking.unregister_cuda_shared_memory(),
            ):
                assert refusal(change) == ("501" if kind == "http" else "StatusCode.UNIMPLEMENTED", disabled)
            tensor = inputs(kind, INPUT0=values)[0]
            tensor.set_shared_memory("r", 64)
            assert refusal(lambda: asking.infer("numbers", [tensor])) == (
                "404" if kind == "http" else "StatusCode.NOT_FOUND", "Unable to find shared memory region: 'r'",
            )  # fmt: skip


@pytest.fixture
def with_gpus(cuda: FakeCuda, models: Path, tmp_path: Path) -> Iterator[Any]:
    """A server whose driver library is the one of the tests."""
    with serving(models, tmp_path / "state", "--allow-client-shm=true") as running:
        yield running


class TestGpus:
    def test_in_and_out(self, with_gpus: Any, cuda: FakeCuda) -> None:
        for kind in KINDS:
            self.in_and_out(kind, with_gpus, cuda)

    def in_and_out(self, kind: str, with_gpus: Any, cuda: FakeCuda) -> None:
        values = np.arange(WIDTH, dtype=np.float32).reshape(1, WIDTH)
        source, target = cuda.make(values.tobytes()), cuda.make(bytes(values.nbytes + 8))
        module = httpclient if kind == "http" else grpcclient
        with client(kind, with_gpus) as asking:
            asking.register_cuda_shared_memory("in", base64.b64encode(source), 0, values.nbytes)
            asking.register_cuda_shared_memory("out", base64.b64encode(target), 1, values.nbytes + 8)
            found = asking.get_cuda_shared_memory_status()
            if kind == "http":
                regions = {row["name"]: (row["device_id"], row["byte_size"]) for row in found}
            else:
                regions = {name: (row.device_id, row.byte_size) for name, row in found.regions.items()}
            assert regions == {"in": (0, values.nbytes), "out": (1, values.nbytes + 8)}
            tensor = module.InferInput("INPUT0", list(values.shape), "FP32")
            tensor.set_shared_memory("in", values.nbytes)
            output = module.InferRequestedOutput("OUTPUT0")
            output.set_shared_memory("out", values.nbytes, 8)
            asking.infer("double", [tensor], outputs=[output])
            assert cuda.content(target) == bytes(8) + (2 * values).tobytes()
            assert refusal(lambda: asking.register_cuda_shared_memory("in", base64.b64encode(source), 0, 1))[1] == (
                "shared memory region 'in' already in manager"
            )
            assert refusal(lambda: asking.register_cuda_shared_memory("r", base64.b64encode(source), 2, 1))[1] == (
                "failed to register shared memory region: invalid args"
            )
            asking.unregister_cuda_shared_memory("in")
            asking.unregister_cuda_shared_memory()
            left = asking.get_cuda_shared_memory_status()
            assert not (left if kind == "http" else left.regions)
            assert cuda.open_handles() == ""

    def test_the_check_for_gpus(self, with_gpus: Any, cuda: FakeCuda) -> None:
        values = np.arange(WIDTH, dtype=np.float32).reshape(1, WIDTH)
        found = through_regions(f"http://{with_gpus.http}", "double", ("INPUT0", "OUTPUT0"), values)
        assert np.array_equal(found, 2 * values)
        assert cuda.open_handles() == ""

    def test_bodies_of_registrations(self, with_gpus: Any, cuda: FakeCuda) -> None:
        handle = base64.b64encode(cuda.make(b"12345678")).decode()
        said = {"raw_handle": {"b64": handle}, "byte_size": 8, "device_id": 0}
        unsigned = "attempt to access JSON non-unsigned-integer as unsigned-integer"
        invalid = "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"
        for body, status, text in (
            ({}, 400, "Shared memory register request has no 'raw_handle' field"),
            ([], 400, "Shared memory register request has no 'raw_handle' field"),
            (said | {"raw_handle": handle}, 500, "attempt to access non-existing object member 'b64'"),
            (said | {"raw_handle": {}}, 500, "attempt to access non-existing object member 'b64'"),
            (said | {"raw_handle": {"b64": 1}}, 500, "attempt to access JSON non-string as string"),
            ({"raw_handle": {"b64": handle}}, 500, "attempt to access non-existing object member 'byte_size'"),
            ({"raw_handle": {"b64": handle}, "byte_size": 8}, 500,
             "attempt to access non-existing object member 'device_id'"),
            *((said | {name: value}, 500, unsigned) for name in ("byte_size", "device_id")
              for value in (-1, 1.5, "1", True, None, 2**64)),
            *((said | {"raw_handle": {"b64": value}}, 400, invalid)
              for value in ("", "A", "A" * 88, "\u00e9", 2 * handle)),
            (said | {"byte_size": 9}, 400, "failed to register shared memory region 'r': invalid args"),
            (said | {"device_id": 2}, 400, "failed to register shared memory region: invalid args"),
        ):  # fmt: skip
            found, answer = with_gpus.request(
                "POST", "/v2/cudasharedmemory/region/r/register", json.dumps(body).encode()
            )
            assert (found, json.loads(answer)) == (status, {"error": text}), body
        found, answer = with_gpus.request("POST", "/v2/cudasharedmemory/register", b"{")
        assert json.loads(answer)["error"] == "'region name' is necessary to register cuda shared memory region"

    def test_a_device_that_is_lost(self, with_gpus: Any, cuda: FakeCuda) -> None:
        values = np.ones((1, WIDTH), np.float32)
        for kind, status in (("http", "500"), ("grpc", "StatusCode.INTERNAL")):
            module = httpclient if kind == "http" else grpcclient
            with client(kind, with_gpus) as asking:
                asking.register_cuda_shared_memory(
                    kind, base64.b64encode(cuda.make(values.tobytes())), 0, values.nbytes
                )
                tensor = module.InferInput("INPUT0", list(values.shape), "FP32")
                tensor.set_shared_memory(kind, values.nbytes)
                asking.infer("double", [tensor])
                cuda.set("lost")
                assert refusal(partial(asking.infer, "double", [tensor])) == (
                    status, f"shared memory region '{kind}' cannot be read: an illegal memory access was encountered",
                )  # fmt: skip
                answer = asking.infer("double", inputs(kind, INPUT0=values))
                assert (answer.as_numpy("OUTPUT0") == 2 * values).all()  # nobody else is held up
                cuda.unset("lost")


class TestGateways:
    def test_each_knows_what_another_registered(self, server: Any, region: Callable[..., Region]) -> None:
        values = np.arange(16, dtype=np.int32).reshape(1, 16)
        source, target = region(64, values), region(64)
        for number in range(24):  # connections of their own: both gateways have some
            kind = KINDS[number % 2]
            options = {"channel_args": [("grpc.use_local_subchannel_pool", 1)]} if kind == "grpc" else {}
            module = grpcclient if kind == "grpc" else httpclient
            with module.InferenceServerClient(getattr(server, kind), **options) as asking:
                tensors = [given(kind, f"INPUT{at}", values, source, 64) for at in range(2)]
                asking.infer("numbers", tensors, outputs=[wanted(kind, "OUTPUT0", target, 64)])
        source.path.unlink()  # a client may take the name away from what it registered
        with client("http", server) as asking:
            for _ in range(8):
                tensors = [given("http", f"INPUT{at}", values, source, 64) for at in range(2)]
                asking.infer("numbers", tensors, outputs=[wanted("http", "OUTPUT0", target, 64)])


class TestHostile:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        ("offset", "size", "text"),
        [
            (64, 1, "Invalid offset for shared memory region: '{name}'"),
            (2**63 - 1, 1, "Invalid offset for shared memory region: '{name}'"),
            (60, 8, "Invalid offset + byte size for shared memory region: '{name}'"),
            (0, 2**63 - 1, "Invalid offset + byte size for shared memory region: '{name}'"),
            (0, 32, "[request id: <id_unknown>] input byte size mismatch for input 'INPUT0' for model 'numbers'. "
             "Expected 64, got 32"),
        ],
    )  # fmt: skip
    def test_beyond_the_region(
        self, kind: str, offset: int, size: int, text: str, server: Any, region: Callable[..., Region]
    ) -> None:
        source = region(64)
        values = np.zeros((1, 16), np.int32)
        with client(kind, server) as asking:
            tensors = [given(kind, "INPUT0", values, source, size, offset), given(kind, "INPUT1", values, source, 64)]
            assert refusal(lambda: asking.infer("numbers", tensors))[1] == text.format(name=source.name)

    @pytest.mark.parametrize(
        ("parameters", "status", "text"),
        [
            ({"shared_memory_offset": 2**64 - 1, "shared_memory_byte_size": 64}, 400,
             "Invalid offset for shared memory region: '{name}'"),
            ({"shared_memory_offset": 1, "shared_memory_byte_size": 2**64 - 1}, 400,
             "Integer overflow detected: byte_size (18446744073709551615) + offset (1) exceeds maximum value "
             "(18446744073709551615) for region '{name}'"),
            ({"shared_memory_offset": -1, "shared_memory_byte_size": 64}, 500,
             "Unable to parse 'shared_memory_offset': attempt to access JSON non-unsigned-integer as unsigned-integer"),
            ({"shared_memory_region": "n" * 100_000}, 404, "Unable to find shared memory region: '" + "n" * 1024 + "'"),
        ],
    )  # fmt: skip
    def test_numbers_of_raw_requests(
        self, parameters: dict[str, Any], status: int, text: str, server: Any, region: Callable[..., Region]
    ) -> None:
        source = region(64)
        tensor = {"name": "INPUT0", "shape": [1, 16], "datatype": "INT32"}
        asked = {"inputs": [{**tensor, "parameters": {"shared_memory_region": source.name, **parameters}}]}
        found, answer = server.request("POST", "/v2/models/numbers/infer", json.dumps(asked).encode())
        assert (found, json.loads(answer)["error"]) == (status, text.format(name=source.name))

    @pytest.mark.parametrize("kind", KINDS)
    def test_an_output_that_does_not_fit(self, kind: str, server: Any, region: Callable[..., Region]) -> None:
        target = region(64)
        values = np.ones((1, 16), np.int32)
        with client(kind, server) as asking:
            tensors = inputs(kind, INPUT0=values, INPUT1=values)
            ask = lambda: asking.infer("numbers", tensors, outputs=[wanted(kind, "OUTPUT0", target, 63)])  # noqa: E731
            assert refusal(ask) == (
                "500" if kind == "http" else "StatusCode.INTERNAL",
                "shared memory size specified with the request for output 'OUTPUT0' (63 bytes) should be at least 64 "
                "bytes to hold the results",
            )
        assert not target.read(np.int32, (16,)).any()

    @pytest.mark.parametrize("kind", KINDS)
    def test_what_happens_to_a_region_under_way(
        self, kind: str, server: Any, region: Callable[..., Region], tmp_path: Path
    ) -> None:
        """Made smaller, its name deleted, unregistered, and registered by another client as another object."""
        values = np.array([[7, 8]], np.int32)
        regions = {name: region(8) for name in ("shrunk", "deleted", "unregistered", "replaced")}
        with ThreadPoolExecutor(8) as pool, client(kind, server) as other:

            def ask(target: Region) -> Any:
                with client(kind, server) as asking:
                    return asking.infer(
                        "gated", inputs(kind, VALUE=values), outputs=[wanted(kind, "ECHO", target, 8)]
                    )  # fmt: skip

            with Gate(server, "gated", tmp_path, pool):
                asked = {name: pool.submit(ask, one) for name, one in regions.items()}
                until("they wait in the queue", lambda: pending(server, "gated") == len(regions))
                os.truncate(regions["shrunk"].path, 4)
                regions["deleted"].path.unlink()
                other.unregister_system_shared_memory(regions["unregistered"].name)
                other.unregister_system_shared_memory(regions["replaced"].name)
                second = region(8)
                other.register_system_shared_memory(regions["replaced"].name, second.key, 8)
            assert refusal(asked["shrunk"].result)[1] == (
                f"shared memory region '{regions['shrunk'].name}' is smaller than it was registered"
            )
            assert regions["shrunk"].path.stat().st_size == 4
            for name in ("deleted", "unregistered", "replaced"):
                asked[name].result()
                np.testing.assert_array_equal(regions[name].read(np.int32, (1, 2)), values)
            assert not second.read(np.int32, (2,)).any()
            tensor = given(kind, "VALUE", values, regions["shrunk"], 8)
            assert "is smaller than it was registered" in refusal(lambda: other.infer("gated", [tensor]))[1]
            assert other.is_server_live()

    def test_a_client_that_shrinks_and_grows_all_the_time(self, server: Any, region: Callable[..., Region]) -> None:
        """Each answer is whole or a typed error, and no process of the server dies."""
        size = 1 << 20
        values = np.arange(size // 4, dtype=np.int32).reshape(1, -1)
        source, target = region(size, values), region(size)
        # workers for large payloads come and go, and so do processes that complete a configuration at the start
        parts = [one["pid"] for one in server.processes() if "parent" not in one]
        deaths = re.findall(r"instance \S+ died", server.log())
        texts: set[str] = set()
        for number in range(40):
            with ThreadPoolExecutor(2) as pool, client(KINDS[number % 2], server) as asking:
                kind = KINDS[number % 2]
                tensors = [given(kind, f"INPUT{at}", values, source, size) for at in range(2)]
                answer = pool.submit(
                    asking.infer, "numbers", tensors, outputs=[wanted(kind, "OUTPUT0", target, size)]
                )  # fmt: skip
                for one in (source, target):
                    os.truncate(one.path, 4096)
                    os.truncate(one.path, size)
                    os.truncate(one.path, 4096 if number % 4 else size)
                try:
                    answer.result()
                except InferenceServerException as error:
                    texts.add(str(error.message()))
                os.truncate(source.path, size)
                os.truncate(target.path, size)
        assert texts
        assert all(text.endswith("is smaller than it was registered") for text in texts), texts
        assert all(Path(f"/proc/{pid}").exists() for pid in parts)
        assert re.findall(r"instance \S+ died", server.log()) == deaths

    def test_a_job_has_no_region_for_its_outputs(self, server: Any, region: Callable[..., Region]) -> None:
        values = np.arange(16, dtype=np.int32).reshape(1, 16)
        source = region(64, values)
        part = {"shared_memory_region": source.name, "shared_memory_byte_size": 64}
        tensor = {"shape": [1, 16], "datatype": "INT32", "parameters": part}
        asked: dict[str, Any] = {"inputs": [{"name": f"INPUT{at}", **tensor} for at in range(2)]}
        later = {"prefer": "respond-async"}
        path = "/v2/models/numbers/infer"
        status, body = server.request("POST", path, json.dumps(asked).encode(), later)
        assert status == 202
        status, body = server.request("GET", f"/v2/jobs/{json.loads(body)['id']}/result?wait=50")
        assert status == 200, body
        assert json.loads(body)["outputs"][0]["data"] == list(range(16))
        asked["outputs"] = [{"name": "OUTPUT0", "parameters": part}]
        status, body = server.request("POST", path, json.dumps(asked).encode(), later)
        assert (status, json.loads(body)["error"]) == (
            400, "outputs of a request that is answered later cannot be in shared memory",
        )  # fmt: skip
        now = {"idempotency-key": secrets.token_hex(8)}
        for _ in range(2):  # the second time from the job's record
            status, body = server.request("POST", path, json.dumps(asked).encode(), now)
            assert (status, "data" in json.loads(body)["outputs"][0]) == (200, False)
