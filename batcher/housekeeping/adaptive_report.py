"""Publishes the choices of adaptive batching for a model: as a note, and as a log line when they changed."""

from __future__ import annotations

import json
import logging

from batcher.scheduling.queues.adaptive_batching import AdaptiveBatching, Choice
from batcher.scheduling.stateless.scheduler import ModelScheduler
from batcher.scheduling.verbs import Scheduler
from charonia import keys
from charonia.clock import monotonic_ns
from charonia.eventlog.port import Notes

_log = logging.getLogger(__name__)

_NOTE_NS = 10_000_000_000
_NOTE_KEPT_S = 60


class AdaptiveReport:
    """Reports for one model. `look` runs periodically; choices in between are not reported."""

    def __init__(self, log: Notes, model: str) -> None:
        self._log = log
        self._model = model
        self._told: dict[int, Choice] = {}
        self._noted_ns = 0

    async def look(self, scheduler: Scheduler) -> None:
        """Report noticeable changes. Raises what the log raises."""
        choices = adaptive_of(scheduler)
        if not choices:
            return
        news = [version for version, batching in choices.items() if self._is_news(version, batching.choice)]
        for version in news:
            self._tell(version, choices[version])
        now_ns = monotonic_ns()
        if news or now_ns - self._noted_ns > _NOTE_NS:
            self._noted_ns = now_ns
            note = {str(version): _described(batching) for version, batching in sorted(choices.items())}
            await self._log.put_note(keys.adaptive_choices(self._model), json.dumps(note).encode(), _NOTE_KEPT_S)

    def _is_news(self, version: int, choice: Choice) -> bool:
        told = self._told.get(version)
        return told is None or choice.state != told.state or not _near(choice.size, told.size)

    def _tell(self, version: int, batching: AdaptiveBatching) -> None:
        choice = batching.choice
        is_first = version not in self._told
        self._told[version] = choice
        if is_first and choice.state == "learning":
            return
        _log.info(
            "model '%s' version %d: batches from %d rows on, after %.1f ms at the latest, at %.0f rows/s: the target "
            "of %g ms is %s",
            self._model,
            version,
            choice.size,
            choice.delay_ns / 1e6,
            batching.rate_per_s,
            batching.target_ns / 1e6,
            choice.state,
        )


def adaptive_of(scheduler: Scheduler) -> dict[int, AdaptiveBatching]:
    """The current choice of dynamic batching for each version with a target."""
    return scheduler.adaptive() if isinstance(scheduler, ModelScheduler) else {}


def _described(batching: AdaptiveBatching) -> dict[str, object]:
    choice = batching.choice
    return {
        "state": choice.state,
        "size": choice.size,
        "delay_us": choice.delay_ns // 1000,
        "rows_per_s": round(batching.rate_per_s, 1),
        "target_ms": batching.target_ns / 1e6,
    }


def _near(one: int, other: int) -> bool:
    return abs(one - other) <= max(one, other) // 4
