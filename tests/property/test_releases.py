"""Routing rules and the gate of releases, whatever is counted and asked."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.releases.release_gate import ADVANCE, BEGIN, ROLL_BACK, VersionCounts, judge
from charonia.releases.route_rule import (
    CANARY,
    CORRELATION_ID,
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
    sticky_draw,
    sticky_key,
)

shares = st.integers(0, WHOLE)
names = st.text("abc-", min_size=1, max_size=5)
headers = st.lists(st.tuples(names, names), max_size=3, unique_by=lambda pair: pair[0])
gates = st.builds(
    Gate,
    rollback=st.booleans(),
    window_s=st.floats(0.5, 1000),
    min_requests=st.integers(1, 100),
    max_error_percent=st.floats(0, 100),
    max_latency_ratio=st.floats(0.1, 10),
    latency_slack_ms=st.floats(0, 100),
    steps=st.lists(st.integers(1, WHOLE), max_size=4, unique=True).map(lambda steps: tuple(sorted(steps))),
)
rules = st.builds(
    RouteRule,
    present=st.just(2),
    candidate=st.just(3),
    share=shares,
    headers=headers.map(lambda found: tuple(sorted(found))),
    tenants=st.lists(names, max_size=2).map(tuple),
    sticky=st.sampled_from(["", CORRELATION_ID, "a"]),
    shadow=st.sampled_from([0, 3, 4]),
    gate=gates,
    stage=st.sampled_from([CANARY, ROLLED_BACK]),
)
requests = st.builds(
    RequestFacts,
    headers=headers.map(lambda found: [(name.encode(), value.encode()) for name, value in found]),
    tenant=st.sampled_from(["", "a", "b"]),
    correlation_id=st.sampled_from([0, 7, "x"]),
    is_bound=st.booleans(),
)
counts = st.builds(VersionCounts, st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 10**12))


@settings(max_examples=examples(300))
@given(rules, requests, st.integers(0, WHOLE - 1), shares)
def test_a_larger_share_takes_no_request_from_the_candidate(
    rule: RouteRule, facts: RequestFacts, draw: int, share: int
) -> None:
    version = chosen(rule, facts, draw)
    assert version in (rule.present, rule.candidate)
    assert version == chosen(rule, facts, draw)
    if version == rule.candidate:
        assert rule.tests_candidate
        assert chosen(replace(rule, share=max(share, rule.share)), facts, draw) == rule.candidate


@settings(max_examples=examples(200))
@given(rules, requests, requests)
def test_requests_with_one_key_stay_together(rule: RouteRule, one: RequestFacts, other: RequestFacts) -> None:
    rule = replace(rule, headers=(), tenants=())
    key = sticky_key(rule, one)
    if key and key == sticky_key(rule, other) and one.is_bound == other.is_bound:
        draw = sticky_draw("m", key)
        assert chosen(rule, one, draw) == chosen(rule, other, sticky_draw("m", sticky_key(rule, other)))


@settings(max_examples=examples(300))
@given(rules, counts, counts, st.floats(0, 5000))
def test_every_decision_leaves_a_rule_that_can_be_read(
    rule: RouteRule, present: VersionCounts, candidate: VersionCounts, elapsed_s: float
) -> None:
    step = next_step(rule)
    verdict = judge(rule.gate, step, present, candidate, elapsed_s)
    if verdict.action in (ROLL_BACK, ADVANCE, BEGIN):
        assert candidate.requests >= rule.gate.min_requests
        assert verdict.reason
    after = rule
    if verdict.action == ROLL_BACK:
        assert rule.gate.rollback
        after = rolled_back(rule, verdict.reason, 1)
    elif verdict.action == ADVANCE:
        assert elapsed_s >= rule.gate.window_s
        assert step > rule.share
        after = advanced(rule, step, verdict.reason, 1)
    assert read_rule(json.loads(json.dumps(document(after)))) == after


@settings(max_examples=examples(200))
@given(st.floats(0, 100), counts)
def test_a_candidate_as_good_as_the_present_version_stays(percent: float, same: VersionCounts) -> None:
    gate = Gate(min_requests=1, max_error_percent=percent, max_latency_ratio=1.0, latency_slack_ms=0.001)
    assert judge(gate, WHOLE, same, same, 1e9).action != ROLL_BACK


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=8), st.data())
def test_what_is_behind_the_fact_that_counts_may_be_deleted(written: list[tuple[int, int]], data: Any) -> None:
    facts = [route_fact("m", revision, RouteRule(present)) for revision, present in written]
    whole = Routes()
    counted = [at for at, fact in enumerate(facts) if whole.apply(fact)]
    before = data.draw(st.integers(0, counted[-1])) if counted else 0
    kept = Routes()
    for fact in facts[before:]:
        kept.apply(fact)
    assert kept == whole
