"""Keeps forms of other sites out (cross-site request forgery): a form's origin, and a token bound to its viewer.

A browser sends what it knows of a viewer (an API key typed before, an address inside) with the forms of any site. So a
form has to come from a page of this console, by the headers that browsers set and scripts cannot; and has to carry a
token that such a page had for this viewer: a MAC of a cookie and the tenant, by a secret of this process.
"""

from __future__ import annotations

import hmac
import re
from hashlib import sha256
from secrets import token_bytes, token_hex
from urllib.parse import urlsplit

from charonia.console.viewers import Viewer
from charonia.errors import PermissionDenied

COOKIE = "charonia-console"
_VALUE = re.compile(r"[0-9a-f]{32}")
_AGAIN = "open the console's page again, and send the form from there"


class FormGuard:
    """The tokens of one process: after its end, pages have to be opened again."""

    def __init__(self) -> None:
        self._secret = token_bytes(32)

    def token(self, cookie: str, viewer: Viewer) -> str:
        """The token of a viewer with this cookie; "" for a cookie that is none of ours."""
        if not _VALUE.fullmatch(cookie):
            return ""
        who = repr((cookie, viewer.scoped, viewer.tenant)).encode()
        return hmac.new(self._secret, who, sha256).hexdigest()

    def check(self, token: str, cookie: str, viewer: Viewer) -> None:
        """Raises `PermissionDenied` unless a page had the token for this viewer."""
        expected = self.token(cookie, viewer)
        if not expected or not hmac.compare_digest(expected.encode(), token.encode()):
            raise PermissionDenied(
                f"the form has no token of this console for you: it was started again, or cookies are off. {_AGAIN}"
            )


def new_cookie() -> str:
    """A value for `COOKIE`."""
    return token_hex(16)


def is_cookie(value: str) -> bool:
    """Whether a value may be one of `new_cookie`, of this process or of another one."""
    return _VALUE.fullmatch(value) is not None


def check_origin(origin: str | None, fetch_site: str | None, host: str) -> None:
    """Raises `PermissionDenied` unless the headers Origin and Sec-Fetch-Site say that a page of this host sent it.

    Browsers send Origin with each form, Sec-Fetch-Site only where the page came over TLS or from the same machine.
    """
    if fetch_site is not None and fetch_site != "same-origin":
        raise PermissionDenied(f"a page of another site sent this form (Sec-Fetch-Site: {fetch_site[:40]}). {_AGAIN}")
    if origin is not None and _host_of(origin) != host.lower():
        raise PermissionDenied(
            f"a page of another site sent this form (Origin: {origin[:200]}, expected one of '{host[:200]}'). "
            f"{_AGAIN}; a proxy before the console has to leave the header Host as it is"
        )
    if fetch_site is None and origin is None:
        raise PermissionDenied(
            "the form says neither by Origin nor by Sec-Fetch-Site where it is from, as browsers do: programs use the "
            "API, or 'charonia queue', 'jobs' and 'dlq'"
        )


def _host_of(origin: str) -> str | None:
    """Host and port of an origin; None for text that is no origin."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None
