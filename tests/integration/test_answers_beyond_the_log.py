"""Answers that are larger than the log takes, on a server that ends the connection for such a string."""

from __future__ import annotations

import re
import resource
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from executor_bench import Bench, running
from own_server import admin
from response_reader import DURABLE, Reader

from charonia import keys
from charonia.backend import InstanceSpec, ModelRequest, ModelResponse, ModelSource, ResponseStream
from charonia.datatypes import DataType
from charonia.eventlog import port
from charonia.eventlog.embedded import PrivateServer
from charonia.eventlog.payloads import BY_REFERENCE_BYTES, PayloadDirectory
from charonia.eventlog.port import StreamReader
from charonia.eventlog.redis import RedisLog
from charonia.facts.events import VersionLoaded
from charonia.facts.jobs import JobState
from charonia.tensors import Buffer, Tensor
from charonia.wire import (
    FLAG_REPLY_BY_REFERENCE,
    ResponseRecord,
    records_of,
    response_id,
    response_sizes,
    unpack_response,
)
from executors.configuration import declarations

pytestmark = pytest.mark.integration

SERVER_BYTES = 1 << 20
"""The least that a server can be told to take."""
RECORD_BYTES = 900_000
LARGE, SMALL = 2 * SERVER_BYTES, 8

CONFIG = """
backend: "%s" max_batch_size: %d
input { name: "sizes" data_type: TYPE_INT32 dims: -1 } output { name: "y" data_type: TYPE_UINT8 dims: -1 }
instance_group { count: 1 kind: KIND_CPU }
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"


def of_size(size: int) -> ModelResponse:
    return ModelResponse([Tensor("y", DataType.UINT8, (1, size), bytes(size))])


class Streaming:
    """Answers with a tensor of each size."""

    async def execute_stream(self, requests: Sequence[ModelRequest], responses: ResponseStream) -> None:
        for index, request in enumerate(requests):
            for size in request.inputs[0].array()[0].tolist():
                responses.send(index, of_size(size), final=False)
                await responses.drain()
            responses.send(index, None, final=True)

    async def close_instance(self) -> None:
        """Nothing is held."""


class Flagged(Streaming):
    """The same, and the last one says that it is."""

    async def execute_stream(self, requests: Sequence[ModelRequest], responses: ResponseStream) -> None:
        for index, request in enumerate(requests):
            numbers = request.inputs[0].array()[0].tolist()
            for at, size in enumerate(numbers):
                responses.send(index, of_size(size), final=at == len(numbers) - 1)


class Once(Streaming):
    """The same for one size, in one response: a model that answers late."""

    async def execute_stream(self, requests: Sequence[ModelRequest], responses: ResponseStream) -> None:
        for index, request in enumerate(requests):
            responses.send(index, of_size(int(request.inputs[0].array()[0, 0])), final=True)


class Plain:
    def execute(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> Mapping[str, Any]:
        wanted = inputs["sizes"]
        return {"y": np.zeros((len(wanted), int(wanted[0, 0])), np.uint8)}

    def close(self) -> None:
        """Nothing is held."""


class _Backend:
    made: Any

    async def load(self, source: ModelSource) -> Self:
        return self

    async def signature(self) -> None: ...

    async def close(self) -> None: ...

    async def create_instance(self, spec: InstanceSpec) -> Any:
        return self.made()


class StreamingBackend(_Backend):
    name, made = "streaming", Streaming


class FlaggedBackend(_Backend):
    name, made = "flagged", Flagged


class OnceBackend(_Backend):
    name, made = "once", Once


class PlainBackend(_Backend):
    name, made = "plain", Plain


@pytest.fixture
async def bench(
    server: PrivateServer, log: RedisLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Bench]:
    await admin(server, "CONFIG", "SET", "proto-max-bulk-len", str(SERVER_BYTES))
    monkeypatch.setattr(port, "MAX_STRING_BYTES", SERVER_BYTES)
    monkeypatch.setattr(port, "MAX_RECORD_BYTES", RECORD_BYTES)
    for name, backend, max_batch_size, more in (
        ("streaming", StreamingBackend, 1, DECOUPLED),
        ("flagged", FlaggedBackend, 1, DECOUPLED),
        ("once", OnceBackend, 1, ""),
        ("plain", PlainBackend, 1, ""),
        ("pair", PlainBackend, 4, ""),
    ):
        monkeypatch.setitem(declarations.SHIPPED, backend.name, f"{__name__}:{backend.__name__}")
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        (tmp_path / "models" / name / "config.pbtxt").write_text(CONFIG % (backend.name, max_batch_size) + more)
    readers: list[StreamReader] = []
    make = log.reader

    def reader() -> StreamReader:
        readers.append(make())
        return readers[-1]

    monkeypatch.setattr(log, "reader", reader)
    gateway = PayloadDirectory(str(tmp_path / "shm"), "near")
    gateway.open()
    async with running(tmp_path / "models", log=log, shm_dir=str(tmp_path / "shm")) as found:
        yield found
    gateway.close()
    for one in readers:
        await one.close()


def sizes(*numbers: int) -> list[Tensor]:
    return [Tensor.of("sizes", np.array([numbers], np.int32))]


TOO_LARGE = "too large"


def told(records: Sequence[ResponseRecord]) -> list[str | int]:
    """The size of each response, or that it is too large."""
    found: list[str | int] = []
    for record in records:
        if record.error is None:
            found.append(sum(len(tensor.data) for tensor in record.outputs))
        else:
            assert re.fullmatch(r"the answer of model '\w+' has 2\d{6} bytes, which is more .*", record.error.message)
            found.append(TOO_LARGE)
    return found


async def connections(server: PrivateServer) -> set[bytes]:
    """The server's name for each connection of the log: the one that comes after a lost one has another."""
    listed = await admin(server, "CLIENT", "LIST")
    assert isinstance(listed, bytes)
    return {line.split()[0] for line in listed.splitlines() if b" name=test " not in line}


async def counted(bench: Bench, model: str) -> tuple[int, int]:
    """How many requests succeeded and failed."""
    loaded = await bench.control.fact(VersionLoaded, model=model)
    found = await bench.log.statistics(keys.statistics(model, 1, loaded.content_hash))
    return found.get("success_count", 0), found.get("fail_count", 0)


async def responses(bench: Bench, model: str) -> dict[str, int]:
    """How many responses of each index succeeded and failed."""
    loaded = await bench.control.fact(VersionLoaded, model=model)
    found = await bench.log.statistics(keys.statistics(model, 1, loaded.content_hash))
    names = (f"r{index}_{kind}" for index in range(3) for kind in ("success", "fail"))
    return {name: found[f"{name}_count"] for name in names if found.get(f"{name}_count")}


@contextmanager
def no_room() -> Iterator[None]:
    """No file can be as large as a large answer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SERVER_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("near", [False, True])
async def test_a_response_that_is_too_large_fails_and_the_others_go_on(
    bench: Bench, server: PrivateServer, near: bool
) -> None:
    """`near`: its gateway reads answers out of band, and there is no room for them."""
    reader, before = Reader(bench, "near"), await connections(server)
    large, small = [
        await bench.accept("streaming", sizes(*numbers), endpoint="near", flags=FLAG_REPLY_BY_REFERENCE * near)
        for numbers in ((SMALL, LARGE, SMALL), (SMALL, SMALL))
    ]
    with no_room():
        await bench.finished("streaming", await bench.dispatch("streaming", [large[1], small[1]]))
    assert told(await reader.ended(large[0])) == [SMALL, TOO_LARGE, SMALL, 0]
    assert told(await reader.ended(small[0])) == [SMALL, SMALL, 0]
    assert await responses(bench, "streaming") == {"r0_success": 2, "r1_success": 1, "r1_fail": 1, "r2_success": 1}
    assert await bench.log.pending("streaming") == (0, 0)
    assert await connections(server) >= before, "no connection was lost"


@pytest.mark.parametrize("near", [False, True])
async def test_a_last_response_that_is_too_large_is_counted_as_a_failure(bench: Bench, near: bool) -> None:
    reader = Reader(bench, "near")
    flags = FLAG_REPLY_BY_REFERENCE * near
    one = await bench.accept("flagged", sizes(SMALL, LARGE), endpoint="near", flags=flags)
    with no_room():
        await bench.finished("flagged", await bench.dispatch("flagged", [one[1]]))
    assert told(await reader.ended(one[0])) == [SMALL, TOO_LARGE]
    assert await counted(bench, "flagged") == (0, 1)
    assert await responses(bench, "flagged") == {"r0_success": 1, "r1_fail": 1}


@pytest.mark.parametrize("model", ["once", "plain"])
@pytest.mark.parametrize("near", [False, True])
async def test_an_answer_that_is_too_large_is_an_error_of_its_request(
    bench: Bench, server: PrivateServer, model: str, near: bool
) -> None:
    reader, before = Reader(bench, "near"), await connections(server)
    ids: list[bytes] = []
    for size in (LARGE, SMALL):
        accepted = await bench.accept(model, sizes(size), endpoint="near", flags=FLAG_REPLY_BY_REFERENCE * near)
        ids.append(accepted[0])
        with no_room():
            await bench.finished(model, await bench.dispatch(model, [accepted[1]]))
    assert [told(await reader.ended(one)) for one in ids] == [[TOO_LARGE], [SMALL]]
    assert await bench.log.pending(model) == (0, 0)
    assert await counted(bench, model) == (1, 1)
    assert await connections(server) >= before, "no connection was lost"


async def test_with_room_a_large_answer_goes_out_of_band(bench: Bench) -> None:
    reader = Reader(bench, "near")
    for model in ("plain", "once", "streaming"):
        one = await bench.accept(model, sizes(LARGE), endpoint="near", flags=FLAG_REPLY_BY_REFERENCE)
        await bench.finished(model, await bench.dispatch(model, [one[1]]))

        def of(request_id: bytes) -> list[Buffer]:
            records = [record for entry in reader.follower.entries for record in records_of(entry.fields)]
            return [record for record in records if response_id(record) == request_id]

        first = (await reader.follower.until(partial(of, one[0])))[0]
        assert response_sizes([first]) == [LARGE]
        assert len(first) < BY_REFERENCE_BYTES
        assert (await counted(bench, model))[1] == 0


@pytest.mark.parametrize("model", ["streaming", "once", "plain"])
async def test_a_job_whose_result_is_too_large_fails(bench: Bench, server: PrivateServer, model: str) -> None:
    before = await connections(server)
    job_id, record = await bench.accept(model, sizes(LARGE), flags=DURABLE, endpoint="")
    await bench.finished(model, await bench.dispatch(model, [record]))
    job = await bench.log.job(model, job_id)
    assert job is not None
    assert job.state is JobState.FAILED
    kept = [record for _, _, record in await bench.log.job_responses(model, job_id)]
    result = await bench.log.job_result(model, job_id)
    assert result is not None
    expected = [TOO_LARGE, 0] if model == "streaming" else [TOO_LARGE]
    assert told([unpack_response(record) for record in (*kept, result)]) == expected
    assert await connections(server) >= before, "no connection was lost"


async def test_answers_in_order_that_are_too_large_together_fail(bench: Bench, server: PrivateServer) -> None:
    """The owner gets those of a batch in one record."""
    before = await connections(server)
    size = RECORD_BYTES // 2
    made = [await bench.accept("pair", sizes(size)) for _ in range(3)]
    done = await bench.finished("pair", await bench.dispatch("pair", [one[1] for one in made], via_owner=True))
    answers = [unpack_response(answer) for _, answer in done.replies]
    assert [answer.id for answer in answers] == [one[0] for one in made]
    failed = [answer.error.message for answer in answers if answer.error is not None]
    assert failed[0].startswith("the answers of a batch of model 'pair' are sent in order")
    assert len(failed) == 2
    assert await counted(bench, "pair") == (1, 2)
    assert await connections(server) >= before, "no connection was lost"


async def test_answers_that_are_too_large_together_are_several_entries(bench: Bench, server: PrivateServer) -> None:
    """Several records of an entry are one string."""
    reader, before = Reader(bench, "near"), await connections(server)
    size = SERVER_BYTES * 2 // 5
    made = [await bench.accept("pair", sizes(size), endpoint="near") for _ in range(3)]
    await bench.finished("pair", await bench.dispatch("pair", [one[1] for one in made]))
    assert [told(await reader.ended(one[0])) for one in made] == [[size]] * 3
    assert await counted(bench, "pair") == (3, 0)
    assert await connections(server) >= before, "no connection was lost"
