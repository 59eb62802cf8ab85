"""Medians are over the rounds that worked, ratios over pairs of the same round."""

from __future__ import annotations

import pytest

from loadtest.bench.cases import CASES
from loadtest.bench.points import Key, Point, window_s
from loadtest.bench.report import FIGURES, median_of, print_report, ratio_of

KEY = Key("identity", "grpc", 64)


def _point(rate: float, gateway_us: float = 10.0) -> Point:
    cpu, switches = {"gateway": gateway_us, "redis": 2.0}, {"gateway": 0.5, "redis": 0.25}
    return Point(rate, 100, 200, 1000, 0, cpu, switches, log_commands=0.2)


def test_medians_leave_failed_rounds_out() -> None:
    rate = FIGURES["req/s"][0]
    assert median_of([_point(10), None, _point(30), _point(20)], rate) == 20
    assert median_of([None], rate) is None
    assert median_of([_point(1)], FIGURES["req/entry"][0]) is None
    assert median_of([_point(1)], FIGURES["server us"][0]) == 12.0


def test_ratios_pair_rounds() -> None:
    own, base = [_point(10), _point(30), None], [_point(20), _point(10), _point(5)]
    assert ratio_of(own, base, FIGURES["req/s"][0]) == pytest.approx((0.5 + 3) / 2)
    assert ratio_of([None], base, FIGURES["req/s"][0]) is None


def test_slow_models_get_longer_windows() -> None:
    assert window_s(CASES["identity"], 64, 1.0) == (0.35, 1.0)
    warm_s, measured_s = window_s(CASES["resnet18"], 64, 1.0)
    assert (warm_s, measured_s) == (64 * 0.025, 2 * 64 * 0.025)


def test_the_report_names_servers_roles_and_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    results = {KEY: {"own": [_point(20, 5.0)], "base": [_point(10), None]}}
    print_report(results, {(KEY, "own"): {"gateway": 98.0}}, "base")
    text = capsys.readouterr().out
    assert "gateway 5.0 us, 0.50 sw, 98 calls; redis 2.0 us, 0.25 sw" in text
    assert "1/2" in text
    assert "Medians over the rounds of figure / figure of base" in text
    assert text.splitlines()[-1].split()[3:5] == ["own", "2.00"]
