"""Medians over rounds of what was measured in turns, as a table and as a document. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtest.bench.report import table
from loadtest.measurement import median

BARE, XGBOOST = "bare", "xgboost"


@dataclass(frozen=True)
class Figure:
    """One side in one round: rows a second, CPU microseconds a row, of each role, and rows of an execution."""

    rate: float
    cpu_us: float
    roles: Mapping[str, float] = field(default_factory=dict)
    rows_per_execution: float | None = None
    idle_us: float = 0.0
    """CPU microseconds a second of the server without requests: they are no row's."""

    @property
    def busy_us(self) -> float:
        """CPU microseconds a row without those of an idle server."""
        return self.cpu_us - self.idle_us / self.rate


Rounds = Mapping[str, Sequence[Figure]]
"""By side ("bare", "xgboost", "none", "process", "sandbox"), one figure a round."""


def ratio(rounds: Rounds, above: str, below: str, of: str = "cpu_us") -> float | None:
    """Median over the rounds of a figure of one side / that of another in the same round."""
    pairs = zip(rounds.get(above, ()), rounds.get(below, ()), strict=False)
    found = [getattr(one, of) / getattr(other, of) for one, other in pairs]
    return median(found) if found else None


def document(rounds: Rounds) -> dict[str, Any]:
    """What is known of a subject: medians of each side, and of the ratios.

    `bare_of_served` is CPU of the library / CPU of all processes of the server, `bare_of_busy` the same without what
    the idle server takes. `rate` is rows a second / those of the library. `of_none` is CPU, without that, / that of
    the model in the executor, `of_xgboost` CPU / XGBoost's own.
    """
    sides = {}
    for side, figures in rounds.items():
        executed = [one.rows_per_execution for one in figures if one.rows_per_execution]
        sides[side] = {
            "rows_per_s": median([one.rate for one in figures]),
            "cpu_us_per_row": median([one.cpu_us for one in figures]),
            "roles_us": {
                role: median([one.roles.get(role, 0.0) for one in figures])
                for role in sorted({role for one in figures for role in one.roles})
            },
            "rows_per_execution": median(executed) if executed else None,
            "bare_of_served": None if side in (BARE, XGBOOST) else ratio(rounds, BARE, side),
            "bare_of_busy": None if side in (BARE, XGBOOST) else ratio(rounds, BARE, side, "busy_us"),
            "rate": ratio(rounds, side, BARE, "rate"),
            "of_none": ratio(rounds, side, "none", "busy_us"),
            "of_xgboost": ratio(rounds, side, XGBOOST),
        }
    return sides


def lines(documents: Mapping[str, dict[str, Any]]) -> str:
    """The table of all subjects."""
    head = [
        "model",
        "side",
        "rows/s",
        "CPU us/row",
        "bare/served",
        "less idle",
        "rate",
        "of none",
        "of xgboost",
        "rows/execution",
    ]
    rows = [[*head, "CPU us a row by process"]]
    for name, sides in documents.items():
        for side, found in sides.items():
            roles = ", ".join(f"{role} {us:.1f}" for role, us in found["roles_us"].items() if us >= 0.05)
            texts = [f"{found['rows_per_s']:,.0f}", f"{found['cpu_us_per_row']:,.2f}"]
            for key in ("bare_of_served", "bare_of_busy", "rate", "of_none", "of_xgboost"):
                texts.append("-" if found[key] is None else f"{found[key]:.2f}")
            executed = found["rows_per_execution"]
            rows.append([name, side, *texts, "-" if executed is None else f"{executed:.0f}", roles])
    return table(rows, 2)
