"""`charonia route`: shows and changes the routing rules of models."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from charonia import keys
from charonia.calls.route_control import RouteControl
from charonia.catalog.catalog import Catalog
from charonia.errors import InvalidArgument
from charonia.eventlog.control import FollowedControl
from charonia.eventlog.port import EventLog, Statistics
from charonia.models.names import name_of
from charonia.releases.route_change import summary
from charonia.releases.route_rule import document, share_of


async def show_routes(log: EventLog, model: str) -> dict[str, Any]:
    """The rule of a model, or those of all models that have one."""
    control = FollowedControl(log)
    await control.read()
    routes = control.catalog.routes.rules
    models = [control.catalog.resolve(model)] if model else sorted(routes)
    return {"routes": [await _shown(log, control.catalog, one) for one in models]}


async def change_route(log: EventLog, model: str, wanted: Mapping[str, Any] | None) -> dict[str, Any]:
    """Change a model's rule, or with None take it away; the answer is that of `show_routes`."""
    control = FollowedControl(log)
    await control.read()
    await RouteControl(control).change(model, wanted)
    return {"routes": [await _shown(log, control.catalog, control.catalog.resolve(model))]}


async def _shown(log: Statistics, catalog: Catalog, model: str) -> dict[str, Any]:
    rule = catalog.routes.rules.get(model)
    shown: dict[str, Any] = {"model": name_of(model), "served": sorted(catalog.served(model)), "rule": None}
    if rule is not None:
        shown |= {"rule": document(rule), "summary": summary(rule), "shadow": None}
        if rule.shadow:
            shown["shadow"] = dict(await log.statistics(keys.shadow_counts(model, rule.shadow)))
    return shown


def wanted_of(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of the rule that the command line names. Raises `InvalidArgument` for a value that cannot be."""
    wanted: dict[str, Any] = {}
    gate: dict[str, Any] = {}
    if options.canary:
        version, _, share = options.canary.partition(":")
        wanted["candidate"] = _version(version)
        wanted["share"] = share_of(share) / 100 if share else 0.0
    if options.match:
        wanted["headers"] = dict(_pair(text, "--match") for text in options.match)
    if options.tenant:
        wanted["tenants"] = options.tenant
    if options.present is not None:
        wanted["present"] = options.present
    if options.shadow is not None:
        wanted["shadow"] = options.shadow
    if options.sticky is not None:
        wanted["sticky"] = "" if options.sticky == "none" else options.sticky
    if options.tolerance:
        wanted["tolerances"] = dict(_tolerance(text) for text in options.tolerance)
    if options.advance is not None:
        gate["steps"] = [share_of(step) / 100 for step in options.advance.split(",") if step.strip() and step != "none"]
    for name in ("rollback", "window_s", "min_requests", "max_error_percent", "max_latency_ratio", "latency_slack_ms"):
        value = getattr(options, name)
        if value is not None:
            gate[name] = value
    if gate:
        wanted["gate"] = gate
    return wanted


def _version(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise InvalidArgument(f"'{text}' is no version: write VERSION:SHARE, as 3:10%")
    return int(text)


def _pair(text: str, option: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not name or not sign:
        raise InvalidArgument(f"'{text}' of {option} is not NAME=VALUE")
    return name.strip(), value


def _tolerance(text: str) -> tuple[str, float]:
    name, value = _pair(text, "--tolerance") if "=" in text else ("", text)
    try:
        return name, float(value)
    except ValueError:
        raise InvalidArgument(f"'{text}' of --tolerance is neither a number nor OUTPUT=NUMBER") from None
