"""Where a model may be loaded: what its configuration asks for against what an executor is. Pure.

    parameters: { key: "charonia.pool" value: { string_value: "cpu,gpu" } }
    parameters: { key: "charonia.require" value: { string_value: "memory_gib>=8,backend=onnxruntime|python" } }

`charonia.pool` names the pools it may be in, any when it is missing. `charonia.require` has terms, all of which must
hold: `label` (there is one), `!label`, `label=a|b`, `label!=a|b`, and `>`, `>=`, `<`, `<=` for numbers. A label may
have several values, joined by commas: `=` holds when one of them is named, `!=` when none is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from charonia.errors import InvalidArgument

if TYPE_CHECKING:
    from protos.model_config_pb2 import ModelConfig

POOL = "charonia.pool"
REQUIRE = "charonia.require"

_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
_POOL = re.compile(_NAME)
_TERM = re.compile(rf"(?:(!)\s*({_NAME})|({_NAME})\s*(?:(!=|>=|<=|=|>|<)\s*([^\s,|=<>!]+(?:\s*\|\s*[^\s,|=<>!]+)*))?)")
_LABEL = re.compile(rf"({_NAME})=([^\s,|=<>!]+)")


@dataclass(frozen=True, slots=True)
class Term:
    """One condition; `operator` is "" for "the label exists" and "!" for "it does not"."""

    label: str
    operator: str = ""
    values: tuple[str, ...] = ()

    def holds(self, labels: Mapping[str, str]) -> bool:
        text = labels.get(self.label, "")
        has = set(text.split(",")) - {""}
        match self.operator:
            case "":
                return bool(has)
            case "!":
                return not has
            case "=":
                return not has.isdisjoint(self.values)
            case "!=":
                return has.isdisjoint(self.values)
        if (amount := _number(text)) is None:
            return False
        bound = float(self.values[0])
        match self.operator:
            case ">":
                return amount > bound
            case ">=":
                return amount >= bound
            case "<":
                return amount < bound
        return amount <= bound

    def __str__(self) -> str:
        if self.operator == "!":
            return f"!{self.label}"
        return f"{self.label}{self.operator}{'|'.join(self.values)}"


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement that a model requires; `pools` is empty for any pool."""

    pools: tuple[str, ...] = ()
    terms: tuple[Term, ...] = ()

    def why_not(self, pool: str, labels: Mapping[str, str]) -> str:
        """Why an executor may not load the model; "" if it may."""
        if self.pools and pool not in self.pools:
            return f"'{POOL}' is '{','.join(self.pools)}', and this executor is in the pool '{pool}'"
        for term in self.terms:
            if not term.holds(labels):
                has = labels.get(term.label, "")
                what = f"has {term.label}={has}" if has else f"has no label '{term.label}'"
                return f"'{REQUIRE}' has '{term}', and an executor of the pool '{pool}' {what}"
        return ""

    def __str__(self) -> str:
        """The text of its terms, as `placement_of` reads it."""
        return ",".join(map(str, self.terms))


def placement_of(config: ModelConfig) -> Placement:
    """The placement in a configuration. Raises `InvalidArgument` for invalid terms."""
    pools: tuple[str, ...] = ()
    if POOL in config.parameters:
        pools = tuple(name.strip() for name in config.parameters[POOL].string_value.split(","))
        for name in pools:
            if not _POOL.fullmatch(name):
                raise InvalidArgument(f"'{POOL}' must be names of pools with commas between them, got '{name}'")
    terms: tuple[Term, ...] = ()
    if REQUIRE in config.parameters:
        terms = tuple(_term(text.strip()) for text in config.parameters[REQUIRE].string_value.split(","))
    return Placement(tuple(dict.fromkeys(pools)), terms)


def check_pool(name: str) -> str:
    """The pool in an option. Raises `InvalidArgument`."""
    if not _POOL.fullmatch(name):
        raise InvalidArgument(f"--pool must be letters, digits, '_', '.' and '-', got '{name}'")
    return name


def label_of(text: str) -> tuple[str, str]:
    """`key=value` of an option. Raises `InvalidArgument`."""
    found = _LABEL.fullmatch(text)
    if found is None:
        raise InvalidArgument(f"--label must be <key>=<value> without commas and spaces, got '{text}'")
    return found[1], found[2]


def _term(text: str) -> Term:
    found = _TERM.fullmatch(text)
    if found is None:
        raise InvalidArgument(
            f"'{REQUIRE}' must be terms like 'memory_gib>=8', 'backend=onnxruntime|python', 'label' and '!label' with "
            f"commas between them, got '{text}'"
        )
    if found[1]:
        return Term(found[2], "!")
    operator = found[4] or ""
    values = tuple(value.strip() for value in found[5].split("|")) if found[5] else ()
    if operator in (">", ">=", "<", "<=") and (len(values) != 1 or _number(values[0]) is None):
        raise InvalidArgument(f"'{REQUIRE}' compares '{found[3]}' with '{found[5]}', which is not one number")
    return Term(found[3], operator, values)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None
