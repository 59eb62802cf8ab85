"""Boards and alerts speak of metrics and labels that there are, and of every board the stack knows.

Whether their queries have data is asked of a real Prometheus by `make boards`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from loadtest.boards.expressions import BOARDS, of_alerts, of_boards, of_scaling

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| `((?:nv|charonia)_\w+)` \| (\w+) \|([^|]*)\|", re.MULTILINE)
OF_ALL = {"instance", "job", "charonia_release", "charonia_pool"}
"""Labels that Prometheus itself gives, and the Helm chart's ServiceMonitor."""
MORE = {
    "histogram": {"_bucket": {"le"}, "_count": set(), "_sum": set()},
    "summary": {"": {"quantile"}, "_count": set(), "_sum": set()},
}
WORDS = {
    *("sum", "max", "min", "by", "on", "rate", "increase", "changes", "absent", "scalar", "topk", "histogram_quantile"),
    *("and", "or", "unless", "up"),
}


def families() -> dict[str, set[str]]:
    """The labels of each series that `docs/metrics.md` lists, by its name."""
    found: dict[str, set[str]] = {}
    for name, kind, labels in ROW.findall((ROOT / "docs" / "metrics.md").read_text()):
        named = {label.strip() for label in labels.split(",") if label.strip()}
        for suffix, more in MORE.get(kind, {"": set()}).items():
            found[name + suffix] = named | more
    return found


FAMILIES = families()


def wrong_in(expression: str) -> list[str]:
    """Metrics, and labels, that an expression names in vain."""
    wrong = []
    bare = re.sub(r'"[^"]*"', '""', expression)
    series = re.findall(r"\b((?:nv|charonia)_\w+|up)\b(?:\{([^}]*)\})?", bare)
    known = OF_ALL.union(*(FAMILIES.get(name, set()) for name, _ in series))
    for name, selectors in series:
        if name != "up" and name not in FAMILIES:
            wrong.append(name)
            continue
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selectors):
            if label not in FAMILIES.get(name, set()) | OF_ALL:
                wrong.append(f"{name}{{{label}}}")
    for labels in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", bare):
        wrong += [label.strip() for label in labels.split(",") if label.strip() not in known]
    words = re.findall(r"[A-Za-z_]\w*", re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|on)\s*\([^)]*\)|\d+e\d+", " ", bare))
    return wrong + [word for word in words if word not in WORDS and word not in dict(series)]


def test_queries_name_metrics_and_labels_that_there_are() -> None:
    queries = of_boards() | of_alerts() | of_scaling()
    assert len(queries) > 90
    assert not {name: wrong for name, query in queries.items() if (wrong := wrong_in(query))}


@pytest.mark.parametrize(
    ("query", "wrong"),
    [
        ("sum(charonia_no_such_total)", ["charonia_no_such_total"]),
        ('rate(nv_inference_count{tenant="a"}[5m])', ["nv_inference_count{tenant}"]),
        ("sum by (tenant) (nv_inference_count)", ["tenant"]),
        ("sum by (le) (rate(charonia_executor_batch_rows_bucket[5m]))", []),
        ("sun(nv_inference_count)", ["sun"]),
    ],
)
def test_a_query_with_a_fault_is_found(query: str, wrong: list[str]) -> None:
    assert wrong_in(query) == wrong


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_a_board_can_be_provisioned(path: Path) -> None:
    board: dict[str, Any] = json.loads(path.read_text())
    assert board["uid"] == f"charonia-{path.stem}"
    panels = board["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    assert len({panel["title"] for panel in panels}) == len(panels)
    cells = set()
    for panel in panels:
        assert panel["datasource"]["uid"] == "prometheus"
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        taken = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells, f"{panel['title']} lies on another panel"
        cells |= taken
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)
    named = {variable["name"] for variable in board.get("templating", {}).get("list", [])}
    assert set(re.findall(r"\$(\w+)", json.dumps(panels))) - {"__rate_interval", "__range"} == named


def test_the_stack_has_every_board_and_the_page_describes_it() -> None:
    compose = (ROOT / "infra" / "docker-compose.yml").read_text()
    page = (ROOT / "docs" / "boards.md").read_text()
    for path in BOARDS:
        assert f"./grafana/{path.name}:/etc/charonia/dashboards/{path.name}:ro" in compose
        assert f"`infra/grafana/{path.name}`" in page
    missing = [name for name in of_alerts() if f"`{name}`" not in page]
    assert not missing
