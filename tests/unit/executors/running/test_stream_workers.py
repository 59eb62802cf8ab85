"""Which instances answer requests one by one, and what one that does is given."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from charonia.backend import InstanceDied, InstanceSpec, ModelRequest, ModelResponse, ModelSource, ResponseStream
from charonia.clock import monotonic_ns
from charonia.errors import CharoniaError, Unsupported
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from charonia.tensors import Tensor
from charonia.wire import BatchHeader, pack_request, request_meta, unpack_request, unpack_response
from executors.batches.batch_results import Executed
from executors.configuration.config import normalise
from executors.running import stream_workers
from executors.running.instance_pool import InstancePool
from executors.running.stream_workers import StreamWorker
from executors.running.streamed_batch import Outgoing, StreamedBatch
from executors.running.submitted_batch import Responses, SubmittedBatch
from executors.running.workers import TaskWorker

CONFIG = """
name: "m" backend: "x" max_batch_size: 8
input { name: "x" data_type: TYPE_INT32 dims: 1 } output { name: "y" data_type: TYPE_INT32 dims: 1 }
"""
DECOUPLED = "model_transaction_policy { decoupled: true } "
ORDERED = "dynamic_batching { preserve_ordering: true } "
SEQUENCES = "sequence_batching { } "


class Streaming:
    """Gives each request its input twice, or once."""

    copies = 2

    async def execute_stream(self, requests: Sequence[ModelRequest], responses: ResponseStream) -> None:
        for index, request in enumerate(requests):
            for number in range(self.copies):
                (given,) = request.inputs
                response = ModelResponse([Tensor("y", given.datatype, given.shape, given.data)])
                responses.send(index, response, final=number == self.copies - 1)

    async def close_instance(self) -> None: ...


class Both(Streaming):
    answers_later = False
    copies = 1

    async def execute_requests(self, requests: Sequence[ModelRequest]) -> Sequence[ModelResponse]:
        raise NotImplementedError


class Late(Both):
    answers_later = True


def pool_of(config: str, instance: object) -> InstancePool:
    interface = ModelInterface.of(normalise(parse(CONFIG + config)))

    async def create(_: InstanceSpec) -> object:
        raise NotImplementedError

    pool = InstancePool(interface, 1, create)  # type: ignore[arg-type]
    source = ModelSource("m", 1, None, parse(CONFIG))  # type: ignore[arg-type]
    pool.add(InstanceSpec("m_0_0", "CPU", -1, source, interface), instance)  # type: ignore[arg-type]
    return pool


@pytest.mark.parametrize(
    ("config", "instance", "worker"),
    [
        (DECOUPLED, Streaming(), StreamWorker),
        (DECOUPLED, Both(), StreamWorker),
        ("", Streaming(), StreamWorker),
        ("", Both(), TaskWorker),
        ("", Late(), StreamWorker),
        (ORDERED, Late(), TaskWorker),
        (SEQUENCES, Late(), TaskWorker),
        (SEQUENCES, Streaming(), StreamWorker),
        (DECOUPLED + ORDERED, Both(), StreamWorker),
        (DECOUPLED + SEQUENCES, Both(), StreamWorker),
    ],
)
async def test_which_worker_an_instance_gets(config: str, instance: object, worker: type) -> None:
    pool = pool_of(config, instance)
    assert type(pool._workers[0]) is worker
    assert pool.streams is (worker is StreamWorker)


async def test_an_instance_that_only_streams_cannot_do_everything() -> None:
    with pytest.raises(Unsupported, match="which preserve_ordering does not allow"):
        pool_of(ORDERED, Streaming())


@pytest.mark.parametrize("config", [DECOUPLED, ""])
async def test_a_warm_up_runs_without_a_batcher(config: str) -> None:
    pool = pool_of(config, Streaming() if config else Late())
    tensor = Tensor.of("x", np.array([[7]], np.int32))
    meta = request_meta(1, "", [tensor], (), {})
    packed = pack_request(b"1" * 16, b"", b"", meta, [tensor.data], rows=1, signature=0, level=0, accepted_ns=1)
    async with asyncio.timeout(30):
        ((_, executed),) = await pool.warm_up([[unpack_request(packed)]])
    assert executed.failures == []
    assert len(executed.executions) == 1
    final = unpack_response(executed.answers[0])
    assert (final.final, final.place) == (True, (1, 1) if config else None)
    kinds = {name for counts in executed.responses.values() for name in counts if name.endswith("success_count")}
    assert kinds == ({"r0_success_count", "r1_success_count"} if config else set()), "X5"


class Leaving(Streaming):
    """Gives an answer that cannot be read, or ends like a program or a task."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = parameters

    async def execute_stream(self, requests: Sequence[ModelRequest], responses: ResponseStream) -> None:
        if isinstance(self.parameters, BaseException):
            raise self.parameters
        if self.parameters == "plain":
            responses.send(0, ModelResponse(error=ValueError("no error of ours")), final=True)  # type: ignore[arg-type]
            return
        (given,) = requests[0].inputs
        response = ModelResponse([Tensor("y", given.datatype, given.shape, given.data)], self.parameters)
        responses.send(0, response, final=True)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (asyncio.CancelledError("upstream"), "CancelledError: upstream"),
        ("plain", "ValueError: no error of ours"),
        ({"k": [1]}, "response parameter 'k' of model 'm' is a list"),
        ({"k": 1 << 64}, "response parameter 'k' of model 'm' is an int out of range"),
        ({"k": "\ud800"}, "response parameter 'k' of model 'm' is no Unicode text"),
    ],
)
async def test_what_an_instance_must_not_do_is_an_error_of_its_requests(parameters: Any, text: str) -> None:
    pool = pool_of(DECOUPLED, Leaving(parameters))
    tensor = Tensor.of("x", np.array([[7]], np.int32))
    meta = request_meta(1, "", [tensor], (), {})
    packed = pack_request(b"1" * 16, b"", b"", meta, [tensor.data], rows=1, signature=0, level=0, accepted_ns=1)
    with pytest.raises(CharoniaError, match=text):
        async with asyncio.timeout(30):
            await pool.warm_up([[unpack_request(packed)]])


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError("upstream")])
async def test_an_exit_in_empty_slots_or_in_a_close_is_logged(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    class Exiting(Streaming):
        async def execute_stream(self, requests: Sequence[ModelRequest], responses: ResponseStream) -> None:
            raise error

        async def close_instance(self) -> None:
            raise error

    async with asyncio.timeout(30):
        await stream_workers._execute_null_requests(Exiting(), [])
        await asyncio.create_task(pool_of(DECOUPLED, Exiting()).close())
    logged = [record.getMessage() for record in caplog.records]
    text = f"{type(error).__name__}: {error}"
    assert logged == [f"empty slots could not be executed: {text}", f"instance m_0_0 failed to finalize: {text}"]


async def test_a_worker_ends_although_its_instance_dies_in_the_same_moment() -> None:
    pool = pool_of(DECOUPLED, Streaming())
    (worker,) = pool._workers
    assert isinstance(worker, StreamWorker)
    pool.start()
    await asyncio.sleep(0)
    worker._dead.set()
    async with asyncio.timeout(30):
        await pool.close()


async def test_an_idle_instance_that_is_found_dead_is_made_again_without_a_batch() -> None:
    dead, made = Streaming(), Streaming()
    pool = pool_of(DECOUPLED, dead)
    is_made = asyncio.Event()

    async def create(_: InstanceSpec) -> Streaming:
        is_made.set()
        return made

    pool.create = create  # type: ignore[assignment]
    (worker,) = pool._workers
    pool.start()
    await asyncio.sleep(0)
    assert not pool.replace_dead(made)  # type: ignore[arg-type]
    assert pool.replace_dead(dead)  # type: ignore[arg-type]
    assert not pool.replace_dead(dead)  # type: ignore[arg-type]  # it is known
    async with asyncio.timeout(30):
        await is_made.wait()
        while worker.down:
            await asyncio.sleep(0)
        assert worker.generation == 2
        assert not pool.replace_dead(dead)  # type: ignore[arg-type]  # a late answer is not of the new one
        await pool.close()


class Unended:
    """Frees each call at once, and dies in all of them when `dies` is set; or hangs until it is cancelled."""

    def __init__(self) -> None:
        self.dies = asyncio.Event()
        self.begun = asyncio.Semaphore(0)

    async def execute_stream(self, requests: Sequence[ModelRequest], responses: ResponseStream) -> None:
        responses.free()
        self.begun.release()
        await self.dies.wait()
        raise InstanceDied("its process is gone")

    async def close_instance(self) -> None: ...


class NoLog:
    """A writer of responses that keeps none."""

    def open(self, streamed: StreamedBatch, batch: SubmittedBatch, settle: object) -> None: ...

    def close(self, streamed: StreamedBatch) -> None: ...

    def put(self, outgoing: Outgoing) -> None:
        outgoing.batch.flow.written(outgoing.record)

    def freed(self, streamed: StreamedBatch) -> None: ...

    async def written(self, streamed: StreamedBatch) -> None: ...


class Submitted:
    """Batches of one request in a pool, and how they ended."""

    def __init__(self, pool: InstancePool) -> None:
        self.pool = pool

    def submit(self, number: int) -> asyncio.Future[Executed]:
        tensor = Tensor.of("x", np.array([[7]], np.int32))
        meta = request_meta(1, "", [tensor], (), {})
        request_id = number.to_bytes(16, "big")
        packed = pack_request(request_id, b"", b"", meta, [tensor.data], rows=1, signature=0, level=0, accepted_ns=1)
        ended: asyncio.Future[Executed] = asyncio.get_running_loop().create_future()
        responses = Responses(NoLog(), None)  # type: ignore[arg-type]
        header = BatchHeader(str(number), "m", 1, "h", 1, (1,), b"")
        batch = SubmittedBatch([unpack_request(packed)], lambda _, executed: ended.set_result(executed), header)
        batch.responses = responses
        self.pool.submit(batch)
        return ended


@pytest.mark.parametrize("count", [1, 3])
async def test_all_that_run_share_a_death_that_the_health_check_finds_first(count: int) -> None:
    instance = Unended()
    pool = pool_of(DECOUPLED, instance)
    pool.start()
    under = Submitted(pool)
    async with asyncio.timeout(30):
        ends = [under.submit(number) for number in range(count)]
        for _ in ends:
            await instance.begun.acquire()
        assert pool.replace_dead(instance)  # type: ignore[arg-type]
        instance.dies.set()
        deaths = [(await end).death for end in ends]
        await pool.close()
    assert [(death.blameless, death.shared_instance) for death in deaths if death] == [(False, count > 1)] * count


async def test_a_batch_that_comes_as_its_instance_is_found_dead_is_not_to_blame() -> None:
    instance = Unended()
    pool = pool_of(DECOUPLED, instance)
    pool.start()
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        assert pool.replace_dead(instance)  # type: ignore[arg-type]
        end = Submitted(pool).submit(1)
        death = (await end).death
        await pool.close()
    assert death is not None
    assert death.blameless
    assert instance.begun.locked(), "it was called"


async def test_calls_of_a_dead_instance_that_do_not_end_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_workers, "_DEAD_GRACE_S", 0.01)
    instance = Unended()
    pool = pool_of(DECOUPLED, instance)
    made = asyncio.Event()

    async def create(_: InstanceSpec) -> Streaming:
        made.set()
        return Streaming()

    pool.create = create  # type: ignore[assignment]
    pool.start()
    async with asyncio.timeout(30):
        end = Submitted(pool).submit(1)
        await instance.begun.acquire()
        assert pool.replace_dead(instance)  # type: ignore[arg-type]
        death = (await end).death
        await made.wait()
        await pool.close()
    assert death is not None
    assert death.reason == "it is dead, and a call of it did not end"


async def test_an_idle_instance_that_dies_again_and_again_is_made_later_each_time() -> None:
    pool = pool_of(DECOUPLED, Streaming())
    delays: list[float] = []
    (worker,) = pool._workers
    assert isinstance(worker, StreamWorker)

    async def replace(delay_s: float) -> None:
        delays.append(delay_s)
        worker._made_ns = monotonic_ns()

    worker._replace = replace  # type: ignore[assignment, method-assign]
    pool.start()
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        for number in range(10):
            assert pool.replace_dead(worker._instance)  # type: ignore[arg-type]
            while len(delays) <= number:
                await asyncio.sleep(0)
        worker._made_ns -= stream_workers._LONG_LIFE_NS
        assert pool.replace_dead(worker._instance)  # type: ignore[arg-type]
        while len(delays) <= 10:
            await asyncio.sleep(0)
        await pool.close()
    assert delays == [*sorted(delays[:10]), 0.1]
    assert (delays[0], delays[9]) == (0.2, 30)
