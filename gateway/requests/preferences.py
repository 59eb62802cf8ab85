"""Delivery preferences in headers, metadata or request parameters, as `DeliveryOptions`. Pure.

Every protocol has the same ones: a parameter `charonia_<word>`, or a header (metadata key) of `HEADERS`. A header
overrides the parameter. Fronts extract them, `gateway.deferral` reads them and applies time limits, and `gateway.jobs`
keeps the jobs that they ask for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from charonia.errors import InvalidArgument
from charonia.inference import MAX_DEADLINE_NS, Parameters, ParameterValue

from .delivery import ANYONE, WEBHOOK_EVENTS, Caller, DeliveryOptions, Webhook

PREFER = "charonia_prefer"
KEY = "charonia_idempotency_key"
WEBHOOK = "charonia_webhook"
EVENTS = "charonia_webhook_events"
ON_DISCONNECT = "charonia_on_disconnect"
DURABILITY = "charonia_durability"
RETENTION = "charonia_retention_s"
TIMEOUT = "charonia_timeout_ms"

PARAMETERS = frozenset((PREFER, KEY, WEBHOOK, EVENTS, ON_DISCONNECT, DURABILITY, RETENTION, TIMEOUT))
"""Request parameters about delivery, which models do not see."""

HEADERS: Mapping[bytes, str] = {
    b"prefer": PREFER,
    b"idempotency-key": KEY,
    b"charonia-webhook": WEBHOOK,
    b"charonia-webhook-events": EVENTS,
    b"charonia-on-disconnect": ON_DISCONNECT,
    b"charonia-durability": DURABILITY,
    b"charonia-retention": RETENTION,
    b"charonia-timeout-ms": TIMEOUT,
}
"""Header names in lower case, and the parameters that they stand for."""

HEADER_NAMES = frozenset(HEADERS)

MAX_WAIT_S = 60.0
"""Max time that `wait` holds a connection open, so that proxies in between do not close it."""

_MAX_NUMBER = 2**53
_WHOLE = re.compile(r"[0-9]{1,16}")
_SECONDS = re.compile(r"[0-9]{1,16}(?:\.[0-9]{1,9})?")


@dataclass(frozen=True, slots=True)
class Wish:
    """A caller's preferences. `wait_s` > 0: answer in the ordinary way if the job ends within it (RFC 7240).

    `deadline_ns` follows from a relative timeout, 0 for none; `applied` lists honoured preferences, for
    Preference-Applied.
    """

    options: DeliveryOptions
    wait_s: float = 0.0
    deadline_ns: int = 0
    applied: str = ""


def words_of_headers(headers: Iterable[tuple[bytes, bytes]]) -> Parameters:
    """The delivery preferences in headers; a repeated Prefer is one list (RFC 7240).

    Raises `InvalidArgument` for another header that occurs twice with different values: a proxy may have honoured only
    one.
    """
    words: Parameters = {}
    for name, value in headers:
        key = HEADERS.get(name)
        if key is None:
            continue
        add_word(words, key, name.decode(), value.decode("latin-1"))
    return words


def add_word(words: Parameters, key: str, name: str, text: str) -> None:
    """Add the preference in a header. Raises as `words_of_headers`."""
    if key == PREFER and PREFER in words:
        text = f"{words[PREFER]},{text}"
    elif words.get(key, text) != text:
        raise InvalidArgument(f"'{name}' is given twice")
    words[key] = text


def read_wish(words: Parameters, now_ns: int, *, form: Mapping[str, Any], caller: Caller = ANYONE) -> Wish:
    """Interpret preferences: `words` are parameters by name, `now_ns` the wall clock. Raises `InvalidArgument`."""
    respond_async, wait_s = _preferences(_text(words, PREFER))
    key = _text(words, KEY)
    if KEY in words and not (key and key.isprintable()):
        raise InvalidArgument("an idempotency key must hold one or more printable characters")
    options = DeliveryOptions(
        respond_async=respond_async or wait_s > 0,
        idempotency_key=key,
        webhook=_webhook(words),
        on_disconnect=_on_disconnect(words),
        durability=_text(words, DURABILITY),
        retention_s=_whole(words, RETENTION),
        caller=caller,
        form=form,
    )
    timeout_ms = _whole(words, TIMEOUT)
    deadline_ns = min(now_ns + timeout_ms * 1_000_000, MAX_DEADLINE_NS) if TIMEOUT in words else 0
    applied = ["respond-async"] if respond_async else []
    if wait_s > 0:
        applied.append(f"wait={wait_s:g}")
    return Wish(options, wait_s, deadline_ns, ", ".join(applied))


def _preferences(text: str) -> tuple[bool, float]:
    """`respond-async` and `wait` of a Prefer value. Unknown preferences are ignored (RFC 7240, section 2)."""
    respond_async, wait_s = False, 0.0
    for preference in text.split(","):
        token, _, value = preference.partition(";")[0].partition("=")
        token, value = token.strip().lower(), value.strip().strip('"')
        if token == "respond-async":
            respond_async = True
        elif token == "wait" and _SECONDS.fullmatch(value):
            wait_s = min(float(value), MAX_WAIT_S)
    return respond_async, wait_s


def _webhook(words: Parameters) -> Webhook | None:
    if WEBHOOK not in words:
        if EVENTS in words:
            raise InvalidArgument(f"'{EVENTS}' needs '{WEBHOOK}'")
        return None
    url = _text(words, WEBHOOK)
    if EVENTS not in words:
        return Webhook(url)
    events = tuple(dict.fromkeys(event.strip() for event in _text(words, EVENTS).split(",")))
    if not set(events) <= set(WEBHOOK_EVENTS):
        raise InvalidArgument(f"'{EVENTS}' must be a list of {', '.join(WEBHOOK_EVENTS)}")
    return Webhook(url, events)


def _on_disconnect(words: Parameters) -> Literal["", "cancel", "keep"]:
    if ON_DISCONNECT not in words:
        return ""
    match _text(words, ON_DISCONNECT).strip().lower():
        case "cancel":
            return "cancel"
        case "keep":
            return "keep"
        case _:
            raise InvalidArgument(f"'{ON_DISCONNECT}' must be cancel or keep")


def _text(words: Parameters, name: str) -> str:
    value: ParameterValue = words.get(name, "")
    if not isinstance(value, str):
        raise InvalidArgument(f"parameter '{name}' must be a string")
    return value


def _whole(words: Parameters, name: str) -> int:
    value: ParameterValue = words.get(name, 0)
    if isinstance(value, str) and _WHOLE.fullmatch(digits := value.strip()):
        value = int(digits)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_NUMBER:
        raise InvalidArgument(f"'{name}' must be a whole number of 0 or more")
    return value
