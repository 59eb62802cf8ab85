"""Reads what a form asks for, and says who may ask for it. Pure.

A form has fields `model`, `id` (repeated: `<id>.<model>`, of a request in hexadecimal digits or of a dead letter's
entry, the model as in public ids of jobs), `level`, `dependents`, `confirmed` and `back`. `performing` does what an
order says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from urllib.parse import parse_qs, unquote

from charonia.console.viewers import Viewer
from charonia.errors import InvalidArgument, PermissionDenied

MAX_CHOSEN = 100
"""Requests or letters of one order: pages list so many."""
MAX_FORM_BYTES = 65_536
"""Hundred ids with long names of models."""
_MAX_FIELDS = 2 * MAX_CHOSEN
_DIGITS = 9
"""Of a level: beyond 32 bits none can exist."""


class Action(Enum):
    """What can be asked for, by the last part of the address that a form is sent to."""

    PAUSE = "pause"
    RESUME = "resume"
    MOVE = "move"
    CANCEL = "cancel"
    CANCEL_ALL = "cancel-all"
    REPLAY = "replay"
    DISCARD = "discard"
    LOAD = "load"
    UNLOAD = "unload"


TO_CONFIRM = frozenset({Action.CANCEL, Action.CANCEL_ALL, Action.DISCARD, Action.UNLOAD})
"""What cannot be taken back: a page asks first."""
OF_OPERATORS = frozenset({Action.PAUSE, Action.RESUME, Action.MOVE, Action.LOAD, Action.UNLOAD})
"""What concerns the work of all: no tenant may do it. The others a tenant may do to its own work."""
_OF_LETTERS = frozenset({Action.REPLAY, Action.DISCARD})
_OF_CHOSEN = frozenset({Action.CANCEL, Action.MOVE}) | _OF_LETTERS
BACK = frozenset({"model", "models", "jobs", "request", "letters", "letter"})
"""The pages that a form may be on."""


@dataclass(frozen=True, slots=True)
class Order:
    """`chosen` are pairs of id and model, of an action on one model just `model` is set."""

    action: Action
    model: str = ""
    chosen: tuple[tuple[str, str], ...] = ()
    level: int = 0
    dependents: bool = False
    confirmed: bool = False
    back: str = ""

    @property
    def asks_first(self) -> bool:
        """Whether a page has to ask whether this is meant."""
        return self.action in TO_CONFIRM and not self.confirmed

    def models(self) -> list[str]:
        """The models that it concerns."""
        return sorted({model for _, model in self.chosen} | ({self.model} - {""}))


def order_of(name: str, form: bytes) -> Order:
    """The order of a form as a browser sends it (application/x-www-form-urlencoded). Raises `InvalidArgument`."""
    try:
        fields = parse_qs(form.decode(), keep_blank_values=True, max_num_fields=_MAX_FIELDS, errors="strict")
    except ValueError:
        raise InvalidArgument("the form cannot be read: send one of the console's pages, with UTF-8 text") from None
    action = Action(name)
    model, back = _one(fields, "model"), _one(fields, "back")
    chosen = tuple(dict.fromkeys(_chosen(text, action) for text in fields.get("id", ())))
    if action in _OF_CHOSEN:
        if not chosen:
            what = "dead letter" if action in _OF_LETTERS else "request"
            raise InvalidArgument(f"no {what} is chosen: go back, tick at least one, and send the form again")
        if len(chosen) > MAX_CHOSEN:
            raise InvalidArgument(f"{len(chosen)} are chosen, expected at most {MAX_CHOSEN}: choose fewer")
    elif not model:
        raise InvalidArgument("the form names no model: go back to the model's page and use its buttons")
    if action is Action.MOVE and len({name for _, name in chosen}) > 1:
        raise InvalidArgument("requests of several models are chosen: move those of one model at a time")
    return Order(
        action,
        model,
        chosen if action in _OF_CHOSEN else (),
        _level(_one(fields, "level")) if action is Action.MOVE else 0,
        _one(fields, "dependents") == "yes",
        _one(fields, "confirmed") == "yes",
        back if back in BACK else "",
    )


def token_of(form: bytes) -> str:
    """The token that a form carries, "" without one."""
    try:
        return _one(parse_qs(form.decode(), max_num_fields=_MAX_FIELDS), "token")
    except ValueError:
        return ""


def check_right(order: Order, viewer: Viewer) -> None:
    """Raises `PermissionDenied` with what is missing. Whose a chosen request is, is checked where it is read."""
    if order.action in OF_OPERATORS:
        if viewer.scoped:
            raise PermissionDenied(
                f"'{order.action.value}' concerns the work of every tenant, and is for operators: they run "
                "'charonia console --console-actions' beside the log, without --api-keys and --tenant-header"
            )
        if not viewer.operates:
            raise _restricted(order.action, "model-repository")
    elif not viewer.acts:
        raise _restricted(order.action, "inference")


def _restricted(action: Action, group: str) -> PermissionDenied:
    return PermissionDenied(
        f"'{action.value}' needs the header that restricts '{group}' (--http-restricted-api, "
        "--grpc-restricted-protocol): let the proxy before the console add it, or use the API"
    )


def _one(fields: Mapping[str, Sequence[str]], name: str) -> str:
    return fields.get(name, ("",))[0].strip()


def _chosen(text: str, action: Action) -> tuple[str, str]:
    found, dot, model = text.partition(".")
    if not dot or not found or not model:
        what = "a dead letter: its entry" if action in _OF_LETTERS else "a request: 32 hex digits"
        raise InvalidArgument(f"'{text[:80]}' is no id of {what}, a dot, and the name of its model")
    return found, unquote(model)


def _level(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > _DIGITS:
        raise InvalidArgument(f"'{text[:20]}' is no priority level: choose a whole number, 1 is the most urgent")
    return int(text)
