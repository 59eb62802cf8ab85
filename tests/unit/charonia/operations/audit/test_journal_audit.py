"""The auditor on journals written by hand: what is clean, and each rule broken once."""

from __future__ import annotations

import random

import pytest

from charonia.errors import InvalidRecord
from charonia.facts.jobs import JobState
from charonia.facts.journal import pack_accepted, pack_batched, pack_ended, pack_started, read_facts
from charonia.operations.audit.journal_audit import Finding, FinishedRequests, JournalAudit, Rule

A, B, C = (bytes([number]) * 16 for number in (1, 2, 3))

Fact = list[bytes]


def accepted(*ids: bytes) -> Fact:
    return [b"k", b"accepted", b"i", b"".join(ids)]


def batched(*ids: bytes, attempts: bytes = b"1") -> Fact:
    return [b"k", b"batched", b"i", b"".join(ids), b"a", attempts, b"x", b"executor-1", b"b", b"batch-1"]


def started(*ids: bytes, attempts: bytes = b"1") -> Fact:
    return [b"k", b"started", b"i", b"".join(ids), b"a", attempts, b"x", b"executor-1", b"b", b"batch-1"]


def ended(*ids: bytes, outcomes: bytes = b"", mask: bytes = b"") -> Fact:
    fields = [b"k", b"ended", b"i", b"".join(ids), b"a", b"1", b"o", outcomes or b"s" * len(ids)]
    return fields + ([b"w", mask] if mask else [])


def audited(*facts: Fact, complete: bool = True, exact: bool = True) -> tuple[JournalAudit, list[Finding]]:
    audit = JournalAudit("m", complete=complete, exact=exact)
    found: list[Finding] = []
    for number, fact in enumerate(facts, 1):
        found += audit.fold(b"%d-0" % number, fact)
    return audit, found


def rules(*facts: Fact, complete: bool = True, exact: bool = True) -> list[Rule]:
    return [finding.rule for finding in audited(*facts, complete=complete, exact=exact)[1]]


def test_a_history_with_a_retry_and_an_unfinished_request_is_clean() -> None:
    audit, found = audited(
        accepted(A, B),
        batched(A, B),
        started(A, B),
        batched(A, attempts=b"2"),
        accepted(C),
        started(A, attempts=b"2"),
        ended(A, B, outcomes=b"sf"),
    )
    assert found == []
    assert list(audit.open) == [C]
    assert audit.open[C].accepted == "5-0"
    totals = audit.totals
    assert (totals.entries, totals.accepted, totals.batched, totals.started, totals.retried) == (7, 3, 3, 3, 1)
    assert totals.ended == {JobState.SUCCEEDED: 1, JobState.FAILED: 1}


def test_a_second_end_is_found_and_says_where() -> None:
    audit, found = audited(accepted(A), ended(A), ended(A, outcomes=b"c"))
    assert found == [Finding(Rule.ENDED_TWICE, "m", A.hex(), "3-0", "ended again, as cancelled")]
    assert audit.totals.findings == {Rule.ENDED_TWICE: 1}


def test_what_a_settlement_did_not_win_or_does_not_journal_is_no_end() -> None:
    audit, found = audited(
        accepted(A, B), ended(A), ended(A, B, outcomes=b"ss", mask=b"00"), ended(A, B, C, outcomes=b"ss-", mask=b"011")
    )
    assert found == []
    assert not audit.open


@pytest.mark.parametrize("attempt", [b"1", b"0"])
def test_an_attempt_that_does_not_grow_is_found(attempt: bytes) -> None:
    facts = (accepted(A), batched(A), started(A), batched(A, attempts=attempt))
    assert rules(*facts) == [Rule.ATTEMPT_NOT_INCREASING]


def test_an_attempt_given_back_unexecuted_may_be_given_again() -> None:
    audit, found = audited(accepted(A), batched(A), batched(A), started(A), ended(A))
    assert found == []
    assert (audit.totals.given_again, audit.totals.retried) == (1, 0)
    assert rules(accepted(A), batched(A, attempts=b"2"), batched(A)) == [Rule.ATTEMPT_NOT_INCREASING]


def test_one_attempt_run_twice_is_found() -> None:
    assert rules(accepted(A), batched(A), started(A), started(A)) == [Rule.ATTEMPT_NOT_INCREASING]


def test_attempts_are_given_for_each_request() -> None:
    facts = (accepted(A, B), batched(A), batched(A, B, attempts=b"2,1"), started(A, B, attempts=b"2,1"))
    assert rules(*facts) == []
    assert rules(*facts, started(A, B, attempts=b"3,1")) == [Rule.STARTED_UNBATCHED, Rule.ATTEMPT_NOT_INCREASING]


def test_a_batch_after_the_end_is_found() -> None:
    cancelled = ended(A, outcomes=b"c")
    assert rules(accepted(A), cancelled, batched(A)) == [Rule.RAN_AFTER_END]
    assert rules(accepted(A), batched(A), cancelled, batched(A, attempts=b"2")) == [Rule.RAN_AFTER_END]


def test_a_start_after_the_end_is_late_only_when_its_attempt_was_begun_before() -> None:
    audit, found = audited(accepted(A), batched(A), batched(A, attempts=b"2"), ended(A), started(A, attempts=b"1"))
    assert found == []
    assert audit.totals.late_starts == 1
    assert rules(accepted(A), batched(A), ended(A), started(A, attempts=b"2")) == [Rule.RAN_AFTER_END]
    assert rules(accepted(A), ended(A, outcomes=b"c"), started(A)) == [Rule.RAN_AFTER_END]


def test_a_start_may_come_after_that_of_a_later_attempt() -> None:
    second = batched(A, attempts=b"2")
    assert rules(accepted(A), batched(A), second, started(A, attempts=b"2"), started(A, attempts=b"1")) == []


def test_an_attempt_that_nobody_began_is_found() -> None:
    assert rules(accepted(A), started(A)) == [Rule.STARTED_UNBATCHED]


def test_an_id_accepted_again_is_found() -> None:
    assert rules(accepted(A), accepted(A)) == [Rule.ACCEPTED_TWICE]
    assert rules(accepted(A), ended(A), accepted(A)) == [Rule.ACCEPTED_TWICE]


def test_facts_of_a_request_never_accepted_are_found_once() -> None:
    assert rules(batched(A), started(A), ended(A)) == [Rule.UNACCEPTED]


def test_in_a_trimmed_journal_such_requests_are_from_before() -> None:
    audit, found = audited(started(A, attempts=b"3"), ended(A), started(A, attempts=b"2"), ended(B), complete=False)
    assert found == []
    assert audit.totals.earlier == 2
    assert rules(ended(A), ended(A), complete=False) == [Rule.ENDED_TWICE]


def test_inexact_audits_forget_the_finished() -> None:
    audit, found = audited(accepted(A), ended(A), ended(A), exact=False)
    assert [finding.rule for finding in found] == [Rule.UNACCEPTED]
    assert not audit.knows(A)
    assert rules(accepted(A), ended(A), ended(A), exact=False, complete=False) == []


@pytest.mark.parametrize(
    "fields",
    [
        [],
        [b"e", b"fact"],
        [b"k", b"accepted"],
        [b"k", b"accepted", b"i", b""],
        [b"k", b"accepted", b"i", b"short"],
        [b"k", b"\xff", b"i", A],
        [b"k", b"batched", b"i", A],
        [b"k", b"batched", b"i", A, b"a", b"x"],
        [b"k", b"batched", b"i", A, b"a", b"-1"],
        [b"k", b"started", b"i", A, b"a", b"99999999999"],
        [b"k", b"batched", b"i", A + B + C, b"a", b"1,2"],
        [b"k", b"ended", b"i", A],
        [b"k", b"ended", b"i", A, b"o", b"ss"],
        [b"k", b"ended", b"i", A, b"o", b"?"],
        [b"k", b"ended", b"i", A, b"o", b"s", b"w", b"11"],
    ],
)
def test_what_is_no_fact_is_found_and_harms_nothing(fields: list[bytes]) -> None:
    with pytest.raises(InvalidRecord):
        read_facts(fields)
    audit, found = audited(accepted(A), fields, ended(A))
    assert [(finding.rule, finding.entry) for finding in found] == [(Rule.UNREADABLE, "2-0")]
    assert not audit.open


def test_facts_of_a_newer_release_are_skipped_and_counted() -> None:
    audit, found = audited(accepted(A), [b"k", b"output", b"i", A], [b"f", b"\x92\x04\xc0"], ended(A))
    assert found == []
    assert audit.totals.skipped == 2


def test_an_end_may_tell_the_beginning_as_well() -> None:
    ran = ("executor-1", "batch-1")
    whole = [b"f", pack_ended([A, B], [1, 1], b"ss", ran)]
    begun = [[b"f", pack_accepted([A, B])], [b"f", pack_batched([A, B], 1, *ran)]]
    audit, found = audited(*begun, whole)
    assert found == []
    assert (audit.totals.started, audit.totals.ended[JobState.SUCCEEDED]) == (2, 2)
    # who did not win it had started all the same: after its end, which is late, or without having been batched
    audit, found = audited(*begun, ended(B, outcomes=b"c"), [*whole, b"w", b"10"])
    assert found == []
    assert (audit.totals.late_starts, audit.totals.ended[JobState.SUCCEEDED]) == (1, 1)
    assert rules(begun[0], begun[1], [b"f", pack_started([A], [1], *ran)], whole) == [Rule.ATTEMPT_NOT_INCREASING]
    assert rules(begun[0], whole) == [Rule.STARTED_UNBATCHED] * 2
    assert rules(*begun, ended(A), [b"f", pack_ended([A], [2], b"s", ran), b"w", b"0"]) == [Rule.RAN_AFTER_END]


def test_the_table_of_finished_requests_holds_what_it_was_given() -> None:
    random_ids = random.Random(7)
    table = FinishedRequests(places=4)
    put = {random_ids.randbytes(16): random_ids.randrange(300) for _ in range(5000)}
    put[bytes(16)] = 0
    for request_id, attempt in put.items():
        table.put(request_id, 1)
        table.put(request_id, attempt)
    assert len(table) == len(put)
    assert all(table.get(request_id) == min(attempt, table.HIGHEST) for request_id, attempt in put.items())
    assert table.get(b"x" * 16) == -1
