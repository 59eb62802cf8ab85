"""The common part of clouds' fronts: each request is answered by the v2 interface under one of its paths.

A content type of the front's own announces binary tensors and holds the length of the JSON part, because clouds'
proxies do not forward unknown headers.
"""

from __future__ import annotations

import asyncio
import re

from charonia.errors import InvalidArgument
from charonia.options.settings import GatewaySettings
from gateway.handler import Handler
from gateway.http.bodies import EXCHANGE, Receive, Scope, Send, reply_whole
from gateway.http.codec.response_codec import HEADER_LENGTH
from gateway.http.http_application import HttpApplication, answer_failure

CONTENT_TYPE = b"content-type"
_LEADING_INTEGER = re.compile(r"\s*([+-]?[0-9]+)")
_INT32 = range(-(2**31), 2**31)


class CloudApplication(HttpApplication):
    """Answers a cloud's requests with `_answer_cloud`. `cloud` is the middle part of the content type."""

    cloud: str

    def __init__(self, settings: GatewaySettings, handler: Handler) -> None:
        super().__init__(settings, handler)
        self.lane = None  # the lane would read requests before this front does

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            await self._answer_cloud(scope, receive, send)
        except (Exception, asyncio.CancelledError) as failure:
            await answer_failure(failure, scope, send)

    async def _answer_cloud(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        raise NotImplementedError

    async def _answer_v2(
        self, path: str, scope: Scope, receive: Receive, send: Send, *, method: str = "", headers: object = None
    ) -> None:
        """Answer the request as one for this path; `headers` and `method` replace those of the request."""
        state = {key: value for key, value in scope.get("state", {}).items() if key != EXCHANGE}  # `send` is to be used
        changed = {**scope, "path": path, "method": method or scope["method"], "state": state}
        if headers is not None:
            changed["headers"] = headers
        await super().__call__(changed, receive, send)

    def _headers_v2(self, scope: Scope, *, without: frozenset[bytes] = frozenset()) -> list[tuple[bytes, bytes]]:
        """The request's headers, with the length of the JSON part in the v2 interface's header.

        Raises `InvalidArgument` for a malformed content type.
        """
        headers = [(n, v) for n, v in scope["headers"] if n != HEADER_LENGTH and n not in without]
        length = self._header_length(dict(headers).get(CONTENT_TYPE, b"").decode("latin-1"))
        return headers if length is None else [*headers, (HEADER_LENGTH, b"%d" % length)]

    def _header_length(self, content_type: str) -> int | None:
        mime = self._mime
        if mime not in content_type:
            return None
        if not content_type.startswith(mime):
            raise InvalidArgument(f"expect MIME type for binary data starts with '{mime}', got: {content_type}")
        text = content_type.removeprefix(mime)
        found = _LEADING_INTEGER.match(text)
        if found is None:
            raise InvalidArgument(f"Unable to parse inference header size, got: {text}")
        if len(found[1]) > 11 or int(found[1]) not in _INT32:
            raise InvalidArgument(f"Unable to parse inference header size, value is out of range, got: {text}")
        return int(found[1])

    @property
    def _mime(self) -> str:
        return f"application/vnd.{self.cloud}.binary+json;json-header-size="


async def reply_empty(send: Send, status: int) -> None:
    """Send a response without a body."""
    await reply_whole(send, status, [], b"")
