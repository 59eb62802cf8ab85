"""`/v1/batches`: many requests in a file, answered within a day. `batch_runs` executes what is accepted here."""

from __future__ import annotations

from typing import Any

from gateway.openai.api_calls import ApiCall, RouteTable
from gateway.openai.shapes.api_errors import ApiError

from .batch_facts import CANCELLING, CREATED, BatchState
from .batch_lines import URLS
from .batch_runs import BatchRuns
from .file_routes import checked_expiry, list_document, page_of
from .response_requests import read_metadata
from .stored_objects import FINALIZING_S, WINDOW_S, StoredBatches, StoredFiles, new_id, now_s

MAX_PAGE = 100
MAX_ACTIVE = 100
"""Batches of a tenant that have not ended."""


def add_batches(routes: RouteTable, batches: StoredBatches, files: StoredFiles, runs: BatchRuns) -> None:
    """Add the paths of this module."""
    endpoints = _Batches(batches, files, runs)
    routes.add("POST", "/v1/batches", endpoints.create)
    routes.add("GET", "/v1/batches", endpoints.list)
    routes.add("GET", "/v1/batches/{batch}", endpoints.get)
    routes.add("POST", "/v1/batches/{batch}/cancel", endpoints.cancel)


class _Batches:
    def __init__(self, batches: StoredBatches, files: StoredFiles, runs: BatchRuns) -> None:
        self._batches = batches
        self._files = files
        self._runs = runs

    async def create(self, call: ApiCall) -> None:
        fact = _fact(await call.json())
        tenant = call.caller.tenant
        file = await self._files.find(fact["input_file"], tenant)
        if file.purpose != "batch":
            raise ApiError("the file's purpose is not batch", param="input_file_id")
        unended = len(await self._batches.unended(tenant))
        if unended >= MAX_ACTIVE:
            raise ApiError(f"{MAX_ACTIVE} batches have not ended yet", status=429, code="batch_limit_exceeded")
        await self._files.check_batch(tenant, unended, await self._batches.result_bytes(tenant))
        await self._files.keep_until(file, fact["expires_s"] + FINALIZING_S)
        state = await self._batches.create(new_id("batch_"), {**fact, "tenant": tenant})
        self._runs.wake()
        await call.reply(state.document())

    async def get(self, call: ApiCall) -> None:
        await call.reply(await self._document(await self._find(call)))

    async def cancel(self, call: ApiCall) -> None:
        state = await self._find(call)
        if state.outcome and state.outcome != "cancelled":
            raise ApiError(f"Cannot cancel a batch with status '{state.status}'.", status=409)
        if not state.outcome and not state.cancelling_s:
            await self._batches.add(state.id, {"kind": CANCELLING, "time_s": now_s()})
            self._runs.wake(state.id)
            state = await self._batches.state(state.id)
        await call.reply(await self._document(state))

    async def list(self, call: ApiCall) -> None:
        tenant = call.caller.tenant
        found = [BatchState(batch_id) for batch_id in await self._batches.of_tenant(tenant)]
        page, more = page_of(found, {**call.query, "order": "desc"}, default=20, most=MAX_PAGE)
        states = [await self._batches.state(one.id) for one in page]
        await self._batches.forget(tenant, [state.id for state in states if not state.exists])
        documents = [await self._document(state) for state in states if state.exists]
        await call.reply(list_document(documents, more))

    async def _document(self, state: BatchState) -> dict[str, Any]:
        progress = None if state.outcome else (await self._batches.progress([state.id]))[0]
        return state.document(progress)

    async def _find(self, call: ApiCall) -> BatchState:
        return await self._batches.find(call.arguments["batch"], call.caller.tenant)


def _fact(body: dict[str, Any]) -> dict[str, Any]:
    """The fact of a batch's creation, by the body of the request. Raises `ApiError`."""
    file, endpoint = body.get("input_file_id"), body.get("endpoint")
    if not isinstance(file, str) or not file:
        raise ApiError("Missing required parameter: 'input_file_id'", param="input_file_id")
    if endpoint not in URLS:
        raise ApiError(f"'endpoint' must be one of {', '.join(URLS)}", param="endpoint")
    if body.get("completion_window") != "24h":
        raise ApiError("'completion_window' must be 24h", param="completion_window")
    expiry = body.get("output_expires_after")
    if expiry is not None and (not isinstance(expiry, dict) or expiry.get("anchor") != "created_at"):
        raise ApiError("'output_expires_after' must have the anchor created_at", param="output_expires_after")
    metadata = read_metadata(body.get("metadata"))
    created_s = now_s()
    return {
        "kind": CREATED,
        "time_s": created_s,
        "input_file": file,
        "endpoint": endpoint,
        "metadata": metadata or None,
        "expires_s": created_s + WINDOW_S,
        "output_ttl_s": checked_expiry(expiry.get("seconds") if expiry else None, "output_expires_after"),
    }
