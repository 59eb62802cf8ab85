"""What a gateway refuses by itself."""

from __future__ import annotations

import pytest
from memory_log.log import MemoryLog

from charonia.errors import InvalidArgument, NotFound, Unavailable
from charonia.eventlog.control import ControlPlane
from charonia.facts.events import FIELD_FACT, ProcessJoined, RepositoryScanned, pack_fact
from charonia.inference import InferenceRequest
from charonia.keys import CONTROL
from charonia.options.settings import GatewaySettings
from gateway.service import GatewayService


async def service(*facts: object) -> tuple[GatewayService, ControlPlane]:
    log = MemoryLog()
    for fact in facts:
        await log.append(CONTROL, [FIELD_FACT, pack_fact(fact)])  # type: ignore[arg-type]
    control = ControlPlane(log, check_interval_ms=3_600_000, incarnation="g")
    await control.start()
    return GatewayService(log, control, GatewaySettings("g")), control


@pytest.mark.parametrize("mode", ["none", "poll"])
async def test_models_are_not_controlled_outside_explicit_mode(mode: str) -> None:
    gateway, control = await service(ProcessJoined("executor", "e"), RepositoryScanned("e", (), mode, ready=True))
    with pytest.raises(Unavailable) as caught:
        await gateway.load_model("m", None, {})
    assert caught.value.message == "explicit model load / unload is not allowed if polling is enabled"
    with pytest.raises(Unavailable):
        await gateway.unload_model("m", unload_dependents=False)
    await control.close()


async def test_files_need_a_configuration() -> None:
    gateway, control = await service(ProcessJoined("executor", "e"), RepositoryScanned("e", (), "explicit", ready=True))
    with pytest.raises(InvalidArgument) as caught:
        await gateway.load_model("m", None, {"1/model.py": b"x"})
    assert caught.value.message == "Load parameter 'config' must be specified for model file override"
    await control.close()


async def test_statistics_have_words_of_their_own_for_unknown_models() -> None:
    gateway, control = await service()
    with pytest.raises(InvalidArgument) as caught:
        await gateway.statistics("m", "")
    assert caught.value.message == "requested model 'm' is not available"
    await control.close()


async def test_a_gateway_that_leaves_is_not_ready_and_still_serves() -> None:
    gateway, control = await service(ProcessJoined("executor", "e"), RepositoryScanned("e", (), "explicit", ready=True))
    gateway.leave_rotation()
    assert (gateway.live(), gateway.ready()) == (True, False)
    with pytest.raises(NotFound):  # and not "exiting"
        await gateway.infer(InferenceRequest("m", -1, []))
    await control.close()


async def test_a_draining_gateway_is_exiting() -> None:
    gateway, control = await service(ProcessJoined("executor", "e"), RepositoryScanned("e", (), "explicit", ready=True))
    assert gateway.ready()
    gateway.begin_drain()
    assert (gateway.live(), gateway.ready()) == (True, False)
    with pytest.raises(Unavailable, match=r"^Server exiting$"):
        await gateway.infer(InferenceRequest("m", -1, []))
    with pytest.raises(Unavailable, match=r"^Server exiting$"):
        await gateway.load_model("m", None, {})
    await control.close()
