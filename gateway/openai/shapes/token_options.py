"""vLLM's fields about tokens: how they are shown, which log probabilities are given, how a prompt is cut. Pure.

`sampling_fields` has those that say how tokens are drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from charonia.generation.parameters import MAX_LOGPROB_TOKENS

from .api_errors import ApiError
from .sampling_fields import flag, token_ids, whole
from .text_answers import TokenBytes

_ALL = -1
"""As `truncate_prompt_tokens`: as many as the context has room for."""


@dataclass(frozen=True, slots=True)
class TokenOptions:
    """The fields of one call."""

    shows_ids: bool = False
    """`return_token_ids`: the answer has the ids of the prompt's tokens and of the text's."""
    names_ids: bool = False
    """`return_tokens_as_token_ids`: log probabilities name tokens as `token_id:42`, which is never ambiguous."""
    kept: int | None = None
    """`truncate_prompt_tokens`: how many tokens of a prompt are kept; -1 for as many as there is room for."""
    keeps_first: bool = False
    """`truncation_side` is `right`: what is cut off stands at the prompt's end."""

    def cut(self, tokens: list[int], room: int) -> list[int]:
        """A prompt of which at most `room` tokens fit, cut as asked for. Raises `ApiError` where more shall be kept."""
        if self.kept is None:
            return tokens
        if self.kept > room:
            raise ApiError(
                f"'truncate_prompt_tokens' is {self.kept}, but a prompt of this call can have {room} tokens",
                param="truncate_prompt_tokens",
            )
        kept = room if self.kept == _ALL else self.kept
        if len(tokens) <= kept:
            return tokens
        return tokens[:kept] if self.keeps_first else tokens[len(tokens) - kept :]

    def shown(self, **ids: Sequence[int] | None) -> dict[str, list[int] | None]:
        """Members of an answer that have ids; null where they were not asked for."""
        return {name: None if not self.shows_ids or found is None else [*found] for name, found in ids.items()}

    def names(self, bytes_of: TokenBytes | None) -> TokenBytes | None:
        """What log probabilities call a token, whose bytes are `bytes_of`."""
        return id_bytes if self.names_ids else bytes_of


NO_OPTIONS = TokenOptions()


def token_options(body: Mapping[str, Any]) -> TokenOptions:
    """The options of a body. Raises `ApiError`."""
    kept = whole(body, "truncate_prompt_tokens", _ALL, 2**63 - 1)
    if kept == 0:
        raise ApiError("'truncate_prompt_tokens' must be at least 1, or -1", param="truncate_prompt_tokens")
    side = body.get("truncation_side")
    if side not in (None, "left", "right"):
        raise ApiError("'truncation_side' must be 'left' or 'right'", param="truncation_side")
    return TokenOptions(flag(body, "return_token_ids"), flag(body, "return_tokens_as_token_ids"), kept, side == "right")


def chosen_ids(body: Mapping[str, Any], *, has_logprobs: bool) -> list[int]:
    """`logprob_token_ids`: the tokens whose log probabilities stand beside each sampled one's, not the likeliest.

    Empty where it is absent. Raises `ApiError`.
    """
    if body.get("logprob_token_ids") is None:
        return []
    if not has_logprobs:
        raise ApiError("'logprob_token_ids' is only allowed with 'logprobs'", param="logprob_token_ids")
    return token_ids(body["logprob_token_ids"], "logprob_token_ids", MAX_LOGPROB_TOKENS)


def id_bytes(token: int) -> bytes:
    """A token by its id, as vLLM writes it."""
    return b"token_id:%d" % token
