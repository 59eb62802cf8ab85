"""Our own engine: the scheduler of steps over a decoder, then sampling, and the rules for the end of a text.

Pure. `step_scheduler` decides what a step computes, `step_input` makes its arrays, `generation_state` follows each
request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from charonia.errors import CharoniaError, InvalidArgument, class_of_failure
from charonia.generation.parameters import check_vocabulary
from charonia.generation.sampling import Sampled, sample
from charonia.generation.tokenizer import Tokenizer

from .engine import Decoder, EngineLoad, GenerationRequest, TokenEvent, TokenLogprob
from .generation_state import GenerationState
from .scheduled_request import ScheduledRequest
from .step_input import StepBuilder
from .step_scheduler import SchedulerSettings, StepPlan, StepScheduler


@dataclass(slots=True)
class EngineCounters:
    """What an engine has done since it was made. `hit_tokens` were found computed, of the `queried_tokens` of requests
    that began: prompts, and what they had generated before they were preempted or came from another executor.
    """

    steps: int = 0
    prompt_tokens: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    adapter_loads: int = 0


@dataclass(frozen=True, slots=True)
class _Adapter:
    """`name` is unique among all that ever had the name of the adapter, so that their blocks are never mixed up."""

    name: str
    directory: str


class TokenEngine:
    """Implements `Engine`. `adapters` are the names of adapters that requests may use, and their directories.

    `salt` keeps the hashes of its blocks apart from those of other models.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        settings: SchedulerSettings,
        *,
        adapters: Mapping[str, str] = MappingProxyType({}),
        salt: bytes = b"",
    ) -> None:
        self.counters = EngineCounters()
        self.scheduler = StepScheduler(
            settings,
            blocks=decoder.blocks,
            block_tokens=decoder.block_tokens,
            context=decoder.context,
            adapter_slots=decoder.adapter_slots,
            salt=salt,
        )
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._builder = StepBuilder(settings.max_num_batched_tokens, settings.max_num_seqs, decoder.block_tokens)
        self._vocabulary = min(decoder.vocabulary, tokenizer.vocabulary)
        """Models may have more rows than their tokenizer has tokens: none of those is ever sampled."""
        self._states: dict[bytes, GenerationState] = {}
        self._inbox: deque[GenerationState | bytes] = deque()
        """Requests and keys of cancelled ones, from any thread, for the next step."""
        self._adapters: dict[str, _Adapter] = {}
        self._directories: dict[str, str] = {}
        self._adapter_number = 0
        self.change_adapters(adapters)

    @property
    def context(self) -> int:
        """The most tokens of prompt and answer together."""
        return self.scheduler.context

    @property
    def adapters(self) -> Mapping[str, str]:
        """The names that requests may use, and their directories."""
        return {name: adapter.directory for name, adapter in self._adapters.items()}

    # -- from any thread -----------------------------------------------------------------------------------------------

    def change_adapters(self, adapters: Mapping[str, str]) -> None:
        """Let requests use these adapters from now on. Requests that have begun keep theirs."""
        changed: dict[str, _Adapter] = {}
        for name, directory in adapters.items():
            old = self._adapters.get(name)
            if old is None or old.directory != directory:
                self._adapter_number += 1
                old = _Adapter(f"{name}\0{self._adapter_number}", directory)
                self._directories[old.name] = directory
            changed[name] = old
        self._adapters = changed

    def admit(self, request: GenerationRequest) -> None:
        """See `Engine`. Compiles the request's grammar, which may take a while: call it in a thread of its own then."""
        if request.key in self._states:
            raise InvalidArgument("a request with this key is running")
        adapter = self._adapter_of(request)
        self.scheduler.check(len(request.prompt), adapter)
        prompt = np.asarray(request.prompt, np.int64)
        if not 0 <= prompt.min() <= prompt.max() < self._vocabulary:
            raise InvalidArgument(f"token ids of a prompt must be from 0 to {self._vocabulary - 1}")
        check_vocabulary(request.parameters, self._vocabulary)
        max_tokens = min(request.parameters.max_tokens, self.context - len(prompt))
        state = GenerationState(request, self._tokenizer, adapter, max_tokens)
        self._states[request.key] = state
        self._inbox.append(state)

    def cancel(self, keys: Collection[bytes]) -> None:
        self._inbox.extend(keys)

    def _adapter_of(self, request: GenerationRequest) -> str:
        if not request.adapter:
            return ""
        found = self._adapters.get(request.adapter)
        if not self._decoder.adapter_slots or not self._adapters:
            raise InvalidArgument("LoRA feature is not enabled.")
        if found is None:
            raise InvalidArgument(
                f"LoRA {request.adapter} is not supported, we currently support {list(self._adapters)}"
            )
        return found.name

    # -- in the thread of the engine -----------------------------------------------------------------------------------

    def load(self) -> EngineLoad:
        scheduler = self.scheduler
        return EngineLoad(
            scheduler.running,
            scheduler.waiting + len(self._inbox),
            scheduler.waiting_tokens,
            scheduler.pool.available,
            scheduler.pool.size,
        )

    def close(self) -> None:
        self._decoder.close()

    def step(self) -> Sequence[TokenEvent]:
        events: list[TokenEvent] = []
        if self._inbox:
            self._take_inbox(events)
        plan = self._plan(events)
        if not plan.decodes and not plan.chunks:
            return events
        logits = self._decoder.step(self._builder.build(plan))[:, : self._vocabulary]
        sampling, scoring = plan.sampling(), plan.scoring()
        self.scheduler.complete(plan)
        if scoring:
            self._score(scoring, logits[len(sampling) :])
            logits = logits[: len(sampling)]
        self._count(plan)
        if sampling:
            self._sample(sampling, logits, events)
        return events

    def _take_inbox(self, events: list[TokenEvent]) -> None:
        while self._inbox:
            given = self._inbox.popleft()
            if isinstance(given, bytes):
                self._forget(given)
                continue
            request = given.request
            if self._states.get(request.key) is not given:
                continue  # cancelled by another thread, between the two lines by which it was admitted
            if given.finish:  # the earlier attempt had emitted the last token, but did not say so
                del self._states[request.key]
                events.append(TokenEvent(request.key, len(request.emitted), (), finish=given.finish))
                continue
            self.scheduler.add(
                request.key,
                request.prompt,
                max_tokens=given.max_tokens,
                answer=given.row.emitted,
                adapter=given.adapter,
                priority=request.priority,
                scores_prompt=given.prompt_logprobs is not None,
            )
            self.counters.prompt_tokens += len(request.prompt)

    def _forget(self, key: bytes) -> None:
        """Free what a request has; unknown ones are ignored."""
        self._states.pop(key, None)
        scheduled = self.scheduler.find(key)
        if scheduled is not None:
            self.scheduler.remove(scheduled)

    def _plan(self, events: list[TokenEvent]) -> StepPlan:
        """The next step. Its adapters are loaded; requests with one that cannot be loaded fail."""
        while True:
            plan = self.scheduler.plan()
            self.counters.preemptions += len(plan.preempted)
            failed = False
            for slot, name in plan.adapters:
                try:
                    self._decoder.load_adapter(slot, self._directories[name])
                    self.counters.adapter_loads += 1
                except CharoniaError as error:
                    failed = True
                    for one in self.scheduler.drop_adapter(name):
                        self._fail(one.key, error, events)
            if not failed:
                return plan

    def _fail(self, key: bytes, error: Exception, events: list[TokenEvent]) -> None:
        state = self._states[key]
        self._forget(key)
        events.append(TokenEvent(key, len(state.row.emitted), (), error=error))

    def _count(self, plan: StepPlan) -> None:
        counters = self.counters
        counters.steps += 1
        counters.computed_tokens += plan.tokens
        for one, count in plan.chunks:
            if one.computed - count == one.hit_tokens:
                counters.queried_tokens += one.length
                counters.hit_tokens += one.hit_tokens

    def _score(self, scoring: Sequence[tuple[ScheduledRequest, int, int]], logits: npt.NDArray[np.float32]) -> None:
        """Note how likely tokens of prompts were. The rows are theirs, in this order."""
        at = 0
        for one, begin, end in scoring:
            state = self._states[one.key]
            if state.score_error is None:
                state.score(logits[at : at + end - begin])
            at += end - begin

    # -- sampling ------------------------------------------------------------------------------------------------------

    def _sample(
        self, sampling: list[ScheduledRequest], logits: npt.NDArray[np.float32], events: list[TokenEvent]
    ) -> None:
        """Sample a token for each of these rows. A row that cannot be sampled fails its own request only."""
        states = [self._states[one.key] for one in sampling]
        failed: dict[int, Exception] = {}
        for row, state in enumerate(states):
            if state.matcher is not None:
                try:
                    state.constrain()
                except Exception as error:
                    failed[row] = error
        try:
            sampled: Sequence[Sampled | Exception] = sample(logits, [state.row for state in states])
        except Exception:
            sampled = [_sampled_alone(logits[row : row + 1], state) for row, state in enumerate(states)]
        for row, (scheduled, state) in enumerate(zip(sampling, states, strict=True)):
            self._accept(scheduled, state, failed.get(row, sampled[row]), events)

    def _accept(
        self,
        scheduled: ScheduledRequest,
        state: GenerationState,
        sampled: Sampled | Exception,
        events: list[TokenEvent],
    ) -> None:
        if state.score_error is not None:
            sampled = state.score_error
        if isinstance(sampled, Exception):
            self._fail(scheduled.key, _as_error(sampled), events)
            return
        token = sampled.token
        try:
            text = state.accept(token)
        except Exception as error:
            self._fail(scheduled.key, _as_error(error), events)
            return
        self.counters.generated_tokens += 1
        logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
        if sampled.logprobs:
            logprobs = (tuple(TokenLogprob(one.token, one.logprob, one.rank) for one in sampled.logprobs),)
        index = len(state.row.emitted) - 1
        prompt = None if state.prompt_logprobs is None else tuple(state.prompt_logprobs)
        state.prompt_logprobs = None
        events.append(TokenEvent(scheduled.key, index, (token,), text, state.finish, logprobs, prompt_logprobs=prompt))
        if state.finish:
            self._forget(scheduled.key)


def _sampled_alone(logits: npt.NDArray[np.float32], state: GenerationState) -> Sampled | Exception:
    try:
        return sample(logits, [state.row])[0]
    except Exception as error:
        return error


def _as_error(error: Exception) -> CharoniaError:
    if isinstance(error, CharoniaError):
        return error
    return class_of_failure(error)(f"the next token could not be sampled: {type(error).__name__}: {error}")
