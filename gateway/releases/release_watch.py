"""Judges the candidates of releases: measures, decides by `charonia.releases.release_gate`, and writes the new rule.

One gateway judges a model's candidate at a time, by a token of the log as a model belongs to a batcher; when it is
lost, another one takes over and begins a new window. The figures are the statistics in the log, so they are of all
gateways.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, Metric

from charonia import keys
from charonia.catalog.catalog import Catalog, ServedVersion
from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import CharoniaError
from charonia.eventlog.port import Keys, Leases, Statistics
from charonia.facts.events import RouteChanged
from charonia.releases.release_gate import ADVANCE, BEGIN, ROLL_BACK, VersionCounts, counts_of, judge
from charonia.releases.route_rule import Gate, RouteRule, advanced, next_step, rolled_back, route_fact
from charonia.tasks import Tasks, periodic

from .request_recorder import RequestRecorder
from .shadow_requests import ShadowRequests
from .version_choice import VersionChoice

_CHECK_S = 1.0
"""Executors write the counts of waves once a second: looking more often shows nothing more."""
_PATIENCE_S = 30.0
"""How long to wait until a decision that was written is read back."""

_log = logging.getLogger(__name__)


class ReleaseLog(Leases, Statistics, Keys, Protocol):
    """What of the log a release needs."""


class Control(Protocol):
    """Reads and writes control facts (`charonia.eventlog.control.ControlPlane`)."""

    catalog: Catalog

    async def announce(self, fact: RouteChanged) -> None: ...

    async def changed(self) -> None: ...


@dataclass(slots=True)
class _Window:
    """A window of one candidate's judgement: when it began, and the counts of both versions then."""

    about: tuple[str, str, int, Gate]
    """The contents of both versions, the share and the gate: when one changes, a new window begins."""
    began_ns: int
    present: VersionCounts
    candidate: VersionCounts


class ReleaseWatch:
    """Judges candidates for one gateway. Call `start`, and `close` at the end."""

    def __init__(self, log: ReleaseLog, control: Control, incarnation: str) -> None:
        self._log = log
        self._control = control
        self._incarnation = incarnation
        self._tokens: dict[str, int] = {}
        """The models whose candidates this gateway judges."""
        self._windows: dict[str, _Window] = {}
        self._tasks = Tasks()
        self.decisions: dict[tuple[str, str], int] = {}
        """Counts by model and action."""

    def start(self) -> None:
        judging = periodic(
            *(self.look, _CHECK_S, "releases could not be judged"),
            at_once=True,
            on_refusal=lambda _: self._windows.clear(),
        )
        self._tasks.spawn(judging, "releases")

    async def close(self) -> None:
        """Give all candidates back, so that another gateway takes them over at once."""
        await self._tasks.close()
        for model in list(self._tokens):
            try:
                await self._give_back(model)
            except CharoniaError:
                return  # the log cannot be reached: the heartbeat's end does the same

    def begin_anew(self) -> None:
        """The log was replaced: nothing is owned in it."""
        self._tokens.clear()
        self._windows.clear()

    async def look(self) -> None:
        """Judge each candidate that no other gateway judges. Raises what the log raises."""
        rules = self._control.catalog.routes.rules
        judged = {model for model, rule in rules.items() if rule.tests_candidate and _has_gate(rule)}
        for model in self._tokens.keys() - judged:
            await self._give_back(model)
        for model in judged:
            try:
                if await self._owns(model) and (rule := rules.get(model)) is not None:
                    await self._judge(model, rule)
            except CharoniaError:
                raise
            except Exception:
                _log.exception("the candidate of model '%s' could not be judged", model)

    async def _owns(self, model: str) -> bool:
        name = keys.release_owner(model)
        owner, token = await self._log.owner(name)
        if owner == self._incarnation and token == self._tokens.get(model):
            return True
        self._tokens.pop(model, None)
        self._windows.pop(model, None)
        if owner and owner != self._incarnation and (await self._log.alive("gateway", [owner]))[0]:
            return False
        token = await self._log.take_ownership(name, self._incarnation, owner)
        if token:
            self._tokens[model] = token
        return bool(token)

    async def _give_back(self, model: str) -> None:
        token = self._tokens.pop(model)
        self._windows.pop(model, None)
        await self._log.release_ownership(keys.release_owner(model), self._incarnation, token)

    async def _judge(self, model: str, rule: RouteRule) -> None:
        served = self._control.catalog.served(model)
        present, candidate = served.get(rule.present), served.get(rule.candidate)
        if present is None or candidate is None:
            self._windows.pop(model, None)
            return
        counts = await self._counts(present), await self._counts(candidate)
        about = (present.content_hash, candidate.content_hash, rule.share, rule.gate)
        window = self._windows.get(model)
        now_ns = monotonic_ns()
        if window is None or window.about != about:
            self._windows[model] = _Window(about, now_ns, *counts)
            return
        elapsed_s = (now_ns - window.began_ns) / 1e9
        step = next_step(rule)
        verdict = judge(rule.gate, step, counts[0].since(window.present), counts[1].since(window.candidate), elapsed_s)
        if verdict.action == BEGIN:
            self._windows[model] = _Window(about, now_ns, *counts)
            return
        at_us = wall_ns() // 1000
        if verdict.action == ROLL_BACK:
            changed = rolled_back(rule, verdict.reason, at_us)
        elif verdict.action == ADVANCE:
            changed = advanced(rule, step, verdict.reason, at_us)
        else:
            return
        if self._control.catalog.routes.rules.get(model) is not rule:
            return  # it was changed meanwhile
        self._windows.pop(model, None)
        if not await self._write(model, changed):
            return
        self.decisions[model, verdict.action] = self.decisions.get((model, verdict.action), 0) + 1
        _log.log(
            logging.WARNING if verdict.action == ROLL_BACK else logging.INFO,
            "model '%s': %s: %s", model, changed.history[-1].what, verdict.reason,
        )  # fmt: skip

    async def _write(self, model: str, rule: RouteRule) -> bool:
        """Write a rule, and wait until it is read: the next look has to know it. Returns whether it is what counts and
        not what another writer wrote meanwhile.
        """
        routes = self._control.catalog.routes
        revision = routes.next_revision(model)
        await self._control.announce(route_fact(model, revision, rule))
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while routes.revisions.get(model, 0) < revision:
                    await self._control.changed()
        except TimeoutError:
            _log.warning("model '%s': a change of its routing rule was written and is not read back yet", model)
        return routes.rules.get(model) == rule

    async def _counts(self, served: ServedVersion) -> VersionCounts:
        return counts_of(await self._log.statistics(keys.statistics(served.model, served.version, served.content_hash)))


def release_metrics(
    choice: VersionChoice, watch: ReleaseWatch, shadows: ShadowRequests, recorder: RequestRecorder
) -> Iterator[Metric]:
    """The families of releases."""
    family = CounterMetricFamily(
        "charonia_release_reruns",
        "Requests run again after a candidate failed them",
        labels=["model"],
    )
    for model, count in choice.reruns.items():
        family.add_metric([model], count)
    yield family
    family = CounterMetricFamily(
        "charonia_release_decisions", "Changes of routing rules that this gateway decided", labels=["model", "decision"]
    )
    for (model, action), count in watch.decisions.items():
        family.add_metric([model, action.replace(" ", "_")], count)
    yield family
    family = CounterMetricFamily(
        "charonia_shadow_requests", "Copies of requests for a shadow version, by result", labels=["model", "result"]
    )
    for (model, result), count in shadows.counts.items():
        family.add_metric([model, result], count)
    yield family
    family = CounterMetricFamily(
        "charonia_recorded_requests", "Requests that were to be recorded, by result", labels=["model", "result"]
    )
    for (model, result), count in recorder.counts.items():
        family.add_metric([model, result], count)
    yield family


def _has_gate(rule: RouteRule) -> bool:
    return rule.gate.rollback or bool(rule.gate.steps)
