"""What a check found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PASSED, FAILED, NOT_RUN, NOT_JUDGED = "pass", "FAIL", "not run", "not judged"


@dataclass(slots=True)
class Outcome:
    """A verdict, the figure it is about in words, and all figures as numbers."""

    verdict: str
    figure: str = ""
    reason: str = ""
    values: dict[str, float] = field(default_factory=dict)
    took_s: float = 0.0


def judged(device: str, reached: bool, figure: str, values: Mapping[str, float], reason: str = "") -> Outcome:
    """The outcome of a check of speed, whose goals are those of a GPU."""
    verdict = (PASSED if reached else FAILED) if device == "cuda" else NOT_JUDGED
    return Outcome(verdict, figure, reason, {key: round(value, 4) for key, value in values.items()})
