"""Folds a model's journal and finds what must never be in it (ADR 0004). Pure.

    ended_twice             a second terminal fact of one request
    attempt_not_increasing  a request batched with an attempt that was run or is below the last, or run twice under one
    ran_after_end           batched after its terminal fact, or started then with an attempt that was not batched before
    started_unbatched       run with an attempt that was never begun
    accepted_twice          one id accepted again
    unaccepted              a fact about a request that was never accepted, in a journal that still has its beginning
    unreadable              an entry that is no journal fact
    trimmed_unfinished, end_unrecorded, uncarried, progress_left   found beside the journal, by
                            `charonia.operations.audit.model_audit`

An attempt that was batched and not started may be batched again: its executor gave it back unexecuted, as one that
drains does. `started` is appended by executors outside a script: one that comes after the end, or after a later
attempt, is late and not wrong, as long as its attempt was begun before.

Requests are held while they are unfinished; of finished ones only a compact trace stays (`FinishedRequests`), so that a
second end is found however late it comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from charonia.errors import InvalidRecord
from charonia.facts.jobs import JobState
from charonia.facts.journal import ID_BYTES, JournalFact, read_facts
from charonia.tensors import Buffer


class Rule(StrEnum):
    """The rule that a finding breaks; the module's docstring explains each."""

    ENDED_TWICE = "ended_twice"
    ATTEMPT_NOT_INCREASING = "attempt_not_increasing"
    RAN_AFTER_END = "ran_after_end"
    STARTED_UNBATCHED = "started_unbatched"
    ACCEPTED_TWICE = "accepted_twice"
    UNACCEPTED = "unaccepted"
    UNREADABLE = "unreadable"
    TRIMMED_UNFINISHED = "trimmed_unfinished"
    END_UNRECORDED = "end_unrecorded"
    UNCARRIED = "uncarried"
    PROGRESS_LEFT = "progress_left"


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule. `request` is its id in hex, `entry` the id of the entry that shows it; or ""."""

    rule: Rule
    model: str
    request: str
    entry: str
    detail: str


@dataclass(slots=True)
class OpenRequest:
    """An unfinished request. `accepted` is its entry's id, "" if it is before the journal's beginning.

    Bit n of `batched` and `started` is attempt n.
    """

    accepted: str
    batched: int = 0
    started: int = 0

    @property
    def attempt(self) -> int:
        return max(self.batched.bit_length(), self.started.bit_length(), 1) - 1


@dataclass(slots=True)
class Totals:
    """Totals of the entries read. `given_again`: attempts batched again before they ran. `earlier`: requests accepted
    before the first entry. `late_starts`: starts written after their request's end.
    """

    entries: int = 0
    accepted: int = 0
    batched: int = 0
    started: int = 0
    retried: int = 0
    given_again: int = 0
    earlier: int = 0
    late_starts: int = 0
    skipped: int = 0
    ended: Counter[JobState] = field(default_factory=Counter)
    findings: Counter[Rule] = field(default_factory=Counter)


class FinishedRequests:
    """Highest attempt by request id, in 17 bytes a slot: 26 to 51 bytes a request, 36 MB for the first million.

    Open addressing in one buffer; doubling it needs half as much again for a moment.
    """

    __slots__ = ("_count", "_mask", "_table")

    _PLACE = ID_BYTES + 1
    HIGHEST = 254
    """Higher attempts are stored as this one."""

    def __init__(self, places: int = 1024) -> None:
        self._mask = places - 1
        self._table = bytearray(places * self._PLACE)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, request_id: bytes, attempt: int) -> None:
        at = self._find(request_id)
        if not self._table[at + ID_BYTES]:
            self._count += 1
            self._table[at : at + ID_BYTES] = request_id
        self._table[at + ID_BYTES] = min(attempt, self.HIGHEST) + 1
        if 3 * self._count > 2 * (self._mask + 1):
            self._grow()

    def get(self, request_id: bytes) -> int:
        """The attempt, or -1 for an unknown id."""
        return self._table[self._find(request_id) + ID_BYTES] - 1

    def _find(self, request_id: bytes) -> int:
        table, mask, place = self._table, self._mask, hash(request_id) & self._mask
        while True:
            at = place * 17
            if not table[at + 16] or table[at : at + 16] == request_id:
                return at
            place = (place + 1) & mask

    def _grow(self) -> None:
        old = self._table
        self._mask = 2 * self._mask + 1
        self._table = bytearray((self._mask + 1) * self._PLACE)
        for at in range(0, len(old), self._PLACE):
            if old[at + ID_BYTES]:
                to = self._find(bytes(old[at : at + ID_BYTES]))
                self._table[to : to + self._PLACE] = old[at : at + self._PLACE]


class JournalAudit:
    """Folds one model's journal, oldest entry first. `open` are the unfinished requests, oldest first.

    `complete`: the journal has its beginning, so that every request in it must have been accepted in it. `exact` False
    forgets finished requests: memory is then bounded by the unfinished ones, but a second end is reported as
    `unaccepted`, and only in a complete journal.
    """

    def __init__(self, model: str, *, complete: bool, exact: bool = True) -> None:
        self.model = model
        self.open: dict[bytes, OpenRequest] = {}
        self.totals = Totals()
        self._complete = complete
        self._finished = FinishedRequests() if exact else None

    def fold(self, entry_id: bytes, fields: Sequence[Buffer]) -> list[Finding]:
        """The findings of one entry."""
        found: list[Finding] = []
        entry = entry_id.decode(errors="replace")
        self.totals.entries += 1
        try:
            facts = read_facts(fields)
        except InvalidRecord as error:
            return [self._finding(Rule.UNREADABLE, b"", entry, str(error))]
        self.totals.skipped += not facts
        for fact in facts:
            for at, request_id in enumerate(fact.ids):
                if fact.kind == "accepted":
                    self._accepted(request_id, entry, found)
                elif fact.kind == "ended":
                    self._ended(request_id, fact.outcomes[at], entry, found)
                else:
                    self._given_out(fact.kind, request_id, fact.attempts[at], fact, entry, found)
        return found

    def finding(self, rule: Rule, request_id: bytes, detail: str) -> Finding:
        """Add a finding from outside the journal."""
        return self._finding(rule, request_id, "", detail)

    def knows(self, request_id: bytes) -> bool:
        """Whether the journal has a fact about this request (finished ones only if `exact`)."""
        return request_id in self.open or (self._finished is not None and self._finished.get(request_id) >= 0)

    def _accepted(self, request_id: bytes, entry: str, found: list[Finding]) -> None:
        self.totals.accepted += 1
        if self.knows(request_id):
            found.append(self._finding(Rule.ACCEPTED_TWICE, request_id, entry, "the id was accepted before"))
        else:
            self.open[request_id] = OpenRequest(entry)

    def _given_out(
        self, kind: str, request_id: bytes, attempt: int, fact: JournalFact, entry: str, found: list[Finding]
    ) -> None:
        batched = kind == "batched"
        if batched:
            self.totals.batched += 1
        else:
            self.totals.started += 1
        where = f"attempt {attempt}" + (f", batch {fact.batch_id}" if fact.batch_id else "")
        where += f", executor {fact.executor}" if fact.executor else ""
        begun = self._finished.get(request_id) if self._finished is not None else -1
        if begun >= 0:
            if not batched and attempt <= begun:
                self.totals.late_starts += 1
            else:
                found.append(self._finding(Rule.RAN_AFTER_END, request_id, entry, f"{kind} after its end: {where}"))
            return
        request = self.open.get(request_id) or self._appears(request_id, entry, kind, found)
        if batched:
            last = request.batched.bit_length() - 1
            if attempt < last or request.started >> attempt & 1:
                text = f"batched again after attempt {last}: {where}"
                found.append(self._finding(Rule.ATTEMPT_NOT_INCREASING, request_id, entry, text))
            elif attempt == last:
                self.totals.given_again += 1
            elif request.batched:
                self.totals.retried += 1
            request.batched |= 1 << attempt
            return
        if request.started >> attempt & 1:
            text = f"started twice: {where}"
            found.append(self._finding(Rule.ATTEMPT_NOT_INCREASING, request_id, entry, text))
        elif request.accepted and not request.batched >> attempt & 1:
            text = f"started and never batched: {where}"
            found.append(self._finding(Rule.STARTED_UNBATCHED, request_id, entry, text))
        request.started |= 1 << attempt

    def _ended(self, request_id: bytes, outcome: JobState, entry: str, found: list[Finding]) -> None:
        if self._finished is not None and self._finished.get(request_id) >= 0:
            text = f"ended again, as {outcome}"
            found.append(self._finding(Rule.ENDED_TWICE, request_id, entry, text))
            return
        request = self.open.get(request_id) or self._appears(request_id, entry, f"ended as {outcome}", found)
        self.totals.ended[outcome] += 1
        if self._finished is not None:
            # attempts begun before the journal's beginning are unknown: any late start may be one of those
            begun = request.batched.bit_length() - 1 if request.accepted else FinishedRequests.HIGHEST
            self._finished.put(request_id, max(begun, 0))
        del self.open[request_id]

    def _appears(self, request_id: bytes, entry: str, what: str, found: list[Finding]) -> OpenRequest:
        """Add a request whose first fact is not its acceptance."""
        if self._complete:
            found.append(self._finding(Rule.UNACCEPTED, request_id, entry, f"{what} and never accepted"))
        else:
            self.totals.earlier += 1
        request = self.open[request_id] = OpenRequest("")
        return request

    def _finding(self, rule: Rule, request_id: bytes, entry: str, detail: str) -> Finding:
        self.totals.findings[rule] += 1
        return Finding(rule, self.model, request_id.hex(), entry, detail)
