"""`--metrics-config` (M3-M5)."""

from __future__ import annotations

import pytest

from charonia.errors import StartupError
from charonia.options.metrics_options import metrics_settings
from charonia.options.settings import MetricsSettings

QUANTILES = "summary_quantiles in --metrics-config must be <quantile>:<error>,...,"


def settings(*entries: str) -> MetricsSettings:
    return metrics_settings(
        {"metrics_config": entries, "allow_cpu_metrics": True, "allow_gpu_metrics": True, "metrics_interval_ms": 2000}
    )


def test_defaults() -> None:
    assert settings() == MetricsSettings()


def test_all_of_them() -> None:
    found = settings(
        "counter_latencies=false",
        "summary_latencies=false",
        "summary_latencies=TRUE",
        "histogram_latencies=true",
        "summary_quantiles=0.1:0.0.1,.7:0.01,1:0",
    )
    assert found == MetricsSettings(counters=False, histograms=True, summaries=True, quantiles=(0.1, 0.7, 1.0))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("summary_latencies", "--metrics-config option format is <setting>=<value>. Got summary_latencies"),
        (
            "a,summary_latencies=true",
            "--metrics-config option format is <setting>=<value>. Got a,summary_latencies=true",
        ),
        (
            "other=true",
            "unknown setting 'other' in --metrics-config: there are counter_latencies, histogram_latencies, "
            "summary_latencies, summary_quantiles",
        ),
        ("counter_latencies=maybe", "counter_latencies in --metrics-config must be true or false, got 'maybe'"),
        ("summary_quantiles=0.5", QUANTILES + " got '0.5'"),
        (
            "summary_quantiles=2:0.1",
            QUANTILES + " got '2:0.1'",
        ),
        (
            "summary_quantiles=0.5:x",
            QUANTILES + " got '0.5:x'",
        ),
    ],
)
def test_refused(entry: str, message: str) -> None:
    with pytest.raises(StartupError) as refused:
        settings(entry)
    assert str(refused.value) == message
