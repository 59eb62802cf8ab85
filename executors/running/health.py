"""Asks the instances of a version that can tell whether they are well, and tells of changes (P6).

Nobody is asked per probe of a client: instances are asked every so often, whoever looks finds the last answer in the
catalog. A version is well on an executor while each of its instances that can tell says so in time; one that executes
a batch is not asked, its last answer holds. What that means for readiness is the catalog's to say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from charonia.backend import InstanceDied, ModelSource, SelfCheckingInstance
from executors.configuration.ceilings import parameter_seconds

_log = logging.getLogger(__name__)

INTERVAL = "charonia.health_interval_s"
DEFAULT_INTERVAL_S = 2.0
TIMEOUT_S = 5.0
_MIN_INTERVAL_S = 0.01


def interval_s(source: ModelSource) -> float:
    """How often a model is asked. Raises `InvalidArgument` for a value that is no time."""
    return max(_MIN_INTERVAL_S, parameter_seconds(source, INTERVAL, DEFAULT_INTERVAL_S))


class HealthWatch:
    """The health of one loaded version. `idle_instances` gives those that are not busy, by a name of their own."""

    def __init__(
        self,
        name: str,
        idle_instances: Callable[[], Sequence[tuple[str, SelfCheckingInstance]]],
        report: Callable[[bool], Awaitable[None]],
        period_s: float,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.healthy = True
        self._name = name
        self._idle_instances = idle_instances
        self._report = report
        self._period_s = period_s
        self._timeout_s = timeout_s
        self._complaints: dict[str, str] = {}

    async def run(self) -> None:
        """Ask until cancelled, at once for the first time."""
        while True:
            await self.check()
            await asyncio.sleep(self._period_s)

    async def check(self) -> None:
        """Ask everybody once, and tell when the answer is another than before."""
        asked = self._idle_instances()
        answers = await asyncio.gather(*(self._complaint(instance) for _, instance in asked))
        for (name, _), complaint in zip(asked, answers, strict=True):
            self._complaints.pop(name, None)
            if complaint:
                self._complaints[name] = complaint
        if self.healthy == bool(self._complaints):
            self.healthy = not self._complaints
            reasons = "; ".join(f"{name}: {complaint}" for name, complaint in self._complaints.items())
            _log.warning("%s is %s", self._name, f"not ready, {reasons}" if reasons else "ready again")
            await self._report(self.healthy)

    async def _complaint(self, instance: SelfCheckingInstance) -> str:
        """Why an instance is not well, "" when it is; one that died is replaced, which is no matter of health."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return "" if await instance.check_health() else "is_ready says no"
        except TimeoutError:
            return f"is_ready did not answer within {self._timeout_s:g} s"
        except InstanceDied:
            return ""
        except Exception as error:
            return f"is_ready failed: {error}"
