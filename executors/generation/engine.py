"""The seam between instances that serve requests and engines that generate text, and the one between engine and model.

Pure. An `Engine` runs many requests at a time and gives tokens after each step. Our own does that over a `Decoder`,
which only turns token ids into logits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from charonia.generation.parameters import SamplingParameters

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What an engine needs of a request. `key` is unique among those that run.

    `emitted` are the tokens that an earlier attempt gave: generation continues after them, and they are not given
    again. Token `i` of a request depends on weights, adapter, prompt, the tokens before it, `parameters` and `i` alone.
    """

    key: bytes
    prompt: Sequence[int]
    parameters: SamplingParameters
    adapter: str = ""
    priority: int = 0
    """A smaller number goes first, as in Triton; 0 is the model's default level."""
    emitted: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One candidate for a place in the text. `rank` is 1 for the most likely token."""

    token: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What one step gave one request: its tokens from `index` on. `finish` is "", "stop" or "length".

    `text` is what is certain since the event before: it may lack the end of these tokens, and have more of earlier
    ones. An event with `error` ends its request. `logprobs` has a tuple per token, the chosen one first, if asked for.
    """

    key: bytes
    index: int
    tokens: tuple[int, ...]
    text: str = ""
    finish: str = ""
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    error: Exception | None = None
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None
    """With the first token, if asked for: a tuple for each token of the prompt but the first, that token first."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine has to do. `waiting_tokens` are those of prompts that are still to be read."""

    running: int
    waiting: int
    waiting_tokens: int
    free_blocks: int
    blocks: int


class EngineObserver(Protocol):
    """Counts what an engine does. What it raises is logged, and it is not called again."""

    def arrived(self, key: bytes) -> None:
        """A request has come. Called in the event loop, before the engine gets it."""

    def admitted(self, key: bytes, prompt_tokens: int) -> None:
        """Its prompt was read. Called in any thread, before the engine gets it."""

    def left(self, key: bytes) -> None:
        """A request has ended or was given up; its steps may still be reported. Called in the event loop."""

    def stepped(self, events: Sequence[TokenEvent], load: EngineLoad) -> None:
        """A step was made. Called in the engine's thread."""

    def closed(self) -> None:
        """The engine makes no more steps. Called in its thread."""


class Engine(Protocol):
    """Continuous batching. All methods but `admit` and `cancel` are called in one thread; none waits for a request."""

    def admit(self, request: GenerationRequest) -> None:
        """Take a request; it begins in a later step. Raises `InvalidArgument` for one that can never run."""

    def step(self) -> Sequence[TokenEvent]:
        """One pass of the model over all requests that run; empty when there is nothing to do."""

    def cancel(self, keys: Collection[bytes]) -> None:
        """Forget requests: their slots and blocks are free before the next step. Unknown keys are ignored."""

    def load(self) -> EngineLoad: ...

    def close(self) -> None:
        """Give up the model; a second call does nothing."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """One pass: the new tokens of `B` sequences, `T` in all, and the blocks that hold keys and values of each.

    `tokens`, `positions` [T]; `past_lengths` [B], how many tokens of each are in its blocks already; `begins` [B + 1]
    into `tokens`; `blocks`, `block_begins` [B + 1]; `sampled` [S], the places in `tokens` whose logits are wanted:
    first those of next tokens, then those that say how likely tokens of prompts were; `adapters` [T], the slot of the
    adapter of each token, -1 for none. Sequences that decode come first, with one token each. The arrays are used again
    for the next step.
    """

    tokens: Ids
    positions: Ids
    past_lengths: Ids
    begins: Ids
    blocks: Ids
    block_begins: Ids
    sampled: Ids
    adapters: Ids


class Decoder(Protocol):
    """A model with paged keys and values. Called in one thread."""

    vocabulary: int
    context: int
    """The most tokens of prompt and answer together."""
    block_tokens: int
    """How many tokens a block holds."""
    blocks: int
    adapter_slots: int

    def step(self, step: StepInput) -> npt.NDArray[np.float32]:
        """Logits [S, vocabulary]; keys and values of all `T` tokens are in their blocks afterwards."""

    def load_adapter(self, slot: int, directory: str) -> None:
        """Put an adapter's weights in a slot. Raises `InvalidArgument` for files that do not fit the model."""

    def close(self) -> None:
        """Give up the model; a second call does nothing."""
