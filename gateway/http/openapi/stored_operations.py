"""The operations and schemas of the OpenAI API about what is stored: responses, files and batches. Pure.

`text_operations` has the others of that API.
"""

from __future__ import annotations

from typing import Any

from .operations import BINARY, EVENTS, JSON, Content, Operation, Parameter, Reply
from .schemas import COUNT, FLAG, TEXT, Schema, array, opened, ref
from .text_operations import ERROR, maybe

_TAG = "openai"
_ANY = (400, 401, 403, 429, 431, 500, 503)
_ONE = (*_ANY, 404)
_FORM = "multipart/form-data"

_RESPONSE: dict[str, Any] = {
    "id": "resp_7457b95f84c638bd8fe9eafa0a4bf414.smollm2",
    "object": "response",
    "created_at": 1750000000,
    "status": "completed",
    "model": "smollm2",
    "output": [
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Paris", "annotations": []}],
        }
    ],
}
_FILE: dict[str, Any] = {
    "id": "file-1",
    "object": "file",
    "bytes": 120,
    "created_at": 1750000000,
    "expires_at": 1750604800,
    "filename": "in.jsonl",
    "purpose": "batch",
    "status": "processed",
}
_BATCH: dict[str, Any] = {
    "id": "batch_1",
    "object": "batch",
    "endpoint": "/v1/chat/completions",
    "input_file_id": "file-1",
    "completion_window": "24h",
    "status": "in_progress",
    "output_file_id": None,
    "error_file_id": None,
    "created_at": 1750000000,
    "expires_at": 1750086400,
    "request_counts": {"total": 100, "completed": 95, "failed": 5},
}
_ORDER: Schema = {"enum": ["asc", "desc"]}
_AFTER = Parameter("after", "query", "the id after which the page begins", TEXT)
_LIMIT = Parameter("limit", "query", "objects of a page", {"type": "integer", "minimum": 1}, 20)
_DIRECTION = Parameter("order", "query", "by when they were made", _ORDER, "desc")


def _listed(one: dict[str, Any]) -> dict[str, Any]:
    return {"object": "list", "data": [one], "first_id": one["id"], "last_id": one["id"], "has_more": False}


def _deleted(kind: str, name: str) -> dict[str, Any]:
    return {"id": name, "object": kind, "deleted": True}


def _operation(
    head: tuple[str, str, str, str],
    about: str,
    content: tuple[str, Any],
    errors: tuple[int, ...],
    *,
    streams: bool = False,
    **more: Any,
) -> Operation:
    method, path, name, summary = head
    contents = [Content(JSON, ref(content[0]), content[1])]
    if streams:
        contents.append(Content(EVENTS, TEXT, "event: response.created\ndata: {...}\n\n"))
    return Operation(
        method, path, name, _TAG, summary, {200: Reply(about, tuple(contents))}, errors, error_schema=ERROR, **more
    )


_RESPONSES = (
    _operation(
        ("post", "/v1/responses", "createResponse", "Answer, and keep the answer"),
        "The response, or its events with `stream`",
        ("OpenAiResponse", _RESPONSE),
        (*_ONE, 413, 422, 504),
        streams=True,
        bodies=(Content(JSON, ref("OpenAiResponseRequest"), {"model": "smollm2", "input": "Name a city."}),),
        body_required=True,
    ),
    _operation(
        ("get", "/v1/responses/{response}", "getResponse", "A response, or its events"),
        "The response as it is now, or its events with `stream`",
        ("OpenAiResponse", _RESPONSE),
        _ONE,
        streams=True,
        parameters=(
            Parameter("stream", "query", "whether to send events", FLAG, True),
            Parameter("starting_after", "query", "the number of the last event that was seen", COUNT, 7),
        ),
    ),
    _operation(
        ("delete", "/v1/responses/{response}", "deleteResponse", "Delete a response"),
        "It is deleted",
        ("OpenAiDeleted", _deleted("response", "resp_1")),
        _ONE,
    ),
    _operation(
        ("post", "/v1/responses/{response}/cancel", "cancelResponse", "Cancel a response in the background"),
        "The response afterwards",
        ("OpenAiResponse", _RESPONSE),
        _ONE,
    ),
    _operation(
        ("get", "/v1/responses/{response}/input_items", "responseInput", "What the model was given"),
        "A page of items",
        ("OpenAiItems", _listed({"id": "msg_1", "type": "message"})),
        _ONE,
        parameters=(_LIMIT, _DIRECTION, _AFTER),
    ),
)
_FILES = (
    _operation(
        ("post", "/v1/files", "uploadFile", "Store a file"),
        "The file",
        ("OpenAiFile", _FILE),
        (*_ANY, 413),
        bodies=(Content(_FORM, ref("OpenAiUpload"), {"purpose": "batch", "file": "..."}),),
        body_required=True,
    ),
    _operation(
        ("get", "/v1/files", "listFiles", "The stored files"),
        "A page of files",
        ("OpenAiFiles", _listed(_FILE)),
        _ANY,
        parameters=(Parameter("purpose", "query", "only those", TEXT, "batch"), _LIMIT, _DIRECTION, _AFTER),
    ),
    _operation(("get", "/v1/files/{file}", "getFile", "A file"), "The file", ("OpenAiFile", _FILE), _ONE),
    _operation(
        ("delete", "/v1/files/{file}", "deleteFile", "Delete a file"),
        "It is deleted",
        ("OpenAiDeleted", _deleted("file", "file-1")),
        (*_ONE, 409),
    ),
    Operation(
        *("get", "/v1/files/{file}/content", "fileContent", _TAG, "The content of a file"),
        {200: Reply("Its bytes", (Content(BINARY, TEXT, "..."),))},
        _ONE,
        error_schema=ERROR,
    ),
)
_BATCHES = (
    _operation(
        ("post", "/v1/batches", "createBatch", "Answer the requests of a file"),
        "The batch",
        ("OpenAiBatch", _BATCH),
        (*_ONE, 413),
        bodies=(
            Content(
                JSON,
                ref("OpenAiBatchRequest"),
                {"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
            ),
        ),
        body_required=True,
    ),
    _operation(
        ("get", "/v1/batches", "listBatches", "The batches, the newest first"),
        "A page of batches",
        ("OpenAiBatches", _listed(_BATCH)),
        _ANY,
        parameters=(_LIMIT, _AFTER),
    ),
    _operation(("get", "/v1/batches/{batch}", "getBatch", "A batch"), "The batch", ("OpenAiBatch", _BATCH), _ONE),
    _operation(
        ("post", "/v1/batches/{batch}/cancel", "cancelBatch", "Cancel a batch and keep what is done"),
        "The batch afterwards",
        ("OpenAiBatch", _BATCH),
        (*_ONE, 409),
    ),
)
STORED_OPERATIONS = (*_RESPONSES, *_FILES, *_BATCHES)


def stored_schemas() -> dict[str, Schema]:
    """The schemas of these operations, by name."""
    status = {"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]}
    stages = ("validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    item = opened({"id": TEXT, "type": TEXT})
    metadata = maybe({"type": "object", "additionalProperties": TEXT})

    def page(name: str) -> Schema:
        ends = {"first_id": maybe(TEXT), "last_id": maybe(TEXT), "has_more": FLAG}
        return opened({"object": {"const": "list"}, "data": array(ref(name)), **ends})

    return {
        "OpenAiItem": item,
        "OpenAiItems": page("OpenAiItem"),
        "OpenAiDeleted": opened({"id": TEXT, "object": TEXT, "deleted": {"const": True}}),
        "OpenAiResponseRequest": opened(
            {"model": TEXT, "input": {"anyOf": [TEXT, array({"type": "object"})]}},
            {
                "instructions": maybe(TEXT),
                "previous_response_id": maybe(TEXT),
                "store": maybe(FLAG),
                "background": maybe(FLAG),
                "stream": maybe(FLAG),
                "max_output_tokens": maybe({"type": "integer", "minimum": 1}),
                "tools": maybe(array({"type": "object"})),
                "text": maybe({"type": "object"}),
                "metadata": metadata,
            },
        ),
        "OpenAiResponse": opened(
            {
                "id": TEXT,
                "object": {"const": "response"},
                "created_at": COUNT,
                "status": status,
                "model": TEXT,
                "output": array(ref("OpenAiItem")),
            },
            {"error": maybe({"type": "object"}), "usage": maybe({"type": "object"}), "metadata": metadata},
        ),
        "OpenAiUpload": opened({"purpose": {"enum": ["batch", "user_data"]}, "file": TEXT}),
        "OpenAiFile": opened(
            {
                "id": TEXT,
                "object": {"const": "file"},
                "bytes": COUNT,
                "created_at": COUNT,
                "expires_at": COUNT,
                "filename": TEXT,
                "purpose": TEXT,
                "status": TEXT,
            }
        ),
        "OpenAiFiles": page("OpenAiFile"),
        "OpenAiBatchRequest": opened(
            {"input_file_id": TEXT, "endpoint": TEXT, "completion_window": {"const": "24h"}}, {"metadata": metadata}
        ),
        "OpenAiBatch": opened(
            {
                "id": TEXT,
                "object": {"const": "batch"},
                "endpoint": TEXT,
                "input_file_id": TEXT,
                "completion_window": TEXT,
                "status": {"enum": list(stages)},
                "output_file_id": maybe(TEXT),
                "error_file_id": maybe(TEXT),
                "created_at": COUNT,
                "expires_at": COUNT,
                "request_counts": opened({"total": COUNT, "completed": COUNT, "failed": COUNT}),
            },
            {"metadata": metadata},
        ),
        "OpenAiBatches": page("OpenAiBatch"),
    }
