"""More and fewer instances of a served model, in place (R23): who stays, comes and goes, and what runs meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executor_bench import Bench, running

from charonia import keys
from charonia.backend import Array, InstanceSpec, ModelRequest, ModelResponse, ModelSource
from charonia.catalog.catalog import Catalog
from charonia.errors import InternalError
from charonia.facts.events import VersionLoaded
from charonia.tensors import Tensor
from executors.backends.registry import BackendRegistry

CONFIG = """
backend: "counted" max_batch_size: 1
input {{ name: "x" data_type: TYPE_INT32 dims: 1 }} output {{ name: "y" data_type: TYPE_INT32 dims: 1 }}
instance_group {{ count: {count} kind: KIND_CPU }}
parameters {{ key: "k" value {{ string_value: "{parameter}" }} }}
model_warmup {{ name: "w" inputs {{ key: "x" value {{ data_type: TYPE_INT32 dims: 1 zero_data: true }} }} }}
"""


FILES_CONFIG = """{{
"backend": "counted", "max_batch_size": 1,
"input": [{{"name": "x", "data_type": "TYPE_INT32", "dims": [1]}}],
"output": [{{"name": "y", "data_type": "TYPE_INT32", "dims": [1]}}],
"instance_group": [{{"count": {count}, "kind": "KIND_CPU"}}],
"parameters": {{"k": {{"string_value": ""}}}},
"model_warmup": [{{"name": "w", "inputs": {{"x": {{"data_type": "TYPE_INT32", "dims": [1], "zero_data": true}}}}}}]
}}"""
"""`CONFIG` as a load request has it."""


class Counted:
    """A backend that knows its instances, `shape` "thread" or "task"; those in `held` wait before they answer."""

    name = "counted"

    def __init__(self, shape: str) -> None:
        self.shape = shape
        self.made: list[str] = []
        self.files: dict[str, Path] = {}
        """Where the files of each instance are."""
        self.closed: list[str] = []
        self.ran: list[str] = []
        self.fail_warm_up = False
        self.opened = 0
        self.gate = threading.Event()
        self.gate.set()

    async def load(self, source: ModelSource) -> CountedModel:
        self.opened += 1
        return CountedModel(self)

    async def create_instance(self, spec: InstanceSpec) -> Any:
        name = f"{spec.name}#{len(self.made)}"
        self.made.append(name)
        self.files[name] = spec.source.directory / str(spec.source.version) / "file"
        return OnThread(self, name) if self.shape == "thread" else InTask(self, name)

    def work(self, name: str, values: Sequence[int]) -> None:
        if 0 in values and self.fail_warm_up:
            raise InternalError("cold")
        self.ran.append(name)

    @property
    def alive(self) -> set[str]:
        return set(self.made) - set(self.closed)


class CountedModel:
    def __init__(self, backend: Counted) -> None:
        self._backend = backend
        self.create_instance = backend.create_instance

    async def signature(self) -> None: ...

    async def close(self) -> None:
        self._backend.opened -= 1


class OnThread:
    def __init__(self, backend: Counted, name: str) -> None:
        self._backend, self._name = backend, name

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        assert self._backend.gate.wait(30)
        self._backend.work(self._name, inputs["x"].ravel().tolist())
        return {"y": inputs["x"]}

    def close(self) -> None:
        self._backend.closed.append(self._name)


class InTask:
    def __init__(self, backend: Counted, name: str) -> None:
        self._backend, self._name = backend, name

    async def execute_requests(self, requests: Sequence[ModelRequest]) -> Sequence[ModelResponse]:
        while not self._backend.gate.is_set():
            await asyncio.sleep(0.001)
        self._backend.work(self._name, [int(request.inputs[0].array().ravel()[0]) for request in requests])
        return [ModelResponse([Tensor.of("y", request.inputs[0].array())]) for request in requests]

    async def close_instance(self) -> None:
        self._backend.closed.append(self._name)


def configure(repository: Path, count: int, parameter: str = "") -> None:
    (repository / "m" / "1").mkdir(parents=True, exist_ok=True)
    (repository / "m" / "config.pbtxt").write_text(CONFIG.format(count=count, parameter=parameter))


async def ask(bench: Bench, count: int) -> None:
    """So many batches, all answered."""
    batches = []
    for number in range(count):
        _, record = await bench.accept("m", [Tensor.of("x", np.array([[number + 1]], np.int32))])
        batches.append(await bench.dispatch("m", [record]))
    for batch in batches:
        await bench.finished("m", batch)


def loaded(bench: Bench) -> list[VersionLoaded]:
    return [fact for fact in bench.control.facts() if isinstance(fact, VersionLoaded)]


async def until_alive(backend: Counted, count: int) -> None:
    async with asyncio.timeout(30):
        while len(backend.alive) != count:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("shape", ["thread", "task"])
async def test_instances_come_and_go_and_the_others_stay(tmp_path: Path, shape: str) -> None:
    backend = Counted(shape)
    configure(tmp_path, 2)
    given = BackendRegistry({"counted": backend})
    async with running(tmp_path, backends=given, model_control_mode="explicit", load_model=("m",)) as bench:
        first = set(backend.made)
        assert len(first) == 2
        await ask(bench, 3)
        configure(tmp_path, 4)
        assert (await bench.request("load", "m")).error == ""
        assert len(backend.made) == 4
        assert backend.closed == [], "those that were there stay"
        assert len({name.partition("#")[0] for name in backend.made}) == 4, "each has a name of its own"
        assert [fact.slots for fact in loaded(bench)] == [2, 4]
        hashes = {fact.content_hash for fact in loaded(bench)}
        assert len(hashes) == 1
        await ask(bench, 4)
        configure(tmp_path, 1)
        backend.gate.clear()  # what runs meanwhile is finished
        asking = asyncio.ensure_future(ask(bench, 6))
        await asyncio.sleep(0)
        assert (await bench.request("load", "m")).error == ""
        assert loaded(bench)[-1].slots == 1
        backend.gate.set()
        await asking
        await until_alive(backend, 1)
        (stays,) = backend.alive
        backend.ran.clear()
        await ask(bench, 3)
        assert backend.ran == [stays] * 3
        counted = await bench.log.statistics(keys.statistics("m", 1, hashes.pop()))
        assert counted["inference_count"] == 4 + 3 + 4 + 6 + 3, "warm-ups of new instances count, and nothing is lost"
        configure(tmp_path, 3)
        assert (await bench.request("load", "m")).error == ""
        assert stays in backend.alive
        assert len({name.partition("#")[0] for name in backend.alive}) == len(backend.alive) == 3
        await ask(bench, 5)
        assert loaded(bench)[-1].slots == 3
        assert backend.opened == 1, "what was opened to read the configurations is closed"
    assert backend.alive == set()
    assert backend.opened == 0


async def test_what_else_changes_is_a_reload(tmp_path: Path) -> None:
    backend = Counted("task")
    configure(tmp_path, 1)
    given = BackendRegistry({"counted": backend})
    async with running(tmp_path, backends=given, model_control_mode="explicit", load_model=("m",)) as bench:
        configure(tmp_path, 2, parameter="other")
        assert (await bench.request("load", "m")).error == ""
        await until_alive(backend, 2)
        assert len(backend.made) == 3
        (tmp_path / "m" / "1" / "file").write_text("new")
        configure(tmp_path, 3, parameter="other")
        assert (await bench.request("load", "m")).error == ""
        await until_alive(backend, 3)
        assert len(backend.made) == 6
    assert backend.opened == 0


@pytest.mark.parametrize("count", [1, 3])
async def test_no_instance_stays_with_files_that_are_removed(tmp_path: Path, count: int) -> None:
    """The files of a load request go with the next load (R25), also when they equal those of the repository."""
    backend = Counted("task")
    configure(tmp_path, 2)
    (tmp_path / "m" / "1" / "file").write_text("same")
    given = BackendRegistry({"counted": backend})
    async with running(tmp_path, backends=given, model_control_mode="explicit", load_model=("m",)) as bench:
        await bench.log.put_blob("blob", b"same", 60)
        asked = {"config_json": FILES_CONFIG.format(count=count), "files": {"1/file": "blob"}}
        assert (await bench.request("load", "m", **asked)).error == ""
        await until_alive(backend, count)
        (brought,) = {backend.files[name] for name in backend.alive}
        assert brought != tmp_path / "m" / "1" / "file"
        assert (await bench.request("load", "m")).error == ""
        await until_alive(backend, 2)
        assert {backend.files[name] for name in backend.alive} == {tmp_path / "m" / "1" / "file"}
        assert len({fact.content_hash for fact in loaded(bench)}) == 1, "nothing but the count differs"


async def test_instances_that_cannot_come_change_nothing(tmp_path: Path) -> None:
    backend = Counted("task")
    configure(tmp_path, 1)
    given = BackendRegistry({"counted": backend})
    async with running(tmp_path, backends=given, model_control_mode="explicit", load_model=("m",)) as bench:
        backend.fail_warm_up = True
        configure(tmp_path, 3)
        error = (await bench.request("load", "m")).error
        assert error == "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: cold;\n"
        assert len(backend.alive) == 1
        assert backend.opened == 1
        await ask(bench, 2)
        backend.fail_warm_up = False
        assert (await bench.request("load", "m")).error == ""
        assert len(backend.alive) == 3


async def test_a_version_that_drains_is_loaded_again_not_resized(tmp_path: Path) -> None:
    backend = Counted("task")
    configure(tmp_path, 1)
    given = BackendRegistry({"counted": backend})
    async with running(tmp_path, backends=given, model_control_mode="explicit", load_model=("m",)) as bench:
        (first,) = backend.made
        # accepted before the unload, so that the version drains until it has run
        _, record = await bench.accept("m", [Tensor.of("x", np.array([[1]], np.int32))])
        assert (await bench.request("unload", "m")).error == ""
        configure(tmp_path, 2)
        assert (await bench.request("load", "m")).error == ""
        await bench.finished("m", await bench.dispatch("m", [record]))
        async with asyncio.timeout(30):
            while first not in backend.closed:
                await asyncio.sleep(0.001)
        await ask(bench, 3)
        assert len(backend.alive) == 2
        assert [fact.slots for fact in loaded(bench)] == [1, 2]
    assert backend.opened == 0


async def test_clients_are_told_the_new_configuration(tmp_path: Path) -> None:
    backend = Counted("task")
    configure(tmp_path, 1)
    given = BackendRegistry({"counted": backend})
    async with running(tmp_path, backends=given, model_control_mode="explicit", load_model=("m",)) as bench:
        configure(tmp_path, 2)
        assert (await bench.request("load", "m")).error == ""
        catalog = Catalog()
        for fact in bench.control.facts():
            catalog.apply(fact)
        (group,) = catalog.find("m", -1).config.instance_group
        assert group.count == 2
