"""What is said of an answer's way to its caller."""

from __future__ import annotations

import pytest

from charonia.console.stories.answer_delivery import WebhookCall, known_of_delivery
from charonia.facts.jobs import DeliveryNote


def test_of_a_call_no_delivery_is_known() -> None:
    told = known_of_delivery(False, None, None)
    assert told.startswith("Settled")
    assert told.endswith("is not recorded in the log.")


def test_of_a_job_what_its_gateway_noted() -> None:
    assert known_of_delivery(True, None, None).endswith("; no caller is known to have asked for it.")
    assert known_of_delivery(True, None, DeliveryNote(1, "gateway-7")).endswith("; gateway-7 gave it to a caller.")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (WebhookCall("pending"), "its webhook is pending, and was not called yet"),
        (WebhookCall("delivered", 2, 204), "attempt 2 to call its webhook answered 204"),
        (WebhookCall("pending", 1, 503), "attempt 1 to call its webhook answered 503; it is pending"),
        (
            WebhookCall("given_up", 10, 0, "refused"),
            "attempt 10 to call its webhook had no answer: refused; it is given up",
        ),
    ],
)
def test_the_state_of_a_webhook(call: WebhookCall, words: str) -> None:
    assert call.words() == words
    assert f"kept with the job; {words}; no caller" in known_of_delivery(True, call, None)
