"""The part of an ensemble's graph that the wanted outputs need; made once for each choice of outputs (S51). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from charonia.models.ensemble import ROOT, EnsembleGraph, Step, needs


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan for some outputs: the steps, the outputs of each, and the scope whose responses are the request's."""

    wanted: tuple[str, ...]
    steps: tuple[Step, ...]
    gives: dict[int, tuple[str, ...]]
    """By step, the outputs of its model."""
    makes: dict[int, tuple[tuple[str, str], ...]]
    """By step, (output of its model, tensor)."""
    by_scope: dict[int, tuple[Step, ...]]
    chain: tuple[int, ...]
    """Decoupled steps, outermost first, that lead to the responses; empty: there is one response."""


@lru_cache(maxsize=1024)
def _made(key: _Key) -> Plan:
    graph, wanted = key.graph, key.wanted
    tensors = set(wanted)
    chosen: set[int] = set()
    found = True
    while found:
        found = False
        for step in graph.steps:
            if step.index not in chosen and not tensors.isdisjoint(step.outputs.values()):
                chosen.add(step.index)
                tensors |= needs(step)
                found = True
    steps = tuple(step for step in graph.steps if step.index in chosen)
    makes = {s.index: tuple((o, t) for o, t in s.outputs.items() if t in tensors) for s in steps}
    by_scope: dict[int, tuple[Step, ...]] = {}
    for step in steps:
        by_scope[step.scope] = (*by_scope.get(step.scope, ()), step)
    scope = next((graph.scopes[t] for t in wanted if graph.scopes[t] != ROOT), ROOT)
    gives = {index: tuple(output for output, _ in made) for index, made in makes.items()}
    return Plan(wanted, steps, gives, makes, by_scope, graph.chain(scope))


class _Key:
    """Identifies a graph and the wanted outputs."""

    __slots__ = ("graph", "wanted")

    def __init__(self, graph: EnsembleGraph, wanted: tuple[str, ...]) -> None:
        self.graph = graph
        self.wanted = wanted

    def __hash__(self) -> int:
        return hash((id(self.graph), self.wanted))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.graph is other.graph and self.wanted == other.wanted


def plan_of(graph: EnsembleGraph, wanted: tuple[str, ...]) -> Plan:
    """The plan for these outputs; empty means all outputs of the graph."""
    # in the ensemble's order, whatever that of the request is
    chosen = tuple([output for output in graph.outputs if output in wanted])
    return _made(_Key(graph, chosen or graph.outputs))
