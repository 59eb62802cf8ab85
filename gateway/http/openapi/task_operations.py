"""The operations and schemas of the OpenAI API that score, classify and transcribe, and of adapters. Pure.

`OPENAI_OPERATIONS` are these and those of `text_operations`; `stored_operations` has what is stored.
"""

from __future__ import annotations

from typing import Any

from .operations import EVENTS, JSON, Content, Operation, Reply
from .schemas import COUNT, FLAG, NUMBER, TEXT, Schema, array, opened, ref
from .text_operations import ERROR, MODEL, TEXT_OPERATIONS, maybe, text_schemas

_TAG = "openai"
_ERRORS = (400, 401, 403, 404, 413, 429, 431, 500, 503, 504)
_PLAIN = "text/plain"
_USAGE = {"prompt_tokens": 6, "total_tokens": 6}
_RERANK_REQUEST = {"model": "minilm", "query": "a city", "documents": ["Paris", "an apple"], "top_n": 1}
_RERANK = {
    "id": "rerank-1",
    "model": "minilm",
    "usage": _USAGE,
    "results": [{"index": 0, "document": {"text": "Paris"}, "relevance_score": 0.7}],
}
_SCORES = {
    "id": "score-1",
    "object": "list",
    "created": 1750000000,
    "model": "minilm",
    "data": [{"index": 0, "object": "score", "score": 0.7}],
    "usage": _USAGE,
}
_RESULT = {
    "flagged": True,
    "categories": {"spam": True},
    "category_scores": {"spam": 0.9},
    "category_applied_input_types": {"spam": ["text"]},
}


def _post(
    path: str, name: str, about: str, schema: str, example: Any, replies: dict[int, Reply], media_type: str = JSON
) -> Operation:
    return Operation(
        *("post", path, name, _TAG, about),
        replies,
        _ERRORS,
        bodies=(Content(media_type, ref(schema), example),),
        body_required=True,
        error_schema=ERROR,
    )


def _json(about: str, schema: str, example: Any) -> dict[int, Reply]:
    return {200: Reply(about, (Content(JSON, ref(schema), example),))}


def _said(about: str) -> dict[int, Reply]:
    return {200: Reply(about, (Content(_PLAIN, TEXT, "Success: LoRA adapter 'red' added successfully."),))}


_RANKED = _json("The documents, the best first", "Ranking", _RERANK)
_TRANSCRIPT = {
    200: Reply(
        "The text, or its parts as events with `stream`",
        (
            Content(JSON, ref("Transcript"), {"text": "hello"}),
            Content(_PLAIN, TEXT, "hello\n"),
            Content(EVENTS, TEXT, "data: {...}\n\ndata: [DONE]\n\n"),
        ),
    )
}

TASK_OPERATIONS = (
    _post("/v1/rerank", "rerank", "Rank documents by a query", "RankingRequest", _RERANK_REQUEST, _RANKED),
    _post("/v2/rerank", "rerankDocuments", "As `/v1/rerank`", "RankingRequest", _RERANK_REQUEST, _RANKED),
    _post(
        *("/v1/score", "score", "Score pairs of texts", "ScoreRequest"),
        {"model": "minilm", "text_1": "a city", "text_2": ["Paris"]},
        _json("A score for each pair", "Scores", _SCORES),
    ),
    _post(
        *("/v1/moderations", "moderation", "Score texts by category", "ModerationRequest", {"input": "a text"}),
        _json("A result for each text", "Moderation", {"id": "modr-1", "model": "spam", "results": [_RESULT]}),
    ),
    _post(
        *("/v1/audio/transcriptions", "transcription", "The text of a recording", "TranscriptionForm"),
        {"model": "tones", "file": "..."},
        _TRANSCRIPT,
        "multipart/form-data",
    ),
    _post(
        *("/v1/load_lora_adapter", "loadAdapter", "Load a model again with one more adapter", "AdapterToLoad"),
        {"lora_name": "red", "lora_path": "adapters/red"},
        _said("It is served"),
    ),
    _post(
        *("/v1/unload_lora_adapter", "unloadAdapter", "Load a model again without an adapter", "AdapterToUnload"),
        {"lora_name": "red"},
        _said("It is served no more"),
    ),
    Operation(
        *("post", "/v1/models/{model}/load", "openaiLoad", _TAG, "Load a model (--model-control-mode=explicit)"),
        _json("It is ready", "OpenAiModel", MODEL),
        _ERRORS,
        error_schema=ERROR,
    ),
    Operation(
        *("post", "/v1/models/{model}/unload", "openaiUnload", _TAG, "Unload a model (--model-control-mode=explicit)"),
        _json("It takes no new requests", "OpenAiUnloaded", {"status": "success", "model": "smollm2"}),
        _ERRORS,
        error_schema=ERROR,
    ),
)

OPENAI_OPERATIONS = (*TEXT_OPERATIONS, *TASK_OPERATIONS)


def openai_schemas() -> dict[str, Schema]:
    """The schemas of `OPENAI_OPERATIONS`, by name."""
    usage = opened({"prompt_tokens": COUNT, "total_tokens": COUNT})
    texts: Schema = {"anyOf": [TEXT, array(TEXT)]}
    document: Schema = {"anyOf": [TEXT, opened({"text": TEXT})]}
    flags: Schema = {"type": "object", "additionalProperties": FLAG}
    numbers: Schema = {"type": "object", "additionalProperties": NUMBER}
    return {
        **text_schemas(),
        "OpenAiUnloaded": opened({"status": TEXT, "model": TEXT}),
        "RankingRequest": opened(
            {"model": TEXT, "query": TEXT, "documents": array(document)},
            {"top_n": maybe(COUNT), "return_documents": maybe(FLAG)},
        ),
        "Ranking": opened(
            {
                "id": TEXT,
                "model": TEXT,
                "usage": usage,
                "results": array(
                    opened({"index": COUNT, "relevance_score": NUMBER}, {"document": opened({"text": TEXT})})
                ),
            }
        ),
        "ScoreRequest": opened({"model": TEXT}, {"text_1": texts, "text_2": texts}),
        "Scores": opened(
            {
                **dict.fromkeys(("id", "object", "model"), TEXT),
                "created": COUNT,
                "data": array(opened({"index": COUNT, "object": TEXT, "score": NUMBER})),
                "usage": usage,
            }
        ),
        "ModerationRequest": opened(
            {"input": {"anyOf": [TEXT, array({"anyOf": [TEXT, {"type": "object"}]})]}}, {"model": maybe(TEXT)}
        ),
        "Moderation": opened(
            {
                "id": TEXT,
                "model": TEXT,
                "results": array(opened({"flagged": FLAG, "categories": flags, "category_scores": numbers})),
            }
        ),
        "TranscriptionForm": opened(
            {"model": TEXT, "file": TEXT},
            {
                **dict.fromkeys(("language", "prompt"), TEXT),
                "response_format": {"enum": ["json", "text"]},
                "stream": {"type": "string"},
                "temperature": {"type": "string"},
            },
        ),
        "Transcript": opened({"text": TEXT}),
        "AdapterToLoad": opened(
            {"lora_name": TEXT, "lora_path": TEXT}, {"model": maybe(TEXT), "load_inplace": maybe(FLAG)}
        ),
        "AdapterToUnload": opened({"lora_name": TEXT}, {"model": maybe(TEXT)}),
    }
