"""The HTML report of `charonia tune`: one page with its plots (SVG) in it, dark and light, without a script. Pure.

Style and plots are those of `charonia.analyzer.report_page`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from charonia.analyzer.report_page import Scale, Series, card, linear, lines, whole_page

from . import tune_report, verdict

_MIB = 1 << 20
_MOST_ROWS = 200


def page(described: Mapping[str, Any]) -> str:
    """The page of a run's document."""
    models = ", ".join(model for group in described["groups"] for model in group["models"])
    averages = ", ".join(f"{value:g}" for value in described["machine"]["load_average"])
    sub = f"charonia tune, {described['began']}, {described['machine']['cores']} cores, load average {averages}"
    body = "".join(_group(group, several=len(described["groups"]) > 1) for group in described["groups"])
    return whole_page(f"{models}: tuned", models, sub, body)


def _group(group: Mapping[str, Any], *, several: bool) -> str:
    of_each = [_front_card(group, model) for model in group["models"]] if tune_report.is_of_several(group) else []
    cards = [_front_card(group), _memory_card(group), *of_each, *_knob_cards(group), _turn_card(group)]
    heading = f"<h1>{escape(', '.join(group['models']))}</h1>" if several else ""
    grid = f'<div class="grid">{"".join(made for made in cards if made)}</div>'
    rows = tune_report.trial_rows(group)[:_MOST_ROWS]
    tables = _table("Configurations, the best first", rows, tune_report.trial_columns(group))
    if group["turns"]:
        turns = tune_report.turn_rows(group), tune_report.turn_columns(group)
        tables = _table("Measured in turns", *turns) + tables
    return f"{heading}{_summary(group)}{grid}<p></p>{tables}{_processes(group)}{_configs(group)}"


def _summary(group: Mapping[str, Any]) -> str:
    limits = []
    if group["latency_limit_us"]:
        limits.append(f"p{group['percentile']} at most {group['latency_limit_us'] / 1000:g} ms")
    if group["memory_limit_bytes"]:
        limits.append(f"memory at most {group['memory_limit_bytes'] / _MIB:g} MiB")
    seen = len(group["trials"])
    beyond = sum(trial["score"][0] == 1 for trial in group["trials"])
    failed = sum(trial["score"][0] == 0 for trial in group["trials"])
    targets = [found for trial in group["trials"] for found in trial["observation"]["targets"].values()]
    levels = sorted({level["level"] for found in targets for level in found})
    rows = [
        ("sought", f"best {group['objective']}" + (f", {', '.join(limits)}" if limits else ", without limits")),
        ("load", f"{', '.join(f'{level:g}' for level in levels)} {group['load']}"),
        ("search", f"{group['search']}: {seen} configurations, {beyond} beyond a limit, {failed} failed"),
        *(
            (d["knob"] if len(group["tuned"]) == 1 else f"{d['model']} {d['knob']}",
             f"{', '.join(d['values'])} (written: {d['written']})")
            for d in group["dimensions"]
        ),
    ]  # fmt: skip
    said = [*group["reasons"], *group["notes"]]
    if group["interrupted"]:
        said.insert(0, "The run was interrupted: this is what was measured until then.")
    words = "".join(f"<p>{escape(text)}</p>" for text in said)
    shown = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in rows)
    return f'<div class="card"><h2>Why this configuration</h2>{words}<p></p><dl>{shown}</dl></div>'


def _points(group: Mapping[str, Any], target: str = "") -> dict[str, tuple[dict[str, float], str]]:
    """Figures and words of each configuration that has figures; with `target` those of that model alone."""
    settings = {trial["name"]: trial["settings"] for trial in group["trials"]}
    return {
        trial["name"]: (
            verdict.figures(trial["observation"], trial["level"], target),
            tune_report.changed_text(trial["settings"], settings[group["base"]]),
        )
        for trial in group["trials"]
        if trial["level"] is not None
    }


def _front_card(group: Mapping[str, Any], target: str = "") -> str:
    """Rate and latency of all configurations: of the model `target`, or of all that were under load."""
    points = _points(group, target)

    def place(name: str) -> tuple[float, float]:
        found = points[name][0]
        return found["rate"], found["latency_us"] / 1000

    note = "The line is the front of rate and latency: no configuration has more of one without less of the other."
    if tune_report.is_of_several(group) and not target:
        note += " The rate is the geometric mean of the models', the latency that of the slowest one."
    if group["latency_limit_us"]:
        note += f" The limit is {group['latency_limit_us'] / 1000:g} ms."
    steps = _staircase(points, "latency_us")
    series = _marked(group, points, place, steps, "Pareto front (rate, latency)")
    plot = lines(series, "inferences a second", f"ms, p{group['percentile']}", linear)
    title = f"{target}: latency over throughput" if target else "Latency over throughput"
    return card(title, plot, series, note) if points else ""


def _memory_card(group: Mapping[str, Any]) -> str:
    points = {name: found for name, found in _points(group).items() if found[0]["memory_bytes"]}

    def place(name: str) -> tuple[float, float]:
        found = points[name][0]
        return found["rate"], found["memory_bytes"] / _MIB

    series = _marked(group, points, place, _staircase(points, "memory_bytes"), "Pareto front (rate, memory)")
    note = "Memory is that of all processes of the server after the load."
    plot = lines(series, "inferences a second", "MiB", linear)
    return card("Memory over throughput", plot, series, note) if points else ""


def _staircase(points: Mapping[str, tuple[dict[str, float], str]], cost: str) -> list[str]:
    """The front of two figures: by falling rate those with less of the cost than all before."""
    kept: list[str] = []
    for name in sorted(points, key=lambda name: (-points[name][0]["rate"], points[name][0][cost])):
        if not kept or points[name][0][cost] < points[kept[-1]][0][cost]:
            kept.append(name)
    return kept


def _marked(
    group: Mapping[str, Any],
    points: Mapping[str, tuple[dict[str, float], str]],
    place: Any,
    steps: Sequence[str],
    front: str,
) -> list[Series]:
    def of(title: str, names: Sequence[str], *, is_line: bool = False) -> Series:
        return Series(title, [place(name) for name in names], True, is_line, [points[name][1] for name in names])

    others = [name for name in points if name not in (group["winner"], group["base"], *steps)]
    found = [of("measured", others), of(front, steps, is_line=True)]
    if group["base"] in points:
        found.append(of("as written", [group["base"]]))
    if group["winner"] in points and group["winner"] != group["base"]:
        found.append(of("winner", [group["winner"]]))
    return found


def _knob_cards(group: Mapping[str, Any]) -> list[str]:
    """Of each knob the configurations that differ from the winner in nothing else."""
    centre = group["winner"] or group["base"]
    trials = {
        tuple(sorted(trial["settings"].items())): trial for trial in group["trials"] if trial["level"] is not None
    }
    settings = next(trial["settings"] for trial in group["trials"] if trial["name"] == centre)
    made = []
    for dimension in group["dimensions"]:
        knob = f"{dimension['model']} {dimension['knob']}"
        seen = []
        for value in dimension["values"]:
            trial = trials.get(tuple(sorted({**settings, knob: value}.items())))
            if trial is not None:
                seen.append((value, verdict.figures(trial["observation"], trial["level"])))
        if len(seen) > 1:
            title = dimension["knob"] if len(group["tuned"]) == 1 else knob
            across = Scale(0, len(seen), tuple((at + 0.5, value) for at, (value, _) in enumerate(seen)))
            series = [Series("inferences a second", [(at + 0.5, found["rate"]) for at, (_, found) in enumerate(seen)],
                             labels=[f"{title} {value}" for value, _ in seen])]  # fmt: skip
            note = "All else as in the winner." if group["winner"] else "All else as written."
            made.append(card(f"Throughput by {title}", lines(series, title, "infer/s", linear, across), [], note))
    return made


def _turn_card(group: Mapping[str, Any]) -> str:
    if not group["turns"]:
        return ""
    aim = tune_report.aim_of(group)
    settings = {trial["name"]: trial["settings"] for trial in group["trials"]}
    series = []
    for name in group["medians"]:
        points = [
            (float(number), verdict.figures(turn[name], verdict.best_level(turn[name], aim))["rate"])
            for number, turn in enumerate(group["turns"], 1)
            if verdict.levels_of(turn[name])
        ]
        series.append(Series(tune_report.changed_text(settings[name], settings[group["base"]]), points))
    rounds = max(2, len(group["turns"]))
    across = Scale(1, rounds, tuple((at, str(at)) for at in range(1, rounds + 1)))
    note = "Measured one after the other in each round, so that all had the same machine."
    return card("In turns", lines(series, "round", "infer/s", linear, across), series, note)


def _table(title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[tuple[str, str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name, _ in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(row.get(key, '–')))}</td>" for _, key in columns) + "</tr>" for row in rows
    )
    return (
        f'<div class="card wide"><h2>{escape(title)}</h2><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _processes(group: Mapping[str, Any]) -> str:
    """Memory of each process, of the winner and of the configuration as written."""
    by_name = {trial["name"]: trial["observation"].get("memory", {}).get("processes", {}) for trial in group["trials"]}
    shown = [(word, by_name[name]) for word, name in (("as written", group["base"]), ("winner", group["winner"]))
             if by_name.get(name)]  # fmt: skip
    names = list(dict.fromkeys(name for _, found in shown for name in found))
    rows = [{"name": name, **{word: f"{found.get(name, 0) / _MIB:.0f}" for word, found in shown}} for name in names]
    columns = [("process", "name"), *((f"{word}, MiB", word) for word, _ in shown)]
    return _table("Memory of processes", rows, columns) if rows else ""


def _configs(group: Mapping[str, Any]) -> str:
    return "".join(
        f'<div class="card wide"><h2>{escape(model)}/config.pbtxt</h2><pre>{escape(text)}</pre></div>'
        for model, text in group["configs"].items()
    )
