"""Which version a gateway admits a request to, and when a request is run again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import catalog_facts as facts
import pytest

from charonia.errors import Cancelled, DeadlineExceeded, InternalError, InvalidArgument, Unavailable
from charonia.inference import InferenceRequest
from charonia.releases.route_rule import CANARY, CORRELATION_ID, RouteRule, route_fact
from gateway.releases.version_choice import VersionChoice, may_run_again
from gateway.requests.delivery import AS_USUAL, Caller, DeliveryOptions
from protos.model_config_pb2 import ModelConfig

RULE = RouteRule(1, 2, 5000, (("x-canary", "yes"),), ("acme",), stage=CANARY)
MATCH = [(b"x-canary", b"yes")]


def choice(rule: RouteRule = RULE) -> tuple[VersionChoice, Any]:
    catalog = facts.catalog(
        facts.joined(), facts.loaded(version=1), facts.loaded(version=2), facts.scanned(), route_fact("m", 1, rule)
    )
    return VersionChoice(catalog), catalog


def request(**more: Any) -> InferenceRequest:
    return InferenceRequest("m", -1, [], headers=more.pop("headers", []), **more)


def test_the_present_version_is_what_requests_without_one_get() -> None:
    _, catalog = choice()
    assert catalog.find("m", -1).version == 1
    assert catalog.find("m", 2).version == 2
    assert catalog.is_ready("m", -1)
    catalog.apply(route_fact("m", 2, None))
    assert catalog.find("m", -1).version == 2


def test_half_of_the_requests_are_drawn_and_have_a_fallback() -> None:
    made, catalog = choice()
    found = catalog.find("m", -1)
    answers = [made.choose(request(), AS_USUAL, found) for _ in range(100)]
    versions = [(served.version, fallback.version if fallback else 0) for served, fallback in answers]
    assert versions.count((2, 1)) == 50
    assert versions.count((1, 0)) == 50


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({}, DeliveryOptions(respond_async=True)),
        ({}, DeliveryOptions(idempotency_key="k")),
        ({"sequence_id": 7}, AS_USUAL),
    ],
)
def test_jobs_and_sequences_go_where_they_are_sent_and_are_not_run_again(
    asked: dict[str, Any], options: DeliveryOptions
) -> None:
    made, catalog = choice()
    found = catalog.find("m", -1)
    assert {made.choose(request(**asked), options, found)[0].version for _ in range(20)} == {1}
    served, fallback = made.choose(request(headers=MATCH, **asked), options, found)
    assert (served.version, fallback) == (2, None)


def test_tenants_and_sequences_kept_together() -> None:
    made, catalog = choice(replace(RULE, sticky=CORRELATION_ID))
    found = catalog.find("m", -1)
    assert made.choose(request(), DeliveryOptions(caller=Caller("acme")), found)[0].version == 2
    versions = {
        n: {made.choose(request(sequence_id=n), AS_USUAL, found)[0].version for _ in range(3)} for n in range(1, 40)
    }
    assert all(len(found) == 1 for found in versions.values())
    assert {1, 2} == set().union(*versions.values())


def test_callers_without_a_request_get_the_candidate_by_name_alone() -> None:
    made, catalog = choice(replace(RULE, share=10_000))
    found = catalog.find("m", -1)
    assert made.named(found, MATCH, "").version == 2
    assert made.named(found, [], "acme").version == 2
    assert made.named(found, [(b"x-canary", b"no")], "north") is found
    catalog.apply(route_fact("m", 2, None))
    assert made.named(found, MATCH, "acme") is found


def test_a_version_that_is_not_served_gets_nothing() -> None:
    made, catalog = choice(replace(RULE, candidate=9, share=10_000))
    found = catalog.find("m", -1)
    assert made.choose(request(headers=MATCH), AS_USUAL, found) == (found, None)
    _, other = choice(replace(RULE, present=9))
    assert other.find("m", -1).version == 2, "rather the highest than none"


def test_a_candidate_that_answers_in_another_way_gets_nothing() -> None:
    config = ModelConfig.FromString(facts.CONFIG)
    config.model_transaction_policy.decoupled = True
    decoupled = replace(facts.loaded(version=2), config=config.SerializeToString())
    rule = route_fact("m", 1, replace(RULE, share=10_000))
    catalog = facts.catalog(facts.joined(), facts.loaded(version=1), decoupled, facts.scanned(), rule)
    found = catalog.find("m", -1)
    assert VersionChoice(catalog).choose(request(), AS_USUAL, found) == (found, None)


def test_errors_that_another_version_may_not_have() -> None:
    assert all(may_run_again(error) for error in (InternalError(""), InvalidArgument(""), Unavailable("")))
    assert not any(may_run_again(error) for error in (Cancelled(""), DeadlineExceeded("")))
