"""The fields of a request that say how tokens are sampled, as `sampling_parameters` of a model. Pure.

OpenAI's fields and vLLM's additions to them. One with a value of another type or out of its range is refused, and
`param` of the error names it. `known_fields` has those that are refused by their names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson

from charonia.generation.parameters import MAX_BAD_WORDS, MAX_BIASES, MAX_SCHEMA_BYTES

from .api_errors import ApiError, missing

MAX_CHOICES = 128
"""Texts of one call, all its prompts together."""

MAX_STOPS = 16
MAX_STOP_BYTES = 1024
MAX_TOKEN_IDS = 1024

_NUMBERS: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-6, 1e6),
}
_WHOLE: Mapping[str, tuple[int, int]] = {
    "top_k": (-1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1),
}
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
MAX_PROMPT_LOGPROBS = 20
_SHOWN_NAMES = 8
"""Of names that are wrong, those that an error repeats."""
_STRUCTURES = ("json", "regex", "choice", "grammar", "json_object")


def whole(body: Mapping[str, Any], name: str, least: int, most: int) -> int | None:
    """A whole number between two bounds, None where it is absent or null. Raises `ApiError`."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        # the parser makes floats of integers with more than 64 bits: -2**63 - 1 would be -2**63
        value = int(value) - (value == -(2.0**63))
    if type(value) is not int:
        raise ApiError(f"'{name}' must be an integer", param=name)
    if not least <= value <= most:
        raise _out_of_range(name, value, least, most)
    return value


def flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A boolean; `default` where it is absent or null. Raises `ApiError`."""
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not bool:
        raise ApiError(f"'{name}' must be a boolean", param=name)
    return value


def text(body: Mapping[str, Any], name: str) -> str:
    """A string that has to be there. Raises `ApiError`."""
    value = body.get(name)
    if value is None:
        raise missing(name)
    if not isinstance(value, str) or not value:
        raise ApiError(f"'{name}' must be a string that is not empty", param=name)
    return value


def choices_of(body: Mapping[str, Any]) -> int:
    """How many texts are wanted for a prompt. Raises `ApiError`."""
    count = whole(body, "n", 1, MAX_CHOICES) or 1
    best = whole(body, "best_of", 1, MAX_CHOICES)
    if best is not None and best != count:
        raise ApiError("'best_of' is not supported, unless it equals 'n'", param="best_of")
    if flag(body, "use_beam_search"):  # no backend of ours has it, and sampled texts are not what was asked for
        raise ApiError("'use_beam_search' is not supported", param="use_beam_search")
    return count


def priority_of(body: Mapping[str, Any]) -> int:
    """vLLM's `priority`, a level of the model: a lower one goes first, 0 is the default. Raises `ApiError`."""
    return whole(body, "priority", 0, 2**31 - 1) or 0


def includes_usage(body: Mapping[str, Any], *, stream: bool) -> bool:
    """`stream_options.include_usage`. Raises `ApiError` for options of a call that does not stream."""
    options = body.get("stream_options")
    if options is None:
        return False
    if not stream:
        raise ApiError("`stream_options` can only be used when `stream` is True", param="stream_options")
    if not isinstance(options, Mapping):
        raise ApiError("'stream_options' must be an object", param="stream_options")
    return flag(options, "include_usage")


def counts_always(body: Mapping[str, Any]) -> bool:
    """vLLM's `stream_options.continuous_usage_stats`: each chunk has the usage so far. Only after `includes_usage`."""
    options = body.get("stream_options") or {}
    return flag(options, "include_usage") and flag(options, "continuous_usage_stats")


def prompt_logprobs_of(body: Mapping[str, Any], *, stream: bool) -> int | None:
    """vLLM's `prompt_logprobs`: how many candidates for each token of the prompt. Raises `ApiError`."""
    count = whole(body, "prompt_logprobs", 0, MAX_PROMPT_LOGPROBS)
    if count is not None and stream:
        raise ApiError("'prompt_logprobs' is not available when 'stream' is true", param="prompt_logprobs")
    return count


def sampling_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters that the body names, by vLLM's names, without `max_tokens` and structured outputs.

    Raises `ApiError`.
    """
    found: dict[str, Any] = {}
    for name, (lowest, highest) in _NUMBERS.items():
        value = body.get(name)
        if value is None:
            continue
        if type(value) not in (int, float):
            raise ApiError(f"'{name}' must be a number", param=name)
        if not lowest <= value <= highest or (name == "top_p" and not value):
            raise _out_of_range(name, value, lowest, highest)
        found[name] = float(value)
    for name, (least, most) in _WHOLE.items():
        if (number := whole(body, name, least, most)) is not None:
            found[name] = number
    if found.get("top_k") == -1:
        found["top_k"] = 0
    for name in _FLAGS:
        if body.get(name) is not None:
            found[name] = flag(body, name)
    if stops := _stops(body):
        found["stop"] = stops
    for name, bound in (("stop_token_ids", MAX_TOKEN_IDS), ("allowed_token_ids", MAX_TOKEN_IDS)):
        if body.get(name) is not None:
            found[name] = token_ids(body[name], name, bound)
    if body.get("bad_words") is not None:
        found["bad_words"] = _strings(body["bad_words"], "bad_words", MAX_BAD_WORDS)
    if body.get("logit_bias") is not None:
        found["logit_bias"] = _biases(body["logit_bias"])
    return found


def _strings(value: Any, name: str, most: int) -> list[str]:
    if not isinstance(value, list) or len(value) > most:
        raise ApiError(f"'{name}' must be a list of at most {most} strings", param=name)
    for one in value:
        if not isinstance(one, str) or not one:
            raise ApiError(f"'{name}' must hold strings that are not empty", param=name)
        if len(one) > MAX_STOP_BYTES:
            raise ApiError(f"a string of '{name}' has more than {MAX_STOP_BYTES} characters", param=name)
    return value


def _stops(body: Mapping[str, Any]) -> list[str]:
    value = body.get("stop")
    if value is None or value == "":
        return []
    return _strings([value] if isinstance(value, str) else value, "stop", MAX_STOPS)


def token_ids(value: Any, name: str, most: int = 2**31 - 1) -> list[int]:
    """A list of token ids. Raises `ApiError`."""
    if not isinstance(value, list) or len(value) > most:
        raise ApiError(f"'{name}' must be a list of at most {most} token ids", param=name)
    if not all(type(one) is int and 0 <= one < 2**31 for one in value):
        raise ApiError(f"'{name}' must hold token ids", param=name)
    return value


def _biases(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping) or len(value) > MAX_BIASES:
        raise ApiError(f"'logit_bias' must be an object with at most {MAX_BIASES} tokens", param="logit_bias")
    found: dict[str, float] = {}
    wrong = [token for token in value if not (token.isascii() and token.isdecimal() and len(token) <= 10)]
    if wrong:
        shown = ", ".join(f"'{token[:32]}'" for token in wrong[:_SHOWN_NAMES])
        raise ApiError(f"'logit_bias' must have token ids as names, got {shown}", param="logit_bias")
    for token, bias in value.items():
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ApiError("'logit_bias' must have values between -100 and 100", param="logit_bias")
        found[token] = float(bias)
    return found


def structure_of(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """`response_format`, or vLLM's `structured_outputs`, as the model's `structured_outputs`. Raises `ApiError`."""
    given = body.get("structured_outputs")
    if given is not None:
        if not isinstance(given, Mapping):
            raise ApiError("'structured_outputs' must be an object", param="structured_outputs")
        kinds = {kind: given[kind] for kind in _STRUCTURES if given.get(kind) is not None}
        if len(kinds) != 1:
            raise ApiError(
                f"'structured_outputs' must have one of {', '.join(_STRUCTURES)}", param="structured_outputs"
            )
        check_size(kinds, "structured_outputs")
        return kinds
    form = body.get("response_format")
    if form is None:
        return None
    if not isinstance(form, Mapping) or form.get("type") not in ("text", "json_object", "json_schema"):
        raise ApiError(
            "'response_format' must have a 'type' of text, json_object or json_schema", param="response_format"
        )
    if form["type"] == "text":
        return None
    if form["type"] == "json_object":
        return {"json_object": True}
    named = form.get("json_schema")
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, Mapping):
        raise ApiError("'response_format.json_schema.schema' must be a JSON schema", param="response_format")
    check_size(schema, "response_format")
    return {"json": schema}


def structure_field(body: Mapping[str, Any]) -> str:
    """The name of the field that `structure_of` reads."""
    return "response_format" if body.get("structured_outputs") is None else "structured_outputs"


def check_size(value: Any, name: str) -> None:
    """Raises `ApiError` for a schema or grammar that is larger than any that is served."""
    size_bytes = len(orjson.dumps(value))
    if size_bytes > MAX_SCHEMA_BYTES:
        raise ApiError(f"'{name}' has {size_bytes} bytes, the bound is {MAX_SCHEMA_BYTES}", param=name)


def seed_of(seed: int, index: int) -> int:
    """The seed of a choice: the first has the request's, the others have seeds that follow from it."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(b"%d/%d" % (seed, index), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _out_of_range(name: str, value: float, least: float, most: float) -> ApiError:
    """The refusal of a number, in the words of pydantic, which vLLM and Triton's frontend answer with.

    A number within the bounds is refused because it must be above the lower one.
    """
    if value < least:
        code, words, bound = "greater_than_equal", "greater than or equal to", least
    elif value > most:
        code, words, bound = "less_than_equal", "less than or equal to", most
    else:
        code, words, bound = "greater_than", "greater than", least
    shown = f"{bound:g}" if isinstance(bound, float) else bound
    kind = f"[type={code}, input_value={_short(value)}, input_type={type(value).__name__}]"
    return ApiError(f"'{name}': Input should be {words} {shown} {kind}", param=name, code=code)


def _short(value: Any) -> str:
    written = str(value)
    return written if len(written) <= 32 else written[:29] + "..."
