"""Tensors over 32 KB travel beside the log: by file where the parts share a machine, else as blobs; none is left."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import e2e_models
import hpack
import numpy as np
import pytest
import redis
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpcaio
import tritonclient.http as httpclient
from e2e_asking import client, inputs
from tritonclient.utils import InferenceServerException

from charonia.eventlog.embedded import PrivateServer, find_server
from charonia.eventlog.payload_slots import _ALIGNMENT, _MAGIC, _WORD_MAGIC, _WORD_USED
from gateway.grpc.native.codec.http2_frames import DATA, HEADERS, SETTINGS, frame

BYTES = 4 * 1024 * 1024


def _ask(server: Any, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    tensor = httpclient.InferInput("VALUE", list(values.shape), "INT32")
    tensor.set_data_from_numpy(values)
    with httpclient.InferenceServerClient(server.http, network_timeout=60, connection_timeout=60) as client:
        answer = client.infer("gated", [tensor]).as_numpy("ECHO")
    assert answer is not None
    return np.asarray(answer)


def _received_by_log(server: Any) -> int:
    with redis.Redis.from_url(server.log_url) as client:
        return int(client.info("stats")["total_net_input_bytes"])


@pytest.fixture
def models(tmp_path: Path) -> Path:
    e2e_models.gated(tmp_path / "models", "gated", "")
    return tmp_path / "models"


@pytest.mark.parametrize(
    ("flags", "in_log"),
    [
        ((), 0),
        (("--batcher=separate",), 0),
        # no directory to share: once as a blob, and the answers in their replies
        (("--shm-dir=/proc/none",), 4),
    ],
    ids=["colocated", "separate", "blobs"],
)
def test_large_tensors_come_back_whole(flags: tuple[str, ...], in_log: int, models: Path, serve: Any) -> None:
    server = serve(models, *flags)
    values = np.arange(BYTES // 4, dtype=np.int32)
    before = _received_by_log(server)
    np.testing.assert_array_equal(_ask(server, values), values)
    assert _received_by_log(server) - before < in_log * BYTES + 200_000
    _wait_given_back(server)


def test_a_blob_server_spares_the_log(models: Path, serve: Any, tmp_path: Path) -> None:
    beside = PrivateServer(tmp_path / "beside", find_server())
    (tmp_path / "beside").mkdir()
    beside.start()
    try:
        beside.wait_ready()
        server = serve(models, "--shm-dir=/proc/none", f"--blob-url={beside.url}", "--batcher=separate")
        values = np.arange(BYTES // 4, dtype=np.int32)
        before = _received_by_log(server)
        np.testing.assert_array_equal(_ask(server, values), values)
        # the answer's three tensors come back in its reply, which is in the log
        assert _received_by_log(server) - before < 3.5 * BYTES
        with redis.Redis.from_url(beside.url) as client:
            assert client.info("stats")["total_net_input_bytes"] > BYTES
    finally:
        beside.stop()


def _wait_given_back(server: Any) -> None:
    """Until nothing that was lent is left in the directory or in the log: it follows the answer by a moment."""

    async def poll() -> None:
        with redis.Redis.from_url(server.log_url) as client:
            async with asyncio.timeout(60):
                while _lent(server) or list(client.scan_iter("blob:*")):
                    await asyncio.sleep(0.01)

    asyncio.run(poll())


def _lent(server: Any) -> list[Path]:
    """Payload files of this server and slots in use, of the processes that are alive."""
    alive = [f"-{pid}-" for role in ("gateway", "executor") for pid in server.pids(role)]
    files = [path for path in _files(server) if any(part in path.parent.name for part in alive)]
    slots = [path for path in files if path.name.startswith("s")]
    return [path for path in files if path not in slots] + [path for path in slots if _is_lent(path)]


def _is_lent(slot: Path) -> bool:
    with suppress(FileNotFoundError):  # given back, with all that its process had
        with slot.open("rb") as file:
            words = memoryview(file.read(_ALIGNMENT).ljust(_ALIGNMENT, b"\0")).cast("Q")
        return words[_WORD_MAGIC] == _MAGIC and words[_WORD_USED] != 0
    return False


def _files(server: Any) -> list[Path]:
    """All payload files of this server. Its directory is the one its gateway has a part of."""
    here = f"-{server.pids('gateway')[0]}-"
    roots = [root for root in _listed(Path("/dev/shm")) if root.name.startswith("charonia-")]
    roots = [root for root in roots if any(here in part.name for part in _listed(root))]
    files = [path for root in roots for part in _listed(root) for path in _listed(part)]
    return [path for path in files if path.name not in ("token", "slots", "replies")]


def _listed(directory: Path) -> list[Path]:
    """What lies in a directory: nothing if that has gone meanwhile, with its process or with another test's server."""
    with suppress(OSError):
        return list(directory.iterdir())
    return []


def _size_bytes(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_blocks * 512
    return 0


@pytest.mark.long
def test_an_executor_killed_with_a_large_batch_costs_nobody_an_answer(models: Path, serve: Any, tmp_path: Path) -> None:
    server = serve(models, "--executors=2")
    entered, gate = tmp_path / "entered", tmp_path / "gate"
    values = np.arange(BYTES // 4, dtype=np.int32)

    async def drive() -> None:
        async with grpcaio.InferenceServerClient(server.grpc) as client:
            tensor = grpcclient.InferInput("VALUE", list(values.shape), "INT32")
            tensor.set_data_from_numpy(values)
            parameters = {"entered": str(entered), "gate": str(gate)}
            asked = asyncio.create_task(client.infer("gated", [tensor], parameters=parameters, client_timeout=180))
            async with asyncio.timeout(60):
                while not entered.exists():
                    await asyncio.sleep(0.005)
            entered.unlink()
            for pid in server.pids("executor"):
                os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(60):
                while not entered.exists():
                    await asyncio.sleep(0.005)
            gate.touch()
            answer = (await asked).as_numpy("ECHO")
            np.testing.assert_array_equal(answer, values)

    asyncio.run(drive())
    _wait_given_back(server)


# -- slots: random sizes, many at once, and what goes wrong in the middle ----------------------------------------------

_MANY_BYTES = 700_000


@pytest.fixture
def echoes(tmp_path: Path) -> Path:
    """`echo` gives back what it gets; through onnxruntime, so that answers leave an instance's thread."""
    e2e_models.echoing(tmp_path / "models", "echo")
    e2e_models.gated(tmp_path / "models", "gated", "")
    return tmp_path / "models"


def _random(choose: np.random.Generator) -> np.ndarray[Any, Any]:
    """What large clients send: below and above each bound at which the way of a tensor changes."""
    columns = int(choose.choice([3, 2_000, 8_192, 9_000, 16_384, 40_000, 150_528, _MANY_BYTES // 4]))
    return choose.random((int(choose.integers(1, 4)), columns), dtype=np.float32)


async def _over_grpc(client: Any, values: np.ndarray[Any, Any]) -> bool:
    tensor = grpcclient.InferInput("INPUT0", list(values.shape), "FP32")
    tensor.set_data_from_numpy(values)
    answer = await client.infer("echo", [tensor], client_timeout=60)
    return bool(np.array_equal(answer.as_numpy("OUTPUT0"), values))


def _over_http(server: Any, values: np.ndarray[Any, Any]) -> bool:
    tensor = httpclient.InferInput("INPUT0", list(values.shape), "FP32")
    tensor.set_data_from_numpy(values)
    with httpclient.InferenceServerClient(server.http, network_timeout=60, connection_timeout=60) as client:
        return bool(np.array_equal(client.infer("echo", [tensor]).as_numpy("OUTPUT0"), values))


async def _ask_many(server: Any, count: int, choose: np.random.Generator) -> list[bool]:
    """Ask over both protocols, eight at once, those of gRPC over one connection; which answers were right."""
    async with grpcaio.InferenceServerClient(server.grpc) as client:
        turns = [asyncio.Semaphore(8), asyncio.Semaphore(8)]

        async def one(number: int, values: np.ndarray[Any, Any]) -> bool:
            async with turns[number % 2]:
                if number % 2:
                    return await _over_grpc(client, values)
                return await asyncio.to_thread(_over_http, server, values)

        return list(await asyncio.gather(*[one(number, _random(choose)) for number in range(count)]))


@pytest.mark.parametrize("flags", [(), ("--grpc-front=grpcio",), ("--batcher=separate",)])
@pytest.mark.long
def test_random_tensors_of_many_sizes_come_back_byte_by_byte(flags: tuple[str, ...], echoes: Path, serve: Any) -> None:
    server = serve(echoes, *flags)
    assert all(asyncio.run(_ask_many(server, 200, np.random.default_rng(7))))
    slots = [path for path in _files(server) if path.name.startswith("s")]
    assert slots
    assert len(slots) <= 100
    _wait_given_back(server)


@pytest.mark.long
def test_small_requests_of_many_callers_share_slots_and_outlive_executors(echoes: Path, serve: Any) -> None:
    with (echoes / "echo" / "config.pbtxt").open("a") as config:
        config.write("dynamic_batching { }\n")
    server = serve(echoes, "--executors=2")

    async def drive() -> None:
        choose = np.random.default_rng(3)
        async with grpcaio.InferenceServerClient(server.grpc) as client:

            async def ask() -> None:
                right = await asyncio.gather(
                    *[_over_grpc(client, choose.random((1, 3000), dtype=np.float32)) for _ in range(32)]
                )
                assert all(right)

            async with asyncio.timeout(60):
                while not any(path.name.startswith("s") and "gateway" in path.parent.name for path in _files(server)):
                    await ask()
            asking = asyncio.gather(*[ask() for _ in range(10)])
            os.kill(server.pids("executor")[0], signal.SIGKILL)
            await asking

    asyncio.run(drive())
    _wait_given_back(server)


@pytest.mark.long
def test_executors_killed_under_large_requests_give_no_wrong_bytes(echoes: Path, serve: Any) -> None:
    server = serve(echoes, "--executors=2")

    async def drive() -> None:
        done = asyncio.Event()
        choose = np.random.default_rng(11)
        counts = {"right": 0, "refused": 0}

        async def ask(which: int) -> None:
            async with grpcaio.InferenceServerClient(server.grpc) as client:
                while not done.is_set():
                    try:
                        assert await _over_grpc(client, _random(choose)), which
                        counts["right"] += 1
                    except InferenceServerException:  # typed, and never other bytes
                        counts["refused"] += 1

        async def reached(right: int) -> None:
            async with asyncio.timeout(60):
                while counts["right"] < right:
                    await asyncio.sleep(0.01)

        asking = [asyncio.create_task(ask(which)) for which in range(6)]
        await reached(30)
        for _ in range(3):
            with suppress(ProcessLookupError):  # one that was killed is listed for a moment longer
                os.kill(server.pids("executor")[0], signal.SIGKILL)
            await reached(counts["right"] + 30)
        done.set()
        await asyncio.gather(*asking)
        assert counts["right"] > counts["refused"]

    asyncio.run(drive())
    _wait_given_back(server)
    assert sum(map(_size_bytes, _files(server))) < 256 * 1024 * 1024


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.long
def test_a_client_that_leaves_within_its_body_leaves_no_slot(protocol: str, echoes: Path, serve: Any) -> None:
    server = serve(echoes)

    async def drive() -> None:
        assert all(await _ask_many(server, 8, np.random.default_rng(3)))
        host, _, port = (server.http if protocol == "http" else server.grpc).rpartition(":")
        for _ in range(3):
            reader, writer = await asyncio.open_connection(host, int(port))
            if protocol == "http":
                head = (
                    f"POST /v2/models/echo/infer HTTP/1.1\r\nHost: {server.http}\r\nContent-Length: 900000\r\n"
                    "Inference-Header-Content-Length: 100\r\n\r\n"
                )
                writer.write(head.encode() + bytes(400_000))
            else:
                fields = [
                    (":method", "POST"),
                    (":scheme", "http"),
                    (":path", "/inference.GRPCInferenceService/ModelInfer"),
                    (":authority", server.grpc),
                    ("content-type", "application/grpc"),
                    ("te", "trailers"),
                ]
                writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0))
                writer.write(frame(HEADERS, 4, 1, hpack.Encoder().encode(fields)))
                writer.write(frame(DATA, 0, 1, b"\0" + (900_000).to_bytes(4, "big") + bytes(10_000)))
                for _ in range(24):
                    writer.write(frame(DATA, 0, 1, bytes(16_384)))
            await writer.drain()
            async with asyncio.timeout(60):
                while not _lent(server):  # it has begun to come
                    await asyncio.sleep(0.01)
            writer.close()
            await reader.read()

    asyncio.run(drive())
    _wait_given_back(server)


@pytest.mark.long
def test_a_slow_reader_gets_its_bytes_while_others_use_slots(echoes: Path, serve: Any) -> None:
    server = serve(echoes)
    values = np.random.default_rng(5).random((1, 2_000_000), dtype=np.float32)

    async def drive() -> None:
        host, _, port = server.http.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=4096)
        head = (
            b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,2000000],"parameters":{"binary_data_size":8000000}}'
            b'],"parameters":{"binary_data_output":true}}'
        )
        asked = (
            f"POST /v2/models/echo/infer HTTP/1.1\r\nHost: {server.http}\r\n"
            f"Content-Length: {len(head) + values.nbytes}\r\nInference-Header-Content-Length: {len(head)}\r\n\r\n"
        )
        writer.write(asked.encode() + head + values.tobytes())
        await writer.drain()
        size = json_size = 0
        while (line := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode().partition(":")
            size = int(value) if name == "content-length" else size
            json_size = int(value) if name == "inference-header-content-length" else json_size
        assert all(await _ask_many(server, 60, np.random.default_rng(6)))  # it does not read meanwhile
        body = await reader.readexactly(size)
        assert body[json_size:] == values.tobytes()
        writer.close()

    asyncio.run(drive())
    _wait_given_back(server)


@pytest.mark.long
def test_a_gateway_killed_under_large_requests_leaves_bounded_memory(echoes: Path, serve: Any) -> None:
    server = serve(echoes)
    before = server.pids("gateway")[0]

    async def drive() -> None:
        asking = asyncio.create_task(_ask_many(server, 400, np.random.default_rng(9)))
        async with asyncio.timeout(60):
            while not _lent(server):
                await asyncio.sleep(0.005)
        os.kill(before, signal.SIGKILL)
        await asyncio.gather(asking, return_exceptions=True)
        async with asyncio.timeout(60):
            while before in server.pids("gateway") or not server.pids("gateway"):
                await asyncio.sleep(0.05)

    asyncio.run(drive())
    server.wait_ready()
    assert all(asyncio.run(_ask_many(server, 100, np.random.default_rng(10))))


# -- answers that fit no slot ------------------------------------------------------------------------------------------

GROWS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            times = 1 if array.size < 1000 else 500
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.tile(array, times))]))
        return answers
"""
GROWS_CONFIG = """
max_batch_size: 0
dynamic_batching { }
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
"""


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.long
def test_answers_larger_than_any_slot_come_whole(protocol: str, tmp_path: Path, serve: Any) -> None:
    """Of requests that travel in waves, by a model without batches."""
    e2e_models.python(tmp_path / "models", "grows", GROWS, GROWS_CONFIG)
    server = serve(tmp_path / "models")
    with client(protocol, server) as caller:
        for count in (10, 10, 40_000, 10, 40_000, 40_000, 40_000, 10):
            values = np.random.default_rng(count).random(count, dtype=np.float32)
            answer = caller.infer("grows", inputs(protocol, INPUT0=values)).as_numpy("OUTPUT0")
            np.testing.assert_array_equal(answer, np.tile(values, 1 if count < 1000 else 500))
    _wait_given_back(server)
