from __future__ import annotations

from typing import Any

import pytest

from charonia.errors import InvalidArgument
from charonia.inference import MAX_DEADLINE_NS
from gateway.grpc.job_calls import words_of_metadata
from gateway.requests.delivery import WEBHOOK_EVENTS, Caller, DeliveryOptions, Webhook
from gateway.requests.preferences import HEADERS, PARAMETERS, Wish, read_wish, words_of_headers

NOW_NS = 1_700_000_000_000_000_000


def read(**words: Any) -> Wish:
    return read_wish({f"charonia_{name}": value for name, value in words.items()}, NOW_NS, form={})


def test_nothing_said_is_the_default() -> None:
    assert read() == Wish(DeliveryOptions())


def test_every_parameter_has_a_header() -> None:
    assert set(HEADERS.values()) == PARAMETERS
    assert all(name == name.lower() for name in HEADERS)


@pytest.mark.parametrize(
    ("text", "respond_async", "wait_s", "applied"),
    [
        ("respond-async", True, 0.0, "respond-async"),
        ("Respond-Async , WAIT=2.5", True, 2.5, "respond-async, wait=2.5"),
        ('wait="3"', True, 3.0, "wait=3"),
        ("wait=0", False, 0.0, ""),
        ("wait=100000", True, 60.0, "wait=60"),
        ("respond-async;odd=1", True, 0.0, "respond-async"),
        # RFC 7240: preferences that are not understood are no errors
        ("wait=soon", False, 0.0, ""),
        ("wait=-1, handling=lenient", False, 0.0, ""),
        ("respond-asynchronously", False, 0.0, ""),
        (",;=,", False, 0.0, ""),
    ],
)
def test_prefer(text: str, respond_async: bool, wait_s: float, applied: str) -> None:
    wish = read(prefer=text)
    assert (wish.options.respond_async, wish.wait_s, wish.applied) == (respond_async, wait_s, applied)


def test_a_header_is_not_given_twice() -> None:
    assert words_of_headers([(b"idempotency-key", b"k"), (b"idempotency-key", b"k")]) == {
        "charonia_idempotency_key": "k"
    }
    with pytest.raises(InvalidArgument, match=r"^'idempotency-key' is given twice$"):
        words_of_headers([(b"idempotency-key", b"k"), (b"idempotency-key", b"l")])
    with pytest.raises(InvalidArgument, match=r"^'charonia-timeout-ms' is given twice$"):
        words_of_metadata([("charonia-timeout-ms", "1"), ("x", "y"), ("charonia-timeout-ms", "")])


def test_everything_said() -> None:
    caller = Caller("t", scoped=True)
    words = words_of_headers(
        [
            (b"host", b"x"),
            (b"prefer", b"respond-async"),
            (b"idempotency-key", b"k\xe9y"),
            (b"charonia-webhook", b"https://example.org/ended"),
            (b"charonia-webhook-events", b"failed, failed, expired"),
            (b"charonia-on-disconnect", b"Keep"),
            (b"charonia-durability", b"replicated:1"),
            (b"charonia-retention", b"3600"),
            (b"charonia-timeout-ms", b"250"),
            (b"prefer", b"wait=1"),
        ]
    )
    wish = read_wish(words, NOW_NS, form={"binary": True}, caller=caller)
    assert wish.options == DeliveryOptions(
        True,
        "k\u00e9y",
        Webhook("https://example.org/ended", ("failed", "expired")),
        "keep",
        "replicated:1",
        3600,
        caller,
        {"binary": True},
    )
    assert (wish.wait_s, wish.deadline_ns) == (1.0, NOW_NS + 250_000_000)


def test_webhooks_are_told_every_end_by_default() -> None:
    assert read(webhook="http://x").options.webhook == Webhook("http://x", WEBHOOK_EVENTS)


def test_numbers_may_be_numbers() -> None:
    wish = read(retention_s=5, timeout_ms=0)
    assert (wish.options.retention_s, wish.deadline_ns) == (5, NOW_NS)
    assert read(timeout_ms=2**53 - 1).deadline_ns == MAX_DEADLINE_NS


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"idempotency_key": ""}, "an idempotency key must hold one or more printable characters"),
        ({"idempotency_key": "a\nb"}, "an idempotency key must hold one or more printable characters"),
        ({"idempotency_key": 5}, "parameter 'charonia_idempotency_key' must be a string"),
        ({"on_disconnect": "linger"}, "'charonia_on_disconnect' must be cancel or keep"),
        ({"retention_s": "-1"}, "'charonia_retention_s' must be a whole number of 0 or more"),
        ({"retention_s": True}, "'charonia_retention_s' must be a whole number of 0 or more"),
        ({"retention_s": 1.5}, "'charonia_retention_s' must be a whole number of 0 or more"),
        ({"timeout_ms": 2**53}, "'charonia_timeout_ms' must be a whole number of 0 or more"),
        ({"timeout_ms": "\u0663"}, "'charonia_timeout_ms' must be a whole number of 0 or more"),
        ({"webhook_events": "failed"}, "'charonia_webhook_events' needs 'charonia_webhook'"),
        ({"webhook": "http://x", "webhook_events": "begun"},
         "'charonia_webhook_events' must be a list of succeeded, failed, cancelled, expired"),
    ],
)  # fmt: skip
def test_what_is_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read(**words)
    assert caught.value.message == message
