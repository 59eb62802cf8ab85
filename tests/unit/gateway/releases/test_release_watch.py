"""A gateway judges candidates by the statistics in the log, one gateway at a time."""

from __future__ import annotations

import catalog_facts as facts
from memory_log.log import MemoryLog

from charonia import keys
from charonia.eventlog.control import ControlPlane
from charonia.facts.events import FIELD_FACT, Fact, pack_fact
from charonia.inference import InferenceRequest
from charonia.releases.route_rule import CANARY, RELEASED, ROLLED_BACK, Gate, RouteRule, route_fact
from charonia.wire import ResponseRecord
from gateway.releases.release_watch import ReleaseWatch, release_metrics
from gateway.releases.request_recorder import RequestRecorder
from gateway.releases.shadow_requests import ShadowRequests
from gateway.releases.version_choice import VersionChoice
from gateway.requests.delivery import Caller

GATE = Gate(window_s=1e-9, min_requests=10, steps=(5000, 10_000))
RULE = RouteRule(1, 2, 1000, stage=CANARY, gate=GATE)


async def never(_request: InferenceRequest, _caller: Caller) -> ResponseRecord:
    raise AssertionError("nothing is copied here")


class Watched:
    """A log with two versions of `m`, and gateways that watch it."""

    def __init__(self) -> None:
        self.log = MemoryLog()
        self.controls: list[ControlPlane] = []

    async def write(self, *written: Fact) -> None:
        for fact in written:
            await self.log.append(keys.CONTROL, [FIELD_FACT, pack_fact(fact)])

    async def gateway(self, name: str) -> tuple[ReleaseWatch, ControlPlane]:
        control = ControlPlane(self.log, check_interval_ms=3_600_000, incarnation=name)
        await control.start()
        await self.log.beat("gateway", name, 3_600_000)
        self.controls.append(control)
        return ReleaseWatch(self.log, control, name), control

    async def count(self, version: int, answered: int, failed: int = 0, mean_ms: int = 10) -> None:
        increments = {"success_count": answered, "success_ns": answered * mean_ms * 1_000_000, "fail_count": failed}
        await self.log.add_statistics(keys.statistics("m", version, "h1"), increments)

    async def close(self) -> None:
        for control in self.controls:
            await control.close()


async def watched(rule: RouteRule = RULE) -> Watched:
    made = Watched()
    await made.write(
        facts.joined(), facts.loaded(version=1), facts.loaded(version=2), facts.scanned(), route_fact("m", 1, rule)
    )
    await made.count(1, 500)  # before the window
    await made.count(2, 500, 500)
    return made


async def test_a_candidate_that_errs_is_rolled_back() -> None:
    world = await watched()
    watch, control = await world.gateway("g1")
    await watch.look()
    await world.count(1, 90)
    await world.count(2, 5, 5)
    await watch.look()
    rule = control.catalog.routes.rules["m"]
    assert (rule.stage, rule.share, control.catalog.routes.revisions["m"]) == (ROLLED_BACK, 0, 2)
    assert rule.history[-1].reason.startswith("50.0% of 10 requests in ")
    await watch.look()
    assert await world.log.owner(keys.release_owner("m")) == ("", 1), "there is nothing to judge any more"
    shadows, recorder = ShadowRequests(world.log, never), RequestRecorder(world.log)
    families = {
        metric.name: metric for metric in release_metrics(VersionChoice(control.catalog), watch, shadows, recorder)
    }
    (sample,) = families["charonia_release_decisions"].samples
    assert (sample.labels, sample.value) == ({"model": "m", "decision": "roll_back"}, 1)
    await world.close()


async def test_a_good_one_advances_step_by_step_until_it_is_released() -> None:
    world = await watched()
    watch, control = await world.gateway("g1")
    rules = control.catalog.routes.rules
    shares = []
    for _ in range(2):
        await watch.look()
        await world.count(1, 90)
        await world.count(2, 10)
        await watch.look()
        shares.append(rules["m"].share)
    assert shares == [5000, 0]
    assert (rules["m"].present, rules["m"].candidate, rules["m"].stage) == (2, 0, RELEASED)
    assert [decision.by for decision in rules["m"].history] == ["gate", "gate"]
    await world.close()


async def test_one_gateway_judges_until_it_is_lost() -> None:
    world = await watched()
    first, _ = await world.gateway("g1")
    second, control = await world.gateway("g2")
    await first.look()
    await world.count(1, 90)
    await world.count(2, 0, 10)
    await second.look()
    await second.look()
    assert control.catalog.routes.rules["m"].stage == CANARY, "another gateway judges it"
    await world.log.end_beat("gateway", "g1")
    await second.look()  # takes it over and begins a window
    await world.count(2, 0, 10)
    await second.look()
    assert control.catalog.routes.rules["m"].stage == ROLLED_BACK
    await first.look()
    await first.close()
    await world.close()


async def test_what_an_operator_changes_meanwhile_counts() -> None:
    world = await watched()
    watch, control = await world.gateway("g1")
    await watch.look()
    await world.count(1, 90)
    await world.count(2, 0, 10)
    await world.write(route_fact("m", 2, None))
    while "m" in control.catalog.routes.rules:
        await control.changed()
    await watch.look()
    assert "m" not in control.catalog.routes.rules
    await world.close()
