"""What `charonia check` prints without --json."""

from __future__ import annotations

from typing import Any

from .rendering import one_line


def check_lines(document: dict[str, Any]) -> list[str]:
    lines = [line for diff in document["diffs"] for line in diff.splitlines()]
    lines += [f"fixed: {text}" for text in document["fixed"]]
    for fault in document["faults"]:
        place = f":{fault['line']}:{fault['column']}" if fault["line"] else ""
        field = f" {fault['field']}:" if fault["field"] else ""
        lines += [
            f"{fault['file']}{place}:{field} {one_line(fault['problem'])}",
            f"    expected: {one_line(fault['expected'])}",
            f"    write: {one_line(fault['instead'])}" + (" (--fix does)" if fault["fixable"] else ""),
        ]
    lines += [f"note: {note['model'] and note['model'] + ': '}{note['text']}" for note in document["notes"]]
    found, models = len(document["faults"]), document["models"]
    bad = len({fault["model"] for fault in document["faults"]})
    lines.append(f"{models} models, no fault" if not found else f"{models} models, {found} faults in {bad} of them")
    if found and document["fixed"]:
        lines.append("the faults above were not fixed: more than one thing could be meant")
    return lines
