"""Loading models over a log in memory: whose answers are waited for, and what ends the wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from memory_log.log import MemoryLog

from charonia import keys
from charonia.calls.model_control import ModelControl
from charonia.errors import ErrorCode, InternalError, InvalidArgument, LogUnavailable, Unavailable
from charonia.eventlog.control import ControlPlane
from charonia.facts.events import (
    FIELD_FACT,
    ExecutorDraining,
    Fact,
    ModelExcluded,
    ModelRequested,
    ModelRequestFinished,
    ProcessJoined,
    ProcessLeft,
    RepositoryScanned,
    VersionLoaded,
    VersionStateChanged,
    facts_of,
    pack_fact,
)
from protos.model_config_pb2 import ModelConfig


async def tell(log: MemoryLog, *facts: Fact) -> None:
    for fact in facts:
        await log.append(keys.CONTROL, [FIELD_FACT, pack_fact(fact)])


async def requested(log: MemoryLog) -> ModelRequested:
    async with asyncio.timeout(30):
        while True:
            for entry in await log.range(keys.CONTROL):
                for fact in facts_of(entry):
                    if isinstance(fact, ModelRequested):
                        return fact
            await asyncio.sleep(0)


@pytest.fixture
async def log() -> MemoryLog:
    log = MemoryLog()
    await tell(log, ProcessJoined("executor", "e"), RepositoryScanned("e", ("m",), "explicit", ready=True))
    return log


@pytest.fixture
async def control(log: MemoryLog) -> AsyncIterator[ControlPlane]:
    control = ControlPlane(log, check_interval_ms=3_600_000, incarnation="g")
    await control.start()
    yield control
    await control.close()


async def test_a_load_returns_when_the_executor_has_answered(log: MemoryLog, control: ControlPlane) -> None:
    loading = asyncio.ensure_future(ModelControl(control, log).load("m", None, {}))
    request = await requested(log)
    assert (request.action, request.model) == ("load", "m")
    assert not loading.done()
    await tell(log, ModelRequestFinished("e", request.request_id))
    await asyncio.wait_for(loading, 30)


async def test_the_executors_own_error_is_raised(log: MemoryLog, control: ControlPlane) -> None:
    loading = asyncio.ensure_future(ModelControl(control, log).load("m", None, {}))
    request = await requested(log)
    await tell(log, ModelRequestFinished("e", request.request_id, int(InvalidArgument.code), "broken"))
    with pytest.raises(InvalidArgument, match="broken"):
        await asyncio.wait_for(loading, 30)


async def test_whoever_was_asked_may_leave(log: MemoryLog, control: ControlPlane) -> None:
    loading = asyncio.ensure_future(ModelControl(control, log).load("m", None, {}))
    await requested(log)
    await tell(log, ProcessLeft("executor", "e", "lost"))
    with pytest.raises(Unavailable, match="every executor that was asked left before model 'm' was loaded"):
        await asyncio.wait_for(loading, 30)


async def test_nobody_answers_what_another_log_never_heard_of(log: MemoryLog, control: ControlPlane) -> None:
    loading = asyncio.ensure_future(ModelControl(control, log).load("m", None, {}))
    await requested(log)
    await log.delete_stream(keys.CONTROL)
    control.begin_anew()
    with pytest.raises(LogUnavailable, match="log epoch changed"):
        await asyncio.wait_for(loading, 30)


async def test_what_cannot_be_loaded_is_refused_before_anybody_is_asked(log: MemoryLog, control: ControlPlane) -> None:
    models = ModelControl(control, log)
    for name in ("../m", "a/b", " .. ", " "):
        with pytest.raises(InvalidArgument):
            await models.load(name, None, {})
    with pytest.raises(InvalidArgument, match="must be specified for model file override"):
        await models.load("m", None, {"1/model.onnx": b""})
    with pytest.raises(InvalidArgument, match=r"^the configuration of a model must be a string, not dict$"):
        await models.load("m", {"name": "m"}, {})  # type: ignore[arg-type]
    for change in (models.load(5, None, {}), models.unload(5, unload_dependents=False)):  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match=r"^the name of a model must be a string, not int$"):
            await change
    await tell(log, RepositoryScanned("e", ("m",), "none", ready=True))
    async with asyncio.timeout(30):
        while control.catalog.control_modes() != {"none"}:
            await control.changed()
    with pytest.raises(Unavailable, match="not allowed if polling is enabled"):
        await models.load("m", None, {})
    assert not [f for entry in await log.range(keys.CONTROL) for f in facts_of(entry) if isinstance(f, ModelRequested)]


# -- several executors -------------------------------------------------------------------------------------------------


async def test_those_that_should_load_it_decide(log: MemoryLog, control: ControlPlane) -> None:
    """One on which the model is not placed says so, and counts only when nobody else has anything to say."""
    await tell(log, ProcessJoined("executor", "f", pool="gpu"), RepositoryScanned("f", ("m",), "explicit", ready=True))
    await control.changed()
    loading = asyncio.ensure_future(ModelControl(control, log).load("m", None, {}))
    request = await requested(log)
    await tell(
        log,
        ModelExcluded("e", "m", "not here"),
        ModelRequestFinished("e", request.request_id, int(ErrorCode.UNAVAILABLE), "not here"),
        ModelRequestFinished("f", request.request_id, int(ErrorCode.INVALID_ARG), "load failed"),
    )
    with pytest.raises(InvalidArgument, match=r"^load failed$"):
        await loading


async def test_placed_nowhere_is_the_answer_of_last_resort(log: MemoryLog, control: ControlPlane) -> None:
    loading = asyncio.ensure_future(ModelControl(control, log).load("m", None, {}))
    request = await requested(log)
    await tell(
        log,
        ModelExcluded("e", "m", "not here"),
        ModelRequestFinished("e", request.request_id, int(ErrorCode.UNAVAILABLE), "not here"),
    )
    with pytest.raises(Unavailable, match=r"^not here$"):
        await loading


async def test_one_that_drains_is_not_waited_for(log: MemoryLog, control: ControlPlane) -> None:
    await tell(log, ProcessJoined("executor", "f"), RepositoryScanned("f", ("m",), "explicit", ready=True))
    await tell(log, ExecutorDraining("e"))
    async with asyncio.timeout(30):
        while control.catalog.answering_executors() != ["f"]:
            await control.changed()
    loading = asyncio.ensure_future(ModelControl(control, log).load("m", None, {}))
    request = await requested(log)
    await tell(log, ModelRequestFinished("f", request.request_id))
    await asyncio.wait_for(loading, 30)


async def test_one_in_another_mode_is_not_asked(log: MemoryLog, control: ControlPlane) -> None:
    """An executor that loads on demand beside an explicit one neither loads for others nor keeps them from it."""
    await tell(log, ProcessJoined("executor", "f"), RepositoryScanned("f", ("m",), "none", ready=True))
    async with asyncio.timeout(30):
        while control.catalog.control_modes() != {"none", "explicit"}:
            await control.changed()
    models = ModelControl(control, log)
    loading = asyncio.ensure_future(models.load("m", None, {}))
    request = await requested(log)
    refused = int(ErrorCode.UNAVAILABLE)
    await tell(log, ModelRequestFinished("f", request.request_id, refused, "polling is enabled"))
    await tell(log, ModelRequestFinished("e", request.request_id, int(ErrorCode.INVALID_ARG), "load failed"))
    with pytest.raises(InvalidArgument, match=r"^load failed$"):
        await asyncio.wait_for(loading, 30)


# -- unloading ---------------------------------------------------------------------------------------------------------


async def serve(log: MemoryLog, control: ControlPlane) -> None:
    """Have executor e serve version 1 of model m."""
    await tell(log, VersionLoaded("e", "m", 1, "content", 1, ModelConfig(name="m").SerializeToString()))
    async with asyncio.timeout(30):
        while not control.catalog.is_ready("m", -1):
            await control.changed()


async def test_an_unload_returns_when_the_model_is_not_ready_here(log: MemoryLog, control: ControlPlane) -> None:
    await serve(log, control)
    unloading = asyncio.ensure_future(ModelControl(control, log).unload("m", unload_dependents=False))
    request = await requested(log)
    assert (request.action, request.model) == ("unload", "m")
    await control.changed()
    assert not unloading.done(), "the executor has only heard of it"
    await tell(log, VersionStateChanged("e", "m", 1, "UNLOADING"), ModelRequestFinished("e", request.request_id))
    await asyncio.wait_for(unloading, 30)
    assert not control.catalog.is_ready("m", -1)


async def test_what_an_executor_could_not_unload_is_said(log: MemoryLog, control: ControlPlane) -> None:
    unloading = asyncio.ensure_future(ModelControl(control, log).unload("m", unload_dependents=False))
    request = await requested(log)
    await tell(log, ModelRequestFinished("e", request.request_id, int(ErrorCode.INTERNAL), "OSError: broken"))
    with pytest.raises(InternalError, match="broken"):
        await asyncio.wait_for(unloading, 30)


async def test_an_executor_that_leaves_has_unloaded(log: MemoryLog, control: ControlPlane) -> None:
    unloading = asyncio.ensure_future(ModelControl(control, log).unload("m", unload_dependents=False))
    await requested(log)
    await tell(log, ProcessLeft("executor", "e", "lost"))
    await asyncio.wait_for(unloading, 30)


async def test_an_unload_that_is_not_answered_names_what_is_still_served(log: MemoryLog, control: ControlPlane) -> None:
    await serve(log, control)
    with pytest.raises(InternalError) as caught:
        await ModelControl(control, log, max_wait_s=0.01).unload("m", unload_dependents=False)
    assert caught.value.message == "failed to unload 'm', versions that are still available: 1"


async def test_an_unload_takes_any_name(log: MemoryLog, control: ControlPlane) -> None:
    unloading = asyncio.ensure_future(ModelControl(control, log).unload("../etc", unload_dependents=False))
    await tell(log, ModelRequestFinished("e", (await requested(log)).request_id))
    await asyncio.wait_for(unloading, 30)
