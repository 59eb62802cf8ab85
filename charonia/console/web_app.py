"""Answers the console's requests: pages, their live updates as server-sent events, and static files. What they show is
`live_pages`'.

A Starlette application below `/console`. Without `actions` it takes only GET and HEAD, so no page can be made to change
anything; with them also the forms that `actions.action_routes` checks. Each answer has a content security policy under
which a page runs the console's own scripts and styles and nothing else. Who asks is decided by `identify`, as for the
API (`charonia.composition.console.console_role`).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from ipaddress import ip_address
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from charonia.errors import CharoniaError, InvalidArgument, NotFound, PermissionDenied, Unauthenticated
from charonia.eventlog.port import EventLog
from charonia.facts.jobs import parse_public_id
from charonia.metrics.endpoint import LIVE, READY

from . import log_views
from .actions.action_routes import ActionRoutes, Acts
from .live_pages import REGIONS, WORDS, LivePages, Values
from .log_views import ReadStatistics
from .page_rendering import HERE, PageRenderer
from .readings import READ_S, Sampler
from .stories.request_reading import ReadWebhook, no_webhooks
from .viewers import OPERATOR, Viewer

ROOT = "/console"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),  # without a referrer browsers say no origin of a form either
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)

_STATUSES = {NotFound: 404, PermissionDenied: 403, InvalidArgument: 400}
"""Of errors; others are the log's, which may answer later."""

_NOTHING: Mapping[str, str] = {}

RawHeaders = Sequence[tuple[bytes, bytes]]
Identify = Callable[[RawHeaders], Viewer]
"""Who asks, by the headers of a request, names in lower case. Raises `Unauthenticated`."""


class ConsoleApp:
    """The pages of one server. `asgi` is the application."""

    def __init__(
        self,
        log: EventLog,
        sampler: Sampler,
        read_statistics: ReadStatistics,
        identify: Identify | None = None,
        names: Collection[str] | None = None,
        *,
        read_webhook: ReadWebhook = no_webhooks,
        actions: bool = False,
    ) -> None:
        """Without `identify` every viewer sees everything, and with `actions` may change everything. `names` are the
        host names, in lower case, under which it may be opened beside IP addresses and localhost; None for any.
        """
        self._log = log
        self._identify = identify
        self._pages = PageRenderer()
        self._live_pages = LivePages(log, sampler, read_statistics, read_webhook, self._region)
        self._actions = ActionRoutes(log, ROOT, self._viewer, self._page) if actions else None
        pages = [
            *(self._actions.routes if self._actions is not None else ()),
            Route("/", self._overview),
            Route("/live", self._live),
            Route("/models", self._models),
            Route("/models/{model:path}", self._model),
            Route("/jobs", self._jobs),
            Route("/streams", self._streams),
            Route("/find", self._find),
            Route("/requests/{model:path}/{id}", self._request),
            Route("/dead-letters", self._letters),
            Route("/dead-letters/{model:path}/{id}", self._letter),
            Mount("/static", StaticFiles(directory=HERE / "static")),
        ]
        handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
            CharoniaError: self._failed,
            HTTPException: self._refused,
        }
        routes = [
            Route("/", _to_console),
            Route(LIVE.decode(), _alive),
            Route(READY.decode(), self._ready),
            Route(ROOT, _to_console),
            Mount(ROOT, routes=pages),
        ]
        app = Starlette(routes=routes, exception_handlers=handlers)
        self.asgi: ASGIApp = _Guarded(app, names, ("GET", "HEAD", "POST") if actions else ("GET", "HEAD"))

    async def close(self) -> None:
        """End what actions have begun to wait for."""
        if self._actions is not None:
            await self._actions.close()

    # -- pages --------------------------------------------------------------------------------------------------------

    async def _overview(self, request: Request) -> Response:
        return await self._live_page(request, "overview", "overview")

    async def _models(self, request: Request) -> Response:
        return await self._live_page(request, "models", "models")

    async def _model(self, request: Request) -> Response:
        return await self._live_page(request, "model", "models", request.path_params)

    async def _jobs(self, request: Request) -> Response:
        return await self._live_page(request, "jobs", "jobs", request.query_params)

    async def _streams(self, request: Request) -> Response:
        return await self._live_page(request, "streams", "streams")

    async def _request(self, request: Request) -> Response:
        return await self._live_page(request, "request", "jobs", request.path_params)

    async def _letters(self, request: Request) -> Response:
        return await self._live_page(request, "letters", "letters", request.query_params)

    async def _live_page(self, request: Request, name: str, here: str, asked: Mapping[str, str] = _NOTHING) -> Response:
        """A page that `live_pages` knows; `here` is its place among the links at the top."""
        viewer = self._viewer(request)
        values = await self._live_pages.values(name, asked, viewer)
        return self._page(request, viewer, name, **values, here=here)

    async def _find(self, request: Request) -> Response:
        """From an id in the search field to its page."""
        self._viewer(request)
        parsed = parse_public_id(request.query_params.get("id", "").strip())
        if parsed is None:
            raise HTTPException(400, "this is no id of a job: 32 hex digits, a dot, and the name of its model")
        model, job_id = parsed
        return RedirectResponse(f"{ROOT}/requests/{quote(model, safe='')}/{job_id.hex()}", 303)

    async def _letter(self, request: Request) -> Response:
        viewer = self._viewer(request)
        model, text = request.path_params["model"], request.path_params["id"]
        shown = await log_views.letter_page(self._log, viewer, model, text)
        return self._page(request, viewer, "letter", letter=shown, here="letters")

    def _page(self, request: Request, viewer: Viewer, name: str, **values: Any) -> Response:
        """A page as this viewer may use it: with forms for what it may do, and the message of what it has done."""
        acts = notice = None
        cookie = ""
        if self._actions is not None and (viewer.acts or viewer.operates):
            cookie = self._actions.cookie(request)
            acts = self._actions.acts(request, viewer, cookie)
            notice = self._actions.notice(request, acts)
        content = self._pages.page(name, root=ROOT, acts=acts, notice=notice, **values)
        page = HTMLResponse(content, headers={"cache-control": "no-store"})
        return self._actions.give(request, page, cookie) if self._actions is not None and cookie else page

    # -- live ---------------------------------------------------------------------------------------------------------

    async def _live(self, request: Request) -> Response:
        page = request.query_params.get("page", "overview")
        asked = {name: request.query_params.get(name, "") for name in WORDS}
        if page not in REGIONS:
            raise HTTPException(404, f"no page '{page}' has live updates")
        viewer = self._viewer(request)
        acts = self._actions.acts(request, viewer) if self._actions is not None else None
        return StreamingResponse(
            self.live_events(page, asked, viewer, acts),
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )

    def live_events(
        self, page: str, asked: Mapping[str, str], viewer: Viewer, acts: Acts | None = None
    ) -> AsyncIterator[bytes]:
        """The updates of an open page, whose address has the words `asked`."""
        return self._live_pages.events(page, asked, viewer, acts)

    def _region(self, name: str, acts: Acts | None, values: Values) -> str:
        return self._pages.region(name, root=ROOT, acts=acts, **values)

    # -- health -------------------------------------------------------------------------------------------------------

    async def _ready(self, _request: Request) -> Response:
        """As parts say it on their metrics ports: pages need the log, and nothing else."""
        try:
            async with asyncio.timeout(READ_S):
                await self._log.memory_bytes()
        except CharoniaError as error:
            return JSONResponse({"error": error.message}, 503)
        except TimeoutError:
            return JSONResponse({"error": f"the log does not answer within {READ_S:g} s"}, 503)
        return JSONResponse({"ready": True})

    # -- who, and what went wrong -------------------------------------------------------------------------------------

    def _viewer(self, request: Request) -> Viewer:
        if self._identify is None:
            viewer = OPERATOR
        else:
            viewer = self._identify([_with_key(header) for header in request.headers.raw])
        return viewer if self._actions is not None else replace(viewer, acts=False, operates=False)

    async def _failed(self, _request: Request, error: CharoniaError) -> Response:
        if isinstance(error, Unauthenticated):
            page = self._problem(401, error.message)
            page.headers["www-authenticate"] = 'Basic realm="charonia: any name, and an API key as the password"'
            return page
        status = next((code for kind, code in _STATUSES.items() if isinstance(error, kind)), 503)
        return self._problem(status, error.message)

    async def _refused(self, _request: Request, error: HTTPException) -> Response:
        return self._problem(error.status_code, error.detail)

    def _problem(self, status: int, text: str) -> Response:
        content = self._pages.page("problem", root=ROOT, status=status, text=text, here="", acts=None, notice=None)
        return HTMLResponse(content, status, headers={"cache-control": "no-store"})


def _with_key(header: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    """Browsers send what was typed into their dialogue as Basic; its password is the key."""
    name, value = header
    if name != b"authorization" or value[:6].lower() != b"basic ":
        return name, value
    try:
        _, _, key = base64.b64decode(value[6:].strip(), validate=True).partition(b":")
    except binascii.Error:
        key = b""
    return name, b"Bearer " + key


async def _alive(_request: Request) -> Response:
    return JSONResponse({"live": True})


async def _to_console(_request: Request) -> Response:
    return RedirectResponse(f"{ROOT}/", 308)


class _Guarded:
    """Adds the security headers to each answer, and lets no other method and no other host in."""

    def __init__(self, app: ASGIApp, names: Collection[str] | None, methods: Collection[str]) -> None:
        self._app = app
        self._names = names
        self._methods = methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        if scope["method"] not in self._methods:
            text = "only GET and HEAD: this console changes nothing, as it was started without --console-actions\n"
            if "POST" in self._methods:
                text = "only GET, HEAD, and POST of forms\n"
            await Response(text, 405, media_type="text/plain")(scope, receive, guarded)
            return
        host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
        if self._names is not None and not is_own(host, self._names):
            text = "the console is not known by this name: open it by an IP address, or start it with --console-name\n"
            await Response(text, 421, media_type="text/plain")(scope, receive, guarded)
            return
        await self._app(scope, receive, guarded)


def is_own(host: str, names: Collection[str]) -> bool:
    """Whether a Host header names this server. Any other name may belong to a site that lets it point here, to have a
    viewer's browser read the pages for it.
    """
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    name = name.lower().removesuffix(".")
    if name in ("", "localhost") or name in names:
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
