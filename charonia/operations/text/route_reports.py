"""What `charonia route` prints, from its document."""

from __future__ import annotations

from typing import Any

from charonia.releases.route_rule import CANARY

from .rendering import moment, one_line


def route_lines(document: dict[str, Any]) -> list[str]:
    """Each rule in words, its gate, and the decisions that made it what it is."""
    if not document["routes"]:
        return ["no model has a routing rule"]
    return [line for route in document["routes"] for line in _route(route)]


def _route(route: dict[str, Any]) -> list[str]:
    versions = ", ".join(map(str, route["served"])) or "none"
    rule = route["rule"]
    if rule is None:
        return [f"{route['model']}: no rule, the highest version gets the requests (served: {versions})"]
    lines = [f"{route['model']}: {rule['stage']}; {route['summary']} (served: {versions})"]
    gate, served = rule["gate"], route["served"]
    if rule["stage"] == CANARY and rule["candidate"] not in served:
        lines.append(f"  version {rule['candidate']} is not served: the present version gets its requests until it is")
    if rule["shadow"] and rule["shadow"] not in served:
        lines.append(f"  version {rule['shadow']} is not served: it gets no copies until it is")
    if rule["candidate"]:
        steps = ", ".join(f"{step:g}%" for step in gate["steps"]) or "by hand"
        lines.append(
            f"  gate: {gate['window_s']:g} s with {gate['min_requests']} requests; errors at most "
            f"{gate['max_error_percent']:g} points more, latency at most {gate['max_latency_ratio']:g} times and "
            f"{gate['latency_slack_ms']:g} ms; rollback {'on' if gate['rollback'] else 'off'}, steps {steps}"
        )
    if route["shadow"] is not None:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(route["shadow"].items())) or "nothing yet"
        lines.append(f"  shadow {rule['shadow']}: {counts}")
    lines += [
        f"  {moment(decision['at_us'])} {decision['by']}: {one_line(decision['what'])} ({one_line(decision['reason'])})"
        for decision in rule["history"]
    ]
    return lines
