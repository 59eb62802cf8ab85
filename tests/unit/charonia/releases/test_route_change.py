"""What an operator's change makes of a rule."""

from __future__ import annotations

from typing import Any

import pytest

from charonia.errors import InvalidArgument
from charonia.releases.route_change import MAX_RULE_BYTES, changed_rule, summary
from charonia.releases.route_rule import CANARY, PINNED, ROLLED_BACK, RouteRule, rolled_back, route_fact, without_values


def changed(rule: RouteRule | None, **wanted: Any) -> RouteRule:
    return changed_rule(rule, wanted, [1, 2, 3], 5)


def test_the_present_version_is_the_highest_other_one() -> None:
    assert changed(None, candidate=3, share=10).present == 2
    assert changed(None, shadow=3).present == 2
    assert changed(None, present=1, candidate=3).present == 1
    with pytest.raises(InvalidArgument, match="no other version is served"):
        changed_rule(None, {"candidate": 3}, [3], 5)


def test_a_version_that_is_not_served_cannot_become_the_present_one() -> None:
    with pytest.raises(InvalidArgument, match="version 9 is not served: requests cannot go to it"):
        changed(None, present=9)
    rule = changed(None, present=1)
    with pytest.raises(InvalidArgument, match="version 9 is not served"):
        changed(rule, present=9)
    assert changed_rule(rule, {"shadow": 3}, [2], 5).present == 1, "it was served when it was named"


def test_what_is_not_named_stays() -> None:
    rule = changed(None, candidate=3, share=10, headers={"X-Canary": "yes"}, gate={"window_s": 30, "steps": [50]})
    wider = changed(rule, share=20, gate={"min_requests": 5})
    assert (wider.share, wider.headers, wider.present) == (2000, (("x-canary", "yes"),), 2)
    assert (wider.gate.window_s, wider.gate.min_requests, wider.gate.steps) == (30, 5, (5000,))
    assert [decision.by for decision in wider.history] == ["operator", "operator"]
    assert wider.history[-1].what == summary(without_values(wider))
    assert "header x-canary" in wider.history[-1].what, "a history is shown to more people than values of headers"


def test_a_candidate_that_is_named_again_is_tested_again() -> None:
    back = rolled_back(changed(None, candidate=3, share=10), "slow", 6)
    assert changed(back, gate={"window_s": 5}).stage == ROLLED_BACK
    again = changed(back, candidate=3, share=5)
    assert (again.stage, again.share) == (CANARY, 500)
    assert len(again.history) == 3


def test_an_operator_releases_by_naming_the_candidate_as_present() -> None:
    rule = changed(None, candidate=3, share=10, headers={"a": "b"}, tenants=["acme"])
    done = changed(rule, present=3)
    assert (done.present, done.candidate, done.share, done.headers, done.stage) == (3, 0, 0, (), PINNED)
    gone = changed(rule, candidate=0)
    assert (gone.present, gone.candidate, gone.tenants, gone.stage) == (2, 0, (), PINNED)


def test_stage_and_history_are_not_for_operators() -> None:
    with pytest.raises(InvalidArgument, match="unknown field 'stage' of a routing rule: present, candidate, "):
        changed(None, present=1, stage="released")


def test_a_long_history_makes_room_for_a_change() -> None:
    """Characters outside ASCII take six bytes each, in the tenants and in each decision that names them."""
    rule = changed(None, candidate=3, tenants=[f"{number}" + "é" * 120 for number in range(30)])
    for share in range(1, 20):
        rule = changed(rule, share=share)
    assert rule.share == 1900
    assert 1 < len(rule.history) < 20
    assert rule.history[-1].what.startswith(
        "version 2 gets requests that name no version; version 3 gets 19%, tenant 0é"
    )
    assert len(route_fact("m", 1, rule).rule) <= MAX_RULE_BYTES


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"headers": {"a": "é" * 129}}, "names and values in a routing rule have at most 256 bytes"),
        ({"tenants": ["a" * 257]}, "names and values in a routing rule have at most 256 bytes"),
        ({"tolerances": {"a" * 257: 1}}, "names and values in a routing rule have at most 256 bytes"),
        ({"tolerances": {str(n): 1 for n in range(65)}}, "a routing rule has at most 64 tolerances"),
        ({"headers": {f"{n:0256}": "é" * 128 for n in range(64)}}, "a routing rule has at most 65536 bytes"),
    ],
)
def test_rules_are_small(wanted: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        changed(None, candidate=3, **wanted)
    assert caught.value.message == text


def test_the_history_of_a_large_rule_does_not_stop_its_changes() -> None:
    rule = changed(None, candidate=3, headers={f"{n:064}": "b" * 250 for n in range(64)})
    for share in range(1, 30):
        rule = changed(rule, share=share)
    assert (rule.share, len(rule.history)) == (2900, 20)
    assert rule.history[-1].what.endswith("...")


def test_words() -> None:
    rule = changed(None, candidate=3, share=10, headers={"a": "b"}, tenants=["acme"], sticky="x-user", shadow=1)
    assert summary(rule) == (
        "version 2 gets requests that name no version; version 3 gets 10%, a=b, tenant acme; "
        "kept together by x-user; version 1 gets copies"
    )
    assert summary(rolled_back(rule, "slow", 6)).split("; ")[1] == "version 3 gets none (rolled back)"
