"""Where the chart and what it was rendered to lie, and a digest by which tests know that both belong together."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "infra" / "helm" / "charonia"
RENDERED = ROOT / "tests" / "house" / "rendered_chart"
PAGE = ROOT / "docs" / "howto" / "kubernetes-values.md"
GUIDE = ROOT / "docs" / "howto" / "kubernetes.md"
_ELSEWHERE = {"alerts.yml"}
"""Files of the stack that the chart links to; none of the kept manifests holds them."""


def digest() -> str:
    """SHA-256, in hex, of the names and contents of all files that kept manifests are made of, the matrix included."""
    whole = hashlib.sha256()
    paths = [path for path in CHART.rglob("*") if path.is_file() and path.name not in _ELSEWHERE]
    for path in sorted([*paths, Path(__file__).with_name("cases.py")]):
        content = path.read_bytes()
        whole.update(f"{path.relative_to(ROOT).as_posix()} {len(content)}\n".encode() + content)
    return whole.hexdigest()
