"""What a webhook says about a job."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from charonia.facts.jobs import JobEvent, JobRecord, JobState
from gateway.webhooks.messages import message_of, wanted

ID = bytes(range(16))


def job(state: JobState, **detail: Any) -> JobRecord:
    events = (JobEvent(1, "accepted", 1), JobEvent(2, str(state), 1_763_700_000_123_456, detail))
    return JobRecord(
        model="a model",
        id=ID,
        state=state,
        tenant="",
        attempts=2,
        size_bytes=1,
        result_size_bytes=1,
        accepted_us=1,
        ended_us=1_763_700_000_123_456,
        retention_s=60,
        durability="fsync",
        about={"version": 3},
        events=events,
    )


def test_a_success_names_the_job_and_where_its_result_is() -> None:
    message = message_of(job(JobState.SUCCEEDED))
    public = "000102030405060708090a0b0c0d0e0f.a%20model"
    assert message.id == "msg_000102030405060708090a0b0c0d0e0f"
    assert json.loads(message.body) == {
        "type": "job.succeeded",
        "timestamp": "2025-11-21T04:40:00.123456Z",
        "data": {
            "id": public,
            "model": "a model",
            "version": "3",
            "state": "succeeded",
            "error": None,
            "attempts": 2,
            "durability": "fsync",
            "result_url": "/v2/jobs/000102030405060708090a0b0c0d0e0f.a%2520model/result",
        },
    }
    assert message_of(job(JobState.SUCCEEDED)) == message


def test_a_failure_says_why() -> None:
    data = json.loads(message_of(job(JobState.FAILED, error="boom", version=4)).body)["data"]
    assert (data["error"], data["version"], data["result_url"]) == ("boom", "4", None)


def test_headers_differ_between_tries_only_by_time_and_signature() -> None:
    message = message_of(job(JobState.EXPIRED))
    first, second = (dict(message.headers([b"k" * 32], at_s)) for at_s in (1, 2))
    assert {name for name in first if first[name] != second[name]} == {"webhook-timestamp", "webhook-signature"}


@pytest.mark.parametrize(
    ("trace", "added"),
    [
        ({"traceparent": "00-aa-bb-01", "tracestate": "v=1"}, {"traceparent": "00-aa-bb-01", "tracestate": "v=1"}),
        ({"traceparent": "00-aa-bb-01", "other": "x"}, {"traceparent": "00-aa-bb-01"}),
        ({"traceparent": "00\r\nx: y", "tracestate": "é"}, {}),
        ({"traceparent": 7}, {}),
        ("00-aa-bb-01", {}),
        (None, {}),
    ],
)
def test_the_trace_of_the_request_goes_along(trace: object, added: dict[str, str]) -> None:
    traced = replace(job(JobState.EXPIRED), about={"version": 3, "webhook": {"url": "u", "trace": trace}})
    without = message_of(job(JobState.EXPIRED)).headers([b"k" * 32], 1)
    assert message_of(traced).headers([b"k" * 32], 1) == [*without, *added.items()]


@pytest.mark.parametrize(
    ("webhook", "state", "told"),
    [
        ({}, JobState.FAILED, True),
        ({"events": []}, JobState.FAILED, True),
        ({"events": 7}, JobState.FAILED, True),
        ({"events": ["failed"]}, JobState.FAILED, True),
        ({"events": ["failed"]}, JobState.SUCCEEDED, False),
        ({}, JobState.RUNNING, False),
    ],
)
def test_a_webhook_may_ask_for_some_ends_only(webhook: dict[str, Any], state: JobState, told: bool) -> None:
    assert wanted(webhook, state) is told
