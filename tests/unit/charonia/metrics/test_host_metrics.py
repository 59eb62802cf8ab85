"""The machine's processor time and memory (M7), from files as Linux writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from charonia.metrics.host_metrics import HostMetrics, busy_and_total, total_and_used
from charonia.options.settings import MetricsSettings

STAT = "cpu  100 0 50 800 50 0 0 0 7 0\ncpu0 1 2 3\n"
MEMINFO = "MemTotal:       1000 kB\nMemFree:  1 kB\nMemAvailable:    400 kB\nHugePages_Total:       0\n"


def test_the_files() -> None:
    assert busy_and_total(STAT) == (150, 1000)
    assert total_and_used(MEMINFO) == (1_024_000, 614_400)
    for text in ("", "intr 1", "cpu  1 2"):
        with pytest.raises(ValueError):
            busy_and_total(text)
    with pytest.raises(ValueError):
        total_and_used("MemTotal: 1 kB\n")


def values(host: HostMetrics) -> dict[str, float]:
    page = host.render().decode().splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in page if not line.startswith("#")}


def test_utilization_is_since_it_was_read_last(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text(STAT)
    (tmp_path / "meminfo").write_text(MEMINFO)
    host = HostMetrics(MetricsSettings(interval_ms=0), tmp_path)
    (tmp_path / "stat").write_text("cpu  175 0 50 825 50 0 0 0 0 0\n")
    assert values(host) == {
        "nv_cpu_utilization": 0.75,
        "nv_cpu_memory_total_bytes": 1_024_000,
        "nv_cpu_memory_used_bytes": 614_400,
        "nv_pinned_memory_pool_total_bytes": 0,
        "nv_pinned_memory_pool_used_bytes": 0,
    }


def test_figures_hold_for_the_interval(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text(STAT)
    (tmp_path / "meminfo").write_text(MEMINFO)
    host = HostMetrics(MetricsSettings(interval_ms=10**9), tmp_path)
    (tmp_path / "stat").write_text("cpu  175 0 50 825 50 0 0 0 0 0\n")
    assert values(host)["nv_cpu_utilization"] == 0.15


def test_none_where_they_are_not_wanted_or_not_there(tmp_path: Path) -> None:
    assert "nv_cpu_utilization" not in values(HostMetrics(MetricsSettings(cpu=False)))
    assert "nv_cpu_utilization" not in values(HostMetrics(MetricsSettings(), tmp_path))
