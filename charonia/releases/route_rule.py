"""The routing rule of a model: which version a request gets that names none. Pure.

A rule names the *present* version, which gets all requests that nothing else sends elsewhere, and it may name a
*candidate* with a share of the requests, or with headers and tenants whose requests it gets. The catalog folds the
rules of the log (`RouteChanged`), gateways choose a request's version by them before they admit it
(`gateway.releases.version_choice`), and `release_gate` decides when the share changes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import blake2b
from typing import Any

from charonia.errors import InvalidArgument
from charonia.facts.events import RouteChanged

WHOLE = 10_000
"""All requests, in the unit of shares: a hundredth of a percent."""

CANARY = "canary"
ROLLED_BACK = "rolled back"
RELEASED = "released"
PINNED = "pinned"
STAGES = (CANARY, ROLLED_BACK, RELEASED, PINNED)
"""What became of the candidate: it gets requests, it gets none any more, it is the present version now; PINNED is a
rule that has no candidate.
"""

CORRELATION_ID = "correlation-id"
"""`sticky` by the correlation id of sequences; any other word is the name of a header."""

MAX_HISTORY = 20
_MAX_MATCHES = 64
_MAX_VERSION = 1 << 62
_STRIDE = 6181
"""Coprime with `WHOLE` and near its golden section: any few consecutive multiples lie evenly apart."""


@dataclass(frozen=True, slots=True)
class Gate:
    """What a candidate has to keep to. Rates are in percent, and the latency is a mean over the window.

    In a window of `window_s` seconds with at least `min_requests` requests of the candidate, its failures may exceed
    the present version's by `max_error_percent` points, and its mean latency may be `max_latency_ratio` times the
    present version's plus `latency_slack_ms`. `steps` are the shares that follow one another while it does; none: the
    share stays.
    """

    rollback: bool = True
    window_s: float = 60.0
    min_requests: int = 50
    max_error_percent: float = 1.0
    max_latency_ratio: float = 1.5
    latency_slack_ms: float = 5.0
    steps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """A change of a rule: when (us since the epoch), by whom (`operator` or `gate`), what, and why."""

    at_us: int
    by: str
    what: str
    reason: str


@dataclass(frozen=True, slots=True)
class RouteRule:
    """The rule of one model. `share` is the candidate's, of `WHOLE`. `shadow` is a version that gets copies, 0 for
    none.

    `headers` are (name in lower case, value) and `tenants` names; a request with any of them goes to the candidate.
    `sticky` keeps requests with an equal key together (`CORRELATION_ID` or a header's name). `tolerances` are by name
    of the output, "" for all others: how far a shadow's numbers may differ.
    """

    present: int
    candidate: int = 0
    share: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    tenants: tuple[str, ...] = ()
    sticky: str = ""
    shadow: int = 0
    tolerances: tuple[tuple[str, float], ...] = ()
    gate: Gate = Gate()
    stage: str = PINNED
    history: tuple[Decision, ...] = ()

    @property
    def tests_candidate(self) -> bool:
        """Whether requests may go to the candidate."""
        return self.stage == CANARY and self.candidate > 0


_RULE_FIELDS = frozenset(found.name for found in fields(RouteRule))
_GATE_FIELDS = frozenset(found.name for found in fields(Gate))


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What a rule may ask of a request. Header names are in lower case. `is_bound`: the request cannot be run again on
    another version unnoticed (jobs, streams, sequences).
    """

    headers: Iterable[tuple[bytes, bytes]] = ()
    tenant: str = ""
    correlation_id: int | str = 0
    is_bound: bool = False


def chosen(rule: RouteRule, facts: RequestFacts, draw: int) -> int:
    """The version for a request; `draw` is its place in 0..`WHOLE` - 1, from `sticky_draw` or `spread_draw`.

    Bound requests go to the candidate only if a header or the tenant names them, or if the rule keeps sequences
    together.
    """
    if not rule.tests_candidate:
        return rule.present
    if facts.tenant and facts.tenant in rule.tenants:
        return rule.candidate
    if rule.headers:
        wanted = {(name.encode("latin-1", "replace"), value.encode()) for name, value in rule.headers}
        if any((name, value) in wanted for name, value in facts.headers):
            return rule.candidate
    if facts.is_bound and not (facts.correlation_id and rule.sticky == CORRELATION_ID):
        return rule.present
    return rule.candidate if draw < rule.share else rule.present


def without_values(rule: RouteRule) -> RouteRule:
    """The rule for those who may see what it does and not which values of headers choose the candidate."""
    return replace(rule, headers=tuple((name, "") for name, _ in rule.headers))


def standing_in(rule: RouteRule, versions: Collection[int]) -> int:
    """Which of the served `versions`, of which there is one at least, gets the present version's requests.

    It is the present version while that is served; else the highest that callers may be given: no shadow, and no
    candidate that was rolled back, unless there is no other.
    """
    if rule.present in versions:
        return rule.present
    kept_out = {rule.shadow, rule.candidate if rule.stage == ROLLED_BACK else 0}
    return max([version for version in versions if version not in kept_out] or versions)


def sticky_key(rule: RouteRule, facts: RequestFacts) -> bytes:
    """What keeps a request together with others; b"" for nothing."""
    if not rule.sticky:
        return b""
    if rule.sticky == CORRELATION_ID:
        return str(facts.correlation_id).encode() if facts.correlation_id else b""
    name = rule.sticky.encode("latin-1", "replace")
    return next((value for found, value in facts.headers if found == name), b"")


def sticky_draw(model: str, key: bytes) -> int:
    """The same in every gateway and for every share: who is in a small share stays in a larger one."""
    return int.from_bytes(blake2b(key, key=model.encode()[:64], digest_size=8).digest(), "little") % WHOLE


def spread_draw(number: int) -> int:
    """The draw of a gateway's n-th request without a key: each share gets its part of any few requests in a row."""
    return number * _STRIDE % WHOLE


# -- changing ----------------------------------------------------------------------------------------------------------


def decided(rule: RouteRule, decision: Decision, **changes: Any) -> RouteRule:
    """The rule after a decision, which its history has last."""
    return replace(rule, **changes, history=(*rule.history, decision)[-MAX_HISTORY:])


def rolled_back(rule: RouteRule, reason: str, at_us: int) -> RouteRule:
    """All requests go to the present version."""
    what = f"rolled back version {rule.candidate}: all requests go to version {rule.present}"
    return decided(rule, Decision(at_us, "gate", what, reason), share=0, stage=ROLLED_BACK)


def advanced(rule: RouteRule, share: int, reason: str, at_us: int) -> RouteRule:
    """The candidate gets this share; with all of it, it is the present version."""
    if share < WHOLE:
        what = f"version {rule.candidate} gets {percent(share)}"
        return decided(rule, Decision(at_us, "gate", what, reason), share=share)
    what = f"released version {rule.candidate}: it gets all requests"
    done = Decision(at_us, "gate", what, reason)
    ended: dict[str, Any] = {"candidate": 0, "share": 0, "headers": (), "tenants": (), "stage": RELEASED}
    if rule.shadow == rule.candidate:
        ended["shadow"] = 0
    return decided(rule, done, present=rule.candidate, **ended)


def next_step(rule: RouteRule) -> int:
    """The share that follows the present one, 0 for none."""
    return next((step for step in rule.gate.steps if step > rule.share), 0)


# -- the form in the log and over HTTP ---------------------------------------------------------------------------------


def percent(share: int) -> str:
    """`10%`, `0.25%`."""
    return f"{share / 100:g}%"


def share_of(text: str | float) -> int:
    """A share from `10%`, `10` or 10.0. Raises `InvalidArgument`."""
    try:
        number = float(text.strip().removesuffix("%") if isinstance(text, str) else text)
    except ValueError:
        raise InvalidArgument(f"'{text}' is no share: write a number of percent, as 10%") from None
    if not 0 <= number <= 100:
        raise InvalidArgument(f"'{text}' is no share: it must be from 0% to 100%")
    return round(number * 100)


def document(rule: RouteRule) -> dict[str, Any]:
    """A rule as a JSON object, with shares in percent."""
    gate = asdict(rule.gate)
    gate["steps"] = [step / 100 for step in rule.gate.steps]
    return {
        "present": rule.present,
        "candidate": rule.candidate,
        "share": rule.share / 100,
        "headers": dict(rule.headers),
        "tenants": list(rule.tenants),
        "sticky": rule.sticky,
        "shadow": rule.shadow,
        "tolerances": dict(rule.tolerances),
        "gate": gate,
        "stage": rule.stage,
        "history": [asdict(decision) for decision in rule.history],
    }


def read_rule(body: Mapping[str, Any]) -> RouteRule:
    """The rule of a JSON object; a field that is missing has its default. Raises `InvalidArgument` in words."""
    unknown = body.keys() - _RULE_FIELDS
    if unknown:
        raise InvalidArgument(f"unknown field '{min(unknown)}' of a routing rule")
    steps = _list(body.get("gate", {}), "steps") if isinstance(body.get("gate", {}), Mapping) else []
    rule = RouteRule(
        present=_version(body, "present", least=1),
        candidate=_version(body, "candidate"),
        share=share_of(_number(body, "share", 0.0)),
        headers=tuple(sorted((name.lower(), value) for name, value in _texts(body, "headers").items())),
        tenants=tuple(_words(body, "tenants")),
        sticky=_word(body, "sticky").lower(),
        shadow=_version(body, "shadow"),
        tolerances=tuple(sorted(_tolerances(body).items())),
        gate=_gate(body.get("gate", {}), steps),
        stage=_word(body, "stage"),
        history=tuple(_decision(found) for found in _list(body, "history")[-MAX_HISTORY:]),
    )
    if not rule.stage:
        rule = replace(rule, stage=CANARY if rule.candidate else PINNED)
    _check(rule)
    return rule


def _check(rule: RouteRule) -> None:
    if rule.stage not in STAGES:
        raise InvalidArgument(f"'{rule.stage}' is no stage of a routing rule: {', '.join(STAGES)}")
    if rule.candidate and rule.candidate == rule.present:
        raise InvalidArgument(f"version {rule.candidate} is the present version and cannot be the candidate too")
    if rule.shadow and rule.shadow == rule.present:
        raise InvalidArgument(f"version {rule.shadow} is the present version and cannot be its shadow too")
    if not rule.candidate and (rule.share or rule.headers or rule.tenants):
        raise InvalidArgument("a share, headers or tenants need a candidate that they send requests to")
    if len(rule.headers) > _MAX_MATCHES or len(rule.tenants) > _MAX_MATCHES:
        raise InvalidArgument(f"a routing rule matches at most {_MAX_MATCHES} headers and {_MAX_MATCHES} tenants")
    steps = rule.gate.steps
    if list(steps) != sorted(set(steps)) or (steps and steps[0] < 1):
        raise InvalidArgument("the steps of a gate are growing shares above 0%")


def _gate(body: Any, steps: list[Any]) -> Gate:
    if not isinstance(body, Mapping):
        raise InvalidArgument("'gate' of a routing rule must be an object")
    unknown = body.keys() - _GATE_FIELDS
    if unknown:
        raise InvalidArgument(f"unknown field '{min(unknown)}' of a gate")
    default = Gate()
    rollback = body.get("rollback", default.rollback)
    if not isinstance(rollback, bool):
        raise InvalidArgument("'rollback' of a gate must be true or false")
    gate = Gate(
        rollback=rollback,
        window_s=_number(body, "window_s", default.window_s),
        min_requests=int(_number(body, "min_requests", default.min_requests)),
        max_error_percent=_number(body, "max_error_percent", default.max_error_percent),
        max_latency_ratio=_number(body, "max_latency_ratio", default.max_latency_ratio),
        latency_slack_ms=_number(body, "latency_slack_ms", default.latency_slack_ms),
        steps=tuple(share_of(step) if isinstance(step, (int, float, str)) else share_of("") for step in steps),
    )
    if gate.window_s <= 0 or gate.min_requests < 1 or gate.max_latency_ratio <= 0:
        raise InvalidArgument("'window_s', 'min_requests' and 'max_latency_ratio' of a gate must be above 0")
    if gate.max_error_percent < 0 or gate.latency_slack_ms < 0:
        raise InvalidArgument("'max_error_percent' and 'latency_slack_ms' of a gate must not be below 0")
    return gate


def _decision(body: Any) -> Decision:
    try:
        decision = Decision(**body)
    except TypeError:
        raise InvalidArgument("an item of 'history' of a routing rule is no decision") from None
    if type(decision.at_us) is not int or not all(
        isinstance(word, str) for word in (decision.by, decision.what, decision.reason)
    ):
        raise InvalidArgument("an item of 'history' of a routing rule is no decision")
    return decision


def _version(body: Mapping[str, Any], name: str, least: int = 0) -> int:
    value = body.get(name, 0)
    if type(value) is not int or not least <= value <= _MAX_VERSION:
        raise InvalidArgument(f"'{name}' of a routing rule must be the number of a version")
    return value


def _number(body: Mapping[str, Any], name: str, default: float) -> float:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e12:
        raise InvalidArgument(f"'{name}' of a routing rule must be a number")
    return value


def _word(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name, "")
    if not isinstance(value, str) or not _is_text(value):
        raise InvalidArgument(f"'{name}' of a routing rule must be a string")
    return value


def _is_text(value: str) -> bool:
    """Whether it can be encoded: JSON may have halves of surrogate pairs."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _list(body: Mapping[str, Any], name: str) -> list[Any]:
    value = body.get(name, [])
    if not isinstance(value, (list, tuple)):
        raise InvalidArgument(f"'{name}' of a routing rule must be a list")
    return list(value)


def _words(body: Mapping[str, Any], name: str) -> list[str]:
    words = _list(body, name)
    if not all(isinstance(word, str) and word and _is_text(word) for word in words):
        raise InvalidArgument(f"'{name}' of a routing rule must be a list of strings")
    return words


def _texts(body: Mapping[str, Any], name: str) -> dict[str, str]:
    texts = body.get(name, {})
    if not isinstance(texts, Mapping) or not all(
        isinstance(word, str) and _is_text(word) for pair in texts.items() for word in pair
    ):
        raise InvalidArgument(f"'{name}' of a routing rule must be an object of strings")
    return dict(texts)


def _tolerances(body: Mapping[str, Any]) -> dict[str, float]:
    found = body.get("tolerances", {})
    if not isinstance(found, Mapping) or not all(isinstance(name, str) and _is_text(name) for name in found):
        raise InvalidArgument("'tolerances' of a routing rule must be an object of numbers")
    return {name: _number(found, name, 0.0) for name in found}


@dataclass(slots=True)
class Routes:
    """The rules of all models: a fold of `RouteChanged`. `rules` is changed in place, so parts may keep it.

    `revisions` are those of the log that is read now. The rules of a log that was replaced stay until the new one has a
    fact of the model, whichever revision that has: all processes that read a log end with the same rules.
    """

    rules: dict[str, RouteRule] = field(default_factory=dict)
    revisions: dict[str, int] = field(default_factory=dict)
    _facts: dict[str, RouteChanged] = field(default_factory=dict)
    """By model: the fact that counts, as it was written."""
    _former: dict[str, RouteChanged] = field(default_factory=dict)
    """By model: the fact with the largest revision of the logs before."""

    def apply(self, fact: RouteChanged) -> bool:
        """Fold one fact; returns whether it counts.

        Of a rule that this release cannot read only the revision counts: the rule before it goes on here, and what this
        release writes must have a greater one.
        """
        if fact.revision <= self.revisions.get(fact.model, 0):
            return False
        self.revisions[fact.model] = fact.revision
        self._facts[fact.model] = fact
        try:
            rule = rule_of(fact)
        except InvalidArgument:
            return False
        if rule is None:
            self.rules.pop(fact.model, None)
        else:
            self.rules[fact.model] = rule
        return True

    def begin_anew(self) -> None:
        """The log was replaced; calling it again changes nothing."""
        for model, fact in self._facts.items():
            if model not in self._former or fact.revision >= self._former[model].revision:
                self._former[model] = fact
        self._facts.clear()
        self.revisions.clear()

    def unwritten(self) -> list[RouteChanged]:
        """The facts of former logs that the present one has nothing as new for, as they were written: a rule that this
        release cannot read must not be replaced by the one before it.
        """
        return [fact for fact in self._former.values() if fact.revision > self.revisions.get(fact.model, 0)]

    def next_revision(self, model: str) -> int:
        """The revision of a change. It equals that of a former log's rule that is not written again yet: the first of
        both counts.
        """
        former = self._former.get(model)
        return max(self.revisions.get(model, 0) + 1, former.revision if former is not None else 0)


def rule_of(fact: RouteChanged) -> RouteRule | None:
    """The rule in a fact; fields of a newer release are skipped. Raises `InvalidArgument`."""
    if not fact.rule:
        return None
    try:
        body = json.loads(fact.rule)
    except ValueError as error:
        raise InvalidArgument(f"a routing rule is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidArgument("a routing rule must be a JSON object")
    known = {name: value for name, value in body.items() if name in _RULE_FIELDS}
    if isinstance(known.get("gate"), dict):
        known["gate"] = {name: value for name, value in known["gate"].items() if name in _GATE_FIELDS}
    return read_rule(known)


def route_fact(model: str, revision: int, rule: RouteRule | None) -> RouteChanged:
    return RouteChanged(model, revision, "" if rule is None else json.dumps(document(rule), separators=(",", ":")))
