"""Instances of every shape in a process of their own answer as in the executor's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import plugin_backends
import pytest
from fake_tensorrt import driver_file

from charonia.backend import (
    BatchInstance,
    InstanceSpec,
    ModelCalls,
    ModelRequest,
    ModelResponse,
    ModelSource,
    Outcome,
    RequestInstance,
    StreamingInstance,
    Timings,
    WindowedInstance,
)
from charonia.errors import Cancelled, CharoniaError, InternalError, InvalidArgument, NotFound
from charonia.inference import InferenceRequest
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from charonia.tensors import Tensor
from executors.configuration.config import normalise
from executors.isolation.isolated_model import IsolatedModel

__all__ = ["driver_file"]

CONFIG = """
name: "m" backend: "shapes" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: -1 } output { name: "y" data_type: TYPE_FP32 dims: -1 }
parameters { key: "shape" value { string_value: "SHAPE" } }
"""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(plugin_backends.install(tmp_path / "site")), prepend=":")


class Isolated:
    """A model of `plugin_backends.shapes` with one instance."""

    def __init__(
        self, directory: Path, shape: str, *, sandboxed: bool = False, more: str = "", calls: ModelCalls | None = None
    ) -> None:
        config = normalise(parse(CONFIG.replace("SHAPE", shape) + more))
        source = ModelSource("m", 1, directory, config)
        self.model = IsolatedModel(replace(source, isolation="sandbox" if sandboxed else "process"), ceiling_s=60)
        kind, device_id = ("GPU", 0) if "KIND_GPU" in more else ("CPU", -1)
        self.spec = InstanceSpec("m_0", kind, device_id, source, ModelInterface.of(config), calls=calls)

    async def __aenter__(self) -> Any:
        self.instance = await self.model.create_instance(self.spec)
        return self.instance

    async def __aexit__(self, *_: object) -> None:
        if isinstance(self.instance, BatchInstance):
            await asyncio.to_thread(self.instance.close)
        else:
            await self.instance.close_instance()
        await self.model.close()


def request(value: float, size: int = 4, **facts: Any) -> ModelRequest:
    tensor = Tensor.of("x", np.full((1, size), value, np.float32))
    return ModelRequest("id", facts.pop("correlation_id", 0), [tensor], (), facts.pop("parameters", {}), **facts)


def value(response: ModelResponse | None) -> float:
    assert response is not None
    assert response.error is None
    return float(response.outputs[0].array().ravel()[-1])  # type: ignore[arg-type]


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize(("shape", "text"), [("exit", "SystemExit: 3"), ("cancel", "CancelledError: upstream")])
async def test_an_instance_whose_making_exits_fails_the_load(shape: str, text: str, tmp_path: Path) -> None:
    isolated = Isolated(tmp_path, shape)
    with pytest.raises(InternalError, match=text):
        async with asyncio.timeout(30), isolated:
            pass
    await isolated.model.close()


@pytest.mark.usefixtures("plugins")
async def test_a_cancelled_health_check_is_answered(tmp_path: Path) -> None:
    more = 'parameters { key: "health" value { string_value: "cancel" } }'
    async with Isolated(tmp_path, "requests", more=more) as instance:
        with pytest.raises(InternalError, match="CancelledError: upstream"):
            async with asyncio.timeout(30):
                await instance.check_health()


@pytest.mark.usefixtures("plugins")
async def test_batches(tmp_path: Path) -> None:
    async with Isolated(tmp_path, "batch") as instance:
        assert isinstance(instance, BatchInstance)
        assert not isinstance(instance, StreamingInstance | RequestInstance)
        assert (instance.stateless, instance.rows_fail_alone, instance.batch_sizes) == (True, True, (1, 4))
        assert await instance.check_health(), "it knows its thread"
        for size in (1, 100_000):
            x = np.array([[1.0], [-2.0], [3.0]], np.float32).repeat(size, 1)
            found = await asyncio.to_thread(instance.execute, {"x": x}, ["y"])
            assert isinstance(found, Outcome)
            assert (found.arrays["y"] == 2 * x).all()
            assert found.timings == Timings(1, 2, 3)
            assert {row: error.message for row, error in found.failures.items()} == {1: "this model takes no -2"}
        with pytest.raises(InvalidArgument, match="takes no -1"):
            await asyncio.to_thread(instance.execute, {"x": -x / x}, ["y"])
        with pytest.raises(InternalError, match="the model gave -2 as 'infer_ns' of its timings"):
            await asyncio.to_thread(instance.execute, {"x": np.full((1, 4), -5, np.float32)}, ["y"])
        x[1] = -6
        found = await asyncio.to_thread(instance.execute, {"x": x}, ["y"])
        assert {row: error.message for row, error in found.failures.items()} == {1: "no file 'a\\udcff'"}
        plain = await asyncio.to_thread(instance.execute, {"x": x[:1]}, ["y"])
        assert isinstance(plain, dict)


@pytest.mark.usefixtures("plugins")
async def test_pinned_batches(tmp_path: Path, driver_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that both processes share is pinned as far as it is used, and keeps its pages."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver_file.parent))
    more = """
    parameters { key: "wants" value { string_value: "pinned" } } instance_group { kind: KIND_GPU gpus: 0 }
    """
    async with Isolated(tmp_path, "batch", more=more) as instance:
        assert instance._slots.keeps_pages
        for size in (1, 100_000, 4_000_000, 20_000, 2_000_000, 3):
            x = np.array([[1.0], [size]], np.float32).repeat(size, 1)
            found = await asyncio.to_thread(instance.execute, {"x": x}, ["y"])
            assert (found["y"] == 2 * x).all()


@pytest.mark.parametrize("sandboxed", [False, True])
@pytest.mark.usefixtures("plugins")
async def test_requests(tmp_path: Path, sandboxed: bool) -> None:
    async with Isolated(tmp_path, "requests", sandboxed=sandboxed) as instance:
        assert isinstance(instance, RequestInstance)
        assert not isinstance(instance, StreamingInstance | BatchInstance)
        assert instance.checks_health
        assert await instance.check_health()
        for size in (1, 100_000):
            batch = [request(3, size, correlation_id=7, flags=1, parameters={"p": "q"}), request(-1, size), request(4)]
            first, second, third = await instance.execute_requests(batch)
            assert (value(first), value(third)) == (6, 8)
            assert first.outputs[0].shape == (1, size)
            assert first.parameters == {"id": "id", "sequence": 7, "flags": 1, "p": "q"}
            assert isinstance(second.error, InvalidArgument)
        for parameters, text in (
            ({"k": 1 << 64}, "response parameter 'k' of model 'm' is an int out of range"),
            ({"k": "\ud800"}, "response parameter 'k' of model 'm' is no Unicode text"),
            ({"shape": 1}, "TypeError: can not serialize 'numpy.int64' object"),
        ):
            for size in (1, 100_000):
                batch = [request(3, size), request(4, size, parameters=parameters), request(5, size)]
                first, second, third = await instance.execute_requests(batch)
                assert (value(first), value(third)) == (6, 10)
                assert second.error is not None
                assert second.error.message.startswith(text)
        # more answers than slots that are kept: the rest travels in frames
        kept = [(await instance.execute_requests([request(n, 50_000)]))[0] for n in range(8)]
        assert [value(one) for one in kept] == [2 * n for n in range(8)]
        waiting = request(-2)
        running = asyncio.create_task(instance.execute_requests([waiting]))
        await asyncio.sleep(0)
        instance.cancel_requests([waiting])
        assert value((await running)[0]) == -4


@pytest.mark.parametrize("shape", ["batch", "requests", "stream"])
@pytest.mark.usefixtures("plugins")
async def test_what_a_model_raises_is_its_failure(tmp_path: Path, shape: str) -> None:
    """Whatever type it has, as in the executor's process."""
    more = "model_transaction_policy { decoupled: true }" if shape == "stream" else ""
    async with Isolated(tmp_path, shape, more=more) as instance:
        try:
            if shape == "batch":
                await asyncio.to_thread(instance.execute, {"x": np.full((1, 4), -4, np.float32)}, ["y"])
            elif shape == "stream":
                await instance.execute_stream([request(-4)], Received())
            else:
                (response,) = await instance.execute_requests([request(-4)])
                assert response.error is not None
                raise response.error
        except InternalError as error:
            assert error.message == "TimeoutError: it waited in vain"
        else:
            pytest.fail("it raised nothing")


@pytest.mark.usefixtures("plugins")
async def test_what_a_stream_raises_after_its_instance_was_freed_is_its_failure(tmp_path: Path) -> None:
    """Its instance takes other requests by then."""
    received = Received()
    async with Isolated(tmp_path, "stream", more="model_transaction_policy { decoupled: true }") as instance:
        await instance.execute_stream([request(-4), request(-3)], received)
    assert [type(error) for error in received.errors] == [InternalError, InternalError]


class Received:
    """A `ResponseStream` that keeps what it gets; of each request a number of responses are wanted."""

    full = blocked = False

    def __init__(self) -> None:
        self.responses: list[tuple[int, float | None, bool]] = []
        self.errors: list[CharoniaError] = []
        self.freed = asyncio.Event()
        self.came = asyncio.Event()

    def send(self, index: int, response: ModelResponse | None, *, final: bool) -> None:
        if response is not None and response.error is not None:
            self.responses.append((index, None, final))
            self.errors.append(response.error)
        else:
            self.responses.append((index, None if response is None else value(response), final))
        self.came.set()

    async def drain(self) -> None: ...

    def free(self) -> None:
        self.freed.set()

    async def until(self, count: int) -> None:
        while len(self.responses) < count:
            self.came.clear()
            await self.came.wait()


@pytest.mark.usefixtures("plugins")
async def test_streams(tmp_path: Path) -> None:
    decoupled = "model_transaction_policy { decoupled: true }"
    async with Isolated(tmp_path, "stream", more=decoupled) as instance:
        assert isinstance(instance, StreamingInstance)
        assert not isinstance(instance, RequestInstance)
        assert isinstance(instance, WindowedInstance)
        for size in (1, 100_000):
            found = Received()
            await instance.execute_stream([request(2, size), request(0, size)], found)
            assert found.responses == [(0, 2, False), (0, 3, False), (0, None, True), (1, None, True)]
            assert found.freed.is_set()
        refused = Received()
        await instance.execute_stream([request(1, parameters={"k": 1 << 64}), request(1)], refused)
        assert refused.responses == [(0, None, False), (0, None, True), (1, 1, False), (1, None, True)]
        (error,) = refused.errors
        assert error.message.startswith("response parameter 'k' of model 'm' is an int out of range")
        refused = Received()
        asked = [request(1, size, parameters={"shape": 1}) for size in (1, 100_000)]
        await instance.execute_stream([*asked, request(1)], refused)
        ends = [(0, None, True), (1, None, False), (1, None, True), (2, 1, False), (2, None, True)]
        assert refused.responses == [(0, None, False), *ends]
        assert {error.message for error in refused.errors} == {"TypeError: can not serialize 'numpy.int64' object"}
        with pytest.raises(CharoniaError, match="ended without a final response"):
            await instance.execute_stream([request(-1)], Received())
        found = Received()
        await instance.execute_stream([request(-3)], found)
        assert found.responses == [(0, None, True)], "an error after it was freed is a response"
        # no more than are wanted
        found, wanted = Received(), request(5, window=2)
        running = asyncio.create_task(instance.execute_stream([wanted], found))
        await found.until(2)
        health = asyncio.create_task(instance.execute_stream([request(1)], Received()))
        await health  # what it would have sent by now has come
        assert len(found.responses) == 2
        instance.allow_responses(wanted, 100)
        await running
        assert len(found.responses) == 6


class Opened:
    """An `OpenCall` of one answer."""

    def __init__(self, answers: list[ModelResponse]) -> None:
        self._answers = answers

    async def next(self) -> ModelResponse | None:
        return self._answers.pop(0) if self._answers else None

    def cancel(self) -> None: ...

    def ask_to_end(self) -> None: ...


class Others:
    """A `ModelCalls` with one model, which doubles."""

    def __init__(self) -> None:
        self.origins: list[Sequence[object]] = []
        self.failure: CharoniaError | None = None

    async def find(self, model: str, version: int) -> ModelInterface:
        if self.failure is not None:
            raise self.failure
        return ModelInterface.of(normalise(parse(CONFIG)))

    async def open(
        self, request: InferenceRequest, model: str, origins: Sequence[object], *, blocks: bool = False
    ) -> Opened:
        self.origins.append(origins)
        return Opened([ModelResponse([Tensor.of("y", request.inputs[0].array() * 2)])])  # type: ignore[operator]

    async def load(self, model: str, config_json: str, files: dict[str, bytes]) -> None: ...

    async def unload(self, model: str, *, unload_dependents: bool) -> None: ...

    async def is_ready(self, model: str, version: str) -> bool:
        return True


@pytest.mark.usefixtures("plugins")
async def test_calls_of_other_models(tmp_path: Path) -> None:
    others = Others()
    async with Isolated(tmp_path, "calls", calls=others, sandboxed=True) as instance:
        origin = object()
        (answer,) = await instance.execute_requests([request(21, 50_000, origin=origin)])
        assert value(answer) == 42
        assert others.origins == [[origin]]
        others.failure = NotFound("no such model")
        (answer,) = await instance.execute_requests([request(21)])
        assert isinstance(answer.error, CharoniaError)
        assert "no such model" in answer.error.message
        others.failure = Cancelled("")
        (answer,) = await instance.execute_requests([request(21)])
        assert isinstance(answer.error, Cancelled)
