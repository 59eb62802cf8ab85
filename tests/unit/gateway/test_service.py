"""What a gateway refuses by itself."""

from __future__ import annotations

import catalog_facts as facts
import pytest
from memory_log.log import MemoryLog

from charonia.errors import InvalidArgument, NotFound, Unavailable
from charonia.eventlog.control import ControlPlane
from charonia.eventlog.port import START
from charonia.facts.events import FIELD_FACT, ProcessJoined, RepositoryScanned, facts_of, pack_fact
from charonia.inference import InferenceRequest
from charonia.keys import CONTROL, statistics
from charonia.options.settings import GatewaySettings
from charonia.releases.route_rule import CANARY, WHOLE, RouteRule, route_fact
from gateway.service import GatewayService

RULE = RouteRule(1, 2, headers=(("x-canary", "yes"),), stage=CANARY)


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
    assert not gateway.loads_by_call()
    with pytest.raises(Unavailable) as caught:
        await gateway.load_model("m", None, {})
    assert caught.value.message == "explicit model load / unload is not allowed if polling is enabled"
    with pytest.raises(Unavailable):
        await gateway.unload_model("m", unload_dependents=False)
    await control.log.append(CONTROL, [FIELD_FACT, pack_fact(route_fact("m", 1, RULE))])
    while "m" not in control.catalog.routes.rules:
        await control.changed()
    for wanted in ({"present": 1}, None):
        with pytest.raises(Unavailable, match="'charonia route' changes them in every mode"):
            await gateway.change_route("m", wanted)
    rule = gateway.route("m")
    assert rule is not None
    assert rule.headers == (("x-canary", ""),), "values are for those who may change them"
    await control.close()


async def test_the_mode_is_not_known_without_an_executor() -> None:
    gateway, control = await service()
    with pytest.raises(Unavailable) as caught:
        await gateway.load_model("m", None, {})
    with pytest.raises(Unavailable, match=f"^{caught.value.message}$"):
        gateway.loads_by_call()
    await control.log.append(CONTROL, [FIELD_FACT, pack_fact(ProcessJoined("executor", "e"))])
    await control.log.append(CONTROL, [FIELD_FACT, pack_fact(RepositoryScanned("e", (), "explicit", ready=True))])
    while not control.catalog.control_modes():
        await control.changed()
    assert gateway.loads_by_call()
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


async def test_metadata_name_the_version_that_was_asked_for_or_all() -> None:
    versions = [facts.loaded(version=version) for version in (1, 3)]
    gateway, control = await service(facts.joined(), *versions, facts.scanned())
    assert [gateway.model_metadata("m", version).versions for version in ("", "1", "3")] == [("1", "3"), ("1",), ("3",)]
    await gateway.close()
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


async def test_rules_outlive_a_log_that_is_replaced_even_if_it_fails_to_join_at_first() -> None:
    fact = route_fact("m", 3, RouteRule(1))
    gateway, control = await service(fact)
    await control.log.delete_stream(CONTROL)
    for _ in range(2):
        gateway.begin_anew()
        assert control.catalog.routes.rules == {"m": RouteRule(1)}, "requests go by it all the time"
    await gateway.publish_routes()
    while control.catalog.routes.unwritten():
        await control.changed()
    await gateway.publish_routes()
    assert [found for entry in await control.log.range(CONTROL, START) for found in facts_of(entry)] == [fact]
    await gateway.close()
    await control.close()


async def test_what_the_present_version_refuses_too_does_not_count_against_a_candidate() -> None:
    rule = RouteRule(1, 2, WHOLE, stage=CANARY)
    versions = [facts.loaded(version=1), facts.loaded(version=2)]
    gateway, control = await service(facts.joined(), *versions, facts.scanned(), route_fact("m", 1, rule))
    with pytest.raises(InvalidArgument):
        await gateway.infer(InferenceRequest("m", -1, [], headers=[]))
    await gateway.close()
    counted = [await control.log.statistics(statistics("m", version, "h1")) for version in (1, 2)]
    assert [fields.get("fail_count", 0) for fields in counted] == [0, 0]
    await control.close()
