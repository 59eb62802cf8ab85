"""Takes the forms of the console's pages, asks before what cannot be taken back, and sends the browser on with 303.

Every form goes through the same checks, in this order: who sends it (`identify`, as for pages), where it is from and
whether a page had its token (`forgery`), what it asks for and who may (`orders`). Then `performing` does it. Nothing
here needs a script in the browser.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from charonia.console.viewers import Viewer
from charonia.eventlog.port import EventLog

from .forgery import COOKIE, FormGuard, check_origin, is_cookie, new_cookie
from .notices import Notice, Notices
from .orders import MAX_FORM_BYTES, Action, Order, check_right, order_of, token_of
from .performing import Performer

_FORM = "application/x-www-form-urlencoded"
_BODY_S = 10.0
"""For so long a form may be under way."""
_PAGES = {"models": "/models", "jobs": "/jobs", "letters": "/dead-letters"}


@dataclass(frozen=True, slots=True)
class Acts:
    """What the templates need to offer actions to a viewer: the token of its forms, and its rights.

    `scoped`: what it changes is its own alone, else that of all.
    """

    token: str
    acts: bool
    operates: bool
    scoped: bool


class ActionRoutes:
    """The actions of one console. `routes` belong below the console's address."""

    def __init__(
        self,
        log: EventLog,
        root: str,
        viewer_of: Callable[[Request], Viewer],
        page: Callable[..., Response],
    ) -> None:
        """`viewer_of` says who sends a request, or raises `Unauthenticated`; `page` renders a template's page."""
        self._event_log = log
        self._root = root
        self._viewer_of = viewer_of
        self._page = page
        self._performer = Performer(log)
        self._guard = FormGuard()
        self._notices = Notices()
        self.routes = [Route("/actions/{name}", self._ordered, methods=["GET", "POST"])]

    def acts(self, request: Request, viewer: Viewer, cookie: str = "") -> Acts | None:
        """What this viewer is offered; None for one who may do nothing, or whose browser has no cookie."""
        token = self._guard.token(cookie or request.cookies.get(COOKIE, ""), viewer)
        if not token or not (viewer.acts or viewer.operates):
            return None
        return Acts(token, viewer.acts, viewer.operates, viewer.scoped)

    def cookie(self, request: Request) -> str:
        """The viewer's cookie, a new one for a browser that has none."""
        given = request.cookies.get(COOKIE, "")
        return given if is_cookie(given) else new_cookie()

    def give(self, request: Request, response: Response, cookie: str) -> Response:
        """The response, with the cookie for a browser that does not have it."""
        if request.cookies.get(COOKIE) != cookie:
            response.set_cookie(COOKIE, cookie, path=self._root, httponly=True, samesite="strict")
        return response

    def notice(self, request: Request, acts: Acts | None) -> Notice | None:
        """The message of the action that led to this page."""
        word = request.query_params.get("notice", "")
        return self._notices.take(acts.token, word) if word and acts is not None else None

    async def close(self) -> None:
        """Wait for no model any more."""
        await self._performer.close()

    async def _ordered(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in {action.value for action in Action}:
            raise HTTPException(404, f"the console has no action '{name[:40]}'")
        if request.method != "POST":
            raise HTTPException(405, "this address takes the forms of the console's pages: begin at the page itself")
        viewer = self._viewer_of(request)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _FORM:
            raise HTTPException(415, f"expected a form ({_FORM}), as the console's pages send it")
        if "content-length" not in request.headers:
            raise HTTPException(411, "the form does not say how long it is: a proxy has to leave its Content-Length")
        headers = request.headers
        check_origin(headers.get("origin"), headers.get("sec-fetch-site"), headers.get("host", ""))
        form = await _body(request)
        token = token_of(form)
        self._guard.check(token, request.cookies.get(COOKIE, ""), viewer)
        order = order_of(name, form)
        check_right(order, viewer)
        if order.asks_first:
            return await self._question(request, order, viewer)
        where = request.client.host if request.client is not None else ""
        notice = await self._performer.perform(order, viewer, where)
        path, sign = self._back(order), "?"
        if "?" in path:
            sign = "&"
        return RedirectResponse(f"{self._root}{path}{sign}notice={self._notices.keep(token, notice)}", 303)

    async def _question(self, request: Request, order: Order, viewer: Viewer) -> Response:
        """The page that asks whether this is meant: its form is this one, with `confirmed`."""
        values: dict[str, Any] = {"pending": None}
        if order.action is Action.CANCEL_ALL:
            values["pending"] = await self._pending(order.model, viewer)
        return self._page(request, viewer, "confirm", order=order, back_to=self._back(order), here="", **values)

    async def _pending(self, model: str, viewer: Viewer) -> int:
        """How many unsettled requests of a model there are that the viewer may cancel."""
        if not viewer.scoped:
            return (await self._event_log.pending(model))[0]
        ((requests, _),) = await self._event_log.pending_of_tenants(model, [viewer.tenant])
        return requests

    def _back(self, order: Order) -> str:
        """The address, below the console's, of the page to go on with."""
        if order.back == "letter" and order.action is Action.DISCARD and order.confirmed:
            return _PAGES["letters"]  # the letter's own page is gone
        if order.back in ("request", "letter") and order.chosen:
            ((found, model), *_) = order.chosen
            room = "requests" if order.back == "request" else "dead-letters"
            return f"/{room}/{quote(model, safe='')}/{quote(found, safe='')}"
        if order.back in _PAGES:
            path = _PAGES[order.back]
            return f"{path}?model={quote(order.model, safe='')}" if order.model and order.back != "models" else path
        model = order.model or next(iter(order.models()), "")
        return f"/models/{quote(model, safe='')}" if model else "/"


async def _body(request: Request) -> bytes:
    """The form. Raises `HTTPException` for one that is too long or does not come."""
    found = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in request.stream():
                found += part
                if len(found) > MAX_FORM_BYTES:
                    raise HTTPException(413, f"the form is longer than {MAX_FORM_BYTES} bytes: choose fewer")
    except TimeoutError:
        raise HTTPException(408, f"the form did not come within {_BODY_S:g} s: send it again") from None
    return bytes(found)
