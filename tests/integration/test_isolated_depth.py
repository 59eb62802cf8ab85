"""Several batches under way in an instance of another process: time limits, cancellation, what it says of memory."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import plugin_backends
import pytest

from charonia.backend import BatchInstance, InstanceDied, InstanceSpec, Interrupted, ModelSource
from charonia.errors import InternalError
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from executors.configuration.config import normalise
from executors.isolation import isolated_model
from executors.isolation.isolated_batch import IsolatedBatches
from executors.isolation.isolated_model import IsolatedModel

CONFIG = """
name: "m" backend: "deep" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: -1 } output { name: "y" data_type: TYPE_FP32 dims: -1 }
"""
GATED = -3.0
WORN_OUT = -4.0


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Opened for writing, it lets a batch of GATED end."""
    monkeypatch.setenv("PYTHONPATH", str(plugin_backends.install(tmp_path / "site")), prepend=":")
    os.mkfifo(tmp_path / "gate")
    return tmp_path / "gate"


class Deep:
    """The parts of one instance."""

    def __init__(self, gate: Path, *, ceiling_s: float = 60, **parameters: Any) -> None:
        words = {"gate": gate, **parameters}
        more = "".join(
            f'parameters {{ key: "{key}" value {{ string_value: "{word}" }} }}' for key, word in words.items()
        )
        config = normalise(parse(CONFIG + more))
        source = ModelSource("m", 1, gate.parent, config)
        self.model = IsolatedModel(replace(source, isolation="process"), ceiling_s=ceiling_s)
        self.spec = InstanceSpec("m_0", "CPU", -1, source, ModelInterface.of(config))

    async def __aenter__(self) -> list[IsolatedBatches]:
        self.instance = await self.model.create_instance(self.spec)
        assert isinstance(self.instance, IsolatedBatches)
        assert isinstance(self.instance, BatchInstance)
        return self.instance.parallel_parts

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.instance.close)
        await self.model.close()


def begin(part: BatchInstance, value: float) -> asyncio.Task[Any]:
    given = {"x": np.full((1, 1), value, np.float32)}
    return asyncio.create_task(asyncio.to_thread(lambda: float(part.execute(given, ["y"])["y"][0, 0])))  # type: ignore[index]


async def test_waiting_for_earlier_batches_is_not_counted(gate: Path) -> None:
    """Together they take longer than the limit, and each one alone much less, so that a busy machine is no matter."""
    async with Deep(gate, ceiling_s=4.6, depth=5, device_ms=1000) as parts:
        assert await asyncio.gather(*(begin(part, 4) for part in parts)) == [8] * 5


async def test_one_that_never_ends_is_ended_although_others_wait_for_it(gate: Path) -> None:
    async with Deep(gate, ceiling_s=4) as (first, second):
        for part, value in ((second, 1), (first, 2)):
            assert await begin(part, value) == 2 * value  # others that ended do not count for later ones
        ends = [begin(first, GATED), begin(second, GATED)]
        found = await asyncio.gather(*ends, return_exceptions=True)
    assert all(isinstance(one, InstanceDied) for one in found)
    assert any("it ran longer than 4 s (charonia.max_execution_s)" in str(one) for one in found)
    assert [one.blameless for one in found if isinstance(one, InstanceDied)].count(False) == 1


async def test_one_whose_instance_cannot_be_used_any_more_ends_the_process(gate: Path) -> None:
    deep = Deep(gate)
    async with deep as (first, second):
        ends = [begin(first, WORN_OUT), begin(second, WORN_OUT)]
        found = await asyncio.gather(*ends, return_exceptions=True)
        assert all(isinstance(one, InstanceDied) for one in found)
        assert all("exited with code 70" in str(one) for one in found)
        assert any("cannot be used any more: the device is worn out" in one.stderr for one in found)  # type: ignore[union-attr]
        again = await deep.model.create_instance(deep.spec)
        assert isinstance(again, IsolatedBatches)
        assert await begin(again, 3) == 6
        await asyncio.to_thread(again.close)


async def test_a_batch_is_cancelled_before_its_device_has_begun(gate: Path) -> None:
    async with Deep(gate) as (first, second):
        running = begin(first, GATED)
        with await asyncio.to_thread(gate.open, "wb"):  # opens once the device has begun
            waiting = begin(second, 1)
            while not waiting.done():
                second.cancel()
                first.cancel()  # has begun: it is left alone
                await asyncio.sleep(0)
            with pytest.raises(Interrupted):
                await waiting
            assert not running.done()
        assert await running == 2 * GATED
        second.cancel()  # nothing is under way
        assert await begin(second, 5) == 10


async def test_a_model_that_does_not_say_what_it_holds_goes_on(gate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated_model, "_MEMORY_S", 0.05)
    deep = Deep(gate, memory_gate=gate)
    async with deep as (first, _):
        with pytest.raises(InternalError, match=r"model 'm' did not say in 0\.05 s how much memory it holds"):
            await asyncio.to_thread(deep.model.memory)
        assert await begin(first, 1) == 2
        await asyncio.to_thread(gate.write_bytes, b"")  # its late answer is dropped
        assert await begin(first, 2) == 4
