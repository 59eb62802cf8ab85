"""How the tokens of one request are sampled, and when its text ends. The names, defaults and ranges are vLLM's.

`parse_sampling` reads the `sampling_parameters` of a request (`text_tensors`); `check_vocabulary` compares its token
ids with a model. What costs work per token has a bound here, so that one request cannot hold up a step. `grammar` reads
the texts of structured output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import orjson

from charonia.errors import InvalidArgument

StructuredKind = Literal["json", "regex", "choice", "grammar", "json_object"]

DEFAULT_MAX_TOKENS = 16
MAX_TEXT_BYTES = 1 << 20
MAX_SEQUENCES = 16384
"""vLLM's VLLM_MAX_N_SEQUENCES."""
MAX_LOGPROBS = 20
"""vLLM's limit."""
MAX_PROMPT_CANDIDATES = 32_768
"""Of the log probabilities of a prompt, for all its tokens: a candidate is about 60 bytes of JSON. A call of the OpenAI
API has no more for all its prompts and choices together: the gateway reads and writes its answer at once."""
MAX_LOGPROB_TOKENS = 128
"""vLLM's limit."""
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 1024
MAX_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 256
MAX_SCHEMA_BYTES = 64 * 1024
MAX_STRUCTURED_BYTES = 256 * 1024
MAX_NAME_CHARACTERS = 1024
_LOWEST_TEMPERATURE = 0.01
"""A lower one that is not 0 is raised to this, as in vLLM: its logits would overflow."""
_SHOWN_CHARACTERS = 80
"""How much of a wrong value an error shows."""


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What the text has to be. `text` is a JSON schema, a regular expression, a Lark grammar, or JSON of choices."""

    kind: StructuredKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """A request's parameters; the defaults are vLLM's. `seed` is always known here: without one it was drawn before."""

    seed: int
    max_tokens: int = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that may be sampled; None: all."""
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """How many candidates to report for each token, besides the chosen one; None: no log probabilities."""
    logprob_token_ids: tuple[int, ...] = ()
    """The candidates to report besides the chosen one, in place of the most likely; they need no `logprobs`."""
    prompt_logprobs: int | None = None
    """The same as `logprobs` for each token of the prompt but the first."""
    bad_words: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    structured: StructuredOutput | None = None
    lora_name: str = ""
    """The adapter that the request names; "" is the model without one."""

    @property
    def reports_candidates(self) -> bool:
        """Whether log probabilities are wanted for the tokens of the text."""
        return self.logprobs is not None or bool(self.logprob_token_ids)


def parse_sampling(
    text: bytes | str | Mapping[str, Any],
    *,
    context: int,
    prompt_tokens: int,
    seed: Callable[[], int],
    scores_prompt: bool = True,
) -> SamplingParameters:
    """Returns the parameters in a JSON object (or a dict of the same form); null means the default, as in vLLM.

    `max_tokens` is 16 if absent, and all that the context holds if null; it is cut to what the context has left.
    `seed` is called where the request has none. Without `scores_prompt` the request is not given the log probabilities
    of its prompt, whatever it says: `prompt_logprobs` is None, and has no bound by the prompt. Numbers and truth values
    may be strings, as Triton's backend allows.
    Raises `InvalidArgument`, which says what was expected and what came, for an unknown name, a wrong type, a value out
    of range, more than a bound allows, and a prompt that leaves no token to generate.
    """
    given = _object(text)
    unknown = sorted(name for name in given if name not in _NAMES)
    if unknown:
        raise InvalidArgument(f"unknown sampling parameter {_shown(unknown[0])}; known are {', '.join(sorted(_NAMES))}")
    left = context - prompt_tokens
    if left < 1:
        raise InvalidArgument(
            f"the prompt has {prompt_tokens} tokens, but the model's context of {context} tokens has to hold the "
            "prompt and at least one token of the answer"
        )
    _check_sequences(given)
    prompt_logprobs = _candidates(given, "prompt_logprobs")
    if not scores_prompt:
        prompt_logprobs = None
    if prompt_logprobs is not None and (prompt_logprobs + 1) * prompt_tokens > MAX_PROMPT_CANDIDATES:
        raise InvalidArgument(
            f"prompt_logprobs={prompt_logprobs} of {prompt_tokens} tokens are more than {MAX_PROMPT_CANDIDATES} "
            "candidates: ask for fewer, or with a shorter prompt"
        )
    max_tokens = _whole(given, "max_tokens", None if "max_tokens" in given else DEFAULT_MAX_TOKENS, low=1)
    min_tokens = _whole(given, "min_tokens", 0, low=0) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidArgument(f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}.")
    temperature = _temperature(given)
    greedy = temperature == 0.0
    top_p = _real(given, "top_p", 1.0, "in (0, 1]", lambda value: 0.0 < value <= 1.0)
    top_k = max(0, _whole(given, "top_k", 0, low=-1, wording="0 (disable), or at least 1") or 0)
    min_p = _real(given, "min_p", 0.0, "in [0, 1]", lambda value: 0.0 <= value <= 1.0)
    return SamplingParameters(
        seed=_seed(given, seed),
        max_tokens=left if max_tokens is None else min(max_tokens, left),
        min_tokens=min(min_tokens, left),
        temperature=temperature,
        top_p=1.0 if greedy else top_p,
        top_k=0 if greedy else top_k,
        min_p=0.0 if greedy else min_p,
        presence_penalty=_real(given, "presence_penalty", 0.0, "in [-2, 2]", _within_two),
        frequency_penalty=_real(given, "frequency_penalty", 0.0, "in [-2, 2]", _within_two),
        repetition_penalty=_real(
            given, "repetition_penalty", 1.0, "a finite number greater than zero", lambda value: value > 0.0
        ),
        logit_bias=_biases(given),
        allowed_token_ids=_allowed(given),
        stop=_texts(given, "stop", MAX_STOPS, MAX_STOP_CHARACTERS),
        include_stop_str_in_output=_truth(given, "include_stop_str_in_output", False),
        stop_token_ids=_tokens(given, "stop_token_ids", MAX_STOP_TOKENS),
        ignore_eos=_truth(given, "ignore_eos", False),
        logprobs=_candidates(given, "logprobs"),
        logprob_token_ids=_tokens(given, "logprob_token_ids", MAX_LOGPROB_TOKENS),
        prompt_logprobs=prompt_logprobs,
        bad_words=_texts(given, "bad_words", MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS),
        skip_special_tokens=_truth(given, "skip_special_tokens", True),
        structured=_structured(given),
        lora_name=_name(given, "lora_name"),
    )


def check_vocabulary(parameters: SamplingParameters, vocabulary: int) -> None:
    """Raises `InvalidArgument` for a token id in the parameters that a model of `vocabulary` tokens does not have."""
    for name, tokens in (
        ("logit_bias", parameters.logit_bias),
        ("allowed_token_ids", parameters.allowed_token_ids or ()),
        ("stop_token_ids", parameters.stop_token_ids),
        ("logprob_token_ids", parameters.logprob_token_ids),
    ):
        wrong = [token for token in tokens if not 0 <= token < vocabulary]
        if wrong:
            raise InvalidArgument(
                f"{name} contains token id {wrong[0]}, out of the vocabulary: the model has {vocabulary} tokens"
            )


def structured_output(value: object) -> StructuredOutput:
    """Returns what an object with exactly one of `json`, `regex`, `choice`, `grammar` and `json_object` asks for.

    Raises `InvalidArgument` for any other value, and for texts that are empty or too long.
    """
    given = _nested(value, "structured_outputs")
    for name in given:
        if name not in _STRUCTURED_NAMES:
            raise InvalidArgument(
                f"structured_outputs must have one of {', '.join(get_args(StructuredKind))}, got {_shown(name)}"
            )
    if any(given.get(name) for name in _STRUCTURED_OFF):
        name = next(name for name in _STRUCTURED_OFF if given.get(name))
        raise InvalidArgument(f"structured_outputs: {name} is not supported")
    chosen = [name for name in get_args(StructuredKind) if given.get(name) is not None]
    if len(chosen) != 1:
        raise InvalidArgument(
            f"structured_outputs must have exactly one kind of constraint, got {', '.join(chosen) or 'none'}"
        )
    kind: StructuredKind = chosen[0]
    constraint = given[kind]
    if kind == "json_object":
        if constraint is not True:
            raise InvalidArgument(f"structured_outputs: json_object must be true, got {_shown(constraint)}")
        return StructuredOutput(kind)
    if kind == "choice":
        text = _choices(constraint)
    elif kind == "json" and isinstance(constraint, Mapping):
        text = _dumped(constraint, "structured_outputs: json")
    elif isinstance(constraint, str):
        text = constraint
    else:
        expected = "a JSON schema (an object or a string)" if kind == "json" else "a string"
        raise InvalidArgument(f"structured_outputs: {kind} must be {expected}, got {_typed(constraint)}")
    if not text.strip():
        raise InvalidArgument(f"structured_outputs: {kind} must not be empty")
    if len(text) > MAX_STRUCTURED_BYTES or len(text.encode(errors="replace")) > MAX_STRUCTURED_BYTES:
        raise InvalidArgument(
            f"structured_outputs: {kind} must have at most {MAX_STRUCTURED_BYTES} bytes, got {len(text)} characters"
        )
    return StructuredOutput(kind, text)


_NAMES = frozenset(each.name for each in fields(SamplingParameters)) - {"structured"} | {
    "n",
    "spaces_between_special_tokens",
    "detokenize",
    "structured_outputs",
    "guided_decoding",
}
"""`guided_decoding` is the older name of `structured_outputs`. Spaces between special tokens belong to decoders that
Charonia does not have: the parameter changes nothing."""
_STRUCTURED_OFF = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "structural_tag")
"""Options that are only accepted as off."""
_STRUCTURED_NAMES = frozenset((*get_args(StructuredKind), *_STRUCTURED_OFF))
_TRUTHS = {"true": True, "1": True, "false": False, "0": False}


def _object(text: bytes | str | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(text, Mapping):
        return text
    if len(text) > MAX_TEXT_BYTES:
        raise InvalidArgument(f"sampling_parameters must have at most {MAX_TEXT_BYTES} bytes, got {len(text)}")
    if not text.strip():
        return {}
    try:
        given = orjson.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"sampling_parameters must be a JSON object: {error}") from None
    if not isinstance(given, dict):
        raise InvalidArgument(f"sampling_parameters must be a JSON object, got {_typed(given)}")
    return given


def _nested(value: object, name: str) -> Mapping[Any, Any]:
    if isinstance(value, str):
        if len(value) > MAX_TEXT_BYTES:
            raise InvalidArgument(f"{name} must have at most {MAX_TEXT_BYTES} bytes, got {len(value)}")
        try:
            value = orjson.loads(value)
        except ValueError as error:
            raise InvalidArgument(f"{name} must be a JSON object: {error}") from None
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{name} must be a JSON object, got {_typed(value)}")
    return value


def _check_sequences(given: Mapping[str, Any]) -> None:
    sequences = _whole(given, "n", 1, low=1)
    if sequences is not None and sequences > MAX_SEQUENCES:
        raise InvalidArgument(f"n must be at most {MAX_SEQUENCES}, got {_shown(sequences)}.")
    if sequences not in (None, 1):
        raise InvalidArgument(f"n must be 1, got {sequences}: one request generates one text")
    if not _truth(given, "detokenize", True):
        raise InvalidArgument("detokenize must be true: ask for return_token_ids to have the tokens as well")
    _truth(given, "spaces_between_special_tokens", True)


def _temperature(given: Mapping[str, Any]) -> float:
    value = _real(given, "temperature", 1.0, "in [0, 2]", lambda value: 0.0 <= value <= 2.0)
    return max(value, _LOWEST_TEMPERATURE) if value else 0.0


def _seed(given: Mapping[str, Any], draw: Callable[[], int]) -> int:
    seed = _whole(given, "seed", None)
    if seed is None or seed == -1:
        return draw()
    if not -(1 << 63) <= seed < 1 << 63:
        raise InvalidArgument(f"seed must fit in 64 bits, got {_shown(seed)}.")
    return seed


def _candidates(given: Mapping[str, Any], name: str) -> int | None:
    value = given.get(name)
    if isinstance(value, bool):
        return 1 if value else None
    count = _whole(given, name, None, low=-1, wording="non-negative")
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        raise InvalidArgument(f"{name} must be in [0, {MAX_LOGPROBS}], got {_shown(count)}.")
    return count


def _whole(
    given: Mapping[str, Any], name: str, default: int | None, *, low: int | None = None, wording: str = ""
) -> int | None:
    value = given.get(name)
    if value is None:
        return default
    if isinstance(value, str) and len(value) <= 20:
        try:
            value = int(value)
        except ValueError:
            raise InvalidArgument(f"{name} must be an integer, got {_shown(value)}.") from None
    elif isinstance(value, float) and value.is_integer() and abs(value) < 2.0**63:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument(f"{name} must be an integer, got {_typed(value)}.")
    if low is not None and value < low:
        raise InvalidArgument(f"{name} must be {wording or f'at least {low}'}, got {_shown(value)}.")
    return value


def _real(given: Mapping[str, Any], name: str, default: float, range_: str, inside: Callable[[float], bool]) -> float:
    value = given.get(name)
    if value is None:
        return default
    number = _number(name, value)
    if not math.isfinite(number) or not inside(number):
        raise InvalidArgument(f"{name} must be {range_}, got {_shown(value)}.")
    return number


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise InvalidArgument(f"{name} must be a number, got {_typed(value)}.")
    try:
        return float(value)
    except (ValueError, OverflowError):
        raise InvalidArgument(f"{name} must be a number, got {_shown(value)}.") from None


def _within_two(value: float) -> bool:
    return -2.0 <= value <= 2.0


def _truth(given: Mapping[str, Any], name: str, default: bool) -> bool:
    value = given.get(name)
    if value is None:
        return default
    if isinstance(value, bool):
        return value
    if (isinstance(value, str) and len(value) <= 5) or (isinstance(value, int) and value in (0, 1)):
        found = _TRUTHS.get(str(value).lower())
        if found is not None:
            return found
    raise InvalidArgument(f"{name} must be true or false, got {_shown(value)}.")


def _biases(given: Mapping[str, Any]) -> Mapping[int, float]:
    value = given.get("logit_bias")
    if value is None:
        return {}
    biases = _nested(value, "logit_bias")
    if len(biases) > MAX_BIASES:
        raise InvalidArgument(f"logit_bias must have at most {MAX_BIASES} tokens, got {len(biases)}")
    found = {}
    for key, bias in biases.items():
        number = _number("logit_bias", bias)
        if math.isnan(number):
            raise InvalidArgument("logit_bias must have numbers as values, got nan.")
        found[_token("logit_bias", key)] = min(100.0, max(-100.0, number))
    return found


def _allowed(given: Mapping[str, Any]) -> tuple[int, ...] | None:
    if given.get("allowed_token_ids") is None:
        return None
    tokens = _tokens(given, "allowed_token_ids", MAX_BIASES)
    if not tokens:
        raise InvalidArgument("allowed_token_ids must not be empty")
    return tokens


def _tokens(given: Mapping[str, Any], name: str, most: int) -> tuple[int, ...]:
    value = given.get(name)
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InvalidArgument(f"{name} must be a list of token ids, got {_typed(value)}.")
    if len(value) > most:
        raise InvalidArgument(f"{name} must have at most {most} token ids, got {len(value)}")
    return tuple(dict.fromkeys(_token(name, token) for token in value))


def _token(name: str, value: object) -> int:
    token = value
    if isinstance(token, str) and len(token) <= 10 and token.isascii() and token.isdigit():
        token = int(token)
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 1 << 31:
        raise InvalidArgument(f"{name} must have token ids that are non-negative integers, got {_shown(value)}.")
    return token


def _texts(given: Mapping[str, Any], name: str, most: int, most_characters: int) -> tuple[str, ...]:
    value = given.get(name)
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or isinstance(texts, bytes):
        raise InvalidArgument(f"{name} must be a string or a list of strings, got {_typed(value)}.")
    if len(texts) > most:
        raise InvalidArgument(f"{name} must have at most {most} strings, got {len(texts)}")
    for text in texts:
        if not isinstance(text, str):
            raise InvalidArgument(f"{name} must have strings, got {_typed(text)}.")
        if not text:
            raise InvalidArgument(f"{name} cannot contain an empty string.")
        if len(text) > most_characters:
            raise InvalidArgument(f"{name} must have strings of at most {most_characters} characters, got {len(text)}")
    return tuple(dict.fromkeys(texts))


def _structured(given: Mapping[str, Any]) -> StructuredOutput | None:
    values = [given[name] for name in ("structured_outputs", "guided_decoding") if given.get(name) is not None]
    if len(values) > 1:
        raise InvalidArgument("structured_outputs and guided_decoding are the same parameter: give one of them")
    return structured_output(values[0]) if values else None


def _choices(value: object) -> str:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InvalidArgument(f"structured_outputs: choice must be a list of strings, got {_typed(value)}")
    if not value or not all(isinstance(choice, str) and choice for choice in value):
        raise InvalidArgument("structured_outputs: choice must be a list of strings that are not empty")
    return _dumped(list(value), "structured_outputs: choice")


def _dumped(value: object, name: str) -> str:
    try:
        return orjson.dumps(value, default=dict).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{name} must be JSON: {_shown(str(error))}") from None


def _name(given: Mapping[str, Any], name: str) -> str:
    value = given.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_NAME_CHARACTERS:
        raise InvalidArgument(
            f"{name} must be a string of at most {MAX_NAME_CHARACTERS} characters, got {_typed(value)}"
        )
    return value


def _typed(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _shown(value: object) -> str:
    """A short form: errors go to clients and logs, and a wrong value may be a megabyte."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 64:
        return "an integer of more than 64 bits"
    if not isinstance(value, str | int | float):
        return _typed(value)
    text = repr(value[: _SHOWN_CHARACTERS + 1] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
