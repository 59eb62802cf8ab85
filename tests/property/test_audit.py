"""Every history that the scripts can write is clean; every way to spoil one is found."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import assume, given
from hypothesis import strategies as st

from charonia.facts.journal import FIELD, pack_accepted, pack_batched, pack_ended, pack_started
from charonia.operations.audit.journal_audit import JournalAudit, Rule


@dataclass(frozen=True)
class Fact:
    """One fact of one request, before it joins an entry."""

    kind: str
    request: int
    attempt: int = 0
    outcome: bytes = b"s"


def _id(request: int) -> bytes:
    return request.to_bytes(16, "big")


@st.composite
def histories(draw: st.DrawFn) -> list[Fact]:
    """Facts of several requests, interleaved as requests run at once; a start may be late. Some stay unfinished."""
    threads = [draw(_lives(request)) for request in range(draw(st.integers(1, 6)))]
    facts: list[Fact] = []
    while threads:
        thread = threads[draw(st.integers(0, len(threads) - 1))]
        if thread:
            facts.append(thread.pop(0))
        threads = [thread for thread in threads if thread]
    return facts


@st.composite
def _lives(draw: st.DrawFn, request: int) -> list[Fact]:
    facts = [Fact("accepted", request)]
    late: list[Fact] = []
    attempt = 0
    for _ in range(draw(st.integers(0, 4))):
        attempt += draw(st.integers(1, 3))
        # given back unexecuted, it may be given again under the same attempt
        facts += [Fact("batched", request, attempt)] * draw(st.integers(1, 2))
        match draw(st.sampled_from(["started", "late", "lost"])):
            case "started":
                facts.append(Fact("started", request, attempt))
            case "late":
                late.append(Fact("started", request, attempt))
    if draw(st.booleans()):
        facts.append(Fact("ended", request, outcome=draw(st.sampled_from([b"s", b"f", b"c", b"x"]))))
        return facts + late
    return facts


def packed(kind: str, ids: list[bytes], members: list[Fact]) -> list[bytes]:
    """An entry as it is written today; `journals` writes those of earlier releases beside it."""
    attempts = [member.attempt for member in members]
    if kind == "accepted":
        return [FIELD, pack_accepted(ids)]
    if kind == "ended":
        return [FIELD, pack_ended(ids, attempts, b"".join(member.outcome for member in members))]
    if kind == "batched" and len(set(attempts)) == 1:
        return [FIELD, pack_batched(ids, attempts[0], "e", "b1")]
    if kind == "started":
        return [FIELD, pack_started(ids, attempts, "e", "b1")]
    text = b",".join(b"%d" % attempt for attempt in attempts)
    return [b"k", kind.encode(), b"i", b"".join(ids), b"a", text, b"x", b"e", b"b", b"b1"]


@st.composite
def journals(draw: st.DrawFn, facts: list[Fact]) -> list[list[bytes]]:
    """The facts as entries: neighbours of one kind may share an entry, lost settlements and unjournalled ids join."""
    entries: list[list[bytes]] = []
    at = 0
    while at < len(facts):
        first = facts[at]
        members = [first]
        while (
            at + len(members) < len(facts)
            and (candidate := facts[at + len(members)]).kind == first.kind
            and candidate.request not in {member.request for member in members}
            and draw(st.booleans())
        ):
            members.append(candidate)
        at += len(members)
        ids = [_id(member.request) for member in members]
        if draw(st.booleans()):
            entries.append(packed(first.kind, ids, members))
            continue
        fields = [b"k", first.kind.encode(), b"i"]
        if first.kind in ("batched", "started"):
            attempts = [member.attempt for member in members]
            same = len(set(attempts)) == 1 and draw(st.booleans())
            text = b"%d" % attempts[0] if same else b",".join(b"%d" % attempt for attempt in attempts)
            fields += [b"".join(ids), b"a", text, b"x", b"e", b"b", b"b1"]
        elif first.kind == "ended":
            outcomes = b"".join(member.outcome for member in members)
            mask = b"1" * len(ids)
            if draw(st.booleans()):
                ids.append(_id(draw(st.integers(0, 7))))
                lost = draw(st.booleans())
                outcomes += b"s" if lost else b"-"
                mask += b"0" if lost else b"1"
            fields += [b"".join(ids), b"o", outcomes]
            if b"0" in mask or draw(st.booleans()):
                fields += [b"w", mask]
        else:
            fields.append(b"".join(ids))
        entries.append(fields)
    return entries


def audit(entries: list[list[bytes]], *, complete: bool = True) -> tuple[JournalAudit, set[Rule]]:
    folded = JournalAudit("m", complete=complete)
    found = {f.rule for number, fields in enumerate(entries) for f in folded.fold(b"%d-0" % number, fields)}
    return folded, found


@given(st.data(), histories())
def test_what_the_scripts_can_write_is_clean(data: st.DataObject, facts: list[Fact]) -> None:
    folded, found = audit(data.draw(journals(facts)))
    assert not found
    ended = {fact.request for fact in facts if fact.kind == "ended"}
    assert set(folded.open) == {_id(fact.request) for fact in facts if fact.kind == "accepted"} - {
        _id(request) for request in ended
    }
    assert sum(folded.totals.ended.values()) == len(ended)


@given(st.data(), histories())
def test_any_tail_of_a_history_is_clean_when_its_head_is_known_to_be_trimmed(
    data: st.DataObject, facts: list[Fact]
) -> None:
    entries = data.draw(journals(facts))
    _, found = audit(entries[data.draw(st.integers(0, len(entries))) :], complete=False)
    assert not found


@given(st.data(), histories())
def test_a_second_end_is_found(data: st.DataObject, facts: list[Fact]) -> None:
    ended = [at for at, fact in enumerate(facts) if fact.kind == "ended"]
    assume(ended)
    at = data.draw(st.sampled_from(ended))
    again = Fact("ended", facts[at].request, outcome=data.draw(st.sampled_from([b"s", b"c"])))
    facts.insert(data.draw(st.integers(at + 1, len(facts))), again)
    assert audit(data.draw(journals(facts)))[1] == {Rule.ENDED_TWICE}


@given(st.data(), histories())
def test_an_attempt_that_does_not_grow_is_found(data: st.DataObject, facts: list[Fact]) -> None:
    run = [at for at, fact in enumerate(facts) if fact.kind in ("batched", "started")]
    assume(run)
    at = data.draw(st.sampled_from(run))
    lower = facts[at].attempt - (facts[at].kind == "batched")
    again = Fact("batched", facts[at].request, data.draw(st.integers(0, lower)))
    assume(again.request not in {fact.request for fact in facts[:at] if fact.kind == "ended"})
    facts.insert(at + 1, again)
    assert Rule.ATTEMPT_NOT_INCREASING in audit(data.draw(journals(facts)))[1]


@given(st.data(), histories())
def test_a_run_after_the_end_is_found(data: st.DataObject, facts: list[Fact]) -> None:
    ended = [at for at, fact in enumerate(facts) if fact.kind == "ended"]
    assume(ended)
    at = data.draw(st.sampled_from(ended))
    request = facts[at].request
    highest = max((fact.attempt for fact in facts if fact.request == request), default=0)
    kind = data.draw(st.sampled_from(["batched", "started"]))
    facts.insert(data.draw(st.integers(at + 1, len(facts))), Fact(kind, request, highest + 1))
    assert Rule.RAN_AFTER_END in audit(data.draw(journals(facts)))[1]


@given(st.data(), histories())
def test_a_request_whose_acceptance_is_missing_is_found(data: st.DataObject, facts: list[Fact]) -> None:
    several = {fact.request for fact in facts if fact.kind != "accepted"}
    assume(several)
    request = data.draw(st.sampled_from(sorted(several)))
    facts = [fact for fact in facts if fact != Fact("accepted", request)]
    assert audit(data.draw(journals(facts)))[1] == {Rule.UNACCEPTED}
