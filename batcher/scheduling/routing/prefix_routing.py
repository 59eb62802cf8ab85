"""Chooses the executor for a request that generates text: where most of its prompt has been computed, unless that one
has too much to do. Pure.

It knows only what was dispatched: which beginnings of prompts an executor was given, how many tokens it still has to
compute, and how many it was given lately. What it knows of an executor ends with that one.

An executor is *overloaded* for a request if what it has to do, or what it was given lately, exceeds `BOUND` times the
mean of all by more than `SLACK_TOKENS` and the tokens that the request would save there. So a prompt that takes long
to compute is worth more of a wait, and an executor with no more than the mean of both is never overloaded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batcher.scheduling.observations import RequestQueued
from batcher.scheduling.queues.token_shares import AnswerLengths, prompt_of
from charonia.generation.prompt_keys import BLOCK_TOKENS, PromptRoute, blocks_of

BOUND = 1.25
SLACK_TOKENS = 512
"""About one short request with its answer: less would send every second one elsewhere while little is to do."""
LATELY_TOKENS = 65_536
"""After so many tokens that all executors were given, what was given before counts half."""
MAX_NAMES = 16_384
"""Beginnings that are remembered of one executor: half a million tokens of different prompts."""


class KnownPrefixes:
    """Beginnings of prompts that one executor was given; the least recently used are forgotten first.

    A longer beginning is never remembered without the shorter ones of the same prompt.
    """

    __slots__ = ("_most", "_names")

    def __init__(self, most: int = MAX_NAMES) -> None:
        self._most = most
        self._names: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def match(self, names: Sequence[bytes]) -> int:
        """How many of these names of one prompt, the shortest first, are known."""
        known = self._names
        return bisect_left(names, True, key=lambda name: name not in known)

    def add(self, names: Sequence[bytes]) -> None:
        """The executor has got a prompt with these beginnings."""
        known = self._names
        for name in reversed(names[: self._most]):
            known[name] = None
            known.move_to_end(name)
        while len(known) > self._most:
            known.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request is to go. `warm_tokens` of its prompt were computed there."""

    executor: str
    warm_tokens: int


@dataclass(slots=True)
class RouteCounts:
    """Dispatched requests: `warm` where most of their prompt was known, `shed` elsewhere, `cold` where none was.

    `warm_tokens` are those of prompts that were computed before as far as is known, `prompt_tokens` all.
    """

    warm: int = 0
    shed: int = 0
    cold: int = 0
    prompt_tokens: int = 0
    warm_tokens: int = 0


@dataclass(slots=True)
class _Given:
    """What is left to compute of a dispatched request."""

    executor: str
    prompt_left: int
    answer_left: int


class PrefixRouting:
    """The executors of one version, as far as requests were dispatched to them."""

    def __init__(self, answers: AnswerLengths) -> None:
        self.counts = RouteCounts()
        self._answers = answers
        self._known: dict[str, KnownPrefixes] = {}
        self._to_do: dict[str, int] = {}
        self._lately: dict[str, float] = {}
        self._given: dict[bytes, _Given] = {}

    # -- choosing ------------------------------------------------------------------------------------------------------

    def place(self, prompt: PromptRoute, executors: Sequence[str]) -> Placement:
        """The one of these executors, at least one, for a request; of equals the first."""
        names = prompt.names()
        warm = {executor: self._match(executor, names) for executor in executors}
        to_do = {executor: self._to_do.get(executor, 0) for executor in executors}
        lately = self._shares(executors)
        most_to_do = BOUND * sum(to_do.values()) / len(executors) + SLACK_TOKENS
        most_lately = BOUND * sum(lately.values()) / len(executors) + SLACK_TOKENS
        fit = [e for e in executors if to_do[e] <= most_to_do + warm[e] and lately[e] <= most_lately + warm[e]]
        if fit:
            chosen = min(fit, key=lambda executor: (-warm[executor], to_do[executor], lately[executor]))
        else:  # one has less to do, another was given less lately
            chosen = min(executors, key=lambda executor: (to_do[executor], lately[executor]))
        return Placement(chosen, warm[chosen])

    def _match(self, executor: str, names: Sequence[bytes]) -> int:
        known = self._known.get(executor)
        return blocks_of(known.match(names)) * BLOCK_TOKENS if known is not None and names else 0

    def _shares(self, executors: Sequence[str]) -> Mapping[str, float]:
        """What each was given lately. One that is new begins with the least of the others: it does not catch up."""
        found = self._lately
        if not all(executor in found for executor in executors):
            least = min((found[executor] for executor in executors if executor in found), default=0.0)
            for executor in executors:
                found.setdefault(executor, least)
        return {executor: found[executor] for executor in executors}

    # -- what is under way ---------------------------------------------------------------------------------------------

    def given(self, request: RequestQueued, executor: str) -> None:
        """A request is dispatched to an executor."""
        prompt = prompt_of(request)
        names = prompt.names()
        warm = min(self._match(executor, names), prompt.tokens)
        best = min(max((self._match(other, names) for other in self._known), default=0), prompt.tokens)
        counts = self.counts
        counts.prompt_tokens += prompt.tokens
        counts.warm_tokens += warm
        counts.warm += 0 < warm == best
        counts.shed += warm < best
        counts.cold += best == 0
        self._take(request, executor, warm, names)

    def found(self, request: RequestQueued, executor: str) -> None:
        """A predecessor has dispatched a request."""
        names = prompt_of(request).names()
        self._take(request, executor, self._match(executor, names), names)

    def _take(self, request: RequestQueued, executor: str, warm: int, names: Sequence[bytes]) -> None:
        self.ended(request.id)
        prompt_left = max(1, prompt_of(request).tokens - warm)
        one = self._given[request.id] = _Given(executor, prompt_left, self._answers.expected(request))
        tokens = one.prompt_left + one.answer_left
        self._to_do[executor] = self._to_do.get(executor, 0) + tokens
        fading = 0.5 ** (tokens / LATELY_TOKENS)
        for other in self._lately:
            self._lately[other] *= fading
        self._lately[executor] = self._lately.get(executor, 0.0) + tokens
        if names:
            self._known.setdefault(executor, KnownPrefixes()).add(names)

    def began(self, request_id: bytes) -> None:
        """A request has its first response, so its prompt is computed."""
        one = self._given.get(request_id)
        if one is not None:
            self._to_do[one.executor] -= one.prompt_left
            one.prompt_left = 0

    def ended(self, request_id: bytes, *, took_nothing: bool = False) -> None:
        """A request has ended, or came back; `took_nothing`: its prompt was not computed. Unknown ones are ignored."""
        one = self._given.pop(request_id, None)
        if one is not None:
            left = one.prompt_left + one.answer_left
            self._to_do[one.executor] -= left
            if took_nothing and one.prompt_left:
                self._lately[one.executor] = max(0.0, self._lately[one.executor] - left)

    # -- executors -----------------------------------------------------------------------------------------------------

    def loaded(self, executor: str) -> None:
        """An executor has loaded the version again: it has computed nothing."""
        self._known.pop(executor, None)

    def lose(self, executor: str) -> None:
        """An executor does not serve the version any more."""
        self._known.pop(executor, None)
        self._lately.pop(executor, None)
        self._to_do.pop(executor, None)
        for request_id in [i for i, one in self._given.items() if one.executor == executor]:
            del self._given[request_id]

    def to_do(self) -> dict[str, int]:
        """Tokens that each executor has still to compute, as far as is known here."""
        return dict(self._to_do)

    def remembered(self) -> int:
        """Beginnings of prompts that are remembered, of all executors."""
        return sum(map(len, self._known.values()))
