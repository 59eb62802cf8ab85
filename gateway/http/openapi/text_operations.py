"""The operations and schemas of the OpenAI API that generate, embed and count text (`gateway.openai`). Pure.

They are in the document where the API is on. Requests are open, as unknown fields are ignored; answers list what
clients rely on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .operations import EVENTS, JSON, Content, Operation, Parameter, Reply
from .schemas import COUNT, FLAG, NUMBER, TEXT, Schema, array, opened, ref

ERROR = "OpenAiError"
"""The schema of a failed call."""

_TAG = "openai"
_OPEN = (400, 403, 431, 500, 503)
_CALL = (*_OPEN, 401)
_TEXTS = (*_CALL, 404, 413, 429, 504)


def maybe(schema: Schema) -> Schema:
    """The schema, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


_USAGE = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}
_CHAT_REQUEST = {"model": "smollm2", "messages": [{"role": "user", "content": "Name a city."}], "max_tokens": 8}
_CHAT: dict[str, Any] = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1750000000,
    "model": "smollm2",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Paris"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ],
    "usage": _USAGE,
}
_MESSAGE: dict[str, Any] = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "smollm2",
    "content": [{"type": "text", "text": "Paris"}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 9, "output_tokens": 5},
}
_COMPLETION: dict[str, Any] = {
    "id": "cmpl-1",
    "object": "text_completion",
    "created": 1750000000,
    "model": "smollm2",
    "choices": [{"index": 0, "text": " Paris", "logprobs": None, "finish_reason": "stop"}],
    "usage": _USAGE,
}
MODEL = {
    "id": "smollm2:red",
    "object": "model",
    "created": 1750000000,
    "owned_by": "charonia",
    "root": "smollm2",
    "parent": "smollm2",
    "max_model_len": 8192,
}
_TOKENIZER_INFO = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": 8192,
    "chat_template": "{% for message in messages %}...{% endfor %}",
    "eos_token": "<|im_end|>",
}
_EMBEDDINGS = {
    "object": "list",
    "data": [{"object": "embedding", "index": 0, "embedding": [0.6, 0.8]}],
    "model": "minilm",
    "usage": {"prompt_tokens": 2, "total_tokens": 2},
}
_EVENTS = "data: {...}\n\ndata: [DONE]\n\n"


def _body(name: str, example: Any) -> tuple[Content, ...]:
    return (Content(JSON, ref(name), example),)


def _whole(about: str, name: str, example: Any, *, streams: bool = False) -> dict[int, Reply]:
    events = (Content(EVENTS, TEXT, _EVENTS),) if streams else ()
    return {200: Reply(about, (Content(JSON, ref(name), example), *events))}


_ANSWER_CHAT = Operation(
    *("post", "/v1/chat/completions", "chatCompletion", _TAG, "Answer a chat"),
    _whole("The answer, or its chunks as events with `stream`", "ChatCompletion", _CHAT, streams=True),
    _TEXTS,
    bodies=_body("ChatCompletionRequest", _CHAT_REQUEST),
    body_required=True,
    error_schema=ERROR,
)

TEXT_OPERATIONS = (
    _ANSWER_CHAT,
    Operation(
        *("post", "/v1/completions", "completion", _TAG, "Go on with a text"),
        _whole("The answer, or its chunks as events with `stream`", "TextCompletion", _COMPLETION, streams=True),
        _TEXTS,
        bodies=_body("TextCompletionRequest", {"model": "smollm2", "prompt": "The capital of France is"}),
        body_required=True,
        error_schema=ERROR,
    ),
    replace(
        _ANSWER_CHAT, path="/invocations", id="invocation", summary="Answer a chat, or go on with a text, by the fields"
    ),
    Operation(
        *("post", "/v1/messages", "message", _TAG, "Answer a message in Anthropic's form"),
        _whole("The answer, or its events with `stream`", "Message", _MESSAGE, streams=True),
        _TEXTS,
        bodies=_body("MessageRequest", _CHAT_REQUEST),
        body_required=True,
        error_schema=ERROR,
    ),
    Operation(
        *("post", "/v1/messages/count_tokens", "countMessageTokens", _TAG, "The number of a message's tokens"),
        _whole("The number", "MessageTokens", {"input_tokens": 9}),
        (*_CALL, 404, 413, 429),
        bodies=_body("MessageRequest", _CHAT_REQUEST),
        body_required=True,
        error_schema=ERROR,
    ),
    Operation(
        *("post", "/v1/embeddings", "embeddings", _TAG, "Embed texts"),
        _whole("An embedding for each text, in their order", "Embeddings", _EMBEDDINGS),
        _TEXTS,
        bodies=_body("EmbeddingRequest", {"model": "minilm", "input": ["a text"]}),
        body_required=True,
        error_schema=ERROR,
    ),
    Operation(
        *("get", "/v1/models", "openaiModels", _TAG, "The ready models, and their adapters"),
        _whole("The ready ones", "OpenAiModels", {"object": "list", "data": [MODEL]}),
        _CALL,
        error_schema=ERROR,
    ),
    Operation(
        *("get", "/v1/models/{model}", "openaiModel", _TAG, "One model or adapter"),
        _whole("The model", "OpenAiModel", MODEL),
        (*_CALL, 404),
        error_schema=ERROR,
    ),
    Operation(
        *("post", "/tokenize", "tokenize", _TAG, "The tokens of a text or a chat"),
        _whole("The tokens", "Tokens", {"count": 1, "max_model_len": 8192, "tokens": [42], "token_strs": None}),
        (*_CALL, 404, 413, 429),
        bodies=_body("TokenizeRequest", {"model": "smollm2", "prompt": "a"}),
        body_required=True,
        error_schema=ERROR,
    ),
    Operation(
        *("post", "/detokenize", "detokenize", _TAG, "The text of tokens"),
        _whole("The text", "Detokenized", {"prompt": "a"}),
        (*_CALL, 404, 413, 429),
        bodies=_body("DetokenizeRequest", {"model": "smollm2", "tokens": [42]}),
        body_required=True,
        error_schema=ERROR,
    ),
    Operation(
        *("get", "/tokenizer_info", "tokenizerInfo", _TAG, "The tokenizer of a model, and its chat template"),
        _whole("What is known of it", "TokenizerInfo", _TOKENIZER_INFO),
        (*_CALL, 404),
        parameters=(Parameter("model", "query", "of this model; the first that has a tokenizer without it"),),
        error_schema=ERROR,
    ),
    Operation(
        *("get", "/health", "openaiHealth", _TAG, "Whether the server is ready for requests"),
        {200: Reply("It is")},
        _OPEN,
        error_schema=ERROR,
    ),
    Operation(
        *("get", "/health/ready", "openaiReady", _TAG, "Whether the server is ready for requests, as `/health`"),
        {200: Reply("It is")},
        _OPEN,
        error_schema=ERROR,
    ),
    Operation(
        *("get", "/version", "openaiVersion", _TAG, "The version of the server's interface"),
        _whole("The version", "OpenAiVersion", {"version": "2.73.0"}),
        _OPEN,
        error_schema=ERROR,
    ),
)


def text_schemas() -> dict[str, Schema]:
    """The schemas of these operations, by name."""
    finish = maybe({"enum": ["stop", "length", "tool_calls", "content_filter"]})
    usage = opened({"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT})
    head: dict[str, Schema] = {"id": TEXT, "object": TEXT, "created": COUNT, "model": TEXT}
    common: dict[str, Schema] = {
        name: maybe(schema)
        for name, schema in {
            "stream": FLAG,
            "stream_options": opened({}, {"include_usage": FLAG}),
            "max_tokens": {"type": "integer", "minimum": 1},
            "n": {"type": "integer", "minimum": 1, "maximum": 128},
            "temperature": {"type": "number", "minimum": 0, "maximum": 2},
            "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            "seed": {"type": "integer"},
            "stop": {"anyOf": [TEXT, array(TEXT)]},
            "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
            "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
            "logit_bias": {"type": "object", "additionalProperties": NUMBER},
            "response_format": {"type": "object"},
        }.items()
    }
    call = opened({"id": TEXT, "type": TEXT, "function": opened({"name": TEXT, "arguments": TEXT})})
    message = opened({"role": TEXT, "content": maybe(TEXT)}, {"tool_calls": array(call), "refusal": maybe(TEXT)})
    logprobs = maybe({"type": "object"})
    ids = array({"type": "integer", "minimum": 0})
    texts: Schema = {"anyOf": [TEXT, array(TEXT), ids, array(ids)]}
    tokens: dict[str, Schema] = {
        "return_token_ids": maybe(FLAG),
        "return_tokens_as_token_ids": maybe(FLAG),
        "truncate_prompt_tokens": maybe({"type": "integer", "minimum": -1}),
        "truncation_side": maybe({"enum": ["left", "right"]}),
        "logprob_token_ids": maybe(ids),
        "allowed_token_ids": maybe(ids),
    }
    model = opened(
        {"id": TEXT, "object": TEXT, "created": COUNT, "owned_by": TEXT},
        {"root": TEXT, "parent": maybe(TEXT), "max_model_len": maybe(COUNT)},
    )
    numbers: Schema = {"anyOf": [array(NUMBER), TEXT]}
    embedding = opened({"object": TEXT, "index": COUNT, "embedding": numbers})
    error = opened({"message": TEXT, "type": TEXT, "param": maybe(TEXT), "code": maybe(TEXT)})
    return {
        ERROR: opened({"error": error}, {"detail": TEXT}),
        "ChatCompletionRequest": opened(
            {"model": TEXT, "messages": array(opened({"role": TEXT}))},
            {
                **common,
                "max_completion_tokens": maybe({"type": "integer", "minimum": 1}),
                "logprobs": maybe(FLAG),
                "top_logprobs": maybe({"type": "integer", "minimum": 0, "maximum": 20}),
                "tools": maybe(array({"type": "object"})),
                "tool_choice": maybe({"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]}),
                "parallel_tool_calls": maybe(FLAG),
                "echo": maybe(FLAG),
                "kv_transfer_params": maybe({"type": "object"}),
                **tokens,
            },
        ),
        "ChatCompletion": opened(
            {
                **head,
                "choices": array(
                    opened({"index": COUNT, "message": message, "logprobs": logprobs, "finish_reason": finish})
                ),
                "usage": usage,
            }
        ),
        "MessageRequest": opened(
            {"model": TEXT, "messages": array(opened({"role": TEXT}))},
            {"max_tokens": {"type": "integer", "minimum": 1}, "system": {"anyOf": [TEXT, array({"type": "object"})]}},
        ),
        "Message": opened(
            {
                "id": TEXT,
                "type": TEXT,
                "role": TEXT,
                "model": TEXT,
                "content": array({"type": "object"}),
                "stop_reason": maybe({"enum": ["end_turn", "max_tokens", "tool_use"]}),
                "usage": opened({"input_tokens": COUNT, "output_tokens": COUNT}),
            }
        ),
        "MessageTokens": opened({"input_tokens": COUNT}),
        "TextCompletionRequest": opened(
            {"model": TEXT, "prompt": texts},
            {
                **common,
                "echo": maybe(FLAG),
                "logprobs": maybe({"type": "integer", "minimum": 0, "maximum": 20}),
                **tokens,
            },
        ),
        "TextCompletion": opened(
            {
                **head,
                "choices": array(opened({"index": COUNT, "text": TEXT, "logprobs": logprobs, "finish_reason": finish})),
                "usage": usage,
            }
        ),
        "EmbeddingRequest": opened(
            {"model": TEXT, "input": texts},
            {"encoding_format": {"enum": ["float", "base64"]}, "dimensions": maybe({"type": "integer", "minimum": 1})},
        ),
        "Embeddings": opened(
            {
                "object": TEXT,
                "data": array(embedding),
                "model": TEXT,
                "usage": opened({"prompt_tokens": COUNT, "total_tokens": COUNT}),
            }
        ),
        "OpenAiModel": model,
        "OpenAiModels": opened({"object": TEXT, "data": array(ref("OpenAiModel"))}),
        "TokenizeRequest": opened(
            {"model": TEXT},
            {"prompt": TEXT, "messages": array({"type": "object"}), "add_special_tokens": FLAG},
        ),
        "Tokens": opened({"count": COUNT, "max_model_len": COUNT, "tokens": ids, "token_strs": maybe(array(TEXT))}),
        "DetokenizeRequest": opened({"model": TEXT, "tokens": ids}),
        "Detokenized": opened({"prompt": TEXT}),
        "TokenizerInfo": opened(
            {"tokenizer_class": TEXT, "model_max_length": COUNT, "chat_template": maybe(TEXT)}, {"eos_token": TEXT}
        ),
        "OpenAiVersion": opened({"version": TEXT}),
    }
