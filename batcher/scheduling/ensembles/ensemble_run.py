"""The progress of one request through the graph of its ensemble (S50, S51, S54, S55). Pure.

A *place* is a step and a path: the indices of the responses of decoupled steps for which it runs, empty for a step that
runs once per request. A tensor is pending, present or absent. It is absent if a condition was false, directly or
further up, or if a model left it out. Steps that need a tensor that is absent by condition are skipped. If a model left
a tensor out, its consumers are called without it, and may refuse. The answer has neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from charonia.models.ensemble import ROOT, EnsembleGraph, Step

from .ensemble_plan import plan_of

Path = tuple[int, ...]
Place = tuple[int, Path]

ABSENT_BY_CONDITION = object()
ABSENT = object()


@dataclass(frozen=True, slots=True)
class Start:
    """Run a step: `inputs` are its model's, `outputs` the outputs wanted of its model."""

    step: Step
    path: Path
    inputs: Mapping[str, Any]
    outputs: tuple[str, ...]
    window: int = 0
    """How many responses it may give before more are wanted; 0 for any number."""


@dataclass(frozen=True, slots=True)
class Emit:
    """Send response `index` of the request. The last one is `final`; it `is_flag` if all work ended only after the last
    response was sent (S54).
    """

    index: int
    outputs: Mapping[str, Any]
    final: bool
    is_flag: bool = False


@dataclass(frozen=True, slots=True)
class Want:
    """A decoupled step may give responses below index `count`; it was started with a `window` of that meaning (S55)."""

    step: Step
    path: Path
    count: int


Moves = list[Start | Emit | Want]


class Run:
    """One request. `inputs` are its tensors, `wanted` the requested outputs (empty: all). With a `window` it may itself
    produce only this many responses, until more are `allowed`. If it is `resumed`, a former owner may have sent any
    response as not the last: its end is then always a response of its own.
    """

    def __init__(
        self,
        graph: EnsembleGraph,
        inputs: Mapping[str, Any],
        wanted: tuple[str, ...],
        is_true: Callable[[Any], bool],
        window: int = 0,
        *,
        resumed: bool = False,
    ) -> None:
        self.graph = graph
        self._resumed = resumed
        self._limit = min(filter(None, (graph.max_inflight_requests, window)), default=0)
        self._allowed = window
        self._told: dict[Place, int] = {}
        self._plan = plan_of(graph, wanted)
        self._is_true = is_true
        self._tensors: dict[Path, dict[str, Any]] = {(): {name: inputs.get(name, ABSENT) for name in graph.inputs}}
        self._open: dict[Path, list[Step]] = {}
        self._flying: dict[Place, None] = {}
        """Running steps, in the order they were started."""
        self._seen: dict[Place, set[int]] = {}
        self._counts: dict[Place, int] = {}
        """How many responses a decoupled step produced in all, once known."""
        self._held: dict[Place, deque[tuple[int, Mapping[str, Any]]]] = {}
        self._running: dict[Place, set[Path]] = {}
        """For decoupled steps: the responses that are processed further."""
        self._load: dict[Path, int] = {}
        """How many steps are open or running at a path or below."""
        self._quiet: dict[Path, Place] = {}
        """Those of these responses where no step is open or running any more."""
        self._changed: dict[Path, None] = {}
        """Paths whose open steps must be checked again."""
        self._cursor = [0] * len(self._plan.chain)
        self._emitted = 0
        self.ended = False

    def begin(self) -> Moves:
        """The actions that are possible now."""
        moves: Moves = []
        self._enter(ROOT, ())
        self._settle(moves)
        return moves

    def allowed(self, count: int) -> Moves:
        """Responses below index `count` may be given."""
        moves: Moves = []
        if count > self._allowed > 0 and not self.ended:
            self._allowed = count
            self._settle(moves)
        return moves

    def in_flight(self) -> list[Place]:
        """The steps that were started and have not sent their last response."""
        return list(self._flying)

    def answered(
        self, step: int, path: Path, index: int, outputs: Mapping[str, Any], final: bool, is_flag: bool = False
    ) -> Moves:
        """A step produced a response; one that is not awaited, or is repeated, changes nothing. One that `is_flag` only
        ends a decoupled step.
        """
        place = (step, path)
        moves: Moves = []
        if self.ended or place not in self._flying:
            return moves
        known = self.graph.steps[step]
        if not known.decoupled:
            self._land(place)
            self._made(known, path, outputs)
        else:
            seen = self._seen.setdefault(place, set())
            if index not in seen:
                seen.add(index)
                if not is_flag:
                    self._held.setdefault(place, deque()).append((index, outputs))
                if final:
                    self._counts[place] = index if is_flag else index + 1
            count = self._counts.get(place)
            if count is not None and len([i for i in seen if i < count]) == count:
                self._land(place)
            self._let_in(place)
        self._settle(moves)
        return moves

    # -- the graph ----------------------------------------------------------------------------------------------------

    def _enter(self, scope: int, path: Path) -> None:
        """The steps of a scope may run for one more path."""
        steps = self._plan.by_scope.get(scope)
        if steps:
            self._open[path] = list(steps)
            self._changed[path] = None
            self._weigh(path, 1)

    def _weigh(self, path: Path, change: int) -> None:
        """One step more or less is open or running there."""
        for depth in range(1, len(path) + 1):
            at = path[:depth]
            left = self._load.get(at, 0) + change
            if left:
                self._load[at] = left
            else:
                self._load.pop(at, None)
                self._rest(at)

    def _rest(self, path: Path) -> None:
        """No step is open or running there."""
        for step in self._plan.steps:
            place = (step.index, path[:-1])
            if path in self._running.get(place, ()):
                self._quiet[path] = place
                return

    def _land(self, place: Place) -> None:
        """A step has sent its last response."""
        del self._flying[place]
        self._weigh(place[1], -1)

    def _look(self, moves: Moves) -> None:
        """Start, or skip, every step that can be decided now."""
        while self._changed:
            path = next(iter(self._changed))
            del self._changed[path]
            for step in list(self._open.get(path, ())):
                self._decide(step, path, moves)

    def _decide(self, step: Step, path: Path, moves: Moves) -> None:
        inputs: dict[str, Any] = {}
        excluded = pending = False
        if step.condition:
            value = self._value(step.condition, path)
            if value is None:
                return
            excluded = value is ABSENT or value is ABSENT_BY_CONDITION or not self._is_true(value)
        if not excluded:
            for name, tensor in step.inputs.items():
                value = self._value(tensor, path)
                if value is None:
                    pending = True
                elif value is ABSENT_BY_CONDITION:
                    excluded = excluded or name not in step.optional
                elif value is not ABSENT:
                    inputs[name] = value
            if pending and not excluded:
                return
        if not excluded:
            self._flying[(step.index, path)] = None
            self._weigh(path, 1)
            window = self._limit if step.decoupled else 0
            self._close(step, path)
            moves.append(Start(step, path, inputs, self._plan.gives[step.index], window))
        else:
            self._close(step, path)
            self._pass_over(step, path)
            self._touch(path)

    def _close(self, step: Step, path: Path) -> None:
        left = self._open[path]
        left.remove(step)
        if not left:
            del self._open[path]
            self._weigh(path, -1)

    def _pass_over(self, step: Step, path: Path) -> None:
        if step.decoupled:
            self._counts[(step.index, path)] = 0
        else:
            self._keep(path, dict.fromkeys((t for _, t in self._plan.makes[step.index]), ABSENT_BY_CONDITION))

    def _made(self, step: Step, path: Path, outputs: Mapping[str, Any]) -> None:
        self._keep(path, {t: outputs.get(output, ABSENT) for output, t in self._plan.makes[step.index]})
        self._touch(path)

    def _keep(self, path: Path, tensors: Mapping[str, Any]) -> None:
        self._tensors.setdefault(path, {}).update(tensors)

    def _touch(self, path: Path) -> None:
        """A path has new tensors: check its steps again. Those of the request concern every path, others only their
        own.
        """
        if path:
            self._changed[path] = None
        else:
            self._changed |= dict.fromkeys(self._open)

    def _value(self, tensor: str, path: Path) -> Any:
        """None while it is pending."""
        known = self._tensors.get(path if self.graph.scopes[tensor] != ROOT else ())
        return known.get(tensor) if known is not None else None

    # -- decoupled steps ----------------------------------------------------------------------------------------------

    def _let_in(self, place: Place) -> bool:
        """Process the next responses of a decoupled step, as many at once as `max_inflight_requests` allows (S55).
        Returns whether there was one.
        """
        step, limit = self.graph.steps[place[0]], self._limit
        held = self._held.get(place)
        running = self._running.setdefault(place, set())
        before = len(running)
        while held and not (limit and len(running) >= limit):
            index, outputs = held.popleft()
            path = (*place[1], index)
            self._keep(path, {t: outputs.get(output, ABSENT) for output, t in self._plan.makes[step.index]})
            running.add(path)
            self._enter(step.index, path)
            if path not in self._load:
                self._quiet[path] = place
        return len(running) > before

    def _settle(self, moves: Moves) -> None:
        """Let the next responses in where others are done, and send the answers that are complete."""
        while not self.ended:
            self._look(moves)
            self._emit(moves)
            quiet, self._quiet = self._quiet, {}
            for path, place in quiet.items():
                if self._busy(path):
                    self._quiet[path] = place  # its answer was not sent yet
                else:
                    self._running[place].discard(path)
            more = False
            for place in [place for place, held in self._held.items() if held]:
                more = self._let_in(place) or more
            if not more:
                break
        if self._limit and not self.ended:
            self._want(moves)

    def _want(self, moves: Moves) -> None:
        """Allow each decoupled step that goes on as many more responses as were processed (S55)."""
        for place, running in self._running.items():
            if place in self._flying:
                through = len(self._seen.get(place, ())) - len(self._held.get(place, ())) - len(running)
                count = self._limit + through
                if count > self._told.get(place, self._limit):
                    self._told[place] = count
                    moves.append(Want(self.graph.steps[place[0]], place[1], count))

    def _busy(self, path: Path) -> bool:
        if path in self._load:
            return True
        return self._allowed > 0 and path >= tuple(self._cursor[: len(path)])

    # -- answers ------------------------------------------------------------------------------------------------------

    def _emit(self, moves: Moves) -> None:
        plan = self._plan
        if not plan.chain:
            self._emit_only(moves)
            return
        while not self.ended:
            path = self._next_path()
            if path is None:
                return
            if self._allowed and self._emitted >= self._allowed and path:
                return
            if path == ():
                self._finish(moves)
                return
            outputs = self._complete(path)
            if outputs is None:
                return
            if outputs or not self._is_excluded(path):
                moves.append(Emit(self._emitted, outputs, False))
                self._emitted += 1
            self._cursor[-1] += 1
            self._drop(path)

    def _finish(self, moves: Moves) -> None:
        """No step is running any more: the last response says so, unless it was sent already."""
        self.ended = True
        at = max((at for at, move in enumerate(moves) if isinstance(move, Emit)), default=None)
        last = moves[at] if at is not None and not self._resumed else None
        if at is not None and isinstance(last, Emit):
            del moves[at]
            moves.append(Emit(last.index, last.outputs, True))
        else:
            moves.append(Emit(self._emitted, {}, True, is_flag=True))

    def _emit_only(self, moves: Moves) -> None:
        outputs = self._complete(())
        if outputs is not None:
            self.ended = True
            moves.append(Emit(0, outputs, True, is_flag=not outputs and self._is_excluded(())))

    def _complete(self, path: Path) -> dict[str, Any] | None:
        """The wanted outputs of a path that exist; None while any is pending."""
        found: dict[str, Any] = {}
        for tensor in self._plan.wanted:
            value = self._value(tensor, path)
            if value is None:
                return None
            if value is not ABSENT and value is not ABSENT_BY_CONDITION:
                found[tensor] = value
        return found

    def _is_excluded(self, path: Path) -> bool:
        """Whether conditions removed all outputs of a path."""
        return all(self._value(tensor, path) is ABSENT_BY_CONDITION for tensor in self._plan.wanted)

    def _next_path(self) -> Path | None:
        """The next path to answer; None while it is not known, () when there is no more."""
        chain, cursor = self._plan.chain, self._cursor
        level = 0
        while level < len(chain):
            place = (chain[level], tuple(cursor[:level]))
            count = self._counts.get(place)
            if cursor[level] in self._seen.get(place, ()) and (count is None or cursor[level] < count):
                level += 1
                continue
            if count is None or cursor[level] < count:
                return None
            if level == 0:
                return ()
            cursor[level - 1] += 1
            cursor[level:] = [0] * (len(chain) - level)
            level = 0
        return tuple(cursor)

    def _drop(self, path: Path) -> None:
        """Drops the tensors of an answered path, and those its steps would still make."""
        if self._open.pop(path, None) is not None:
            self._weigh(path, -1)
        self._tensors.pop(path, None)
