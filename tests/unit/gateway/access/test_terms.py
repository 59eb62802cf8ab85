"""On what terms callers are accepted."""

from __future__ import annotations

import pytest

from charonia.errors import InvalidArgument
from charonia.eventlog.port import Limits
from charonia.keys import LANES, lane_of
from charonia.options.settings import GatewaySettings
from gateway.access.terms import TenantBounds, TermsBook, check_durability
from gateway.requests.delivery import Caller, DeliveryOptions


def test_lanes_are_stable_and_spread() -> None:
    assert lane_of("") == 0
    assert lane_of("acme") == 48
    assert lane_of("north wind") == 39
    lanes = [lane_of(f"tenant-{n}") for n in range(2000)]
    assert set(lanes) == set(range(LANES))


def test_equal_callers_have_the_same_terms_and_bounds_follow_their_table() -> None:
    bounds = {"acme": TenantBounds(3, 4)}
    settings = GatewaySettings("g", max_pending_requests=1, max_pending_bytes=2, journal="all", durability="fsync")
    book = TermsBook(settings, lambda tenant: bounds.get(tenant, TenantBounds()))
    acme = DeliveryOptions(caller=Caller("acme", scoped=True), idempotency_key="any")
    terms = book.of(acme)
    assert (terms.tenant, terms.lane, terms.limits) == ("acme", lane_of("acme"), Limits(1, 2, 3, 4))
    assert (terms.journalled, terms.durability) == (True, "fsync")
    assert book.of(acme) is terms
    bounds["acme"] = TenantBounds(9)
    assert book.of(acme).limits == Limits(1, 2, 9, 0)
    weaker = DeliveryOptions(durability="memory")
    assert book.of(weaker).durability == "memory"
    assert (book.default.tenant, book.default.lane, book.default.durability) == ("", 0, "fsync")
    assert book.of(DeliveryOptions()) is book.default


@pytest.mark.parametrize("level", ["memory", "fsync", "replicated:1", "replicated:12"])
def test_durability_levels(level: str) -> None:
    check_durability(level)


@pytest.mark.parametrize("level", ["", "disk", "replicated", "replicated:0", "replicated:100", "fsync ", "FSYNC"])
def test_what_is_no_durability_level(level: str) -> None:
    with pytest.raises(InvalidArgument, match="invalid durability"):
        TermsBook(GatewaySettings("g")).of(DeliveryOptions(durability=level)) if level else check_durability(level)
