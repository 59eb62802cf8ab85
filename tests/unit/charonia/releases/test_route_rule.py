"""Which version a rule gives to a request, and what a rule may say."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from charonia.errors import InvalidArgument
from charonia.facts.events import RouteChanged
from charonia.releases.route_rule import (
    CANARY,
    CORRELATION_ID,
    RELEASED,
    ROLLED_BACK,
    WHOLE,
    Gate,
    RequestFacts,
    RouteRule,
    Routes,
    advanced,
    chosen,
    document,
    next_step,
    read_rule,
    rolled_back,
    route_fact,
    share_of,
    spread_draw,
    standing_in,
    sticky_key,
)

RULE = RouteRule(2, 3, 1000, (("x-canary", "yes"),), ("acme",), stage=CANARY, gate=Gate(steps=(2500, WHOLE)))
PLAIN = RequestFacts()


def test_a_share_of_requests_goes_to_the_candidate() -> None:
    versions = [chosen(RULE, PLAIN, spread_draw(number)) for number in range(WHOLE)]
    assert versions.count(3) == 1000
    assert all(1 <= versions[at : at + 20].count(3) <= 3 for at in range(0, WHOLE, 20)), "evenly"


@pytest.mark.parametrize(
    ("facts", "version"),
    [
        (RequestFacts(headers=[(b"x-canary", b"yes")]), 3),
        (RequestFacts(headers=[(b"x-canary", b"no")]), 2),
        (RequestFacts(tenant="acme"), 3),
        (RequestFacts(tenant="other"), 2),
        (RequestFacts(headers=[(b"x-canary", b"yes")], is_bound=True), 3),
    ],
)
def test_headers_and_tenants_name_the_candidate(facts: RequestFacts, version: int) -> None:
    assert chosen(RULE, facts, WHOLE - 1) == version
    assert chosen(replace(RULE, stage=ROLLED_BACK), facts, 0) == 2


def test_what_cannot_be_run_again_is_not_drawn() -> None:
    sequence = RequestFacts(correlation_id=7, is_bound=True)
    assert chosen(RULE, PLAIN, 0) == 3
    assert chosen(RULE, sequence, 0) == 2
    assert chosen(replace(RULE, sticky=CORRELATION_ID), sequence, 0) == 3


def test_who_stands_in_for_a_present_version_that_is_not_served() -> None:
    back = replace(RULE, stage=ROLLED_BACK)
    assert standing_in(back, [1, 2, 3]) == 2
    assert standing_in(back, [1, 3]) == 1, "no candidate that was rolled back"
    assert standing_in(RULE, [1, 3]) == 3
    assert standing_in(RouteRule(2, shadow=3), [1, 3]) == 1, "no shadow"
    assert standing_in(replace(back, shadow=4), [3, 4]) == 4, "rather one of them than none"


def test_keys_of_sticky_rules() -> None:
    facts = RequestFacts([(b"x-user", b"ann")], correlation_id="call")
    assert sticky_key(RULE, facts) == b""
    assert sticky_key(replace(RULE, sticky="x-user"), facts) == b"ann"
    assert sticky_key(replace(RULE, sticky="x-other"), facts) == b""
    assert sticky_key(replace(RULE, sticky=CORRELATION_ID), facts) == b"call"


def test_steps_and_ends() -> None:
    assert next_step(RULE) == 2500
    step = advanced(RULE, 2500, "well", 7)
    assert (step.share, step.stage, next_step(step)) == (2500, CANARY, WHOLE)
    done = advanced(step, WHOLE, "well", 8)
    assert (done.present, done.candidate, done.stage) == (3, 0, RELEASED)
    back = rolled_back(step, "slow", 9)
    assert (back.present, back.candidate, back.share, back.stage) == (2, 3, 0, ROLLED_BACK)
    assert [decision.at_us for decision in back.history] == [7, 9]
    for rule in (RULE, step, done, back):
        assert read_rule(json.loads(json.dumps(document(rule)))) == rule


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "'present' of a routing rule must be the number of a version"),
        ({"present": 1, "candidate": 1}, "version 1 is the present version and cannot be the candidate too"),
        ({"present": 1, "shadow": 1}, "version 1 is the present version and cannot be its shadow too"),
        ({"present": 1, "share": 10}, "a share, headers or tenants need a candidate that they send requests to"),
        ({"present": 1, "candidate": 2, "share": 101}, "'101' is no share: it must be from 0% to 100%"),
        ({"present": 1, "weight": 1}, "unknown field 'weight' of a routing rule"),
        ({"present": True}, "'present' of a routing rule must be the number of a version"),
        ({"present": 1, "headers": {"a": 1}}, "'headers' of a routing rule must be an object of strings"),
        ({"present": 1, "headers": {"a": "\ud800"}}, "'headers' of a routing rule must be an object of strings"),
        ({"present": 1, "sticky": "\ud800"}, "'sticky' of a routing rule must be a string"),
        ({"present": 1, "tenants": ["\ud800"]}, "'tenants' of a routing rule must be a list of strings"),
        ({"present": 1, "tenants": "a"}, "'tenants' of a routing rule must be a list"),
        ({"present": 1, "sticky": 3}, "'sticky' of a routing rule must be a string"),
        ({"present": 1, "stage": "odd"}, "'odd' is no stage of a routing rule: canary, rolled back, released, pinned"),
        ({"present": 1, "gate": []}, "'gate' of a routing rule must be an object"),
        ({"present": 1, "gate": {"odd": 1}}, "unknown field 'odd' of a gate"),
        ({"present": 1, "gate": {"rollback": 1}}, "'rollback' of a gate must be true or false"),
        ({"present": 1, "gate": {"steps": [50, 20]}}, "the steps of a gate are growing shares above 0%"),
        ({"present": 1, "gate": {"window_s": float("nan")}}, "'window_s' of a routing rule must be a number"),
        (
            {"present": 1, "gate": {"window_s": 0}},
            "'window_s', 'min_requests' and 'max_latency_ratio' of a gate must be above 0",
        ),
        ({"present": 1, "history": [{}]}, "an item of 'history' of a routing rule is no decision"),
        ({"present": 1, "tolerances": {"y": "x"}}, "'y' of a routing rule must be a number"),
    ],
)
def test_rules_that_cannot_be(body: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_rule(body)
    assert caught.value.message == text


def test_shares_as_operators_write_them() -> None:
    assert [share_of(text) for text in ("10%", "10", " 0.25% ", "100%")] == [1000, 1000, 25, WHOLE]
    with pytest.raises(InvalidArgument, match="'some' is no share: write a number of percent, as 10%"):
        share_of("some")


def test_the_largest_revision_counts_and_the_first_of_equal_ones() -> None:
    routes = Routes()
    assert routes.apply(route_fact("m", 1, RULE))
    assert not routes.apply(route_fact("m", 1, None)), "another writer was first"
    assert routes.rules == {"m": RULE}
    assert routes.apply(route_fact("m", 2, None))
    assert not routes.apply(route_fact("m", 1, RULE))
    assert routes.rules == {}


def test_rules_of_newer_releases_are_read_as_far_as_they_are_known() -> None:
    routes = Routes()
    body = document(RULE) | {"news": 1}
    body["gate"] |= {"news": 2}
    assert routes.apply(RouteChanged("m", 1, json.dumps(body)))
    assert routes.rules["m"] == RULE
    for unreadable in ("{", "[]", '{"present":"x"}'):
        assert not routes.apply(RouteChanged("m", 2, unreadable))
    assert routes.rules["m"] == RULE
    assert routes.revisions["m"] == 2, "what is written next counts only after it"


def test_rules_go_on_until_the_log_that_replaced_theirs_has_one() -> None:
    other = replace(RULE, present=9)
    ours, theirs, fresh = Routes(), Routes(), Routes()
    for routes in (ours, theirs):
        routes.apply(route_fact("m", 7, RULE))
        for _ in range(2):  # joining the new log may need another attempt
            routes.begin_anew()
            assert routes.rules == {"m": RULE}
            assert routes.next_revision("m") == 7, "a change competes with the rule that is written again"
            assert routes.unwritten() == [route_fact("m", 7, RULE)]
    for fact in (route_fact("m", 7, other), *ours.unwritten()):  # another writer is first in the new log
        for routes in (ours, theirs, fresh):
            routes.apply(fact)
    assert ours.rules == theirs.rules == fresh.rules == {"m": other}
    assert (ours.unwritten(), ours.next_revision("m")) == ([], 8)
    ours.begin_anew()
    assert ours.unwritten() == [route_fact("m", 7, other)]


def test_a_log_that_was_restored_is_believed_until_newer_rules_are_written_again() -> None:
    routes, restored = Routes(), replace(RULE, present=9)
    routes.apply(route_fact("m", 7, RULE))
    routes.begin_anew()
    routes.apply(route_fact("m", 3, restored))
    assert routes.rules == {"m": restored}, "as in a process that has only read the new log"
    assert routes.next_revision("m") == 7
    for fact in routes.unwritten():
        routes.apply(fact)
    assert routes.rules == {"m": RULE}


def test_rules_that_cannot_be_read_here_are_written_again_as_they_are() -> None:
    routes, newer = Routes(), RouteChanged("m", 2, '{"present":"x"}')
    routes.apply(route_fact("m", 1, RULE))
    routes.apply(newer)
    routes.begin_anew()
    assert routes.unwritten() == [newer], "the rule before must not take its revision"
    assert routes.rules == {"m": RULE}
