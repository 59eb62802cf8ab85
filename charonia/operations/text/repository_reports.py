"""What `charonia check` and `charonia migrate` print without --json."""

from __future__ import annotations

from typing import Any

from .rendering import one_line


def check_lines(document: dict[str, Any]) -> list[str]:
    lines = [line for diff in document["diffs"] for line in diff.splitlines()]
    lines += [f"fixed: {text}" for text in document["fixed"]]
    lines += _fault_lines(document["faults"])
    lines += [f"note: {note['model'] and note['model'] + ': '}{note['text']}" for note in document["notes"]]
    found, models = len(document["faults"]), document["models"]
    bad = len({fault["model"] for fault in document["faults"]})
    lines.append(f"{models} models, no fault" if not found else f"{models} models, {found} faults in {bad} of them")
    if found and document["fixed"]:
        lines.append("the faults above were not fixed: more than one thing could be meant")
    return lines


def _fault_lines(faults: list[dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    for fault in faults:
        place = f":{fault['line']}:{fault['column']}" if fault["line"] else ""
        field = f" {fault['field']}:" if fault["field"] else ""
        lines += [
            f"{fault['file']}{place}:{field} {one_line(fault['problem'])}",
            f"    expected: {one_line(fault['expected'])}",
            f"    write: {one_line(fault['instead'])}" + (" (--fix does)" if fault["fixable"] else ""),
        ]
    return lines


def migrate_lines(document: dict[str, Any]) -> list[str]:
    lines = []
    for model in document["models"]:
        lines.append(f"{model['model']}: from {one_line(model['from'])}, backend {model['backend']}")
        lines += [
            f"    {'wrote' if document['repository'] else 'would write'} {one_line(file)}" for file in model["files"]
        ]
        lines += [f"    fill in {one_line(step)}" for step in model["fill_in"]]
        lines += [f"    not taken over: {one_line(one['field'])}: {one_line(one['why'])}" for one in model["unmapped"]]
    lines += _fault_lines(document["faults"])
    if not document["repository"]:
        lines.append("nothing was written: --to=REPOSITORY writes it")
    return lines
