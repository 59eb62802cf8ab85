"""Two executors of a model; one was not there when a load request brought a configuration or files (R24, R25)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from executor_bench import WEIGHTS, Bench, linear, running
from memory_log.log import MemoryLog

from charonia import keys
from charonia.eventlog.control import folded_control
from charonia.facts.events import (
    FIELD_FACT,
    Fact,
    ModelExcluded,
    ModelRequested,
    ModelRequestFinished,
    ProcessJoined,
    ProcessLeft,
    VersionFailed,
    VersionLoaded,
    pack_fact,
)
from executors.deployment import lifecycle
from protos.model_config_pb2 import ModelConfig

CONFIG = '{"name": "m", "backend": "onnxruntime", "max_batch_size": "16"}'


class Two:
    """Executors over one log."""

    def __init__(self) -> None:
        self.log = MemoryLog()
        self._serial = 0
        self.benches: dict[str, Bench] = {}

    @asynccontextmanager
    async def executor(self, name: str, repository: Path, *load: str) -> AsyncIterator[Bench]:
        await asyncio.to_thread(repository.mkdir, exist_ok=True)
        settings: dict[str, Any] = {"model_control_mode": "explicit", "load_model": load, "exit_on_error": True}
        async with running(repository, log=self.log, incarnation=name, **settings) as bench:
            self.benches[name] = bench
            yield bench
        del self.benches[name]

    async def request(self, action: str, **fields: Any) -> dict[str, str]:
        """Ask all executors, and return their errors by executor."""
        self._serial += 1
        fact = ModelRequested(action, "m", f"request-{self._serial}", **fields)
        await self.log.append(keys.CONTROL, [FIELD_FACT, pack_fact(fact)])
        errors = {}
        for name, bench in self.benches.items():
            wanted = {"executor": name, "request_id": fact.request_id}
            errors[name] = (await bench.control.fact(ModelRequestFinished, **wanted)).error
        return errors

    async def bring(self, path: Path, version: int = 1) -> dict[str, str]:
        """Have all executors load `m` from a file."""
        await self.log.put_blob("blob", await asyncio.to_thread(path.read_bytes), 60)
        return await self.request("load", config_json=CONFIG, files={f"{version}/model.onnx": "blob"})

    async def report(
        self, executor: str, *versions: int, config: bytes = b"", override_config: str = "", leased: bool = True
    ) -> None:
        """Play an executor that serves files, or a configuration, of a request which no other one was there for."""
        if leased:
            await self.log.beat("executor", executor, 600_000)
        facts: list[Fact] = [ProcessJoined("executor", executor)]
        override = {"override_id": "old", "override_config": override_config}
        facts += [VersionLoaded(executor, "m", number, "other", 1, config, **override) for number in versions]
        await self.log.append(keys.CONTROL, [part for fact in facts for part in (FIELD_FACT, pack_fact(fact))])

    async def lost(self, executor: str) -> None:
        await self.log.append(keys.CONTROL, [FIELD_FACT, pack_fact(ProcessLeft("executor", executor, "lost"))])

    def served(self, executor: str) -> dict[int, str]:
        """The content that an executor serves of `m`, by version; what only drains does not count."""
        deployment = self.benches[executor].service._deployment
        ready = deployment._lifecycle.ready_versions("m")
        return {version: deployment.serving["m", version].content_hash for version in ready}

    async def until_served(self, executor: str, wanted: dict[int, str]) -> None:
        async with asyncio.timeout(30):
            while self.served(executor) != wanted:
                await asyncio.sleep(0.001)


@pytest.fixture
async def two() -> Two:
    return Two()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Holds `m`."""
    linear(tmp_path / "repository" / "m" / "1" / "model.onnx")
    return tmp_path / "repository"


@pytest.fixture
def brought(tmp_path: Path) -> Path:
    path = tmp_path / "brought.onnx"
    linear(path, WEIGHTS * 5)
    return path


async def test_an_executor_that_starts_leaves_brought_files_to_those_that_have_them(
    two: Two, repository: Path, brought: Path
) -> None:
    async with two.executor("e-1", repository, "m"):
        of_repository = two.served("e-1")
        assert await two.bring(brought) == {"e-1": ""}
        of_request = two.served("e-1")
        assert of_request != of_repository
        async with two.executor("e-2", repository, "m") as second:
            assert two.served("e-2") == {}
            excluded = await second.control.fact(ModelExcluded, executor="e-2")
            assert excluded.reason.startswith("executor e-1 serves files of a load request that came before")
            assert two.served("e-1") == of_request
            # a load of the repository's files ends what the request brought, everywhere
            assert await two.request("load") == {"e-1": "", "e-2": ""}
            assert two.served("e-1") == two.served("e-2") == of_repository
            assert await two.bring(brought) == {"e-1": "", "e-2": ""}
            assert two.served("e-1") == two.served("e-2") == of_request


async def test_accepted_requests_wait_where_the_last_executor_with_the_brought_files_is_lost(
    two: Two, repository: Path, brought: Path
) -> None:
    """One that left the model to it and is younger is not its successor (`Catalog._was_succeeded`)."""
    async with two.executor("e-1", repository, "m"):
        await two.bring(brought)
        async with two.executor("e-2", repository, "m"), asyncio.timeout(30):
            held: object = None
            while not held:
                catalog = await folded_control(two.log)
                catalog.apply(ProcessLeft("executor", "e-1", "lost"))
                held = catalog.held("m")
                await asyncio.sleep(0.01)


async def test_the_repositorys_files_are_served_once_no_executor_has_the_brought_ones(
    two: Two, repository: Path, brought: Path
) -> None:
    async with two.executor("e-1", repository, "m"):
        of_repository = two.served("e-1")
        await two.bring(brought)
        async with two.executor("e-2", repository, "m"):
            assert two.served("e-2") == {}
            await two.lost("e-1")
            await two.until_served("e-2", of_repository)


async def test_the_load_that_follows_the_loss_is_tried_again_where_it_fails(
    two: Two, repository: Path, brought: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason may pass, as that of a disk that cannot be read for a moment, and no fact may follow."""
    monkeypatch.setattr(lifecycle, "_FIRST_RETRY_S", 0.01)
    file = repository / "m" / "1" / "model.onnx"
    readable = await asyncio.to_thread(file.read_bytes)
    async with two.executor("e-1", repository, "m"):
        of_repository = two.served("e-1")
        await two.bring(brought)
        async with two.executor("e-2", repository, "m") as second:
            await asyncio.to_thread(file.write_bytes, b"cannot be read")
            await two.lost("e-1")
            failures = {"executor": "e-2", "model": "m"}
            assert "parsing failed" in (await second.control.fact(VersionFailed, **failures)).message
            assert two.served("e-2") == {}
            await asyncio.to_thread(file.write_bytes, readable)
            await two.until_served("e-2", of_repository)
    assert "failed to load m, trying again in 0.01 s: " in caplog.text


async def test_a_configuration_is_taken_over_although_its_load_failed_first(
    two: Two, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "_FIRST_RETRY_S", 0.01)
    file = repository / "m" / "1" / "model.onnx"
    readable = await asyncio.to_thread(file.read_bytes)
    async with two.executor("e-2", repository, "m") as second:
        before = two.served("e-2")
        await asyncio.to_thread(file.write_bytes, b"cannot be read")
        await two.report("e-1", 1, override_config=CONFIG)
        await second.control.fact(VersionFailed, executor="e-2", model="m")
        assert two.served("e-2") == before
        await asyncio.to_thread(file.write_bytes, readable)
        async with asyncio.timeout(30):
            while second.service._deployment.serving["m", 1].source.config.max_batch_size != 16:
                await asyncio.sleep(0.001)


async def test_a_model_that_is_unloaded_meanwhile_is_not_loaded_to_agree_with_others(
    two: Two, repository: Path, brought: Path
) -> None:
    async with two.executor("e-1", repository, "m"):
        await two.bring(brought)
        async with two.executor("e-2", repository, "m") as second:
            deployment = second.service._deployment
            lock = deployment.lock("m")
            await lock.acquire()  # an earlier load is under way
            deployment.agreement.hear(ProcessLeft("executor", "e-1", "lost"))
            tasks = []
            for work in (deployment.unload("m"), deployment.agreement.agree("m")):
                tasks.append(asyncio.ensure_future(work))
                while len(lock._waiters or ()) < len(tasks):
                    await asyncio.sleep(0)
            lock.release()
            await asyncio.gather(*tasks)
            assert two.served("e-2") == {}


async def test_an_executor_that_starts_takes_a_configuration_over(two: Two, repository: Path) -> None:
    def sizes(bench: Bench, executor: str) -> list[int]:
        facts = [f for f in bench.control.facts() if isinstance(f, VersionLoaded) and f.executor == executor]
        return [ModelConfig.FromString(fact.config).max_batch_size for fact in facts]

    async with two.executor("e-1", repository, "m"):
        await two.request("load", config_json=CONFIG)
        async with two.executor("e-2", repository, "m") as second:
            assert sizes(second, "e-2") == [16]
            assert two.served("e-1") == two.served("e-2")
            assert await two.request("load") == {"e-1": "", "e-2": ""}
            assert two.served("e-1") == two.served("e-2"), "a plain load keeps it at both (R24)"
            await two.request("unload")
            await two.request("load")
            assert two.served("e-1") == two.served("e-2")
            assert sizes(second, "e-2") == [16, 4]


async def test_an_executor_that_gets_a_plain_load_takes_a_configuration_over(two: Two, repository: Path) -> None:
    async with two.executor("e-1", repository):
        await two.request("load", config_json=CONFIG)
        async with two.executor("e-2", repository):
            assert two.served("e-2") == {}
            await two.request("load")
            assert two.served("e-1") == two.served("e-2") != {}


async def test_brought_files_end_where_the_repository_lacks_the_model_and_another_has_it(
    two: Two, repository: Path, brought: Path
) -> None:
    """R25: a plain load ends the files of an earlier request."""
    async with two.executor("e-1", repository, "m"), two.executor("e-2", repository.parent / "empty") as second:
        of_repository = two.served("e-1")
        assert await two.bring(brought, 7) == {"e-1": "", "e-2": ""}
        assert list(two.served("e-2")) == [7]
        refused = "failed to load 'm', failed to poll from model repository"
        assert await two.request("load") == {"e-1": "", "e-2": refused}
        await two.until_served("e-2", {})
        assert two.served("e-1") == of_repository
        excluded = await second.control.fact(ModelExcluded, executor="e-2")
        assert "the repository's cannot be loaded here" in excluded.reason
        assert await two.bring(brought, 7) == {"e-1": "", "e-2": ""}
        assert two.served("e-1") == two.served("e-2")


async def test_brought_files_stay_where_no_repository_has_the_model(two: Two, tmp_path: Path, brought: Path) -> None:
    """As in Triton: the load fails, and what is served goes on."""
    async with two.executor("e-1", tmp_path / "one"), two.executor("e-2", tmp_path / "other"):
        await two.bring(brought)
        served = two.served("e-1")
        errors = await two.request("load")
        assert all("failed to poll" in error for error in errors.values())
        assert two.served("e-1") == two.served("e-2") == served != {}


async def test_files_that_were_not_known_of_at_the_start_are_left_to_others(
    two: Two, repository: Path, brought: Path
) -> None:
    """The request came before this executor began to listen, and another reports the files of it later."""
    async with two.executor("e-2", repository, "m") as second:
        served = second.service._deployment.serving["m", 1]
        await two.report("e-1", 1, config=served.source.config.SerializeToString())
        await two.until_served("e-2", {})
        await two.lost("e-1")
        await two.until_served("e-2", {1: served.content_hash})


async def test_a_model_stays_left_to_others_where_a_load_with_new_files_succeeds_only_there(
    two: Two, repository: Path, tmp_path: Path
) -> None:
    """The repository's files would be served beside the ones that the client has brought last."""
    async with two.executor("e-2", repository, "m") as second:
        of_repository = two.served("e-2")
        await two.report("e-1", 1)
        await two.until_served("e-2", {})
        bad = tmp_path / "bad.onnx"
        await asyncio.to_thread(bad.write_bytes, b"cannot be loaded at this executor")
        assert "parsing failed" in (await two.bring(bad))["e-2"]
        agreement = second.service._deployment.agreement
        later = VersionLoaded("e-1", "m", 1, "later", 1, b"", override_id="request-1")
        await two.log.append(keys.CONTROL, [FIELD_FACT, pack_fact(later)])
        async with asyncio.timeout(30):
            while later not in agreement._elsewhere._loaded["m"].values():
                await asyncio.sleep(0.001)
        await agreement.agree("m")
        assert two.served("e-2") == {}
        await two.lost("e-1")
        await two.until_served("e-2", of_repository)


async def test_a_model_is_left_once_however_many_versions_others_report(two: Two, repository: Path) -> None:
    """Each wait for a lost executor would keep a client's load waiting."""
    async with two.executor("e-2", repository, "m") as second:
        await two.report("e-1", 1, 2, 3)
        await two.until_served("e-2", {})
        assert await two.request("load") == {"e-2": ""}
        assert len([f for f in second.control.facts() if isinstance(f, ModelExcluded)]) == 1
        assert list(two.served("e-2")) == [1]


async def test_files_of_executors_that_nobody_reports_as_lost_do_not_count(two: Two, repository: Path) -> None:
    """All processes were killed at once: the ones that report losses may start later than an executor."""
    await two.report("e-0", 1, leased=False)
    async with two.executor("e-2", repository, "m") as second:
        assert list(two.served("e-2")) == [1]
        assert not [f for f in second.control.facts() if isinstance(f, ModelExcluded)]


async def test_what_an_executor_reports_after_its_loss_was_reported_does_not_count(two: Two, repository: Path) -> None:
    """It ended before it could join again: its loss is not reported twice."""
    async with two.executor("e-2", repository, "m") as second:
        of_repository = two.served("e-2")
        await two.report("e-1", 1)
        await two.until_served("e-2", {})
        await two.lost("e-1")
        late = VersionLoaded("e-1", "m", 2, "other", 1, b"", override_id="old")
        await two.log.append(keys.CONTROL, [FIELD_FACT, pack_fact(late)])
        await two.until_served("e-2", of_repository)
        assert await two.request("load") == {"e-2": ""}
        assert not second.service._deployment.agreement._elsewhere.of("m")


async def test_a_model_is_served_when_no_executor_with_its_files_comes_back_in_a_new_log(
    two: Two, repository: Path
) -> None:
    """No process reports the loss of an executor that has not joined the new log."""
    async with two.executor("e-2", repository, "m"):
        await two.report("e-1", 1)
        await two.until_served("e-2", {})
        await two.log.end_beat("executor", "e-1")
        two.log._epoch = "another"
        async with asyncio.timeout(30):
            while list(two.served("e-2")) != [1]:
                await asyncio.sleep(0.001)
