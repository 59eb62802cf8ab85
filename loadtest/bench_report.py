"""Folds the rounds of a bench into medians and verdicts, and prints them; it measures nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .budgets import (
    BUDGET_IN_FLIGHT,
    IDLE_PSS_BYTES,
    READY_S,
    REQUESTS_PER_ENTRY,
    Verdict,
    cpu_budgets_us,
    less_backend,
)
from .calibration import factors
from .measurement import median


@dataclass(frozen=True)
class Round:
    """One target at one concurrency, once. CPU in microseconds per answered request; None is not known."""

    throughput_per_s: float
    p50_us: float
    p99_us: float
    generator_us: float
    cpu_us: Mapping[str, float] = field(default_factory=dict)
    backend_us: float | None = None
    requests_per_entry: float | None = None
    batch_size: float | None = None


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Median, least and greatest of the known values; None when there is none."""
    known = [value for value in values if value is not None]
    return {"median": median(known), "min": min(known), "max": max(known)} if known else None


def cell(
    protocol: str,
    level: int,
    rounds: list[Round],
    tolerance: float,
    ours: bool,
    machine: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """A cell's medians, with verdicts where the budgets apply: our server at 64 in flight.

    `machine` is how much slower this machine is for each role; the budgets are stretched by it.
    """
    roles = sorted({role for one in rounds for role in one.cpu_us})
    net = [less_backend(one.cpu_us, one.backend_us) for one in rounds]
    document: dict[str, Any] = {
        "protocol": protocol,
        "in_flight": level,
        "throughput_per_s": spread(one.throughput_per_s for one in rounds),
        "p50_us": spread(one.p50_us for one in rounds),
        "p99_us": spread(one.p99_us for one in rounds),
        "generator_us": spread(one.generator_us for one in rounds),
        "cpu_us": {role: spread(one.cpu_us.get(role) for one in rounds) for role in roles},
        "cpu_less_backend_us": {role: spread(one.get(role) for one in net) for role in roles},
        "backend_us": spread(one.backend_us for one in rounds),
        "requests_per_entry": spread(one.requests_per_entry for one in rounds),
        "batch_size": spread(one.batch_size for one in rounds),
        "verdicts": {},
    }
    if not ours or level != BUDGET_IN_FLIGHT:
        return document
    verdicts: dict[str, Verdict] = {}
    for role, budget in cpu_budgets_us(roles, protocol, machine).items():
        verdicts[role] = Verdict(document["cpu_less_backend_us"][role]["median"], budget, False, tolerance)
    if document["requests_per_entry"] is not None:
        figure = document["requests_per_entry"]["median"]
        verdicts["requests_per_entry"] = Verdict(figure, REQUESTS_PER_ENTRY[protocol], True, tolerance)
    document["verdicts"] = {
        name: {"figure": verdict.figure, "budget": verdict.budget, "within": verdict.within, "text": str(verdict)}
        for name, verdict in verdicts.items()
    }
    return document


def report(
    cells: Mapping[tuple[str, str, int], list[Round]],
    tolerance: float,
    ready_s: float | None,
    pss_idle_bytes: Mapping[str, int],
    pss_after_bytes: Mapping[str, int],
    append_us: float | None = None,
) -> dict[str, Any]:
    """The whole report. `missed` lists every budget that is missed by more than the tolerance, or unmeasured."""
    document: dict[str, Any] = {
        "tolerance": tolerance,
        "ready_s": ready_s,
        "pss_idle_bytes": dict(pss_idle_bytes),
        "pss_after_bytes": dict(pss_after_bytes),
        "append_us": append_us,
        "cells": [],
        "missed": [],
    }
    for (name, protocol, level), rounds in cells.items():
        ours = name.startswith("charonia")
        echo = spread(one.cpu_us.get("echo") for one in cells.get((f"echo {protocol}", protocol, level), []))
        machine = factors(protocol, echo["median"] if echo else None, append_us)
        one = {"target": name, **cell(protocol, level, rounds, tolerance, ours, machine), "machine": machine}
        document["cells"].append(one)
        if ours and level == BUDGET_IN_FLIGHT:
            where = f"{name} at {level} in flight"
            document["missed"] += [
                f"{where}: {what} {verdict['figure']:.1f}, budget {verdict['budget']:g}"
                for what, verdict in one["verdicts"].items()
                if not verdict["within"]
            ]
            # A budget that nobody measured is not kept: --check must not pass on a server without counters.
            if "requests_per_entry" not in one["verdicts"]:
                document["missed"].append(f"{where}: requests per entry not measured")
            measured = {part for what in one["verdicts"] for part in what.split("+")}
            for role in ("gateway", "redis", "batcher", "executor"):
                if role not in measured:
                    document["missed"].append(f"{where}: CPU of {role} not measured")
    return document


def _text(figures: Mapping[str, float] | None, digits: int) -> str:
    if figures is None:
        return "-"
    return f"{figures['median']:.{digits}f} ({figures['min']:.{digits}f}..{figures['max']:.{digits}f})"


def _table(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *rest = row
        padded = [first.ljust(widths[0]), *(text.rjust(width) for text, width in zip(rest, widths[1:], strict=True))]
        print("  ".join(padded).rstrip())


def print_report(document: Mapping[str, Any]) -> None:
    """Two tables, rates and CPU, each figure as median (least..greatest), then memory and what was missed."""
    rates = [["target", "in flight", "inf/s", "p50 us", "p99 us", "requests/entry", "batch", "generator us"]]
    cpu = [["CPU us per request", "in flight", "role", "all", "less backend", "times echo", "budget", "verdict"]]
    echoes = {
        (one["protocol"], one["in_flight"]): one["cpu_us"]["echo"]["median"]
        for one in document["cells"]
        if "echo" in one["cpu_us"]
    }
    for one in document["cells"]:
        level = str(one["in_flight"])
        rates.append(
            [
                one["target"],
                level,
                *(_text(one[name], 0) for name in ("throughput_per_s", "p50_us", "p99_us")),
                *(_text(one[name], 1) for name in ("requests_per_entry", "batch_size")),
                _text(one["generator_us"], 0),
            ]
        )
        for role, figures in one["cpu_us"].items():
            verdict = one["verdicts"].get(role)
            executes = "executor" in role.split("+") and one["backend_us"] is not None
            net = _text(one["cpu_less_backend_us"][role], 1) if executes else "-"
            budget, text = ("-", "-") if verdict is None else (f"{verdict['budget']:.1f}", verdict["text"])
            echo = echoes.get((one["protocol"], one["in_flight"]))
            # A front costs what its bare library costs and more, and that depends on the machine.
            times = f"{figures['median'] / echo:.2f}" if echo and role == "gateway" else "-"
            cpu.append([one["target"], level, role, _text(figures, 1), net, times, budget, text])
    _table(rates)
    print()
    _table(cpu)
    print()
    for one in document["cells"]:
        verdict = one["verdicts"].get("requests_per_entry")
        if verdict is not None:
            figures = f"{verdict['figure']:.1f} requests per entry, floor {verdict['budget']:g}: {verdict['text']}"
            print(f"{one['target']}, {one['in_flight']} in flight: {figures}")
            slower = ", ".join(f"{role} {factor:.2f}" for role, factor in one["machine"].items())
            print(f"{one['target']}: budgets are stretched by what bare tools cost more here: {slower}")
    if document["ready_s"] is not None:
        print(f"ready after {document['ready_s']:.2f} s (promise for four small models: {READY_S:g} s)")
    for when in ("idle", "after"):
        by_role = document[f"pss_{when}_bytes"]
        if by_role:
            parts = ", ".join(f"{role} {size / 2**20:.0f}" for role, size in sorted(by_role.items()))
            limit = f" (promise for four small models: {IDLE_PSS_BYTES >> 20})" if when == "idle" else ""
            label = "before" if when == "idle" else "after"
            print(f"PSS {label} the load: {sum(by_role.values()) / 2**20:.0f} MiB{limit}: {parts}")
    for text in document["missed"]:
        print(f"missed by more than x{document['tolerance']:g}, or unmeasured: {text}")
