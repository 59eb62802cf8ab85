"""Dispatches the requests of a model that generates text, each alone: where its prompt was computed if that pays, and
between tenants by tokens. Pure. `routing.prefix_routing` chooses executors, `queues.token_shares` lanes.

A request whose executor takes no batch at this moment waits for it, at most `HOLD_NS`; requests behind it that can go
to another executor overtake it meanwhile. Then it goes to any that takes it. So no request waits for an executor that
is stuck, and one that is lost is forgotten with all that it had computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

from batcher.scheduling.decisions import Decision, DispatchBatch
from batcher.scheduling.observations import RequestQueued, RequestState
from batcher.scheduling.queues.dynamic_batching import BatchRules, Formation
from batcher.scheduling.queues.token_shares import TokenShares, prompt_of
from batcher.scheduling.routing.prefix_routing import PrefixRouting
from charonia.models.interface import ModelInterface
from charonia.models.scheduling import DynamicBatching
from charonia.models.text_routing import is_routed

from .model_state import Batch, ModelState, ModelVersion, Seat

HOLD_NS = 100_000_000
"""An engine that is not full takes the next request after a few milliseconds; reading 400 tokens again takes longer."""
LOOKAHEAD = 32
"""So many requests at the head of the queue may be overtaken by one behind them."""
_MIN_HELD = 128
_PLAIN = DynamicBatching()
"""Without levels and queue policies."""

DispatchOne = Callable[[ModelVersion, Seat, list[RequestQueued], BatchRules, int], DispatchBatch]
"""Dispatches requests that have left the queue."""


class RoutedDispatching:
    """Dispatches the queues of one model's versions that have a `routing`."""

    __slots__ = ("_dispatch_one", "_held", "_max_held", "_state")

    def __init__(self, state: ModelState, dispatch_one: DispatchOne) -> None:
        self._state = state
        self._dispatch_one = dispatch_one
        self._held: dict[bytes, tuple[int, str]] = {}
        """Until when a request waits for which executor, for those that were passed over once."""
        self._max_held = _MIN_HELD

    def dispatch(
        self, version: ModelVersion, routing: PrefixRouting, rules: BatchRules, now_ns: int, decisions: list[Decision]
    ) -> None:
        """Send requests while an executor can take one."""
        queue, instances, ledger = version.queue, version.instances, self._state.ledger
        while queue.size and instances.best is not None:
            serving = [seat for seat in instances.seats.values() if seat.slots]
            is_first = True
            waits_ns = 0
            for request in islice(queue.in_order(), LOOKAHEAD):
                seat, until_ns = self._seat_for(request, version, routing, serving, now_ns)
                if seat is not None:
                    break
                is_first = False
                waits_ns = min(waits_ns, until_ns) if waits_ns else until_ns
            else:
                version.pause = Formation(0, False, waits_ns, 0, 0)
                self._state.paused[version.number] = waits_ns
                return
            if is_first:
                (request,) = queue.take(1)
            else:
                queue.remove(request, RequestState.DISPATCHED)
            ledger.uncount(request)
            self._held.pop(request.id, None)
            decisions.append(self._dispatch_one(version, seat, [request], rules, now_ns))

    def _seat_for(
        self, request: RequestQueued, version: ModelVersion, routing: PrefixRouting, serving: list[Seat], now_ns: int
    ) -> tuple[Seat | None, int]:
        """The executor for a request, or until when it waits for one. At least one takes a batch now."""
        instances = version.instances
        best = instances.best
        assert best is not None
        if len(serving) == 1:
            return best, 0
        until_ns, executor = self._held.get(request.id, (0, ""))
        if now_ns < until_ns:
            waited_for = instances.seats.get(executor)
            if waited_for is not None and waited_for.slots and not instances.takes(waited_for):
                return None, until_ns  # the choice takes long, and this is asked whenever something has changed
        prompt = prompt_of(request)
        wanted = instances.seats[routing.place(prompt, [seat.executor for seat in serving]).executor]
        if instances.takes(wanted):
            return wanted, 0
        if not until_ns or (now_ns < until_ns and executor != wanted.executor):
            until_ns = self._hold(request.id, until_ns or now_ns + HOLD_NS, wanted.executor)
        if now_ns < until_ns:
            return None, until_ns
        taking = [seat.executor for seat in serving if instances.takes(seat)]
        return instances.seats[routing.place(prompt, taking).executor], 0

    def _hold(self, request_id: bytes, until_ns: int, executor: str) -> int:
        held = self._held
        if len(held) >= self._max_held:  # requests may leave the queue without being dispatched
            known = self._state.ledger.known
            for gone in [one for one in held if one not in known]:
                del held[gone]
            self._max_held = max(_MIN_HELD, 2 * len(held))
        held[request_id] = (until_ns, executor)
        return until_ns


# -- what the other parts of the scheduler say -------------------------------------------------------------------------


def adopt_routing(state: ModelState, interface: ModelInterface) -> None:
    """Route the requests of a model from now on, or no longer, by its new configuration."""
    routed, was_routed = is_routed(interface), state.turns.shares is not None
    block = interface.dynamic_batching
    has_levels = block is not None and replace(block, max_queue_delay_us=0, preferred_batch_sizes=()) != _PLAIN
    if routed is was_routed and (not routed or has_levels is state.has_levels):
        return
    state.has_levels = has_levels
    if routed is not was_routed:
        state.turns.shares = TokenShares(state.turns.weights) if routed else None
    for version in state.versions.values():
        state.route(version)
    if routed is was_routed:
        return
    for batch in state.batches.values():
        found_routed(state, batch)


def found_routed(state: ModelState, batch: Batch) -> None:
    """A predecessor has dispatched a batch, or it was dispatched before its model was routed."""
    routing = state.version(batch.version).routing
    if routing is not None:
        for request in batch.requests:
            routing.found(request, batch.executor)


def dispatched_routed(state: ModelState, version: ModelVersion, batch: Batch) -> None:
    """A batch of a routed version is dispatched."""
    shares, routing = state.turns.shares, version.routing
    if shares is not None and routing is not None:
        for request in batch.requests:
            routing.given(request, batch.executor)
            shares.charge(request)


def ended_routed(state: ModelState, routing: PrefixRouting, requests: Sequence[RequestQueued], tokens: int) -> None:
    """A batch has ended, with so many tokens that were generated."""
    shares = state.turns.shares
    for request in requests:
        routing.ended(request.id, took_nothing=not tokens and shares is not None and shares.reports)
        if shares is not None:
            shares.ended(request.id, tokens if len(requests) == 1 else 0)
