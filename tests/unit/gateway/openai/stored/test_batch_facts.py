"""How a batch stands after its facts."""

from __future__ import annotations

from typing import Any

from gateway.openai.stored.batch_facts import Counts, fold

CREATED = {
    "kind": "created",
    "time_s": 10,
    "tenant": "t",
    "input_file": "file-1",
    "endpoint": "/v1/responses",
    "metadata": {"a": "b"},
    "expires_s": 86_410,
    "output_ttl_s": 3600,
}
STARTED = {"kind": "started", "time_s": 11, "total": 3, "model": "m"}


def ended(outcome: str, **more: Any) -> dict[str, Any]:
    return {"kind": "ended", "time_s": 20, "outcome": outcome, **more}


def test_states_in_order() -> None:
    facts: list[dict[str, Any]] = []
    seen = []
    for fact in (CREATED, STARTED, {"kind": "finalizing", "time_s": 15}, ended("completed", output_file="file-o")):
        facts.append(fact)
        seen.append(fold("b", facts).status)
    assert seen == ["validating", "in_progress", "finalizing", "completed"]
    document = fold("b", facts).document()
    assert (document["in_progress_at"], document["finalizing_at"], document["completed_at"]) == (11, 15, 20)
    assert (document["output_file_id"], document["error_file_id"], document["cancelled_at"]) == ("file-o", None, None)


def test_cancelling() -> None:
    state = fold("b", [CREATED, STARTED, {"kind": "cancelling", "time_s": 12}])
    assert state.status == "cancelling"
    state.apply(ended("cancelled", counts={"total": 3, "completed": 1, "failed": 2}))
    document = state.document()
    assert (document["status"], document["cancelling_at"], document["cancelled_at"]) == ("cancelled", 12, 20)
    assert document["request_counts"] == {"total": 3, "completed": 1, "failed": 2}


def test_the_first_end_counts() -> None:
    state = fold("b", [CREATED, STARTED, ended("cancelled"), ended("completed"), {"kind": "cancelling", "time_s": 30}])
    assert (state.outcome, state.cancelling_s) == ("cancelled", 0)


def test_a_file_that_is_wrong() -> None:
    errors = [{"code": "empty_file", "line": None, "message": "", "param": None}]
    document = fold("b", [CREATED, ended("failed", errors=errors)]).document()
    assert (document["status"], document["failed_at"], document["errors"]["data"]) == ("failed", 20, errors)


def test_progress_counts_while_it_runs() -> None:
    running, progress = fold("b", [CREATED, STARTED]), Counts(3, 1, 1, 10, 5)
    assert running.document()["request_counts"] == {"total": 3, "completed": 0, "failed": 0}
    document = running.document(Counts.of_note(progress.note()))
    assert document["request_counts"] == {"total": 3, "completed": 1, "failed": 1}
    assert document["usage"]["total_tokens"] == 15


def test_unknown_facts_and_batches() -> None:
    assert fold("b", [CREATED, {"kind": "painted", "time_s": 1}]).status == "validating"
    assert not fold("b", []).exists
