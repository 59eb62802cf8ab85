"""The FastAPI application behind `http_application`: metadata, configuration, statistics, repository, settings,
shared memory.

`control_json` converts values to JSON, the handler does the work, `job_routes` adds the routes of jobs, and
`openapi.operations` documents every route.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from importlib.metadata import version
from typing import Any, TypeGuard

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Route

from charonia.errors import CharoniaError, Unsupported
from charonia.models.config_forms import to_json
from charonia.offload.pool import MAX_CONTROL_BYTES, OFF_LOOP_BYTES
from charonia.options.settings import GatewaySettings
from charonia.tensors import Buffer
from gateway.handler import Handler
from gateway.regions.region_store import RegionKind
from gateway.reports import log_settings

from .bodies import AsgiApp, LimitText, check_declared, read_body, too_large, too_large_for_control
from .codec import control_json
from .codec.conversions import load_task, read_load
from .codec.error_replies import (
    INTERNAL_BODY,
    METHOD_NOT_ALLOWED_BODY,
    NOT_FOUND_BODY,
    HttpRefusal,
    error_body,
    render_error,
)
from .job_routes import add_jobs
from .openapi.document import build_document
from .openapi.page import POLICY, render_page

_MODEL = "/v2/models/{model}"
_VERSION = "/v2/models/{model}/versions/{version}"


def control_app(settings: GatewaySettings, handler: Handler) -> AsgiApp:
    """The ASGI application of all endpoints but inference and health."""
    app = FastAPI(redirect_slashes=False, openapi_url=None)
    _add_errors(app)
    _add_metadata(app, handler)
    _add_repository(app, settings, handler)
    _add_logging(app, settings)
    _add_tracing(app, settings, handler)
    add_jobs(app, handler)
    _add_shared_memory(app, settings, handler)
    _add_documentation(app, settings)
    return app


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


async def _large_body(request: Request, settings: GatewaySettings) -> bytes | memoryview:
    """The request's body within `--http-max-input-size` (H24)."""
    return await _read(request, settings.http_max_input_size, too_large)


async def _body(request: Request, settings: GatewaySettings) -> bytes:
    """As `_large_body`, for a body that the event loop parses, which must be small."""
    if settings.http_max_input_size <= MAX_CONTROL_BYTES:
        return bytes(await _large_body(request, settings))
    return bytes(await _read(request, MAX_CONTROL_BYTES, too_large_for_control))


async def _read(request: Request, limit_bytes: int, text: LimitText) -> bytes | memoryview:
    headers = dict(request.scope["headers"])
    check_declared(headers, limit_bytes, text)
    return await read_body(await request.receive(), headers, request.receive, limit_bytes, text)


def _check_version(version: str) -> str:
    # versions are digits only; any other path is not found
    if not (version.isascii() and version.isdigit()):
        raise HTTPException(404)
    return version


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(CharoniaError)
    @app.exception_handler(HttpRefusal)
    async def typed(_request: Request, error: Exception) -> Response:
        assert isinstance(error, (CharoniaError, HttpRefusal))
        status, headers, body = render_error(error)
        return Response(body, status, {name.decode(): value.decode() for name, value in headers})

    @app.exception_handler(Exception)
    async def unexpected(_request: Request, _error: Exception) -> Response:
        return Response(INTERNAL_BODY, 500, media_type="application/json")

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            return Response(NOT_FOUND_BODY, 404, media_type="application/json")
        if error.status_code == 405:
            # this one is text/plain (E2)
            allow = {method for route in app.routes if _leads_to(route, request) for method in route.methods or ()}
            return Response(
                METHOD_NOT_ALLOWED_BODY, 405, {"content-type": "text/plain", "allow": ", ".join(sorted(allow))}
            )
        return Response(error_body(str(error.detail)), error.status_code, media_type="application/json")


def _leads_to(route: BaseRoute, request: Request) -> TypeGuard[Route]:
    """Whether the request's path is the route's, whatever its method."""
    return isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE


def _add_documentation(app: FastAPI, settings: GatewaySettings) -> None:
    """`/openapi.json` and `/docs`, made by the first request for them."""

    @cache
    def document() -> dict[str, Any]:
        if settings.openai is None or not settings.openai.on_http_port:
            return build_document(version("charonia"))
        from .openapi.stored_operations import STORED_OPERATIONS, stored_schemas
        from .openapi.task_operations import OPENAI_OPERATIONS, openai_schemas

        operations = (*OPENAI_OPERATIONS, *STORED_OPERATIONS)
        return build_document(version("charonia"), operations, {**openai_schemas(), **stored_schemas()})

    @cache
    def page() -> bytes:
        return render_page(document())

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return _json(document())

    @app.get("/docs")
    async def docs() -> Response:
        headers = {
            "content-security-policy": POLICY,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }
        return Response(page(), 200, headers, media_type="text/html")


def _add_metadata(app: FastAPI, handler: Handler) -> None:
    @app.get("/v2")
    async def server_metadata() -> Response:
        return _json(control_json.server_metadata(handler.server_metadata()))

    @app.get("/v2/models/stats")
    async def all_statistics() -> Response:
        return _json(control_json.model_statistics(await handler.statistics("", "")))

    @app.get(_MODEL)
    async def model_metadata(model: str) -> Response:
        return _json(control_json.model_metadata(handler.model_metadata(model, "")))

    @app.get(_VERSION)
    async def version_metadata(model: str, version: str) -> Response:
        return _json(control_json.model_metadata(handler.model_metadata(model, _check_version(version))))

    @app.get(_MODEL + "/config")
    async def model_config(model: str) -> Response:
        return _json(to_json(handler.model_config(model, "")))

    @app.get(_VERSION + "/config")
    async def version_config(model: str, version: str) -> Response:
        return _json(to_json(handler.model_config(model, _check_version(version))))

    @app.get(_MODEL + "/stats")
    async def model_statistics(model: str) -> Response:
        return _json(control_json.model_statistics(await handler.statistics(model, "")))

    @app.get(_VERSION + "/stats")
    async def version_statistics(model: str, version: str) -> Response:
        return _json(control_json.model_statistics(await handler.statistics(model, _check_version(version))))


def _add_repository(app: FastAPI, settings: GatewaySettings, handler: Handler) -> None:
    @app.post("/v2/repository/index")
    @app.post("/v2/repository/{repository}/index")  # of all repositories, as in Triton: the name is not read
    async def index(request: Request) -> Response:
        ready = control_json.read_index_request(await _body(request, settings))
        return _json(control_json.repository_index(handler.repository_index(ready=ready)))

    @app.post("/v2/repository/models/{model}/load")
    async def load(model: str, request: Request) -> Response:
        files: Mapping[str, Buffer]
        body = await _large_body(request, settings)
        if len(body) <= OFF_LOOP_BYTES:
            config, files = control_json.read_load_request(bytes(body))
        else:
            config, files = read_load(await handler.offload.run(load_task(body)))
        del body
        await handler.load_model(model, config, files)
        return Response(status_code=200)

    @app.post("/v2/repository/models/{model}/unload")
    async def unload(model: str, request: Request) -> Response:
        dependents = control_json.read_unload_request(await _body(request, settings))
        await handler.unload_model(model, unload_dependents=dependents)
        return Response(status_code=200)

    @app.get("/v2/repository/models/{model}/route")
    async def get_route(model: str) -> Response:
        return _json(control_json.route(model, handler.route(model)))

    @app.post("/v2/repository/models/{model}/route")
    async def set_route(model: str, request: Request) -> Response:
        wanted = control_json.read_route(await _body(request, settings))
        return _json(control_json.route(model, await handler.change_route(model, wanted)))

    @app.delete("/v2/repository/models/{model}/route")
    async def clear_route(model: str) -> Response:
        return _json(control_json.route(model, await handler.change_route(model, None)))

    @app.post("/v2/repository/{repository}/models/{model}/load")
    @app.post("/v2/repository/{repository}/models/{model}/unload")
    async def named_repository() -> Response:
        raise Unsupported("'repository_name' specification is not supported")


def _add_logging(app: FastAPI, settings: GatewaySettings) -> None:
    @app.get("/v2/logging")
    async def get_logging() -> Response:
        return _json(log_settings.current().reply())

    @app.post("/v2/logging")
    async def set_logging(request: Request) -> Response:
        wanted = control_json.read_log_settings(await _body(request, settings))
        switches = log_settings.current().changed(wanted)
        log_settings.apply(switches)
        return _json(switches.reply())


def _add_tracing(app: FastAPI, settings: GatewaySettings, handler: Handler) -> None:
    @app.get("/v2/trace/setting")
    async def get_settings() -> Response:
        return _json(control_json.trace_settings(await handler.trace_settings("")))

    @app.post("/v2/trace/setting")
    async def set_settings(request: Request) -> Response:
        wanted = control_json.read_trace_settings(await _body(request, settings))
        return _json(control_json.trace_settings(await handler.update_trace_settings("", wanted)))

    @app.get(_MODEL + "/trace/setting")
    async def get_model_settings(model: str) -> Response:
        return _json(control_json.trace_settings(await handler.trace_settings(model)))

    @app.post(_MODEL + "/trace/setting")
    async def set_model_settings(model: str, request: Request) -> Response:
        wanted = control_json.read_trace_settings(await _body(request, settings))
        return _json(control_json.trace_settings(await handler.update_trace_settings(model, wanted)))


def _add_shared_memory(app: FastAPI, settings: GatewaySettings, handler: Handler) -> None:
    """Regions of clients' shared memory (H46-H51). A tenant sees only its own."""
    regions = handler.regions

    def tenant(request: Request) -> str:
        return handler.identify(request.scope["headers"]).tenant if handler.identifies else ""

    async def register_system(request: Request, region: str = "") -> Response:
        owner = tenant(request)
        regions.check_name(region, "system")
        wanted = control_json.read_system_region(await _body(request, settings))
        regions.register_system(region, *wanted, owner)
        return Response(status_code=200)

    async def register_cuda(request: Request, region: str = "") -> Response:
        owner = tenant(request)
        await regions.check_cuda(region)
        wanted = control_json.read_cuda_region(await _body(request, settings))
        await regions.register_cuda(region, *wanted, owner)
        return Response(status_code=200)

    def add(kind: RegionKind, register: Callable[..., Awaitable[Response]]) -> None:
        async def status(request: Request, region: str = "") -> Response:
            return _json(control_json.region_list(await regions.status(kind, region, tenant(request))))

        async def unregister(request: Request, region: str = "") -> Response:
            await regions.unregister(kind, region, tenant(request))
            return Response(status_code=200)

        root = f"/v2/{kind}sharedmemory"
        one = root + "/region/{region}"
        app.get(root + "/status")(status)
        app.get(one + "/status")(status)
        app.post(one + "/register")(register)
        app.post(root + "/register")(register)
        app.post(one + "/unregister")(unregister)
        app.post(root + "/unregister")(unregister)

    add("system", register_system)
    add("cuda", register_cuda)
