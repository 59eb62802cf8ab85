"""Every PromQL expression of the overview board and of the alerts, asked of a stack's Prometheus."""

from __future__ import annotations

import json
import re
import urllib.parse
import urllib.request
from pathlib import Path

_INFRA = Path(__file__).resolve().parents[2] / "infra"


def expressions() -> dict[str, str]:
    """Expression by the panel or alert it is of."""
    board = json.loads((_INFRA / "grafana" / "overview.json").read_text())
    found = {
        f"{panel['title']}, {target['legendFormat']}": target["expr"].replace("$__rate_interval", "1m")
        for panel in board["panels"]
        for target in panel["targets"]
    }
    alerts = (_INFRA / "prometheus" / "alerts.yml").read_text()
    return found | dict(re.findall(r"- alert: (\w+)\n +expr: (.+)\n", alerts))


def asked(prometheus: str) -> dict[str, int]:
    """How many series each expression has at `prometheus` (host:port). Raises OSError for one that is refused."""
    found = {}
    for name, expression in expressions().items():
        url = f"http://{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            found[name] = len(json.load(answer)["data"]["result"])
    return found
