"""`/v1/files`: uploads, lists, contents and deletions.

`stored_objects` keeps the files, `multipart_forms` reads uploads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from gateway.http.bodies import ClientGone
from gateway.openai.api_calls import ApiCall, RouteTable
from gateway.openai.shapes.api_errors import ApiError

from .multipart_forms import UploadForm, boundary_of
from .stored_objects import KEPT_S, MAX_KEPT_S, MIN_KEPT_S, FileRecord, FileWriter, StoredBatches, StoredFiles

PURPOSES = ("batch", "user_data")
MAX_PAGE = 10_000
_FORM_BYTES = 1 << 16
"""What a form may have beside its file."""


class _Named(Protocol):
    @property
    def id(self) -> str: ...


_Item = TypeVar("_Item", bound=_Named)


def add_files(routes: RouteTable, files: StoredFiles, batches: StoredBatches) -> None:
    """Add the paths of this module."""
    endpoints = _Files(files, batches)
    routes.add("POST", "/v1/files", endpoints.upload)
    routes.add("GET", "/v1/files", endpoints.list)
    routes.add("GET", "/v1/files/{file}", endpoints.get)
    routes.add("DELETE", "/v1/files/{file}", endpoints.delete)
    routes.add("GET", "/v1/files/{file}/content", endpoints.content)


class _Files:
    def __init__(self, files: StoredFiles, batches: StoredBatches) -> None:
        self._files = files
        self._batches = batches

    async def upload(self, call: ApiCall) -> None:
        """Store a file as it comes. What the form says of its expiry has to be before the file, as clients send it."""
        form = UploadForm(boundary_of(call.headers.get(b"content-type", b"")))
        text = call.headers.get(b"content-length", b"")
        declared = int(text[:20]) if text.isdigit() else None
        results = await self._batches.result_bytes(call.caller.tenant)
        async with self._files.capacity(call.caller.tenant, declared, beside_bytes=results) as limit:
            if declared is not None and declared > limit + _FORM_BYTES:
                raise _too_large(limit)
            record = await self._stored(call, form, limit)
        await call.reply(record.document())

    async def _stored(self, call: ApiCall, form: UploadForm, limit: int) -> FileRecord:
        writer: FileWriter | None = None
        try:
            more = True
            while more:
                message = await call.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                more = message.get("more_body", False)
                content = form.feed(message.get("body", b""))
                if content:
                    writer = writer or self._files.writer(_expiry(form.before))
                    await writer.write(content)
                    if writer.size_bytes > limit:
                        raise _too_large(limit)
            form.end()
            if form.fields.get("purpose") not in PURPOSES:
                raise ApiError(f"'purpose' must be one of {', '.join(PURPOSES)}", param="purpose")
            if writer is None:
                raise ApiError("the file is empty", param="file")
            if _expiry(form.fields) != writer.kept_s:
                raise ApiError("'expires_after' must come before the file in the form", param="expires_after")
            results = await self._batches.result_bytes(call.caller.tenant)
        except BaseException:
            if writer is not None:
                await writer.abandon()
            raise
        tenant, purpose = call.caller.tenant, form.fields["purpose"]
        return await self._files.end_upload(writer, tenant, form.filename or "upload", purpose, beside_bytes=results)

    async def list(self, call: ApiCall) -> None:
        found = await self._files.of_tenant(call.caller.tenant)
        purpose = call.query.get("purpose")
        chosen = [record for record in found if purpose in (None, record.purpose)]
        page, more = page_of(chosen, call.query, default=MAX_PAGE, most=MAX_PAGE)
        await call.reply(list_document([record.document() for record in page], more))

    async def get(self, call: ApiCall) -> None:
        await call.reply((await self._find(call)).document())

    async def delete(self, call: ApiCall) -> None:
        record = await self._find(call)
        for state in await self._batches.unended(record.tenant):
            if state.input_file == record.id:
                raise ApiError(
                    f"the file is the input of batch '{state.id}', which has not ended: cancel it first",
                    status=409,
                    param="id",
                    code="file_in_use",
                )
        await self._files.delete(record)
        await call.reply({"id": record.id, "object": "file", "deleted": True})

    async def content(self, call: ApiCall) -> None:
        """The bytes of a file, sent as they are read."""
        record = await self._find(call)
        sent = 0
        async for piece in self._files.content(record):
            if not sent:
                call.started = True
                headers = [
                    (b"content-type", b"application/octet-stream"),
                    (b"content-length", b"%d" % record.size_bytes),
                    *call.headers_of_reply,
                ]
                await call.send({"type": "http.response.start", "status": 200, "headers": headers})
            sent += len(piece)
            await call.send({"type": "http.response.body", "body": piece, "more_body": sent < record.size_bytes})

    async def _find(self, call: ApiCall) -> FileRecord:
        return await self._files.find(call.arguments["file"], call.caller.tenant)


def _too_large(limit: int) -> ApiError:
    return ApiError(f"the file has more than {limit} bytes", status=413, param="file")


def _expiry(fields: dict[str, str]) -> int:
    """How long a file is kept, in seconds. Raises `ApiError`."""
    if fields.get("expires_after[anchor]", "created_at") != "created_at":
        raise ApiError("'expires_after.anchor' must be created_at", param="expires_after")
    return checked_expiry(fields.get("expires_after[seconds]"), "expires_after")


def checked_expiry(value: Any, param: str) -> int:
    """The seconds of a policy of expiry, a number or its text; None: those of the server. Raises `ApiError`."""
    if value is None:
        return KEPT_S
    text = str(value)
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and MIN_KEPT_S <= int(text) <= MAX_KEPT_S):
        raise ApiError(f"'{param}.seconds' must be between {MIN_KEPT_S} and {MAX_KEPT_S}", param=param)
    return int(text)


def page_of(
    found: Sequence[_Item], query: dict[str, str], *, default: int, most: int, order: str = "desc"
) -> tuple[list[_Item], bool]:
    """A page of objects, given oldest first, and whether there are more. Raises `ApiError`."""
    limit = query.get("limit", str(default))
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 8 and 1 <= int(limit) <= most):
        raise ApiError(f"'limit' must be between 1 and {most}", param="limit")
    wanted = query.get("order", order)
    if wanted not in ("asc", "desc"):
        raise ApiError("'order' must be asc or desc", param="order")
    ordered = list(found) if wanted == "asc" else list(reversed(found))
    if after := query.get("after"):
        places = [at for at, one in enumerate(ordered) if one.id == after]
        if not places:
            raise ApiError(f"'after' names '{after[:64]}', which is not in the list", param="after")
        ordered = ordered[places[0] + 1 :]
    return ordered[: int(limit)], len(ordered) > int(limit)


def list_document(data: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    """A list of objects as the API writes it."""
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": more,
    }
