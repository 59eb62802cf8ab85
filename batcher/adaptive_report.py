"""Tells the log what adaptive batching has chosen for a model, when that is another choice than before."""

from __future__ import annotations

import logging

from .scheduling.adaptive_batching import AdaptiveBatching, Choice
from .scheduling.scheduler import ModelScheduler
from .scheduling.verbs import Scheduler

_log = logging.getLogger(__name__)


class AdaptiveReport:
    """One model's. `look` now and then: the choices in between are not told."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._told: dict[int, Choice] = {}

    def look(self, scheduler: Scheduler) -> None:
        """Tell what changed noticeably."""
        for version, batching in adaptive_of(scheduler).items():
            choice, told = batching.choice, self._told.get(version)
            if told is not None and choice.state == told.state and _near(choice.size, told.size):
                continue
            self._told[version] = choice
            if told is None and choice.state == "learning":
                continue
            _log.info(
                "model '%s' version %d: batches from %d rows on, after %.1f ms at the latest, at %.0f rows/s: "
                "the target of %g ms is %s",
                self._model,
                version,
                choice.size,
                choice.delay_ns / 1e6,
                batching.rate_per_s,
                batching.target_ns / 1e6,
                choice.state,
            )


def adaptive_of(scheduler: Scheduler) -> dict[int, AdaptiveBatching]:
    """What a scheduler that batches dynamically chooses for each version with a target."""
    return scheduler.adaptive() if isinstance(scheduler, ModelScheduler) else {}


def _near(one: int, other: int) -> bool:
    return abs(one - other) <= max(one, other) // 4
