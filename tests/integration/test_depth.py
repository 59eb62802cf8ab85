"""An instance with several batches under way, through an executor, in its own process and in another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executor_bench as bench_
import numpy as np
import plugin_backends
import pytest

from charonia import keys
from charonia.facts.events import BatchDied, BatchDiedInCompany, BatchFinished, VersionLoaded
from charonia.tensors import Tensor

CONFIG = """
backend: "deep" max_batch_size: 8 instance_group { count: 1 kind: KIND_CPU }
input { name: "x" data_type: TYPE_FP32 dims: -1 } output { name: "y" data_type: TYPE_FP32 dims: -1 }
parameters { key: "charonia.isolation" value { string_value: "WHERE" } }
parameters { key: "depth" value { string_value: "2" } }
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    site = plugin_backends.install(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")
    monkeypatch.syspath_prepend(site)
    (tmp_path / "models" / "m" / "1").mkdir(parents=True)
    return tmp_path / "models"


class Asking:
    """Requests, each of which is a batch."""

    def __init__(self, bench: bench_.Bench) -> None:
        self.bench = bench
        self.ids: list[bytes] = []

    async def send(self, value: float, size: int) -> str:
        given = np.full((1, size), value, np.float32)
        request_id, record = await self.bench.accept("m", [Tensor.of("x", given)])
        self.ids.append(request_id)
        return await self.bench.dispatch("m", [record])


@pytest.mark.parametrize("where", ["none", "process"])
async def test_batches_are_answered_each_with_its_own(where: str, models: Path) -> None:
    (models / "m" / "config.pbtxt").write_text(CONFIG.replace("WHERE", where))
    async with bench_.running(models) as bench:
        loaded = await bench.control.fact(VersionLoaded)
        assert loaded.slots == 2, "what a batcher may send at a time"
        asking = Asking(bench)
        given = [-1.0 if number % 5 == 4 else float(number) for number in range(30)]
        batches = [await asking.send(value, 1 if number % 2 else 50_000) for number, value in enumerate(given)]
        found = await bench.replies("gw", len(given))
        for value, request_id in zip(given, asking.ids, strict=True):
            answer = found[request_id]
            if value == -1:
                assert answer.error is not None
                assert answer.error.message == "this model takes no -1"
            else:
                array: Any = answer.outputs[0].array()
                assert (array == 2 * value).all()
        for batch_id in batches:
            await bench.finished("m", batch_id, BatchFinished)
        ((_, instance),) = bench.service._deployment.find("m", 1).pool.checking_instances()
        assert await instance.check_health()
        assert bench.service._deployment.find("m", 1).memory == {"GPU 1": 4096, "CPU 0": 512}


async def test_a_process_that_dies_of_one_batch_gives_the_other_back(models: Path) -> None:
    (models / "m" / "config.pbtxt").write_text(CONFIG.replace("WHERE", "process"))
    async with bench_.running(models) as bench:
        asking = Asking(bench)
        batches = [await asking.send(value, 1) for value in (-2, 1)]

        def ends(batch_id: str) -> Any:
            kinds = BatchDied | BatchDiedInCompany | BatchFinished
            return [fact for fact in follower.facts() if isinstance(fact, kinds) and fact.batch_id == batch_id]

        follower = bench_.Follower(bench.log, keys.facts("m"))
        await follower.until(lambda: all(ends(batch_id) for batch_id in batches))
        assert isinstance(ends(batches[0])[0], BatchDied | BatchDiedInCompany)
        again = await asking.send(3, 1)
        await bench.finished("m", again, BatchFinished)
        answer: Any = (await bench.replies("gw", 1))[asking.ids[-1]].outputs[0].array()
        assert answer == 6
