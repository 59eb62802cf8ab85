"""The sentences of `charonia audit --verify` and `--export`, from their documents."""

from __future__ import annotations

from typing import Any

from .rendering import one_line, size

_FAULTS = {
    "entries_missing": "entries that were sealed are missing",
    "entries_added": "entries were inserted into what was sealed",
    "entries_changed": "entries were changed after they were sealed",
    "seal_unlinked": "a seal does not continue the one before",
    "seal_unreadable": "a seal cannot be read",
    "head_differs": "a seal is not the one that was recorded in the file of heads",
    "head_lost": "a seal that was recorded in the file of heads is gone",
    "head_trimmed": "what the file of heads has is trimmed, so nothing connects it with the log",
}


def verified(document: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for model in document["models"]:
        lines += _verified_model(model)
    if not document["models"]:
        lines.append("the log knows no model")
    if document["heads_added"]:
        lines.append(f"{document['heads_added']} heads added to the file")
    return [*lines, "intact" if document["intact"] else "not intact"]


def _verified_model(model: dict[str, Any]) -> list[str]:
    name, broken = model["model"], model["broken"]
    span = f"{model['sealed']} entries"
    if model["sealed"]:
        span += f" from {model['from']} to {model['to']}"
    if broken is None:
        intact = f"{name}: intact, {span} in seals {model['first_seal']} to {model['last_seal']}"
        if not model["last_seal"]:
            intact = f"{name}: nothing is sealed"
        lines = [f"{intact}, {model['unsealed']} not sealed yet"]
    else:
        lines = [
            f"{name}: BROKEN at seal {broken['seal']}: {_FAULTS.get(broken['fault'], broken['fault'])}",
            f"  entries: {broken['first'] or '?'} to {broken['last'] or '?'}",
            f"  expected: {one_line(broken['expected'])}",
            f"  found: {one_line(broken['found'])}",
            f"  intact before it: {span}",
        ]
    if model["compared"]:
        lines.append(f"  {model['compared']} seals compared with the file of heads")
    if model["late"]:
        lines.append(f"  LATE: {model['unsealed_since']} is not sealed")
    return lines


def exported(document: dict[str, Any]) -> list[str]:
    lines = []
    for model in document["models"]:
        span = f"{model['first_entry']} to {model['last_entry']}" if model["entries"] else "none"
        lines.append(f"{model['model']}: {model['facts']} facts of {model['entries']} entries ({span})")
        if model["skipped"]:
            lines.append(f"  {model['skipped']} entries of a kind unknown here")
        if model["unreadable"]:
            lines.append(f"  {model['unreadable']} entries cannot be read: {', '.join(model['unreadable_entries'])}")
    lines.append(f"{document['file']}: {document['facts']} facts, {size(document['bytes'])}")
    return lines
