"""Forms of other sites are refused: by their origin, and for want of the viewer's token."""

from __future__ import annotations

import pytest

from charonia.console.actions.forgery import FormGuard, check_origin, is_cookie, new_cookie
from charonia.console.viewers import OPERATOR, Viewer
from charonia.errors import PermissionDenied

ACME, UMBRELLA = Viewer("acme", scoped=True, acts=True), Viewer("umbrella", scoped=True, acts=True)


def test_a_token_is_of_one_viewer_one_cookie_and_one_process() -> None:
    guard, cookie = FormGuard(), new_cookie()
    token = guard.token(cookie, ACME)
    guard.check(token, cookie, ACME)
    assert is_cookie(cookie)
    for other in (
        (FormGuard(), token, cookie, ACME),
        (guard, token, new_cookie(), ACME),
        (guard, token, cookie, UMBRELLA),
        (guard, token, cookie, OPERATOR),
        (guard, "", cookie, ACME),
        (guard, "ä", cookie, ACME),
        (guard, "", "", ACME),
        (guard, guard.token("no cookie", ACME), "no cookie", ACME),
    ):
        with pytest.raises(PermissionDenied, match="open the console's page again"):
            other[0].check(*other[1:])


@pytest.mark.parametrize(
    ("origin", "site"),
    [
        ("http://here:8002", "same-origin"),
        ("https://HERE:8002", None),
        (None, "same-origin"),
    ],
)
def test_a_form_of_this_console_is_taken(origin: str | None, site: str | None) -> None:
    check_origin(origin, site, "here:8002")


@pytest.mark.parametrize(
    ("origin", "site"),
    [
        (None, None),
        ("null", None),
        ("null", "same-origin"),
        ("http://here:8003", None),
        ("http://evil.example", None),
        ("http://here:8002.evil.example", None),
        ("http://here:8002@evil.example", None),
        ("http://here:8002", "same-site"),
        ("http://here:8002", "cross-site"),
        (None, "none"),
        ("", "same-origin"),
        ("http://[here:8002", None),
    ],
)
def test_a_form_from_elsewhere_is_refused(origin: str | None, site: str | None) -> None:
    with pytest.raises(PermissionDenied):
        check_origin(origin, site, "here:8002")


def test_a_form_without_an_origin_is_not_of_a_host_without_a_name() -> None:
    with pytest.raises(PermissionDenied):
        check_origin("null", None, "")
