"""One request as the scheduler of steps sees it: its tokens, how many of them are computed, and its blocks. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from charonia.generation.block_hashes import next_hash


class ScheduledRequest:
    """Keys and values of its first `computed` tokens are in `blocks`.

    It decodes when one token is left to compute, and prefills when more are. All fields belong to the scheduler.
    """

    __slots__ = (
        "adapter",
        "adapter_slot",
        "answer",
        "blocks",
        "capacity",
        "computed",
        "hit_tokens",
        "is_long",
        "is_running",
        "key",
        "max_tokens",
        "named",
        "names",
        "number",
        "preemptions",
        "priority",
        "prompt",
        "root",
        "scored",
        "table",
    )

    def __init__(
        self,
        key: bytes,
        prompt: npt.NDArray[np.int32],
        answer: list[int],
        max_tokens: int,
        adapter: str,
        priority: int,
        number: int,
        root: int,
    ) -> None:
        self.key = key
        self.prompt = prompt
        self.answer = answer
        """The tokens that were generated, those of an earlier attempt included. The caller appends to it."""
        self.max_tokens = max_tokens
        self.adapter = adapter
        self.priority = priority
        self.number = number
        """Of its arrival: a later one has a larger number."""
        self.root = root
        self.computed = 0
        self.blocks: list[int] = []
        self.capacity = 0
        """How many tokens its blocks hold."""
        self.table: npt.NDArray[np.int32] | None = None
        """`blocks` as an array; None after they changed. `step_input` keeps it."""
        self.names: list[int] = []
        """The hashes of its full blocks, as far as they are known."""
        self.named = 0
        """How many of its blocks were given their names in the pool."""
        self.preemptions = 0
        self.adapter_slot = -1
        self.hit_tokens = 0
        """How many tokens it did not have to compute when it was last admitted."""
        self.scored: int | None = None
        """How many tokens of the prompt are followed by one whose probability is known; None: it is not wanted."""
        self.is_long = False
        self.is_running = False

    @property
    def order(self) -> tuple[int, int]:
        """The smallest goes first."""
        return (self.priority, self.number)

    @property
    def length(self) -> int:
        """The tokens of prompt and answer."""
        return len(self.prompt) + len(self.answer)

    @property
    def left(self) -> int:
        """Tokens that are still to be computed before the next one can be sampled."""
        return self.length - self.computed

    def to_score(self, count: int) -> tuple[int, int]:
        """The places of the prompt, among the next `count` tokens, whose logits say how likely the token after was."""
        if self.scored is None:
            return 0, 0
        begin, end = max(self.computed, self.scored), min(self.computed + count, len(self.prompt) - 1)
        return begin, max(begin, end)

    def tokens(self, begin: int, end: int) -> npt.NDArray[np.int32]:
        """Tokens of prompt and answer, `end` excluded."""
        at = len(self.prompt)
        if end <= at:
            return self.prompt[begin:end]
        answer = np.array(self.answer[max(begin - at, 0) : end - at], np.int32)
        return answer if begin >= at else np.concatenate((self.prompt[begin:], answer))

    def names_to(self, count: int, block_tokens: int) -> list[int]:
        """The hashes of its first blocks, `count` or as many as are known more. Those blocks have to be full."""
        names = self.names
        while len(names) < count:
            begin = len(names) * block_tokens
            parent = names[-1] if names else self.root
            names.append(next_hash(parent, self.tokens(begin, begin + block_tokens)))
        return names
