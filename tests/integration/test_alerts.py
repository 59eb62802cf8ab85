"""The stack's Prometheus configuration and alerts, by Prometheus's own tool: each fires when it should, and no sooner.

Needs `promtool` on PATH (Debian's package `prometheus` has it); the stack test does the same inside its own Prometheus.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

DIRECTORY = Path(__file__).resolve().parents[2] / "infra" / "prometheus"
PROMTOOL = shutil.which("promtool")

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool: install Debian's prometheus")


def promtool(*words: str) -> str:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *words], cwd=DIRECTORY, capture_output=True, text=True, timeout=60, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


@needs_promtool
def test_alerts_fire_when_they_should() -> None:
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yml")


@needs_promtool
def test_the_configuration_is_one(tmp_path: Path) -> None:
    text = (DIRECTORY / "prometheus.yml").read_text().replace("/etc/prometheus/", f"{DIRECTORY}/")
    (tmp_path / "prometheus.yml").write_text(text)
    assert "14 rules found" in promtool("check", "config", str(tmp_path / "prometheus.yml"))


def test_every_alert_has_a_page_of_the_run_book_and_is_tried() -> None:
    alerts = (DIRECTORY / "alerts.yml").read_text()
    tried = (DIRECTORY / "alerts_test.yml").read_text()
    headings = re.findall(r"^### (.+)$", (DIRECTORY.parents[1] / "docs" / "operating.md").read_text(), re.MULTILINE)
    pages = {heading.lower().replace(" ", "-") for heading in headings}
    for name, page in re.findall(r"- alert: (\w+)(?:.|\n)*?runbook: docs/operating\.md#(\S+)", alerts):
        assert page in pages
        fired = rf"alertname: {name}\n +exp_alerts:\n"
        assert re.search(fired, tried), f"{name} is not seen to fire"
        assert f"alertname: {name}, exp_alerts: []" in tried, f"{name} is not seen to be silent"
