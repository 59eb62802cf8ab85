"""The budgets at 64 in flight and the verdicts against them; it measures nothing.

CPU per request is budgeted because it is steady on shared machines where the rate is not. The floor for requests per
entry is four on the HTTP front; behind grpcio, which delivers calls one by one, flushes are 1 ms apart and fewer meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

BUDGET_IN_FLIGHT = 64
GATEWAY_US = {"http": 50.0, "grpc": 180.0}
REDIS_COLOCATED_US = 8.0
REDIS_SEPARATE_US = 14.0
BATCHER_US = 6.0
EXECUTOR_US = 6.0
REQUESTS_PER_ENTRY = {"http": 4.0, "grpc": 2.0}
READY_S = 2.0
IDLE_PSS_BYTES = 350 << 20


@dataclass(frozen=True)
class Verdict:
    """`figure` measured against `budget`; `floor` when more is better. `within` allows for the tolerance factor."""

    figure: float
    budget: float
    floor: bool
    tolerance: float

    @property
    def ratio(self) -> float:
        """How many times worse than the budget; 1 or less keeps it."""
        if self.floor:
            return self.budget / self.figure if self.figure > 0 else float("inf")
        return self.figure / self.budget

    @property
    def within(self) -> bool:
        return self.ratio <= self.tolerance

    def __str__(self) -> str:
        if self.ratio <= 1:
            return "ok"
        return f"over x{self.ratio:.2f}" if self.within else f"MISSED x{self.ratio:.2f}"


def cpu_budgets_us(roles: Iterable[str], protocol: str, machine: Mapping[str, float] | None = None) -> dict[str, float]:
    """Budget per role, times the factor of the machine where one is given (`loadtest.calibration.factors`).

    A process that hosts several roles ("executor+batcher") has the sum of theirs; roles without a budget (a
    supervisor, say) are left out.
    """
    hosts = {role: set(role.split("+")) for role in roles}
    colocated = any({"batcher", "executor"} <= parts for parts in hosts.values())
    single = {
        "gateway": GATEWAY_US[protocol],
        "redis": REDIS_COLOCATED_US if colocated else REDIS_SEPARATE_US,
        "batcher": BATCHER_US,
        "executor": EXECUTOR_US,
    }
    if machine is not None:
        single = {role: budget * machine.get(role, 1.0) for role, budget in single.items()}
    return {role: sum(single[part] for part in parts) for role, parts in hosts.items() if parts <= single.keys()}


def less_backend(cpu_us: Mapping[str, float], backend_us: float | None) -> dict[str, float]:
    """The CPU figures with the backend's own time taken from the executing role, where it is known."""
    if backend_us is None:
        return dict(cpu_us)
    return {
        role: max(0.0, value - backend_us) if "executor" in role.split("+") else value for role, value in cpu_us.items()
    }
