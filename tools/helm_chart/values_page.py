"""Writes `docs/howto/kubernetes-values.md`: every value of the chart, its type, default and description."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml

from helm_chart.chart_files import CHART

_HEAD = """# Values of the Helm chart

Every value of `infra/helm/charonia`, as `values.yaml` has it and `values.schema.json` checks it; Helm refuses values
that are not named here. `make helm HELM_FLAGS=--accept` writes this page. How they go together:
[Kubernetes](kubernetes.md).

| value | type | default | what |
|---|---|---|---|
"""


def page() -> str:
    """The text of the page. Raises `LookupError` for a value without a description, or that the schema alone has."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    return _HEAD + "".join(
        f"| `{path}` | {kind} | {default} | {what} |\n" for path, kind, default, what in rows(values, schema)
    )


def rows(values: dict[str, Any], schema: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    return list(_rows(values, schema, schema, ""))


def _rows(value: Any, schema: dict[str, Any], whole: dict[str, Any], path: str) -> Iterator[tuple[str, str, str, str]]:
    described = schema.get("description")
    if "$ref" in schema:
        schema = whole["definitions"][schema["$ref"].rsplit("/", 1)[1]]
    if path and not described:
        raise LookupError(f"{path} has no description in values.schema.json")
    if "properties" not in schema:
        yield path, _kind(schema), f"`{json.dumps(value)}`".replace("|", "\\|"), str(described).replace("|", "\\|")
        return
    if path:
        yield path, "section", "", str(described)
    if set(value) != set(schema["properties"]):
        raise LookupError(
            f"{path or 'values.yaml'} and its schema name different values: {set(value) ^ set(schema['properties'])}"
        )
    for name in value:
        yield from _rows(value[name], schema["properties"][name], whole, f"{path}.{name}" if path else name)


def _kind(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    kind = schema["type"]
    return " or ".join(kind) if isinstance(kind, list) else str(kind)
