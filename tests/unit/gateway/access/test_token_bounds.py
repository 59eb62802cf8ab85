"""Tokens of a tenant's calls: counted while they run, by model, and refused beyond the bound."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from charonia.errors import InvalidArgument
from gateway.access.token_bounds import NO_BOUNDS, PendingTokens, TokenBounds, TokensExhausted

BOUNDS = {"acme": TokenBounds(0, 100)}


def pending() -> PendingTokens:
    return PendingTokens(lambda tenant: BOUNDS.get(tenant, NO_BOUNDS))


def test_calls_count_while_they_run() -> None:
    counted = pending()
    with counted.of_call("acme", "m", 60):
        assert counted.remaining("acme", "m") == 40
        assert counted.remaining("acme", "other") == 100
        with counted.of_call("acme", "m", 40), counted.of_call("acme", "other", 100):
            assert counted.remaining("acme", "m") == 0
            with pytest.raises(TokensExhausted, match=r"60|100"), counted.of_call("acme", "m", 1):
                pytest.fail("there is no capacity")
        assert counted.remaining("acme", "m") == 40
    assert counted.remaining("acme", "m") == 100
    assert not counted._pending


def test_a_call_that_never_fits_is_wrong() -> None:
    with pytest.raises(InvalidArgument, match="max_pending_tokens"), pending().of_call("acme", "m", 101):
        pytest.fail("it does not fit")


def test_others_have_no_bound() -> None:
    counted = pending()
    with ExitStack() as calls:
        for tenant in ("", "free"):
            for _ in range(3):
                calls.enter_context(counted.of_call(tenant, "m", 10**9))
        assert not counted._pending


def test_a_call_that_fails_counts_no_longer() -> None:
    counted = pending()
    with pytest.raises(ValueError, match="it failed"), counted.of_call("acme", "m", 100):
        raise ValueError("it failed")
    assert counted.remaining("acme", "m") == 100


def test_a_bound_that_changes_meanwhile() -> None:
    bounds = [TokenBounds(0, 100)]
    counted = PendingTokens(lambda _: bounds[0])
    with counted.of_call("acme", "m", 100):
        bounds[0] = TokenBounds(0, 50)
        assert counted.remaining("acme", "m") == 0
    assert counted.remaining("acme", "m") == 50
