"""Shares a model that generates text between tenants by tokens: a virtual counter for each lane. Pure.

The lane with the smallest counter is served next. Each request adds its tokens, those of its prompt and of the answer
that is expected, divided by the weight of its lane; when it has ended, the difference to what it took is added, or
taken off. A lane that was idle does not catch up: its counter begins where those are that were served meanwhile, less
`MAX_CREDIT`. `fair_sharing` does the same for other models, by rows.

Sources: Sheng et al., "Fairness in Serving Large Language Models" (2024), for the counters and their correction; Goyal,
Vin and Cheng, "Start-time Fair Queueing" (1996), for the virtual time, which needs no list of active lanes.
"""

from __future__ import annotations

from collections.abc import Mapping

from batcher.scheduling.observations import RequestQueued
from charonia.generation.prompt_keys import PromptRoute

MAX_CREDIT = 4096.0
"""Tokens of a lane with weight 1. A correction is often a credit, which a lane must not lose between two requests."""
FIRST_ANSWER_TOKENS = 128
"""How long an answer is expected to be before any has ended."""
_OF_NEWEST = 0.125
"""The weight of the newest answer in the mean length of a lane's answers."""
_UNKNOWN = PromptRoute(64)


def prompt_of(request: RequestQueued) -> PromptRoute:
    """What is known of a request's prompt."""
    meta = request.meta
    return meta.prompt if meta is not None and meta.prompt is not None else _UNKNOWN


class AnswerLengths:
    """How long answers are expected to be: as those of their lane were lately, and at most what was asked for.

    What a prompt was found to have more than was said of it counts as a part of its answer.
    """

    __slots__ = ("_means",)

    def __init__(self) -> None:
        self._means: dict[int, float] = {}

    def expected(self, request: RequestQueued) -> int:
        """In tokens, for a request that runs or will."""
        mean = round(self._means.get(request.lane, FIRST_ANSWER_TOKENS))
        return min(mean, prompt_of(request).max_tokens or mean)

    def ended(self, lane: int, tokens: int) -> None:
        """An answer has ended with so many tokens."""
        before = self._means.get(lane, tokens)
        self._means[lane] = before + _OF_NEWEST * (tokens - before)


class TokenShares:
    """The counters of all lanes of one model. `weights` are 1 by default."""

    __slots__ = ("_charged", "_counters", "_now", "_reports", "_weights", "answers")

    def __init__(self, weights: Mapping[int, int]) -> None:
        self.answers = AnswerLengths()
        self._weights = weights
        self._counters: dict[int, float] = {}
        self._charged: dict[bytes, tuple[int, int, int]] = {}
        """Of each dispatched request: its lane, what it was charged, and how much of that is its prompt."""
        self._reports = False
        """Whether the model says how many tokens its answers have: then none is none, not unknown."""
        self._now = 0.0
        """The counter of the lane that was served last, at that time. It never falls."""

    def counter(self, lane: int) -> float:
        """The virtual counter of a lane: tokens divided by its weight."""
        return max(self._counters.get(lane, 0.0), self._now - MAX_CREDIT)

    def step(self, request: RequestQueued) -> float:
        """How much a request adds to the counter of its lane when it is dispatched."""
        return self._step(request.lane, prompt_of(request).tokens + self.answers.expected(request))

    def charge(self, request: RequestQueued) -> None:
        """A request is dispatched."""
        lane, prompt_tokens = request.lane, prompt_of(request).tokens
        tokens = prompt_tokens + self.answers.expected(request)
        begin = self.counter(lane)
        self._now = max(self._now, begin)
        self._counters[lane] = begin + self._step(lane, tokens)
        self._charged[request.id] = (lane, tokens, prompt_tokens)

    def ended(self, request_id: bytes, tokens: int) -> None:
        """A request has ended; it had so many tokens in all. Unknown requests are ignored.

        0 is none, as of one that was cancelled or refused before its first token, if the model ever reports any.
        """
        lane, charged, prompt_tokens = self._charged.pop(request_id, (0, 0, 0))
        self._reports = self._reports or tokens > 0
        if charged and self._reports:
            if tokens:
                self.answers.ended(lane, max(0, tokens - prompt_tokens))
            self._correct(lane, tokens - charged)

    @property
    def reports(self) -> bool:
        """Whether the model reports the tokens of its answers."""
        return self._reports

    def returned(self, request_id: bytes) -> None:
        """A request came back without an answer: it is charged again when it is dispatched again."""
        lane, charged, _ = self._charged.pop(request_id, (0, 0, 0))
        if charged:
            self._correct(lane, -charged)

    def _correct(self, lane: int, tokens: int) -> None:
        self._counters[lane] = self.counter(lane) + self._step(lane, tokens)

    def _step(self, lane: int, tokens: int) -> float:
        return tokens / max(1, self._weights.get(lane, 1))


class TokenTurns:
    """The lanes of one level, as `fair_sharing.Turns`; what is taken is charged by the caller to `shares`."""

    __slots__ = ("_ahead", "_lanes", "_shares")

    def __init__(self, shares: TokenShares) -> None:
        self._shares = shares
        self._lanes: dict[int, None] = {}
        self._ahead: dict[int, float] | None = None
        """The counters of a copy."""

    def copy(self) -> TokenTurns:
        """A copy, to look ahead without taking requests."""
        turns = TokenTurns(self._shares)
        turns._lanes = self._lanes.copy()
        turns._ahead = {lane: self._shares.counter(lane) for lane in self._lanes}
        return turns

    def begin(self, lane: int) -> None:
        """The lane that has had the level to itself."""
        self._lanes[lane] = None

    def join(self, lane: int) -> None:
        """A lane has queued requests."""
        self._lanes.setdefault(lane)

    def current(self) -> int | None:
        """The lane whose turn it is: the smallest counter, of equals the one that came first. None without lanes."""
        counter = self._shares.counter if self._ahead is None else self._ahead.__getitem__
        return min(self._lanes, key=counter, default=None)

    def spend(self, lane: int, request: RequestQueued) -> None:
        """The current lane is served."""
        if self._ahead is not None:
            self._ahead[lane] += self._shares.step(request)

    def pass_on(self, lane: int) -> bool:
        """The current lane is empty: it is forgotten. Its counter is kept."""
        del self._lanes[lane]
        return True
