"""The options about metrics (M3-M5, M9): `--metrics-config <setting>=<value>` selects the latencies to measure."""

from __future__ import annotations

import re

from charonia.errors import StartupError

from .settings import MetricsSettings
from .values import Values

_SWITCHES = {"counter_latencies": "counters", "histogram_latencies": "histograms", "summary_latencies": "summaries"}
_QUANTILES = "summary_quantiles"
_NUMBER = re.compile(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)")


def metrics_settings(values: Values) -> MetricsSettings:
    """The settings of the options; of a repeated setting the last value counts. Raises `StartupError`."""
    switches: dict[str, bool] = {}
    quantiles = MetricsSettings().quantiles
    for entry in values["metrics_config"]:
        setting, equals, value = entry.partition("=")
        if not equals or not setting or "," in setting:
            raise StartupError(f"--metrics-config option format is <setting>=<value>. Got {entry}")
        if setting == _QUANTILES:
            quantiles = tuple(_quantile(pair) for pair in value.split(","))
        elif setting not in _SWITCHES:
            known = ", ".join([*_SWITCHES, _QUANTILES])
            raise StartupError(f"unknown setting '{setting}' in --metrics-config: there are {known}")
        elif value.lower() not in ("true", "false"):
            raise StartupError(f"{setting} in --metrics-config must be true or false, got '{value}'")
        else:
            switches[_SWITCHES[setting]] = value.lower() == "true"
    return MetricsSettings(
        counters=switches.get("counters", True),
        histograms=switches.get("histograms", False),
        summaries=switches.get("summaries", False),
        quantiles=quantiles,
        cpu=values["allow_cpu_metrics"],
        gpu=values["allow_gpu_metrics"],
        interval_ms=values["metrics_interval_ms"],
    )


def _quantile(pair: str) -> float:
    """The quantile of `<quantile>:<error>`. The error is parsed and ignored: every quantile here is within 1 %."""
    wanted, colon, error = pair.partition(":")
    number = _NUMBER.fullmatch(wanted)
    # Triton reads the part of the error that begins like a number
    if not colon or number is None or _NUMBER.match(error) is None or float(number[1]) > 1:
        raise StartupError(f"{_QUANTILES} in --metrics-config must be <quantile>:<error>,..., got '{pair}'")
    return float(number[1])
