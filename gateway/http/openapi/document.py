"""The OpenAPI 3.1 document of `operations` and `schemas`. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from charonia.errors import DEADLINE_EXCEEDED

from .operations import PATH_PARAMETERS, Content, Operation, Parameter, Reply, all_operations
from .schemas import Schema, all_schemas, ref

_ABOUT = """The KServe v2 and Triton inference protocol over HTTP, with jobs.

An error is `{"error": "<message>"}`. An unknown URL is 404; a known one with another method is 405, in plain text,
with `Allow`. As in Triton, JSON that does not parse and members of a wrong type are 500, not 400. Unknown members are
ignored. With `--api-keys` each inference, job and region belongs to the tenant of its key; with
`--http-restricted-api` a group of endpoints needs the header that the option names."""

_ERRORS = {
    400: ("The request is not valid", "input 'INPUT0' batch size does not match other inputs for 'identity'"),
    401: ("An API key, or the header of a tenant, is needed", "the API key is not known"),
    403: ("The API is restricted", "This API is restricted, expecting header 'admin-key'"),
    404: ("There is no such thing", "Request for unknown model: 'nope' is not found"),
    413: ("The body is too large once it is decompressed", "request is too large when decompressed"),
    409: ("It has ended already", "Cannot cancel a batch with status 'completed'."),
    422: ("The idempotency key was used for another request", "the idempotency key was used for another request"),
    429: (
        "A bound on unsettled requests or bytes is reached",
        "model 'identity' has reached its limit of 100 unsettled requests",
    ),
    431: ("The request has too many headers", "request has more than 256 headers"),
    500: ("The server failed, or JSON is malformed", "failed to parse the request JSON buffer: Invalid value. at 1"),
    501: ("Not supported", "Unsupported compression type"),
    503: ("The server is stopping, a model's queue is full, or a part is not available", "Server exiting"),
    504: ("The deadline passed", DEADLINE_EXCEEDED),
}
_ERROR_HEADERS = {
    401: ("WWW-Authenticate", "how to authenticate"),
    429: ("Retry-After", "seconds after which to ask again"),
}
_PLACES = re.compile(r"\{(\w+)\}")


def build_document(
    version: str, more: Sequence[Operation] = (), schemas: Mapping[str, Schema] | None = None
) -> dict[str, Any]:
    """The document, ready for JSON. `more` and `schemas` are those of interfaces that are served beside `/v2`."""
    paths: dict[str, dict[str, Any]] = {}
    tags: dict[str, None] = {}
    operations = [*all_operations(), *more]
    for operation in operations:
        tags[operation.tag] = None
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Charonia", "version": version, "description": _ABOUT},
        "tags": [{"name": tag} for tag in tags],
        "security": [{}, {"bearer": []}, {"apiKey": []}],
        "paths": paths,
        "components": {
            "schemas": {**all_schemas(), **(schemas or {})},
            "responses": {
                f"{form}{status}": _error(status, form)
                for form in sorted({operation.error_schema for operation in operations})
                for status in _ERRORS
                if form != "Error" or status != 409  # no operation of `/v2` ends so
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "a key of --api-keys"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "a key of --api-keys"},
            },
        },
    }


def _operation(operation: Operation) -> dict[str, Any]:
    responses: dict[str, Any] = {str(status): _reply(reply) for status, reply in operation.replies.items()}
    responses |= {
        str(status): {"$ref": f"#/components/responses/{operation.error_schema}{status}"} for status in operation.errors
    }
    written: dict[str, Any] = {
        "operationId": operation.id,
        "tags": [operation.tag],
        "summary": operation.summary,
        "responses": dict(sorted(responses.items())),
    }
    if operation.about:
        written["description"] = operation.about
    places = (PATH_PARAMETERS[name] for name in _PLACES.findall(operation.path))
    if parameters := [_parameter(one) for one in (*places, *operation.parameters)]:
        written["parameters"] = parameters
    if operation.bodies:
        written["requestBody"] = {"required": operation.body_required, "content": _contents(operation.bodies)}
    return written


def _parameter(parameter: Parameter) -> dict[str, Any]:
    written = {
        "name": parameter.name,
        "in": parameter.place,
        "required": parameter.place == "path",
        "description": parameter.about,
        "schema": parameter.schema,
    }
    return written if parameter.example is None else {**written, "example": parameter.example}


def _reply(reply: Reply) -> dict[str, Any]:
    written: dict[str, Any] = {"description": reply.about}
    if reply.contents:
        written["content"] = _contents(reply.contents)
    if reply.headers:
        written["headers"] = dict(_header(*header) for header in reply.headers)
    if reply.links:
        written["links"] = {
            name: {"operationId": name, "parameters": {"job_id": "$response.body#/id"}} for name in reply.links
        }
    return written


def _error(status: int, form: str) -> dict[str, Any]:
    about, message = _ERRORS[status]
    example: dict[str, Any] = {"error": message}
    if form != "Error":
        example = {"error": {"message": message, "type": "", "param": None, "code": None}}
        example |= {} if status in (401, 413) else {"detail": message}
    written: dict[str, Any] = {
        "description": about,
        "content": {"application/json": {"schema": ref(form), "example": example}},
    }
    if status in _ERROR_HEADERS:
        written["headers"] = dict([_header(*_ERROR_HEADERS[status])])
    return written


def _header(name: str, about: str) -> tuple[str, dict[str, Any]]:
    schema: Schema = {"type": "string"}
    return name, {"description": about, "schema": schema}


def _contents(contents: Iterable[Content]) -> dict[str, Any]:
    return {one.media_type: {"schema": one.schema, "example": one.example} for one in contents}
