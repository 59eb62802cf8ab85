"""Virtual counters of lanes, in tokens."""

from __future__ import annotations

from itertools import count

import pytest

from batcher.scheduling.observations import RequestQueued
from batcher.scheduling.queues.fair_sharing import TurnRules
from batcher.scheduling.queues.queueing import VersionQueue
from batcher.scheduling.queues.token_shares import FIRST_ANSWER_TOKENS, MAX_CREDIT, TokenShares
from charonia.generation.prompt_keys import PromptRoute
from charonia.wire import RequestMeta

NUMBERS = count(1)


def request(lane: int, tokens: int, max_tokens: int = 10) -> RequestQueued:
    meta = RequestMeta(1, "h", (), (), {}, b"", PromptRoute(tokens, max_tokens))
    made = RequestQueued(next(NUMBERS).to_bytes(16, "little"), 1, 0, 1, 7, 0, 0, 0, lane=lane, meta=meta)
    made.order = int.from_bytes(made.id, "little")
    return made


def served(shares: TokenShares, queue: VersionQueue, count: int) -> list[int]:
    """The lanes of the next requests, each charged as it is taken."""
    lanes = []
    for _ in range(count):
        ahead = next(iter(queue))
        (one,) = queue.take(1)
        assert one is ahead
        shares.charge(one)
        lanes.append(one.lane)
    return lanes


def queue_of(shares: TokenShares, *requests: RequestQueued) -> VersionQueue:
    rules = TurnRules({})
    rules.shares = shares
    queue = VersionQueue(rules)
    for one in requests:
        queue.append(one)
    return queue


def test_the_lane_with_the_fewest_tokens_is_next() -> None:
    shares = TokenShares({2: 2})
    queue = queue_of(shares, *[request(1, 90) for _ in range(4)], *[request(2, 90) for _ in range(6)])
    looked = [one.lane for one in queue]
    assert looked == served(shares, queue, 10) == [1, 2, 2, 1, 2, 2, 1, 2, 2, 1]


def test_an_answer_is_charged_as_those_before_were_long_and_corrected() -> None:
    shares = TokenShares({})
    first = request(1, 100, max_tokens=0)
    shares.charge(first)
    assert shares.counter(1) == 100 + FIRST_ANSWER_TOKENS
    shares.ended(first.id, 500)
    assert shares.counter(1) == 500
    second = request(1, 100, max_tokens=0)
    assert shares.answers.expected(second) == 400
    assert shares.answers.expected(request(1, 100, max_tokens=30)) == 30
    assert shares.answers.expected(request(2, 100, max_tokens=0)) == FIRST_ANSWER_TOKENS
    shares.charge(second)
    assert shares.counter(1) == 1000
    shares.ended(second.id, 0)  # refused, or cancelled before its first token
    shares.ended(second.id, 9)  # over
    assert shares.counter(1) == 500
    assert shares.answers.expected(request(1, 100, max_tokens=0)) == 400


def test_answers_of_a_model_that_does_not_count_cost_what_was_expected() -> None:
    shares = TokenShares({})
    one = request(1, 100)
    shares.charge(one)
    shares.ended(one.id, 0)
    assert shares.counter(1) == 110


def test_what_came_back_is_not_charged() -> None:
    shares = TokenShares({1: 2})
    one = request(1, 100)
    shares.charge(one)
    assert shares.counter(1) == 55
    shares.returned(one.id)
    shares.returned(one.id)
    assert shares.counter(1) == 0


@pytest.mark.parametrize("idle", [1, 2])
def test_a_lane_that_was_idle_does_not_catch_up(idle: int) -> None:
    shares = TokenShares({})
    busy = 3 - idle
    for _ in range(50):
        shares.charge(request(busy, 990))
    assert shares.counter(busy) == 50_000
    assert shares.counter(idle) == 49_000 - MAX_CREDIT
    queue = queue_of(shares, *[request(1, 990) for _ in range(20)], *[request(2, 990) for _ in range(20)])
    lanes = served(shares, queue, 20)
    assert lanes[:5] == [idle] * 5
    assert abs(lanes[6:].count(1) - lanes[6:].count(2)) <= 1
