"""Says what the log has of an answer's way to its caller after the settlement. Pure.

The settlement is the last fact of a request. A gateway takes a reply out of its stream and writes to a connection, and
a reader of a job's result only reads: neither leaves a fact, which would cost each request a write (ADR 0051). Calls of
webhooks leave one, as they are tried again.
"""

from __future__ import annotations

from dataclasses import dataclass


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


def known_of_delivery(is_job: bool, call: WebhookCall | None) -> str:
    """Of a settled request; `call` is a job's, None where no webhook is called."""
    if not is_job:
        return "Settled. Whether its gateway could pass the answer on to the caller is not recorded in the log."
    kept = "Settled: the outcome is kept with the job"
    if call is None:
        return f"{kept}. Whether a caller has read it is not recorded in the log."
    return f"{kept}; {call.words()}. Whether a caller has read it otherwise is not recorded in the log."
