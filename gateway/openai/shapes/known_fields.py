"""The fields of a request that OpenAI or vLLM know, by endpoint; a body with another one is refused. Pure.

OpenAI refuses fields that it does not know, so that a mistyped bound (`max_token`) is no call without a bound. vLLM's
fields are known here as well: its clients send them. A field in these tables need not have an effect:
`docs/howto/openai.md` says which have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .api_errors import ApiError

_SHOWN = 64
"""Characters of a field's name that an error repeats."""

_SAMPLED = frozenset(
    (
        *("frequency_penalty", "logit_bias", "logprobs", "max_tokens", "model", "n", "presence_penalty", "seed"),
        *("stop", "stream", "stream_options", "temperature", "top_p", "user"),
    )
)
_OF_VLLM = frozenset(
    (
        *("add_special_tokens", "allowed_token_ids", "bad_words", "best_of", "cache_salt", "echo", "ignore_eos"),
        *("include_stop_str_in_output", "kv_transfer_params", "length_penalty", "logprob_token_ids", "min_p"),
        *("min_tokens", "priority", "prompt_logprobs", "repetition_detection", "repetition_penalty", "request_id"),
        *("response_format", "return_token_ids", "return_token_offsets", "return_tokens_as_token_ids", "session_id"),
        *("skip_special_tokens", "spaces_between_special_tokens", "stop_token_ids", "stream_interval"),
        *("structured_outputs", "thinking_token_budget", "top_k", "truncate_prompt_tokens", "truncation_side"),
        *("use_beam_search", "vllm_xargs", "watermarking", "ec_transfer_params"),
    )
)
_OF_CALLERS = frozenset(
    (
        *("metadata", "moderation", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("safety_identifier", "service_tier", "store"),
    )
)

CHAT = frozenset(
    (
        *_SAMPLED,
        *_OF_VLLM,
        *_OF_CALLERS,
        *("audio", "function_call", "functions", "max_completion_tokens", "messages", "modalities"),
        *("parallel_tool_calls", "prediction", "reasoning_effort", "tool_choice", "tools", "top_logprobs"),
        *("verbosity", "web_search_options"),
        *("add_generation_prompt", "chat_template", "chat_template_kwargs", "continue_final_message", "documents"),
        *("include_reasoning", "media_io_kwargs", "mm_processor_kwargs", "return_prompt_text"),
    )
)
COMPLETION = frozenset((*_SAMPLED, *_OF_VLLM, *_OF_CALLERS, "prompt", "prompt_embeds", "suffix"))
RESPONSE = frozenset(
    (
        *(_SAMPLED - {"logprobs", "max_tokens", "n"}),
        *_OF_VLLM,
        *_OF_CALLERS,
        *("access_programs", "background", "background_options", "context_management", "conversation", "image"),
        *("include", "input", "instructions", "max_output_tokens", "max_tool_calls", "parallel_tool_calls"),
        *("previous_response_id", "prompt", "reasoning", "text", "tool_choice", "tools", "top_logprobs"),
        *("truncation", "verbosity"),
        *("chat_template_kwargs", "enable_response_messages", "include_reasoning", "media_io_kwargs"),
        *("mm_processor_kwargs", "previous_input_messages"),
    )
)
EMBEDDING = frozenset(
    (
        *("dimensions", "encoding_format", "input", "model", "user"),
        *("add_special_tokens", "cache_salt", "embed_dtype", "endianness", "mm_processor_kwargs", "normalize"),
        *("priority", "request_id", "truncate_prompt_tokens", "truncation_side", "use_activation"),
    )
)


def refuse_unknown(body: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raises a 400 `ApiError` that names a field of `body` which is not among the known ones; in OpenAI's words."""
    unknown = next(iter(body.keys() - known), None)
    if unknown is not None:
        shown = unknown if len(unknown) <= _SHOWN else unknown[: _SHOWN - 3] + "..."
        raise ApiError(f"Unknown parameter: '{shown}'.", param=shown, code="unknown_parameter")
