"""How the tokens of one request are sampled, and when its text ends. The names are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What the text has to be. `text` is a JSON schema, a regular expression, a Lark grammar, or JSON of choices."""

    kind: Literal["json", "regex", "choice", "grammar", "json_object"]
    text: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """A request's parameters; the defaults are vLLM's. `seed` is always known here: without one it was drawn before."""

    seed: int
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """How many candidates to report for each token, besides the chosen one; None: no log probabilities."""
    prompt_logprobs: int | None = None
    bad_words: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    structured: StructuredOutput | None = None
