"""When a webhook is tried again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.webhooks.retries import DELAYS, MAX_ATTEMPTS, DeliveryState, judge

MIDDLE = 0.5


def test_waits_are_those_of_the_specification() -> None:
    waits_s = [judge(n, 500, 5.0, MIDDLE).wait_s for n in range(1, MAX_ATTEMPTS)]
    minute, hour = 60, 3600
    assert waits_s == pytest.approx(
        [5, 5 * minute, 30 * minute, 2 * hour, 5 * hour, 10 * hour, 14 * hour, 20 * hour, 24 * hour]
    )
    assert judge(MAX_ATTEMPTS, 500, 5.0, MIDDLE).state is DeliveryState.GIVEN_UP


@given(st.integers(1, MAX_ATTEMPTS), st.integers(0, 999), st.floats(0, 1, exclude_max=True), st.integers(0, 10**9))
def test_only_2xx_is_success_and_410_the_end(attempts: int, status: int, chance: float, wished_s: int) -> None:
    verdict = judge(attempts, status, 1.0, chance, wished_s)
    if 200 <= status < 300:
        assert verdict.state is DeliveryState.DELIVERED
    elif status == 410:
        assert verdict.state is DeliveryState.DISABLED
    elif attempts == MAX_ATTEMPTS:
        assert verdict.state is DeliveryState.GIVEN_UP
    else:
        planned_s = DELAYS[attempts - 1]
        assert verdict.state is DeliveryState.PENDING
        assert verdict.wait_s >= 0.8 * planned_s
        assert verdict.wait_s <= max(1.2 * planned_s, min(wished_s, 86_400)) + 1e-6
    assert verdict.state.final == (verdict.wait_s == 0)


def test_an_endpoint_can_ask_for_more_time_but_not_for_less() -> None:
    assert judge(1, 429, 5.0, MIDDLE, wished_s=60).wait_s == 60
    assert judge(2, 503, 5.0, MIDDLE, wished_s=1).wait_s == pytest.approx(300)
