"""An operator's change of a routing rule: what is named changes, the rest stays. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from charonia.errors import InvalidArgument

from .route_rule import (
    CANARY,
    PINNED,
    Decision,
    RouteRule,
    decided,
    document,
    percent,
    read_rule,
    route_fact,
    without_values,
)

MAX_RULE_BYTES = 65_536
"""With its history: every process keeps it."""
_MAX_TEXT_BYTES = 256
_MAX_TOLERANCES = 64
_MAX_SUMMARY = 500
_CHANGEABLE = ("present", "candidate", "share", "headers", "tenants", "sticky", "shadow", "tolerances", "gate")


def changed_rule(
    current: RouteRule | None, wanted: Mapping[str, Any], versions: Collection[int], at_us: int
) -> RouteRule:
    """The rule after a change. `wanted` has fields of `route_rule.document`, without stage and history.

    A rule that names no present version gets the highest of `versions`, those that are served, beside the candidate and
    the shadow; one that it newly names must be among them. A candidate that is named is tested, again if it was rolled
    back. Raises `InvalidArgument`.
    """
    unknown = wanted.keys() - set(_CHANGEABLE)
    if unknown:
        raise InvalidArgument(f"unknown field '{min(unknown)}' of a routing rule: {', '.join(_CHANGEABLE)}")
    body: dict[str, Any] = document(current) if current is not None else {}
    fields = dict(wanted)
    if "gate" in fields and isinstance(fields["gate"], Mapping) and body:
        fields["gate"] = {**body["gate"], **fields["gate"]}
    body |= fields
    body.pop("history", None)
    if current is not None and "present" in wanted and wanted["present"] == current.candidate:
        body["candidate"] = wanted.get("candidate", 0)
    if not body.get("present"):
        others = [v for v in versions if v not in (body.get("candidate"), body.get("shadow"))]
        if not others:
            raise InvalidArgument("no other version is served: name the version that requests go to now with 'present'")
        body["present"] = max(others)
    if not body.get("candidate"):
        for name in ("candidate", "share", "headers", "tenants"):
            if name not in wanted:
                body.pop(name, None)
    has_new = "candidate" in wanted or "share" in wanted or "headers" in wanted or "tenants" in wanted
    body.pop("stage", None)
    rule = read_rule(body)
    if (current is None or rule.present != current.present) and rule.present not in versions:
        raise InvalidArgument(f"version {rule.present} is not served: requests cannot go to it")
    if current is not None:
        stage = current.stage if current.candidate == rule.candidate and not has_new else rule.stage
        rule = replace(rule, stage=stage, history=current.history)
    _check_size(rule)
    changed = decided(rule, Decision(at_us, "operator", _shortened(summary(without_values(rule))), "asked for"))
    return _fitting(changed)


def _fitting(rule: RouteRule) -> RouteRule:
    """The rule without its oldest decisions, if it is too large with them. Raises `InvalidArgument` if the last one
    alone is too much.
    """
    while len(route_fact("", 0, rule).rule) > MAX_RULE_BYTES:
        if len(rule.history) == 1:
            raise InvalidArgument(f"a routing rule has at most {MAX_RULE_BYTES} bytes")
        rule = replace(rule, history=rule.history[1:])
    return rule


def _check_size(rule: RouteRule) -> None:
    pairs = (*rule.headers, *((name, "") for name, _ in rule.tolerances))
    texts = [text for pair in pairs for text in pair] + [*rule.tenants, rule.sticky]
    if any(len(text.encode()) > _MAX_TEXT_BYTES for text in texts):
        raise InvalidArgument(f"names and values in a routing rule have at most {_MAX_TEXT_BYTES} bytes")
    if len(rule.tolerances) > _MAX_TOLERANCES:
        raise InvalidArgument(f"a routing rule has at most {_MAX_TOLERANCES} tolerances")


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_SUMMARY else text[: _MAX_SUMMARY - 3] + "..."


def summary(rule: RouteRule) -> str:
    """What a rule does, in words; of a header without a value only the name."""
    words = [f"version {rule.present} gets requests that name no version"]
    if rule.candidate and rule.stage == CANARY:
        who = [percent(rule.share)] if rule.share or not (rule.headers or rule.tenants) else []
        who += [f"{name}={value}" if value else f"header {name}" for name, value in rule.headers]
        who += [f"tenant {tenant}" for tenant in rule.tenants]
        words.append(f"version {rule.candidate} gets {', '.join(who)}")
        if rule.sticky:
            words.append(f"kept together by {rule.sticky}")
    elif rule.candidate and rule.stage != PINNED:
        words.append(f"version {rule.candidate} gets none ({rule.stage})")
    if rule.shadow:
        words.append(f"version {rule.shadow} gets copies")
    return "; ".join(words)
