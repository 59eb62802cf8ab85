"""What is said of an answer's way to its caller."""

from __future__ import annotations

import pytest

from charonia.console.stories.answer_delivery import WebhookCall, known_of_delivery


def test_of_a_call_and_of_a_job_without_a_webhook_no_delivery_is_known() -> None:
    for is_job in (False, True):
        told = known_of_delivery(is_job, None)
        assert told.startswith("Settled")
        assert told.endswith("is not recorded in the log.")


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
    assert f"kept with the job; {words}." in known_of_delivery(True, call)
