"""Decides what each step of a decoder computes: which requests run, how many tokens of each, in which blocks.

Pure: it knows no time, and does not run the model. `plan` says what the next step computes, `complete` that it was
computed. In between nothing else is called but `remove`.

- Running requests that decode come first, one token each. What is left of the budget is for prompts, in chunks.
- Prompts are read by level, then in order. Within a level one long prompt is read at a time, and it leaves half of the
  budget to short ones, which therefore do not wait behind it.
- A request gets all blocks of its prompt when it is admitted, and one block at a time as it decodes. When none is left,
  the last request of the lowest level is preempted: it gives up its blocks, waits, and is computed again.
- A request that was preempted `max_preemptions` times gets the blocks for its longest answer at once, and is not
  preempted again.
- A waiting request of a higher level preempts running ones of lower levels when slots or blocks are full.
- No request overtakes one of its level that waits for a slot or for blocks. One that waits for its turn as a long
  prompt, for a slot of an adapter, or for a prefix that is being computed, is overtaken.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from charonia.errors import InvalidArgument
from charonia.generation.block_hashes import root_hash

from .adapter_slots import AdapterSlots
from .block_pool import BlockPool
from .scheduled_request import ScheduledRequest

_MOST_SCORED = 64
"""Tokens of a chunk whose logits are all wanted: those of 64 are 13 MB for 50,000 tokens of vocabulary."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """The bounds of one engine; those of the model come from its decoder."""

    max_num_seqs: int = 32
    """How many requests run at a time."""
    max_num_batched_tokens: int = 512
    """How many tokens one step computes."""
    long_prefill_tokens: int = 128
    """A prompt with more tokens to compute is long."""
    max_preemptions: int = 3
    """How often one request may be preempted."""
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise InvalidArgument(f"max_num_seqs must be at least 1, got {self.max_num_seqs}")
        if self.max_num_batched_tokens <= self.max_num_seqs:
            raise InvalidArgument(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be larger than max_num_seqs "
                f"({self.max_num_seqs})"
            )


@dataclass(slots=True)
class StepPlan:
    """What one step computes: one token of each of `decodes`, and so many of each of `chunks`.

    Before it, `adapters` are to be loaded: slot and name. `preempted` lost their blocks.
    """

    decodes: list[ScheduledRequest] = field(default_factory=list)
    chunks: list[tuple[ScheduledRequest, int]] = field(default_factory=list)
    adapters: list[tuple[int, str]] = field(default_factory=list)
    preempted: list[ScheduledRequest] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return len(self.decodes) + sum(count for _, count in self.chunks)

    def sampling(self) -> list[ScheduledRequest]:
        """The requests that get a next token from this step, in the order of its rows. Only before `complete`."""
        return self.decodes + [one for one, count in self.chunks if count == one.left]

    def scoring(self) -> list[tuple[ScheduledRequest, int, int]]:
        """The places of prompts, all but the last one of each, whose logits are wanted. Only before `complete`."""
        found = [(one, *one.to_score(count)) for one, count in self.chunks if one.scored is not None]
        return [each for each in found if each[1] < each[2]]


class StepScheduler:
    """Of a decoder with `blocks` blocks of `block_tokens` tokens, a `context` and `adapter_slots`."""

    def __init__(
        self,
        settings: SchedulerSettings,
        *,
        blocks: int,
        block_tokens: int,
        context: int,
        adapter_slots: int = 0,
        salt: bytes = b"",
    ) -> None:
        self.settings = settings
        self.pool = BlockPool(blocks)
        self.adapters = AdapterSlots(adapter_slots)
        self.block_tokens = block_tokens
        self.context = min(context, blocks * block_tokens)
        """The most tokens of one request: what the model reads, or what fits the blocks."""
        self.preemptions = 0
        self._salt = salt
        self._requests: dict[bytes, ScheduledRequest] = {}
        self._waiting: list[ScheduledRequest] = []
        self._prefilling: list[ScheduledRequest] = []
        self._decoding: list[ScheduledRequest] = []
        self._computing: dict[int, ScheduledRequest] = {}
        """Blocks of prompts that running requests are about to compute."""
        self._number = 0

    # -- requests ------------------------------------------------------------------------------------------------------

    def check(self, prompt_tokens: int, adapter: str) -> None:
        """Raises `InvalidArgument` for a request that can never run."""
        if prompt_tokens < 1:
            raise InvalidArgument("the prompt has no tokens")
        if prompt_tokens >= self.context:
            raise InvalidArgument(
                f"the prompt has {prompt_tokens} tokens, which leaves none for an answer: the model takes at most "
                f"{self.context} of both"
            )
        if adapter and not self.adapters.count:
            raise InvalidArgument("LoRA feature is not enabled.")

    def add(
        self,
        key: bytes,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        answer: list[int] | None = None,
        adapter: str = "",
        priority: int = 0,
        scores_prompt: bool = False,
    ) -> ScheduledRequest:
        """A new request waits. Raises `InvalidArgument` for one that can never run, or whose key is known.

        With `scores_prompt` the logits of the whole prompt are wanted, so it is computed whatever the cache has.

        `answer` has the tokens that an earlier attempt generated, which `max_tokens` counts. Sampled tokens are to be
        appended to it, after `complete`.
        """
        if key in self._requests:
            raise InvalidArgument("a request with this key is running")
        tokens = np.asarray(prompt, np.int32)
        self.check(len(tokens), adapter)
        self._number += 1
        limit = min(max_tokens, self.context - len(tokens))
        root = root_hash(adapter, self._salt)
        one = ScheduledRequest(
            key, tokens, [] if answer is None else answer, limit, adapter, priority, self._number, root
        )
        one.scored = 0 if scores_prompt else None
        self._requests[key] = one
        insort(self._waiting, one, key=_order)
        return one

    def find(self, key: bytes) -> ScheduledRequest | None:
        return self._requests.get(key)

    def remove(self, one: ScheduledRequest) -> None:
        """A request ended or was cancelled: its slot and blocks are free now. A second call does nothing."""
        if self._requests.pop(one.key, None) is None:
            return
        if one.is_running:
            self._stop(one)
        else:
            self._waiting.remove(one)

    def drop_adapter(self, name: str) -> list[ScheduledRequest]:
        """An adapter could not be loaded, or is unloaded: remove its requests, and empty its slot."""
        dropped = [one for one in self._requests.values() if one.adapter == name]
        for one in dropped:
            self.remove(one)
        self.adapters.forget(name)
        return dropped

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of prompts that are still to be computed."""
        return sum(one.left for one in self._waiting) + sum(one.left for one in self._prefilling)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """What the next step computes; empty only when there is no request."""
        plan = StepPlan()
        self._extend_decodes(plan)
        if self._waiting and not plan.preempted:
            self._admit(plan)
        if self._prefilling:
            self._cut_chunks(plan)
        plan.decodes = self._decoding.copy()
        return plan

    def complete(self, plan: StepPlan) -> None:
        """The step was computed. The sampled tokens are appended to the requests afterwards."""
        block_tokens = self.block_tokens
        for one in plan.decodes:
            if one.is_running:
                one.computed += 1
                if one.computed % block_tokens == 0:
                    self._name_blocks(one)
        for one, count in plan.chunks:
            if not one.is_running:
                continue
            if one.scored is not None:
                one.scored = max(one.scored, one.to_score(count)[1])
            one.computed += count
            self._name_blocks(one)
            if one.computed == one.length:
                self._prefilling.remove(one)
                self._decoding.append(one)

    def _name_blocks(self, one: ScheduledRequest) -> None:
        if not self.settings.prefix_cache:
            return
        full = one.computed // self.block_tokens
        names = one.names_to(full, self.block_tokens)
        for index in range(one.named, full):
            self.pool.name(one.blocks[index], names[index])
            if self._computing.get(names[index]) is one:
                del self._computing[names[index]]
        one.named = max(one.named, full)

    # -- blocks and preemption -----------------------------------------------------------------------------------------

    def _extend_decodes(self, plan: StepPlan) -> None:
        """Give each request that decodes the block for its next token; preempt where there are too few."""
        for one in [one for one in self._decoding if one.computed == one.capacity]:
            while one.is_running and not self.pool.available:
                victim = max((r for r in self._running() if self._may_preempt(r)), key=_order)
                self._preempt(victim, plan)
            if one.is_running:
                self._give(one, self.pool.take(1))

    def _give(self, one: ScheduledRequest, blocks: Sequence[int]) -> None:
        one.blocks += blocks
        one.capacity = len(one.blocks) * self.block_tokens
        one.table = None

    def _running(self) -> Iterable[ScheduledRequest]:
        yield from self._prefilling
        yield from self._decoding

    def _may_preempt(self, one: ScheduledRequest) -> bool:
        return one.preemptions < self.settings.max_preemptions

    def _preempt(self, one: ScheduledRequest, plan: StepPlan) -> None:
        self._stop(one)
        one.preemptions += 1
        self.preemptions += 1
        insort(self._waiting, one, key=_order)
        plan.preempted.append(one)

    def _stop(self, one: ScheduledRequest) -> None:
        """Take a request's slot, blocks and adapter from it."""
        (self._decoding if one in self._decoding else self._prefilling).remove(one)
        for name in one.names[one.named :]:
            if self._computing.get(name) is one:
                del self._computing[name]
        self.pool.release(one.blocks)
        if one.adapter:
            self.adapters.release(one.adapter)
        one.blocks, one.table = [], None
        one.capacity = one.computed = one.named = 0
        one.is_running = False
        one.adapter_slot = -1

    # -- admission -----------------------------------------------------------------------------------------------------

    def _admit(self, plan: StepPlan) -> None:
        """Let waiting requests run, as far as there are slots, blocks and budget."""
        adapter_waits = False
        for one in self._waiting.copy():
            budget = self.settings.max_num_batched_tokens - len(self._decoding)
            short, long = self._demand(one.priority)
            if short + min(long, (budget + 1) // 2) >= budget:
                return
            if one.adapter and (adapter_waits or not self.adapters.can_hold(one.adapter)):
                adapter_waits = True  # later ones must not keep all slots in use for ever
                continue
            found = self._find_prefix(one)
            if found is None:
                continue
            if long and short + long >= budget and self._is_long(one, found):
                continue  # the long prompt before it is not read to its end in this step
            self.pool.hold(found)
            if not self._make_place(one, found, plan):
                self.pool.release(found)
                return
            self._start(one, found, plan)

    def _demand(self, priority: int) -> tuple[int, int]:
        """How many tokens running prefills have to compute before a request of a level: short and long prompts."""
        short, long = 0, 0
        for one in self._prefilling:
            if one.priority <= priority:
                if one.is_long:
                    long += one.left
                else:
                    short += one.left
        return short, long

    def _find_prefix(self, one: ScheduledRequest) -> list[int] | None:
        """The computed blocks that its text begins with; None: wait, the next is being computed by another request.

        At least one token is left to compute, as its logits are needed.
        """
        if not self.settings.prefix_cache:
            return []
        count = (one.length - 1 if one.scored is None else min(one.scored, one.length - 1)) // self.block_tokens
        names = one.names_to(count, self.block_tokens)[:count]
        found = self.pool.find(names)
        if len(found) < count:
            computing = self._computing.get(names[len(found)])
            if computing is not None and computing.priority <= one.priority:
                return None
        return found

    def _is_long(self, one: ScheduledRequest, found: Sequence[int]) -> bool:
        return one.length - len(found) * self.block_tokens > self.settings.long_prefill_tokens

    def _needed(self, one: ScheduledRequest) -> int:
        """How many blocks it gets when it is admitted: for its tokens, or for its longest answer."""
        tokens = one.length if self._may_preempt(one) else len(one.prompt) + one.max_tokens
        return -(-tokens // self.block_tokens)

    def _make_place(self, one: ScheduledRequest, found: Sequence[int], plan: StepPlan) -> bool:
        """Whether there are a slot and blocks, perhaps after preempting requests of lower levels.

        Without preemption a block for each running request is left, so that the new one is not preempted at once.
        """
        needed = self._needed(one) - len(found)
        slots = self.settings.max_num_seqs - self.running
        if slots > 0 and needed + self.running <= self.pool.available:
            return True
        blocks = self.pool.available
        lower = sorted((r for r in self._running() if r.priority > one.priority and self._may_preempt(r)), key=_order)
        victims: list[ScheduledRequest] = []
        while lower and (slots < 1 or needed > blocks):
            victims.append(lower.pop())
            slots += 1
            blocks += self.pool.held_once(victims[-1].blocks)
        if not victims or slots < 1 or needed > blocks:
            return False
        for victim in victims:
            self._preempt(victim, plan)
        return True

    def _start(self, one: ScheduledRequest, found: list[int], plan: StepPlan) -> None:
        self._waiting.remove(one)
        self._give(one, found + self.pool.take(self._needed(one) - len(found)))
        one.computed = one.hit_tokens = len(found) * self.block_tokens
        one.named = len(found)
        one.is_long = self._is_long(one, found)
        one.is_running = True
        for name in one.names[len(found) :]:
            self._computing[name] = one
        if one.adapter:
            one.adapter_slot, needs_load = self.adapters.hold(one.adapter)
            if needs_load:
                plan.adapters.append((one.adapter_slot, one.adapter))
        self._prefilling.append(one)

    # -- chunks --------------------------------------------------------------------------------------------------------

    def _cut_chunks(self, plan: StepPlan) -> None:
        """Divide what the decodes leave of the budget."""
        budget = self.settings.max_num_batched_tokens - len(self._decoding)
        prefilling = sorted(self._prefilling, key=_order)
        for priority in sorted({one.priority for one in prefilling}):
            level = [one for one in prefilling if one.priority == priority]
            long = [one for one in level if one.is_long]
            kept = min(sum(one.left for one in long), (budget + 1) // 2)
            budget -= kept
            for one in level:
                if not one.is_long:
                    budget -= _cut(one, budget, plan)
            budget += kept
            for one in long:
                budget -= _cut(one, budget, plan)


def _order(one: ScheduledRequest) -> tuple[int, int]:
    return one.order


def _cut(one: ScheduledRequest, budget: int, plan: StepPlan) -> int:
    count = min(one.left, budget)
    if one.scored is not None and one.scored < len(one.prompt) - 1:
        count = min(count, _MOST_SCORED)
    if count > 0:
        plan.chunks.append((one, count))
    return max(count, 0)
