"""Requests for text over several executors: all end whatever happens, those that share a beginning meet it, and work
and tenants' shares stay even.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import replace
from itertools import count

import numpy as np
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.scheduling.decisions import CondemnRequest, DispatchBatch, RejectRequest
from batcher.scheduling.observations import (
    BatchFinished,
    ExecutorLost,
    Observation,
    PolicyChanged,
    RequestCancelled,
    RequestQueued,
    ResponsesBegun,
    SlotFreed,
    VersionServed,
)
from batcher.scheduling.queues.token_shares import prompt_of
from batcher.scheduling.routing.prefix_routing import BOUND, SLACK_TOKENS, KnownPrefixes, PrefixRouting
from batcher.scheduling.stateless.model_state import ROUTED_PREFETCH
from batcher.scheduling.stateless.routed_dispatch import HOLD_NS, LOOKAHEAD
from batcher.scheduling.stateless.scheduler import ModelScheduler
from charonia.datatypes import DataType
from charonia.generation.prompt_keys import PromptRoute, route_of_tokens
from charonia.models.interface import ModelInterface, TensorSpec
from charonia.models.scheduling import DynamicBatching
from charonia.wire import RequestMeta

MS = 1_000_000
TEXT = TensorSpec("text_input", DataType.BYTES, (1,))
MODEL = ModelInterface(
    "m",
    "llm",
    "",
    0,
    {"text_input": TEXT},
    {"text_output": TEXT},
    decoupled=True,
    parameters={"charonia.resumable": "1"},
)


def route(prefix: int, prefix_tokens: int, own: int, own_tokens: int, max_tokens: int = 0) -> PromptRoute:
    """A prompt that begins as all others of its prefix, and ends as no other."""
    tokens = np.concatenate((np.full(prefix_tokens, prefix), np.full(own_tokens, 1000 + own)))
    return route_of_tokens(tokens, max_tokens=max_tokens)


def request(number: int, prompt: PromptRoute, now_ns: int = 0, lane: int = 0) -> RequestQueued:
    meta = RequestMeta(1, "h", (), (), {}, b"", prompt)
    return RequestQueued(number.to_bytes(16, "little"), 1, 0, 1, 7, 0, 0, now_ns, lane=lane, meta=meta)


class Cluster:
    """A scheduler, and executors that run up to `room` requests at a time and take one at a time."""

    def __init__(self, executors: int, room: int, weights: dict[int, int] | None = None, seed: int = 0) -> None:
        self.scheduler = ModelScheduler("b", 1, weights)
        self.room = room
        self.random = random.Random(seed)
        self.now_ns = 0
        self.running: dict[str, dict[str, RequestQueued]] = {}
        self.freed: set[str] = set()
        self.finished: Counter[bytes] = Counter()
        self.rejected: set[bytes] = set()
        self.given: list[tuple[RequestQueued, str]] = []
        self.see(PolicyChanged(MODEL))
        for number in range(executors):
            self.join(f"e{number}")

    def join(self, executor: str) -> None:
        self.running[executor] = {}
        self.see(VersionServed(executor, 1, "h", 1))

    def lose(self, executor: str) -> None:
        del self.running[executor]
        self.see(ExecutorLost(executor))

    def see(self, *events: Observation) -> None:
        self._carry_out(self.scheduler.observe_all(list(events), self.now_ns))

    def _carry_out(self, decisions: list[object]) -> None:
        for decision in decisions:
            if isinstance(decision, DispatchBatch):
                (one,) = decision.requests
                assert not self.is_running(one.id)
                assert one.id not in self.rejected
                self.running[decision.executor][decision.batch_id] = one
                self.given.append((one, decision.executor))
            elif isinstance(decision, RejectRequest | CondemnRequest):
                assert decision.request.id not in self.rejected
                self.rejected.add(decision.request.id)
        self.free()

    def is_running(self, request_id: bytes) -> bool:
        return any(one.id == request_id for batches in self.running.values() for one in batches.values())

    def free(self) -> None:
        """Engines with room take the next request."""
        for executor, batches in self.running.items():
            for batch_id in list(batches)[: self.room]:
                if batch_id not in self.freed:
                    self.freed.add(batch_id)
                    self.see(SlotFreed(batch_id, executor))

    def pass_time(self, until_ns: int) -> None:
        while (wakeup_ns := self.scheduler.next_wakeup()) is not None and wakeup_ns <= until_ns:
            self.now_ns = max(self.now_ns, wakeup_ns)
            self._carry_out(self.scheduler.advance(self.now_ns))
        self.now_ns = max(self.now_ns, until_ns)

    def finish(self, executor: str, tokens: int = 40) -> bool:
        """The oldest request of an executor ends with an answer of so many tokens."""
        batches = self.running[executor]
        if not batches:
            return False
        batch_id = next(iter(batches))
        one = batches.pop(batch_id)
        self.finished[one.id] += 1
        tokens += prompt_of(one).tokens
        self.see(
            ResponsesBegun(batch_id, executor, frozenset((one.id,))), BatchFinished(batch_id, executor, False, tokens)
        )
        return True


routes = st.builds(
    route, st.integers(0, 5), st.sampled_from((0, 31, 64, 200, 3000)), st.integers(0, 50), st.integers(1, 90)
)


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data(), executors=st.integers(1, 4), room=st.integers(1, 3))
def test_every_request_ends_once_whatever_happens(data: st.DataObject, executors: int, room: int) -> None:
    cluster = Cluster(executors, room)
    names, numbers, requests = count(10), count(1), dict[bytes, RequestQueued]()
    stopped: set[bytes] = set()
    for _ in range(data.draw(st.integers(5, 40))):
        what = data.draw(st.sampled_from(("arrive", "arrive", "finish", "wait", "lose", "join", "cancel")))
        living = sorted(cluster.running)
        if what == "arrive":
            made = [request(next(numbers), data.draw(routes), cluster.now_ns, lane) for lane in data.draw(lanes)]
            requests |= {one.id: one for one in made}
            cluster.see(*made)
        elif what == "finish":
            cluster.finish(data.draw(st.sampled_from(living)), data.draw(st.integers(0, 300)))
        elif what == "wait":
            cluster.pass_time(cluster.now_ns + data.draw(st.integers(1, 200)) * MS)
        elif what == "join" and len(living) < 5:
            cluster.join(f"e{next(names)}")
        elif what == "lose" and len(living) > 1:
            cluster.lose(data.draw(st.sampled_from(living)))
        elif what == "cancel" and requests:
            request_id = data.draw(st.sampled_from(sorted(requests)))
            if cluster.is_running(request_id):
                stopped.add(request_id)
            cluster.see(RequestCancelled(request_id))
        for executor, batches in cluster.running.items():
            waiting = [batch_id for batch_id in batches if batch_id not in cluster.freed]
            assert len(waiting) <= 1 + ROUTED_PREFETCH, (executor, waiting)
    while cluster.scheduler.unended():
        done = [cluster.finish(executor) for executor in sorted(cluster.running)]
        if not any(done):
            wakeup_ns = cluster.scheduler.next_wakeup()
            assert wakeup_ns is not None, "requests wait for nothing"
            cluster.pass_time(wakeup_ns)
    for request_id in requests:
        ends = cluster.finished[request_id] + (request_id in cluster.rejected)
        assert ends == 1 or (ends == 2 and request_id in stopped)  # it was under way when it was cancelled
    routing = cluster.scheduler.routing()[1]
    assert set(routing.to_do().values()) <= {0}


lanes = st.lists(st.integers(0, 2), min_size=1, max_size=4)


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data(), most=st.integers(1, 12))
def test_a_remembered_beginning_has_its_shorter_ones(data: st.DataObject, most: int) -> None:
    known = KnownPrefixes(most)
    prompts = data.draw(st.lists(routes, min_size=1, max_size=12))
    for prompt in prompts:
        names = prompt.names()
        known.add(names)
        assert len(known) <= most
        assert known.match(names) == min(len(names), most)
        for other in prompts:
            is_known = [known.match([name]) for name in other.names()]
            assert is_known == sorted(is_known, reverse=True)
            assert known.match(other.names()) == sum(is_known)


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data(), executors=st.integers(1, 5))
def test_no_executor_is_given_more_than_the_bound(data: st.DataObject, executors: int) -> None:
    """Before a request is given, its executor has at most the bound, or less to do than all others."""
    scheduler = ModelScheduler("b")
    scheduler.observe(PolicyChanged(MODEL), 0)
    scheduler.observe(VersionServed("e0", 1, "h", 1), 0)
    routing: PrefixRouting = scheduler.routing()[1]
    names = [f"e{number}" for number in range(executors)]
    under_way: deque[bytes] = deque()
    for number, prompt in enumerate(data.draw(st.lists(routes, max_size=40))):
        one = request(number, prompt)
        placement = routing.place(prompt, names)
        to_do = {name: routing.to_do().get(name, 0) for name in names}
        mean = sum(to_do.values()) / executors
        within = to_do[placement.executor] <= BOUND * mean + SLACK_TOKENS + placement.warm_tokens
        assert within or to_do[placement.executor] == min(to_do.values())
        routing.given(one, placement.executor)
        under_way.append(one.id)
        while under_way and data.draw(st.booleans()):
            routing.ended(under_way.popleft())


def numbers_of(cluster: Cluster) -> list[int]:
    return [int.from_bytes(one.id, "little") for one, _ in cluster.given]


def test_a_request_waits_for_its_executor_a_bounded_time() -> None:
    cluster = Cluster(2, room=0)  # no engine takes a request before others have ended
    full = 1 + ROUTED_PREFETCH
    cluster.see(*[request(number, route(1, 2048, number, 10)) for number in range(full + 1)])
    home = cluster.given[0][1]
    assert [executor for _, executor in cluster.given] == [home] * full
    cluster.see(request(90, route(2, 2048, 90, 10)))  # overtakes the one that waits
    assert numbers_of(cluster) == [*range(full), 90]
    assert cluster.scheduler.next_wakeup() == HOLD_NS
    cluster.pass_time(HOLD_NS)
    assert numbers_of(cluster) == [*range(full), 90, full]
    assert cluster.given[-1][1] != home


def test_only_so_many_are_overtaken() -> None:
    cluster = Cluster(2, room=0)
    full = 1 + ROUTED_PREFETCH
    cluster.see(*[request(number, route(1, 2048, number, 10)) for number in range(full + LOOKAHEAD)])
    cluster.see(request(900, route(2, 2048, 3, 10)))
    assert len(cluster.given) == full
    cluster.pass_time(HOLD_NS)
    assert len(cluster.given) == 2 * full


def test_requests_land_warm_and_work_stays_even() -> None:
    """The goal: 90 % land where their beginning was computed, and no executor has more than 1.5 times the mean."""
    for seed in range(3):
        cluster = Cluster(3, room=8, seed=seed)
        draw = cluster.random
        for number in range(900):
            # some beginnings are asked for ten times as often as others
            prefix = min(draw.randrange(12), draw.randrange(12), draw.randrange(12))
            cluster.see(request(number, route(prefix, 352, number, draw.randint(8, 64), 64), cluster.now_ns))
            cluster.pass_time(cluster.now_ns + draw.randrange(4) * MS)
            while sum(map(len, cluster.running.values())) > draw.randint(0, 24):
                cluster.finish(draw.choice(sorted(cluster.running)), draw.randint(8, 64))
        counts = cluster.scheduler.routing()[1].counts
        assert counts.warm >= 0.9 * 900, counts
        carried = Counter(executor for _, executor in cluster.given)
        assert max(carried.values()) <= 1.5 * 300, carried


def test_tenants_share_tokens_by_their_weights() -> None:
    """Lane 1 has short prompts and long answers, lane 2 the other way round, and three times the weight."""
    for seed in range(2):
        cluster = Cluster(2, room=4, weights={2: 3}, seed=seed)
        draw = cluster.random
        numbers = count()
        taken: Counter[int] = Counter()
        waiting: Counter[int] = Counter()
        answers: dict[bytes, int] = {}
        seen = 0
        for step in range(1200):
            for lane in (1, 2):
                while waiting[lane] < 20:
                    tokens = draw.randint(20, 60) if lane == 1 else draw.randint(100, 900)
                    one = request(next(numbers), route(0, 0, next(numbers), tokens, 1000), cluster.now_ns, lane)
                    answers[one.id] = draw.randint(100, 500) if lane == 1 else draw.randint(1, 40)
                    waiting[lane] += 1
                    cluster.see(one)
            executor = draw.choice(sorted(cluster.running))
            if cluster.running[executor]:
                one = next(iter(cluster.running[executor].values()))
                cluster.finish(executor, answers[one.id])
                assert one.meta is not None
                assert one.meta.prompt is not None
                if step > 300:
                    taken[one.lane] += one.meta.prompt.tokens + answers[one.id]
            for given_one, _ in cluster.given[seen:]:
                waiting[given_one.lane] -= 1
            seen = len(cluster.given)
        assert abs(taken[2] / taken[1] - 3) <= 0.3, taken


def test_one_executor_keeps_the_order_of_arrival() -> None:
    cluster = Cluster(1, room=1)
    cluster.see(*[request(number, route(number % 3, 512, number, 10)) for number in range(30)])
    while cluster.finish("e0"):
        pass
    assert [int.from_bytes(one.id, "little") for one, _ in cluster.given] == list(range(30))


def test_a_lost_executor_has_computed_nothing() -> None:
    cluster = Cluster(3, room=2)
    cluster.see(request(1, route(1, 512, 0, 10)))
    home = cluster.given[0][1]
    cluster.finish(home)
    cluster.lose(home)
    cluster.see(request(2, route(1, 512, 1, 10)))
    assert cluster.given[1][1] != home
    cluster.join(home)
    cluster.see(request(3, route(1, 512, 2, 10)))
    assert cluster.given[2][1] == cluster.given[1][1]
    assert cluster.scheduler.routing()[1].remembered() > 0


def test_few_wait_at_an_executor_of_a_model_with_levels() -> None:
    """What waits there is in order: a request of a higher level would stand behind it."""
    cluster = Cluster(1, room=0)
    cluster.see(PolicyChanged(replace(MODEL, dynamic_batching=DynamicBatching(priority_levels=2))))
    cluster.see(*[request(number, route(1, 64, number, 10)) for number in range(8)])
    assert len(cluster.given) == 2
    cluster.see(PolicyChanged(MODEL))
    assert len(cluster.given) == 1 + ROUTED_PREFETCH
