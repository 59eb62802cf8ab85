"""Explains one request from what the log has about it: what happened when, with whom it ran, and why it waited. Pure.

Sources are the events of a job's record, the facts of the model's journal, and the control facts, each with its time;
`request_reading` reads them. Requests that are no jobs are in the journal with `--journal=all` alone. What is known of
the answer's way to its caller is `answer_delivery`'s to say.

Times are microseconds of wall clocks. Those of job events and of journal entries are the log server's, the acceptance
and the start of an execution with an outcome are those of the processes that saw them: on several machines they differ
by what the clocks do, so a time before the acceptance counts as the acceptance. The journal has starts too, later by
up to 20 ms, or with the end of a shorter execution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from charonia.facts.events import Fact, ProcessLeft, VersionHeld, VersionLoaded
from charonia.facts.jobs import DeliveryNote, JobEvent
from charonia.facts.journal import JournalFact

from .answer_delivery import WebhookCall, given_by, known_of_delivery

_PLACES = {
    "queue": "in the queue",
    "run": "in the model",
    "lost": "in an attempt without an outcome",
}
ENDS = frozenset({"succeeded", "failed", "cancelled", "expired"})
_SLIGHT_US = 1_000
"""A wait below a millisecond needs no explanation."""
_REPORTED_US = 20_000
"""An execution has started at most so long before the journal says so (`JournalledStarts` in `executors/settling`)."""


@dataclass(frozen=True, slots=True)
class History:
    """What the log has about a request. `journal` and `control` are in the order of their times.

    `max_delay_us` is the batch delay of its model, None without dynamic batching. `journal_cut`: older or newer entries
    were not read, so counts of other requests are lower bounds.
    """

    id: bytes
    accepted_us: int
    now_us: int
    model: str
    events: Sequence[JobEvent] = ()
    journal: Sequence[tuple[int, JournalFact]] = ()
    control: Sequence[tuple[int, Fact]] = ()
    max_delay_us: int | None = None
    paused: bool = False
    journal_cut: bool = False
    dead_letter: bool = False
    webhook: WebhookCall | None = None
    given: DeliveryNote | None = None


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened: `kind` is past tense, `text` says more, `after_us` counts from the acceptance."""

    time_us: int
    kind: str
    text: str
    after_us: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """A piece of a request's time. `kind` is queue, executor, run, or lost: a run without an outcome. `reasons` say why
    it took that long.
    """

    kind: str
    begin_us: int
    end_us: int
    text: str
    reasons: tuple[str, ...] = ()

    @property
    def lasted_us(self) -> int:
        return self.end_us - self.begin_us


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try to execute it. `others` are the journalled requests of its batch, hex ids; None if no fact names them.

    `outcome` is how the request left it: an end, `returned`, or "" while it runs.
    """

    number: int
    executor: str
    batch_id: str
    begin_us: int
    end_us: int
    outcome: str
    reason: str
    others: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Story:
    """The whole explanation. `verdict` is the answer to "why did this take so long", one or two sentences.

    `delivery` is what the log has of the answer's way to its caller, "" before the end.
    """

    moments: tuple[Moment, ...]
    stretches: tuple[Stretch, ...]
    attempts: tuple[Attempt, ...]
    verdict: str
    state: str
    total_us: int
    delivery: str


@dataclass(slots=True)
class _Run:
    number: int
    executor: str
    batch_id: str
    begin_us: int
    end_us: int = 0
    outcome: str = ""
    reason: str = ""
    start_us: int = 0
    detail: Mapping[str, Any] = field(default_factory=dict)


def explain(history: History) -> Story:
    """The story of a request."""
    runs, end = _runs(history)
    state = end[1] if end is not None else "running" if runs and not runs[-1].end_us else "queued"
    until_us = max(history.accepted_us, end[0] if end is not None else history.now_us)
    attempts = tuple(_attempt(history, run, until_us) for run in runs)
    stretches = _stretches(history, runs, attempts, until_us)
    return Story(
        _moments(history, attempts, end),
        stretches,
        attempts,
        _verdict(history, stretches, attempts, state),
        state,
        until_us - history.accepted_us,
        known_of_delivery(bool(history.events), history.webhook, history.given) if end is not None else "",
    )


# -- what happened -----------------------------------------------------------------------------------------------------


def _runs(history: History) -> tuple[list[_Run], tuple[int, str, Mapping[str, Any]] | None]:
    """Its attempts, and its end: (time, state, detail). Events of a job tell both; without them the journal does."""
    return _runs_of_events(history) if history.events else _runs_of_journal(history)


def _runs_of_events(history: History) -> tuple[list[_Run], tuple[int, str, Mapping[str, Any]] | None]:
    runs: list[_Run] = []
    end: tuple[int, str, Mapping[str, Any]] | None = None
    for event in history.events:
        time_us, detail = max(history.accepted_us, event.time_us), event.detail
        if event.kind == "batched":
            runs.append(_Run(len(runs) + 1, _text(detail, "executor"), _text(detail, "batch_id"), time_us))
        elif event.kind == "returned" and runs:
            runs[-1].end_us, runs[-1].outcome = time_us, "returned"
            runs[-1].reason = _text(detail, "reason").removesuffix(".")  # it stands in sentences
        elif event.kind in ENDS:
            end = (time_us, event.kind, detail)
            if runs and not runs[-1].end_us:
                last = runs[-1]
                last.end_us, last.outcome, last.detail = time_us, event.kind, detail
                last.reason = _text(detail, "error")
                start_us = detail.get("start_us")
                last.start_us = min(time_us, max(last.begin_us, start_us)) if isinstance(start_us, int) else 0
    for at_us, fact in history.journal:
        if fact.kind == "started" and history.id in fact.ids:
            for run in runs:
                if run.batch_id == fact.batch_id and not run.start_us:
                    run.start_us = _start_us(run, min(at_us, run.end_us or at_us))
    return runs, end


def _start_us(run: _Run, reported_us: int) -> int:
    """When a run started, by when the journal says so."""
    return max(run.begin_us, reported_us - _REPORTED_US)


def _runs_of_journal(history: History) -> tuple[list[_Run], tuple[int, str, Mapping[str, Any]] | None]:
    runs: dict[int, _Run] = {}
    end: tuple[int, str, Mapping[str, Any]] | None = None
    for at_us, fact in history.journal:
        if history.id not in fact.ids:
            continue
        place, time_us = fact.ids.index(history.id), max(history.accepted_us, at_us)
        if fact.kind in ("batched", "started"):
            number = fact.attempts[place]
            if number not in runs:
                for earlier in runs.values():
                    if not earlier.end_us:
                        earlier.end_us, earlier.outcome = time_us, "returned"
                runs[number] = _Run(number, fact.executor, fact.batch_id, time_us)
            if fact.kind == "started":
                runs[number].start_us = _start_us(runs[number], time_us)
        elif fact.kind == "ended":
            end = (time_us, fact.outcomes[place].value, {})
            if runs:
                last = runs[max(runs)]
                last.end_us, last.outcome = time_us, end[1]
    return [runs[number] for number in sorted(runs)], end


def _attempt(history: History, run: _Run, until_us: int) -> Attempt:
    return Attempt(
        run.number,
        run.executor,
        run.batch_id,
        run.begin_us,
        run.end_us or until_us,
        run.outcome,
        run.reason,
        _others(history, run.batch_id),
    )


def _others(history: History, batch_id: str) -> tuple[str, ...] | None:
    known: dict[bytes, None] = {}
    for _, fact in history.journal:
        if batch_id and fact.batch_id == batch_id and history.id in fact.ids:
            known |= dict.fromkeys(fact.ids)
    return tuple(one.hex() for one in known if one != history.id) if known else None


def _moments(
    history: History, attempts: Sequence[Attempt], end: tuple[int, str, Mapping[str, Any]] | None
) -> tuple[Moment, ...]:
    found: list[tuple[int, str, str]] = [(history.accepted_us, "accepted", "the log has the request, and it is queued")]
    for event in history.events:
        if event.kind == "moved":
            text = f"from priority level {event.detail.get('from_level')} to {event.detail.get('level')}"
            found.append((event.time_us, "moved", text))
    for attempt in attempts:
        text = f"attempt {attempt.number}"
        if attempt.others is not None:
            text += f", with {_counted(len(attempt.others), 'other request')}" if attempt.others else ", alone"
        found.append((attempt.begin_us, "batched", f"{text}, dispatched to {attempt.executor or 'an ensemble'}"))
        if attempt.outcome == "returned":
            why = f": {attempt.reason}" if attempt.reason else ""
            found.append((attempt.end_us, "returned", f"{attempt.executor} had no outcome for it{why}"))
    if end is not None:
        found += _ending(history, *end)
    found.sort(key=lambda one: one[0])
    return tuple(Moment(at, kind, text, max(0, at - history.accepted_us)) for at, kind, text in found)


def _ending(history: History, at_us: int, state: str, detail: Mapping[str, Any]) -> list[tuple[int, str, str]]:
    found: list[tuple[int, str, str]] = []
    start_us = detail.get("start_us")
    if isinstance(start_us, int):
        rows = detail.get("batch_rows")
        ran = f"the model took {_duration(int(detail.get('infer_us') or 0))} for {_counted(int(rows or 0), 'row')}"
        found.append((min(at_us, max(history.accepted_us, start_us)), "executed", ran))
    error = _text(detail, "error")
    found.append((at_us, state, error or "settled"))
    if history.dead_letter:
        found.append((at_us, "dead letter", "it was given up; its inputs are kept"))
    call = history.webhook
    if call is not None and call.attempts:
        kind = "delivered" if call.state == "delivered" else "webhook called"
        found.append((max(at_us, call.last_us), kind, call.words()))
    if history.given is not None:
        found.append((max(at_us, history.given.at_us), "delivered", given_by(history.given)))
    return found


# -- why it took so long -----------------------------------------------------------------------------------------------


def _stretches(
    history: History, runs: Sequence[_Run], attempts: Sequence[Attempt], until_us: int
) -> tuple[Stretch, ...]:
    found: list[Stretch] = []
    begin_us, failed = history.accepted_us, None
    for run, attempt in zip(runs, attempts, strict=True):
        if run.begin_us > begin_us or failed is not None:
            found.append(_queued(history, begin_us, max(begin_us, run.begin_us), failed, begun=True))
        start_us = run.start_us
        if start_us - run.begin_us >= _SLIGHT_US:
            text = "in the executor, until an instance was free"
            if failed is not None:
                text = "in the executor, until its instance had been started again"
            found.append(Stretch("executor", run.begin_us, start_us, text))
        text = f"attempt {run.number} on {run.executor or 'an ensemble'}"
        kind = "lost" if attempt.outcome == "returned" else "run"
        found.append(Stretch(kind, max(run.begin_us, start_us), attempt.end_us, text, _of_run(run, attempt, failed)))
        begin_us, failed = attempt.end_us, attempt if attempt.outcome == "returned" else None
    waits_again = bool(runs) and runs[-1].outcome == "returned" and not history.dead_letter
    if not runs or waits_again:
        found.append(_queued(history, begin_us, until_us, failed, begun=False))
    return tuple(found)


def _of_run(run: _Run, attempt: Attempt, failed: Attempt | None) -> tuple[str, ...]:
    """Why a run ended as it did; `failed` is the attempt before it, if that had no outcome."""
    if attempt.outcome != "returned":
        return ()
    said = f"came back without an outcome{f': {attempt.reason}' if attempt.reason else ''}"
    if failed is None or failed.executor != attempt.executor or run.start_us:
        return (said,)
    # no fact says when it began, behind the start of its instance: its executor was lost, or the journal is cut
    return said, f"the start of its instance after attempt {failed.number} may be part of this"


def _queued(history: History, begin_us: int, end_us: int, failed: Attempt | None, *, begun: bool) -> Stretch:
    reasons: list[str] = []
    if failed is not None:
        why = f" ({failed.reason})" if failed.reason else ""
        reasons.append(f"attempt {failed.number} had no outcome{why}, so it was queued again")
    if end_us - begin_us >= _SLIGHT_US:
        if not begun and history.paused:
            reasons.append("the queue is paused")
        reasons += _loads(history, begin_us, end_us)
        reasons += _losses(history, begin_us, end_us)
        reasons += _ahead(history, begin_us, end_us)
        if not reasons and history.journal_cut:
            reasons.append("the journal is too long to be read whole here, so what was served before it is not known")
        delay_us = history.max_delay_us
        if not reasons and delay_us is not None and end_us - begin_us <= 2 * delay_us:
            reasons.append(f"the batcher waited for more requests, up to the batch delay of {_duration(delay_us)}")
        if not reasons:
            reasons.append("no fact in the log says why: calls that are no jobs are in the journal with --journal=all")
    return Stretch("queue", begin_us, end_us, "queued again" if failed is not None else "queued", tuple(reasons))


def _loads(history: History, begin_us: int, end_us: int) -> list[str]:
    """Loads of its model that it waited for: they ended while it waited, and no executor had the model before."""
    held: set[str] = set()
    for at_us, fact in history.control:
        if isinstance(fact, ProcessLeft):
            held.discard(fact.incarnation)
        if not isinstance(fact, VersionLoaded | VersionHeld) or fact.model != history.model:
            continue
        if fact.slots and begin_us < at_us <= end_us + _SLIGHT_US and not held and fact.load_ns:
            load_us = fact.load_ns // 1000
            began = "" if at_us - load_us >= begin_us else ", which had begun before"
            text = f"version {fact.version} was not loaded: executor {fact.executor} loaded it in {_duration(load_us)}"
            return [f"{text}{began} (cold load)"]
        if fact.slots:
            held.add(fact.executor)
        else:
            held.discard(fact.executor)
    return []


def _losses(history: History, begin_us: int, end_us: int) -> list[str]:
    lost = [
        fact.incarnation
        for at_us, fact in history.control
        if isinstance(fact, ProcessLeft) and fact.role == "executor" and begin_us <= at_us <= end_us
    ]
    return [f"executor {', '.join(lost)} left while it waited"] if lost else []


def _ahead(history: History, begin_us: int, end_us: int) -> list[str]:
    """Requests that were accepted before it and settled while it waited, as far as the journal has them."""
    before: set[bytes] = set()
    settled = 0
    for at_us, fact in history.journal:
        if at_us > end_us:
            break
        if fact.kind == "accepted" and history.id not in fact.ids and at_us <= history.accepted_us + _SLIGHT_US:
            before.update(fact.ids)
        elif fact.kind == "ended":
            if at_us > begin_us:
                settled += sum(one in before for one in fact.ids)
            before.difference_update(fact.ids)
    if not settled:
        return []
    least = "at least " if history.journal_cut else ""
    verb = "was" if settled == 1 else "were"
    return [f"{least}{_counted(settled, 'request')} accepted before it {verb} served first"]


def _verdict(history: History, stretches: Sequence[Stretch], attempts: Sequence[Attempt], state: str) -> str:
    if not stretches:
        return "The log has only its acceptance."
    longest = max(stretches, key=lambda one: one.lasted_us)
    total_us = sum(one.lasted_us for one in stretches)
    most = "Most of the time" if 2 * longest.lasted_us > total_us else "The longest part of the time"
    place = longest.text if longest.kind == "executor" else _PLACES[longest.kind]
    spent = f"{most}, {_duration(longest.lasted_us)} of {_duration(total_us)}, was spent {place}"
    if poison := _poison(history, attempts, state):
        return poison if longest.kind == "lost" else f"{poison} {spent}."
    reasons = f": {'; '.join(longest.reasons)}" if longest.reasons else ""
    sentence = f"{spent}{reasons}."
    returned = sum(one.outcome == "returned" for one in attempts)
    if returned and longest.kind != "queue":
        sentence += f" {_counted(returned, 'attempt')} before came back without an outcome."
    return sentence


def _poison(history: History, attempts: Sequence[Attempt], state: str) -> str:
    """Of a request whose batches took their instances with them: whether it was the culprit."""
    died = [one for one in attempts if one.outcome == "returned"]
    sizes = ", ".join(str(len(one.others) + 1) for one in attempts if one.others is not None)
    batches = f"batches of {sizes} requests" if sizes else _counted(len(attempts), "batch", "batches")
    if history.dead_letter:
        return (
            f"Poison: each attempt, in {batches}, took its instance down. It was given up and is a dead letter; "
            "the other requests of its batches were tried again."
        )
    if died and state == "succeeded":
        lost_us = sum(one.end_us - one.begin_us for one in died)
        return (
            f"{_counted(len(died), 'attempt')} came back without an outcome and cost {_duration(lost_us)}"
            f"{f' ({died[0].reason})' if died[0].reason else ''}; it was tried again, in {batches}, and succeeded."
        )
    return ""


# -- words -------------------------------------------------------------------------------------------------------------


def _text(detail: Mapping[str, Any], name: str) -> str:
    value = detail.get(name)
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value) if value else ""


def _counted(count: int, thing: str, several: str = "") -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {several or thing + 's'}"


def _duration(us: int) -> str:
    """A duration with three digits that count."""
    if us < 1_000:
        return f"{us} us"
    if us < 999_500:
        return f"{us / 1_000:.3g} ms"
    return f"{us / 1_000_000:.3g} s" if us < 100_000_000 else f"{us // 1_000_000} s"
