"""How many tokens of language models a tenant's calls may have: of one text, and of all that a gateway runs. Pure.

A text has the tokens of its prompt and those that it may generate. Unlike requests and bytes, which the log counts for
all gateways together, each gateway counts the tokens of the calls that it answers: the log does not know what a text
may become, and a count there would be a number more for every request. `tenants` reads the bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from charonia.errors import InvalidArgument, ResourceExhausted


@dataclass(frozen=True, slots=True)
class TokenBounds:
    """Bounds of a tenant in tokens; 0 = no bound. `pending` is of the calls of one model that a gateway runs."""

    text: int = 0
    pending: int = 0


NO_BOUNDS = TokenBounds()


class TokensExhausted(ResourceExhausted):
    """A tenant's calls have as many tokens as they may."""


class PendingTokens:
    """The tokens of the calls that run, by tenant and model. `bounds` returns a tenant's present bounds."""

    def __init__(self, bounds: Callable[[str], TokenBounds]) -> None:
        self._bounds = bounds
        self._pending: dict[tuple[str, str], int] = {}

    def bounds(self, tenant: str) -> TokenBounds:
        """The tenant's bounds; callers without a tenant have none."""
        return self._bounds(tenant) if tenant else NO_BOUNDS

    def remaining(self, tenant: str, model: str) -> int:
        """How many more tokens fit, at least 0; meaningless without a bound."""
        return max(0, self.bounds(tenant).pending - self._pending.get((tenant, model), 0))

    @contextmanager
    def of_call(self, tenant: str, model: str, tokens: int) -> Iterator[None]:
        """Count a call while it runs.

        Raises `InvalidArgument` for one that has more tokens than fit when nothing runs, and `TokensExhausted` for one
        that has to wait for others to end.
        """
        bound = self.bounds(tenant).pending
        if not bound:
            yield
            return
        if tokens > bound:
            raise InvalidArgument(
                f"the texts of the call may have {tokens} tokens with their prompts, those of all calls of tenant "
                f"'{tenant}' at most {bound} (max_pending_tokens)"
            )
        key = (tenant, model)
        if self._pending.get(key, 0) + tokens > bound:
            raise TokensExhausted(
                f"model '{model}' has {self._pending.get(key, 0)} tokens of tenant '{tenant}' under way, and the call "
                f"{tokens}: at most {bound} at a time (max_pending_tokens)"
            )
        self._pending[key] = self._pending.get(key, 0) + tokens
        try:
            yield
        finally:
            self._pending[key] -= tokens
            if not self._pending[key]:
                del self._pending[key]
