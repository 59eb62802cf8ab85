"""Errors of the OpenAI API: `{"error": {message, type, param, code}, "detail": message}`. Pure.

OpenAI's clients read `error`, those of Triton's OpenAI front `detail`. As in that front, a refusal before the endpoint
has `error` alone: one without a key, or of a body that is too large.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import orjson

from charonia.errors import CharoniaError, ErrorCode, ResourceExhausted
from gateway.http.codec.error_replies import CHALLENGE, JSON_CONTENT_TYPE, STATUS, Headers, HttpRefusal

CONTEXT_LENGTH = "context_length_exceeded"
MODEL_NOT_FOUND = "model_not_found"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_MESSAGE_TYPES = {413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
"""Where Anthropic's types differ from OpenAI's; any other failure of a server is an `api_error` there."""
_CODES = {401: "invalid_api_key", 413: "content_too_large", 429: "rate_limit_exceeded"}
_WITHOUT_DETAIL = (401, 413)
_STATUS = {**STATUS, ErrorCode.UNSUPPORTED: 400, ErrorCode.KEY_REUSED: 422}


class ApiError(Exception):
    """A refusal in OpenAI's terms: the HTTP status, the field at fault (`param`), a word for programs (`code`)."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code


@contextlib.contextmanager
def long_field(param: str) -> Iterator[None]:
    """Names the field in the refusal of a text that is too long for the model's context, as OpenAI does."""
    try:
        yield
    except ApiError as error:
        if error.code == CONTEXT_LENGTH and error.param is None:
            error.param = param
        raise


def missing(name: str) -> ApiError:
    """The refusal of a body without a field that it has to have."""
    return ApiError(f"Missing required parameter: '{name}'", param=name, code="missing_required_parameter")


Failure = ApiError | CharoniaError | HttpRefusal


def status_of(failure: Failure) -> int:
    """The HTTP status of a failure."""
    return _STATUS[failure.code] if isinstance(failure, CharoniaError) else failure.status


def error_document(failure: Failure, *, is_message: bool = False) -> dict[str, Any]:
    """The JSON of a failure; of Anthropic's messages it says that it is one."""
    status = status_of(failure)
    param, code = (failure.param, failure.code) if isinstance(failure, ApiError) else (None, None)
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    if is_message:
        kind = _MESSAGE_TYPES.get(status, "api_error" if status >= 500 else kind)
    error = {"message": failure.message, "type": kind, "param": param, "code": code or _CODES.get(status)}
    detail = {} if status in _WITHOUT_DETAIL else {"detail": failure.message}
    return {**({"type": "error"} if is_message else {}), "error": error, **detail}


def render_failure(failure: Failure, *, is_message: bool = False) -> tuple[int, Headers, bytes]:
    """Status, headers and body of a failed call."""
    status, headers = status_of(failure), [JSON_CONTENT_TYPE]
    if isinstance(failure, ResourceExhausted):
        headers.append((b"retry-after", b"%d" % failure.retry_after_s))
    elif status == 401:
        headers.append(CHALLENGE)
    if isinstance(failure, HttpRefusal):
        headers += failure.headers
        if failure.close:
            headers.append((b"connection", b"close"))
    return status, headers, json_bytes(error_document(failure, is_message=is_message))


def json_bytes(document: Any) -> bytes:
    """The document as JSON; lone surrogates, which a client's text may have, are replaced."""
    try:
        return orjson.dumps(document)
    except TypeError:
        return orjson.dumps(_clean(document))


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_clean(key): _clean(one) for key, one in value.items()}
    return [_clean(one) for one in value] if isinstance(value, list | tuple) else value
