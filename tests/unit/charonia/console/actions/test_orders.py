"""Forms as orders: what is read, what is refused and with which words, and who may order what."""

from __future__ import annotations

from urllib.parse import urlencode

import pytest

from charonia.console.actions.orders import MAX_CHOSEN, Action, Order, check_right, order_of, token_of
from charonia.console.viewers import OPERATOR, Viewer
from charonia.errors import InvalidArgument, PermissionDenied

ID = "0" * 31 + "a"
TENANT = Viewer("acme", scoped=True, acts=True)


def form(*fields: tuple[str, str]) -> bytes:
    return urlencode(fields).encode()


def test_a_form_is_read() -> None:
    sent = form(("id", f"{ID}.a%20model"), ("id", f"{ID}.a%20model"), ("level", "2"), ("back", "model"), ("token", "t"))
    order = order_of("move", sent)
    assert order == Order(Action.MOVE, "", ((ID, "a model"),), 2, back="model")
    assert order.models() == ["a model"]
    assert token_of(sent) == "t"
    assert not order.asks_first


def test_what_cannot_be_taken_back_is_asked_for_first() -> None:
    asked = order_of("unload", form(("model", "m"), ("dependents", "yes")))
    assert asked.asks_first
    assert asked.dependents
    assert not order_of("unload", form(("model", "m"), ("confirmed", "yes"))).asks_first
    assert [action.value for action in Action if Order(action).asks_first] == [
        "cancel",
        "cancel-all",
        "discard",
        "unload",
    ]


@pytest.mark.parametrize(
    ("name", "sent", "text"),
    [
        ("pause", form(), "names no model"),
        ("cancel", form(("model", "m")), "no request is chosen"),
        ("replay", form(), "no dead letter is chosen"),
        ("cancel", form(("id", "abc")), "'abc' is no id of a request: 32 hex digits"),
        ("discard", form(("id", ".m")), "'.m' is no id of a dead letter"),
        ("move", form(("id", f"{ID}.a"), ("id", f"{ID}.b"), ("level", "1")), "one model at a time"),
        ("move", form(("id", f"{ID}.a"), ("level", "-1")), "'-1' is no priority level"),
        ("move", form(("id", f"{ID}.a")), "'' is no priority level"),
        ("cancel", form(*(("id", f"{number:032x}.m") for number in range(MAX_CHOSEN + 1))), "expected at most 100"),
        ("cancel", form(*(("id", f"{number:032x}.m") for number in range(300))), "cannot be read"),
        ("cancel", b"id=%ff", "cannot be read"),
        ("cancel", b"\xff", "cannot be read"),
    ],
)
def test_other_forms_are_refused_with_what_was_expected(name: str, sent: bytes, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text.replace("(", r"\(")):
        order_of(name, sent)


def test_an_unknown_page_to_go_back_to_is_none() -> None:
    assert order_of("pause", form(("model", "m"), ("back", "https://elsewhere"))).back == ""
    assert token_of(b"\xff") == ""


@pytest.mark.parametrize("action", list(Action))
def test_who_may_order_what(action: Action) -> None:
    check_right(Order(action), OPERATOR)
    with pytest.raises(PermissionDenied, match=f"'{action.value}' needs the header that restricts"):
        check_right(Order(action), Viewer())
    if action in (Action.CANCEL, Action.CANCEL_ALL, Action.REPLAY, Action.DISCARD):
        check_right(Order(action), TENANT)
    else:
        with pytest.raises(PermissionDenied, match="is for operators"):
            check_right(Order(action), TENANT)
