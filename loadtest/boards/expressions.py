"""Every PromQL expression of the boards, of the alerts, and by which the Helm chart scales."""

from __future__ import annotations

import json
import re
from pathlib import Path

_INFRA = Path(__file__).resolve().parents[2] / "infra"
BOARDS = tuple(sorted(path for path in (_INFRA / "grafana").glob("*.json")))
ALERTS = _INFRA / "prometheus" / "alerts.yml"
SCALING = tuple(sorted((_INFRA / "helm" / "charonia" / "files").glob("*.promql")))
RELEASE, POOL = "serving/demo", "default"
"""Labels that the chart's ServiceMonitor gives all series of a release, and those of a pool's executors."""


def of_boards(rate_interval: str = "1m", time_range: str = "30m") -> dict[str, str]:
    """Expression by board, panel and legend, with Grafana's variables replaced: every model, every tenant."""
    values = {"$__rate_interval": rate_interval, "$__range": time_range, "$model": ".+", "$tenant": ".+"}
    found = {}
    for path in BOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                expression = target["expr"]
                for name, value in values.items():
                    expression = expression.replace(name, value)
                found[f"{path.stem}: {panel['title']}, {target['legendFormat']}"] = expression
    return found


def of_alerts() -> dict[str, str]:
    """Expression by alert."""
    return dict(re.findall(r"- alert: (\w+)\n +expr: (.+)\n", ALERTS.read_text()))


def of_scaling(window: str = "600s") -> dict[str, str]:
    """Expression by file, without the 0 that it has where there is no series, for the release and pool above."""
    values = {"RELEASE": RELEASE, "POOL": POOL, "MODELS": ".+", "WINDOW": window, "ASSUMED": "1"}
    found = {}
    for path in SCALING:
        expression = path.read_text().strip().removesuffix(" or vector(0)")
        for name, value in values.items():
            expression = expression.replace(name, value)
        found[f"scaling: {path.stem}"] = expression
    return found
