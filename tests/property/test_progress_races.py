"""Every order in which runs of a request, their owner, cancels and settlements can meet in the log: no token is lost, none
is there twice, none is of a run that was given up, and nothing is left of what has ended.
"""

from __future__ import annotations

import asyncio
import hashlib

from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_log.log import MemoryLog

from charonia.calls.waiters import Visible
from charonia.eventlog.port import FENCED, OTHERWISE, Limits, ProgressPart

M = "m"
REQUESTS = 3
TOKENS = 6

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "step", "step", "retry", "lose", "lose", "end", "cancel", "read"]),
        st.integers(0, REQUESTS - 1),
        st.integers(0, 3),
    ),
    max_size=60,
)


def token(request_id: bytes, before: list[bytes]) -> bytes:
    """The token that follows these. A run that goes on from others gives others from there on."""
    return hashlib.blake2b(request_id + b"".join(before), digest_size=4).digest()


def undisturbed(request_id: bytes, count: int) -> list[bytes]:
    tokens: list[bytes] = []
    while len(tokens) < count:
        tokens.append(token(request_id, tokens))
    return tokens


class Run:
    """One attempt at an executor, which goes on whatever the log has decided meanwhile."""

    def __init__(self, request_id: bytes, attempt: int, accepted: list[bytes]) -> None:
        self.id, self.attempt = request_id, attempt
        self.tokens = list(accepted)
        self.written = len(accepted)
        self.dropped = False


class World:
    def __init__(self) -> None:
        self.log = MemoryLog()
        self.ids = [bytes(15) + bytes([n]) for n in range(REQUESTS)]
        self.runs: dict[bytes, list[Run]] = {one: [] for one in self.ids}
        self.seen: dict[bytes, list[bytes]] = {one: [] for one in self.ids}
        self.visible = {one: Visible(repeatable=True) for one in self.ids}
        self.over: set[bytes] = set()

    async def begin(self) -> None:
        await self.log.accept(M, 0, 0, [(one, 1) for one in self.ids], [b"r", b"x"], Limits())
        self.token = await self.log.take_ownership(M, "owner", "")
        for one in self.ids:
            await self.dispatch(one)

    async def dispatch(self, one: bytes) -> None:
        """The owner gives the request to another executor, which reads what was accepted."""
        attempt = len(self.runs[one]) + 1
        (going,) = await self.log.begin_attempt(M, self.token, [one], attempt)
        if not going:
            assert one in self.over
            return
        (accepted,) = await self.log.progress(M, [one])
        run = Run(one, attempt, accepted)
        self.runs[one].append(run)
        self.replies(run, 0, accepted)

    async def act(self, what: str, one: bytes, which: int) -> None:
        run = self.runs[one][which % len(self.runs[one])]
        if what == "lose":
            if one not in self.over:
                await self.dispatch(one)
        elif what in ("step", "retry"):
            await self.step(run, again=what == "retry")
        elif what == "end":
            if len(run.tokens) >= TOKENS and not run.dropped:
                (won,) = await self.log.settle(M, [(one, run.attempt)], None, [])
                assert won is (one not in self.over and run is self.runs[one][-1])
                self.over |= {one} if won else set()
        elif what == "cancel":
            (won,) = await self.log.settle(M, [(one, 2**31 - 1)], None, [])
            assert won is (one not in self.over)
            self.over.add(one)
        else:
            (accepted,) = await self.log.progress(M, [one])
            assert accepted == ([] if one in self.over else undisturbed(one, len(accepted)))

    async def step(self, run: Run, *, again: bool) -> None:
        """A step of the engine, whose token is written; `again`: the log's first answer was lost."""
        if run.dropped:
            return
        run.tokens.append(token(run.id, run.tokens))
        part = ProgressPart(run.id, run.attempt, run.written, run.tokens[run.written :])
        (length,) = await self.log.append_progress(M, [part])
        if again:
            assert await self.log.append_progress(M, [part]) == [length]
        assert length != OTHERWISE
        current = run.id not in self.over and run is self.runs[run.id][-1]
        assert (length == FENCED) is not current
        if length == FENCED:
            run.dropped = True
            return
        assert length == len(run.tokens)
        self.replies(run, run.written, run.tokens[run.written :])
        run.written = length

    def replies(self, run: Run, first: int, tokens: list[bytes]) -> None:
        for index, one in enumerate(tokens, first):
            if self.visible[run.id].admits((run.attempt, index), final=False):
                self.seen[run.id].append(one)

    async def check(self) -> None:
        for one in self.ids:
            assert self.seen[one] == undisturbed(one, len(self.seen[one]))
        left = {one for one in await self.log.progress_ids(M)}
        assert left <= set(self.ids) - self.over


@settings(max_examples=examples(300))
@given(STEPS)
def test_no_token_is_lost_or_doubled(steps: list[tuple[str, int, int]]) -> None:
    async def scenario() -> None:
        world = World()
        await world.begin()
        for what, number, which in steps:
            await world.act(what, world.ids[number], which)
            await world.check()
        await world.log.settle(M, [(one, 2**31 - 1) for one in world.ids], None, [])
        assert await world.log.progress_ids(M) == []

    asyncio.run(scenario())
