"""What `charonia tune` found, as text and as CSV. Pure. The document is made by `tuning`; `tune_page` is its HTML."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from charonia.operations.text.rendering import table

from . import verdict
from .knobs import KNOBS, Settings
from .verdict import Aim, Observation

_SHOWN = 12
_FAILURE_SHOWN = 200
"""Characters of a failure in a table."""
_MIB = 1 << 20
_BEYOND_PERCENTILE = 5
"""Requests slower than the judged percentile, of which fewer are noted."""


def text(described: Mapping[str, Any]) -> str:
    """The tables and reasons of all groups."""
    return "\n\n".join(group_text(group) for group in described["groups"])


def group_text(group: Mapping[str, Any]) -> str:
    """The best configurations of a group, and why the winner won."""
    rows, columns = trial_rows(group), trial_columns(group)
    lines = [", ".join(group["models"]), *table(rows[:_SHOWN], columns)]
    if len(rows) > _SHOWN:
        lines.append(f"({len(rows) - _SHOWN} more are in the reports)")
    if group["turns"]:
        lines += ["", "measured in turns", *table(turn_rows(group), turn_columns(group))]
    if group["interrupted"]:
        lines += ["", "interrupted: what was measured until then"]
    lines += ["", *group["reasons"]]
    return "\n".join(lines)


def aim_of(group: Mapping[str, Any]) -> Aim:
    """What was sought."""
    return Aim(group["objective"], group["percentile"], group["latency_limit_us"], group["memory_limit_bytes"])


def trial_columns(group: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Columns of `trial_rows`: heading and key. Knobs come first; of models under load together, each one's figures
    follow those of all."""
    several = len(group["tuned"]) > 1
    knobs = [
        (f"{d['model']} {d['knob']}" if several else d["knob"], f"{d['model']} {d['knob']}")
        for d in group["dimensions"]
    ]
    judged = f"p{group['percentile']} ms"
    figures = [("infer/s", "rate"), (judged, "latency"), ("MiB", "memory"), ("batch", "size"), ("queue ms", "queue")]
    if is_of_several(group):
        for model in group["models"]:
            figures += [(f"{model} infer/s", f"{model} rate"), (f"{model} {judged}", f"{model} latency")]
    return [*knobs, *figures, ("", "note")]


def is_of_several(group: Mapping[str, Any]) -> bool:
    """Whether several models were under load together."""
    return len(group["models"]) > 1


def trial_rows(group: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each configuration, the best first, those that failed last."""
    by_score = sorted(group["trials"], key=lambda trial: trial["score"], reverse=True)
    return [_row(group, trial) for trial in by_score]


def _row(group: Mapping[str, Any], trial: Mapping[str, Any]) -> dict[str, Any]:
    observation, name = trial["observation"], trial["name"]
    row: dict[str, Any] = dict(trial["settings"])
    words = [
        word
        for word, holds in (
            ("winner", name == group["winner"]), ("as written", name == group["base"]),
            ("front", name in group["front"]),
            ("beyond a limit", trial["score"][0] == 1),
        )
        if holds
    ]  # fmt: skip
    if trial["level"] is None or trial["score"][0] == 0:
        words.append(f"failed: {verdict.failure(observation) or 'no request was answered'}"[:_FAILURE_SHOWN])
    if trial["level"] is not None:
        row |= _figures_row(observation, trial["level"])
        if not _is_stable(observation, trial["level"]):
            words.append("not stable")
        if _has_few_requests(observation, trial["level"], group["percentile"]):
            words.append("few requests")
        if len(next(iter(observation["targets"].values()))) > 1:
            level = next(iter(observation["targets"].values()))[trial["level"]]["level"]
            words.append(f"at {level:g} {group['load']}")
    return row | {"note": ", ".join(words)}


def _figures_row(observation: Observation, at: int) -> dict[str, Any]:
    found = verdict.figures(observation, at)
    of_each: dict[str, Any] = {}
    for target in observation["targets"]:
        own = verdict.figures(observation, at, target)
        of_each[f"{target} rate"] = round(own["rate"], 1)
        of_each[f"{target} latency"] = round(own["latency_us"] / 1000, 1)
    server = [figures for levels in observation["targets"].values() for figures in levels[at]["server"].values()]
    executions = sum(figures["executions"] for figures in server)
    sizes = sum(figures["inferences"] for figures in server) / executions if executions else 0.0
    return {
        "rate": round(found["rate"], 1), "latency": round(found["latency_us"] / 1000, 1),
        "memory": round(found["memory_bytes"] / _MIB), "size": round(sizes, 1),
        "queue": round(sum(figures["queue_us"] for figures in server) / 1000, 1), **of_each,
    }  # fmt: skip


def turn_columns(group: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Columns of `turn_rows`."""
    judged = f"p{group['percentile']} ms"
    return [
        ("configuration", "name"),
        ("infer/s", "rate"),
        (judged, "latency"),
        ("of each round", "rates"),
        ("", "note"),
    ]


def turn_rows(group: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each configuration that was measured in turns: medians, and the rate of each round."""
    rows, aim = [], aim_of(group)
    settings = {trial["name"]: trial["settings"] for trial in group["trials"]}
    for name in group["medians"]:
        row: dict[str, Any] = {"name": changed_text(settings[name], settings[group["base"]])}
        seen = [turn[name] for turn in group["turns"]]
        found = [verdict.figures(one, verdict.best_level(one, aim)) for one in seen if verdict.levels_of(one)]
        if found:
            row["rate"] = round(median(figures["rate"] for figures in found), 1)
            row["latency"] = round(median(figures["latency_us"] for figures in found) / 1000, 1)
        row["rates"] = " ".join(f"{figures['rate']:.1f}" for figures in found)
        words = ["winner"] if name == group["winner"] else []
        words += [f"failed {len(seen) - len(found)} times"] if len(found) < len(seen) else []
        rows.append(row | {"note": ", ".join(words)})
    return rows


def figures_text(observation: Observation, aim: Aim) -> str:
    """The figures of a configuration's best level in a line."""
    if not verdict.levels_of(observation):
        return f"failed: {observation['failed']}"
    at = verdict.best_level(observation, aim)
    found = verdict.figures(observation, at)
    words = f"{found['rate']:.1f} infer/s, p{aim.percentile} {found['latency_us'] / 1000:.1f} ms"
    words += f", {found['memory_bytes'] / _MIB:.0f} MiB" if found["memory_bytes"] else ""
    words += "" if _is_stable(observation, at) else ", not stable"
    failed = sum(sum(levels[at]["errors"].values()) for levels in observation["targets"].values())
    return words + (f", {failed} requests failed: {verdict.failure(observation)}" if failed else "")


def _is_stable(observation: Observation, at: int) -> bool:
    return all(levels[at]["stable"] for levels in observation["targets"].values())


def _has_few_requests(observation: Observation, at: int, percentile: int) -> bool:
    """Whether the percentile is of so few requests beyond it that chance decides."""
    fewest = min(levels[at]["requests"] for levels in observation["targets"].values())
    return bool(fewest * (100 - percentile) / 100 < _BEYOND_PERCENTILE)


def settings_document(settings: Settings) -> dict[str, str]:
    """Values by `MODEL KNOB`."""
    return {f"{model} {knob}": value for (model, knob), value in settings.items()}


def shown_settings(settings: Settings, base: Settings) -> str:
    """What differs from the configuration as written."""
    return changed_text(settings_document(settings), settings_document(base))


def changed_text(settings: Mapping[str, str], base: Mapping[str, str]) -> str:
    """What differs from the configuration as written, in words."""
    models = {name.rpartition(" ")[0] for name in settings}
    changed = [name for name in settings if settings[name] != base[name]]
    shown = {name: name if len(models) > 1 else name.rpartition(" ")[2] for name in changed}
    return ", ".join(f"{shown[name]}={settings[name]}" for name in changed) or "as written"


def csv_text(described: Mapping[str, Any]) -> str:
    """A row for each configuration, model under load, and level."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = list(dict.fromkeys(name for group in described["groups"] for name in _knob_names(group)))
    latencies = ("mean", "p50", "p90", "p95", "p99")
    writer.writerow([
        "Models", "Configuration", *names, "Model", "Level", "Inferences/Second",
        *(f"{name} latency (us)" for name in latencies), "Memory (bytes)", "Inferences/Execution", "Queue (us)",
        "Compute infer (us)", "Stable", "Failed requests", "Front", "As written", "Winner", "Error",
    ])  # fmt: skip
    for group in described["groups"]:
        for trial in group["trials"]:
            for row in _csv_rows(group, trial, names, latencies):
                writer.writerow(row)
    return out.getvalue()


def _knob_names(group: Mapping[str, Any]) -> list[str]:
    order = {knob: at for at, knob in enumerate(KNOBS)}
    found = sorted(group["dimensions"], key=lambda dimension: order[dimension["knob"]])
    return [f"{dimension['model']} {dimension['knob']}" for dimension in found]


def _csv_rows(
    group: Mapping[str, Any], trial: Mapping[str, Any], names: Sequence[str], latencies: Sequence[str]
) -> list[list[Any]]:
    observation, name = trial["observation"], trial["name"]
    head = [" ".join(group["models"]), name, *(trial["settings"].get(knob, "") for knob in names)]
    tail = [
        int(name in group["front"]),
        int(name == group["base"]),
        int(name == group["winner"]),
        observation["failed"],
    ]
    rows = []
    for target, levels in observation["targets"].items():
        for level in levels:
            server = level["server"].get(target, {})
            executions = server.get("executions", 0)
            rows.append([
                *head, target, f"{level['level']:g}", f"{level['rate']:.3f}",
                *(f"{level['latency_us'][part]:.0f}" for part in latencies),
                observation.get("memory", {}).get("bytes", 0),
                f"{server['inferences'] / executions:.2f}" if executions else "",
                f"{server.get('queue_us', 0):.0f}", f"{server.get('compute_infer_us', 0):.0f}", int(level["stable"]),
                sum(level["errors"].values()), *tail,
            ])  # fmt: skip
    blank = [""] * (len(latencies) + 9)
    return rows or [[*head, *blank, *tail]]
