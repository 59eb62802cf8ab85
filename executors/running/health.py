"""Checks the health of a version's instances periodically and reports changes (P6).

A client's readiness probe reads the last result from the catalog and calls no instance. A version is healthy on an
executor while each of its instances with a health check answers yes in time. An instance that runs a batch is not
checked; its last answer holds. The catalog derives readiness from the reports.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from charonia.backend import InstanceDied, ModelSource, SelfCheckingInstance
from charonia.tasks import periodic
from executors.backends.given_objects import code_of_models
from executors.configuration.time_parameters import parameter_seconds

_log = logging.getLogger(__name__)

INTERVAL = "charonia.health_interval_s"
DEFAULT_INTERVAL_S = 2.0
TIMEOUT_S = 5.0
_MIN_INTERVAL_S = 0.01
_ALL = "all instances"


def interval_s(source: ModelSource) -> float:
    """Return the period of a model's health checks in seconds. Raises `InvalidArgument` for a value that is no time."""
    return max(_MIN_INTERVAL_S, parameter_seconds(source, INTERVAL, DEFAULT_INTERVAL_S))


class HealthWatch:
    """Watches one loaded version. `idle_instances` returns (name, instance) pairs of the instances that run nothing.

    `report` is awaited with the new state after each change. `replace` is called for an instance that is found dead,
    and returns whether it is made again at once; the version is not healthy until the new one has answered, nor while
    `all_down`: all its instances are being made again. An instance that no longer `exists` counts for nothing.
    """

    def __init__(
        self,
        name: str,
        idle_instances: Callable[[], Sequence[tuple[str, SelfCheckingInstance]]],
        report: Callable[[bool], Awaitable[None]],
        period_s: float,
        timeout_s: float = TIMEOUT_S,
        replace: Callable[[SelfCheckingInstance], bool] = lambda _: False,
        all_down: Callable[[], bool] = lambda: False,
        exists: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self.healthy = True
        self._name = name
        self._idle_instances = idle_instances
        self._report = report
        self._period_s = period_s
        self._timeout_s = timeout_s
        self._replace = replace
        self._all_down = all_down
        self._exists = exists
        self._complaints: dict[str, str] = {}

    async def run(self) -> None:
        """Check at once and then every `period_s`, until cancelled."""
        await periodic(self.check, self._period_s, f"the health of {self._name} could not be checked", at_once=True)

    async def check(self) -> None:
        """Check all idle instances once; report when the version's state has changed."""
        asked = self._idle_instances()
        answers = await asyncio.gather(*(self._complaint(instance) for _, instance in asked))
        for (name, _), complaint in zip(asked, answers, strict=True):
            self._complaints.pop(name, None)
            if complaint:
                self._complaints[name] = complaint
        self._complaints = {name: text for name, text in self._complaints.items() if self._exists(name)}
        self._complaints.pop(_ALL, None)
        if self._all_down():
            self._complaints[_ALL] = "being made again"
        if self.healthy == bool(self._complaints):
            self.healthy = not self._complaints
            reasons = "; ".join(f"{name}: {complaint}" for name, complaint in self._complaints.items())
            _log.warning("%s is %s", self._name, f"not ready, {reasons}" if reasons else "ready again")
            await self._report(self.healthy)

    async def _complaint(self, instance: SelfCheckingInstance) -> str:
        """Return why an instance is not healthy, "" when it is, or when it is dead and replaced by its next batch."""
        try:
            async with asyncio.timeout(self._timeout_s):
                with code_of_models():
                    return "" if await instance.check_health() else "is_ready says no"
        except TimeoutError:
            return f"is_ready did not answer within {self._timeout_s:g} s"
        except InstanceDied as death:
            return f"it died and is made again: {death}" if self._replace(instance) else ""
        except Exception as error:
            return f"is_ready failed: {error}"
