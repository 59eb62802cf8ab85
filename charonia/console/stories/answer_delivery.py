"""Says what the log has of an answer's way to its caller after the settlement. Pure.

The settlement of a call is its reply, and the last fact about it: that a gateway has written it to a connection would
cost each request a write (ADR 0051). Of a job the gateway notes when it first gave the outcome to a caller (ADR 0070),
and senders keep the calls of webhooks, as they are tried again.
"""

from __future__ import annotations

from dataclasses import dataclass

from charonia.facts.jobs import DeliveryNote


@dataclass(frozen=True, slots=True)
class WebhookCall:
    """How far a job's webhook has come: `state` is pending, delivered, disabled, refused or given_up.

    `attempts` were made so far, the last one at `last_us` (0 for none) with the HTTP status `last_status`, 0 for no
    answer, for the reason in `last_error`.
    """

    state: str
    attempts: int = 0
    last_status: int = 0
    last_error: str = ""
    last_us: int = 0

    def words(self) -> str:
        """Its last attempt and its state, without a full stop."""
        state = self.state.replace("_", " ")
        if not self.attempts:
            return f"its webhook is {state}, and was not called yet"
        answer = f"had no answer: {self.last_error or 'unknown'}"
        if self.last_status:
            answer = f"answered {self.last_status}"
        said = f"attempt {self.attempts} to call its webhook {answer}"
        return said if self.state == "delivered" else f"{said}; it is {state}"


def known_of_delivery(is_job: bool, call: WebhookCall | None, note: DeliveryNote | None) -> str:
    """Of a settled request; `call` and `note` are a job's, None where no webhook is called and nothing is noted."""
    if not is_job:
        return "Settled, which is the reply to its gateway. Whether that could pass it on is not recorded in the log."
    words = ["Settled: the outcome is kept with the job"]
    if call is not None:
        words.append(call.words())
    words.append("no caller is known to have asked for it" if note is None else given_by(note))
    return f"{'; '.join(words)}."


def given_by(note: DeliveryNote) -> str:
    """Who first gave the outcome to a caller, without a full stop."""
    return f"{note.gateway} gave it to a caller"
