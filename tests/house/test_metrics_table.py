"""The table of `docs/metrics.md` has every family of the code, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TypeGuard

from executors.backends.engine_families import VLLM

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("charonia", "gateway", "batcher", "executors")
VLLM_ROW = re.compile(r"^\| `vllm:(\w+)` \| (\w+) \|", re.MULTILINE)
ROW = re.compile(r"^\| `((?:nv|charonia)_\w+)` \| (\w+) \|", re.MULTILINE)
FAMILY = re.compile(r"(?:nv|charonia)_[a-z_]+[a-z]")
PREFIX = "charonia_executor_"
"""`ExecutorMetrics._counter` puts it in front of its argument."""


def documented() -> dict[str, str]:
    """Type by family."""
    rows = ROW.findall((ROOT / "docs" / "metrics.md").read_text())
    assert len(rows) == len(dict(rows)), "a family stands twice"
    return dict(rows)


def in_code() -> set[str]:
    """The names in modules that make families, counters without `_total`: prometheus_client wants them so."""
    names: set[str] = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text()
            if "prometheus_client" not in text and "metric" not in str(path.relative_to(ROOT)):
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and FAMILY.fullmatch(node.value):
                    names.add(node.value.removesuffix("_total"))
                elif (
                    isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "_counter"
                ):
                    (name, *_) = node.args
                    assert isinstance(name, ast.Constant)
                    names.add(PREFIX + name.value)
    return names


def test_the_table_has_every_family_of_the_code() -> None:
    rows = {name.removesuffix("_total") for name in documented()}
    assert len(rows) > 50
    assert in_code() == rows


def test_families_of_triton_have_its_texts() -> None:
    """Boards and alerts are made from the `HELP` lines too. The file has those of Triton's core."""
    lines = (ROOT / "tests" / "golden" / "help_of_families.txt").read_text().splitlines()
    texts = dict(line.split(" ", 1) for line in lines)
    assert texts.keys() == {name for name in documented() if name.startswith("nv_")}
    constants: set[str] = set()
    for path in [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if "metric" in str(path)]:
        constants |= {node.value for node in ast.walk(ast.parse(path.read_text())) if _is_text(node)}
    written = "\n".join(constants)
    assert not {f"{name} {text}" for name, text in texts.items() if name not in constants or text not in written}


def _is_text(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_the_table_has_every_family_of_vllm() -> None:
    rows = dict(VLLM_ROW.findall((ROOT / "docs" / "metrics.md").read_text()))
    assert rows == {name: ("counter", "gauge", "histogram")[kind] for name, (_, kind, _) in VLLM.items()}


def test_counters_end_as_prometheus_wants() -> None:
    """Triton's do not."""
    wrong = {
        n
        for n, kind in documented().items()
        if n.startswith("charonia_") and (kind == "counter") != n.endswith("_total")
    }
    assert not wrong
