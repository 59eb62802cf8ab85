"""Pauses of what a model runs on: found in executions that took far longer than others, and simulated.

Pure. Several instances see one pause of the machine at once, so stalls that overlap in time are one pause. In a pause
`everywhere` nothing goes on: each batch that runs over it takes it, once. If other batches began or ended meanwhile, it
was one of single instances or of one machine of several: then as many batches take it as did in the recording.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .recorded_requests import RecordedBatch

_MIDDLE = 0.4
"""Between this share of a pause and the rest of it the pause has begun and is not over, wherever in it a batch was."""


@dataclass(frozen=True, slots=True)
class Stall:
    """An execution took `extra_ns` longer than its size typically does; it would have been half done at `at_ns`. Or it
    was due at `at_ns`, and began so much later than executions usually do.
    """

    at_ns: int
    extra_ns: int

    @property
    def end_ns(self) -> int:
        return self.at_ns + self.extra_ns


@dataclass(frozen=True, slots=True)
class Pause:
    """From `at_ns` on, as long as the first of `extras_ns`, its stalls in descending order, at least one."""

    at_ns: int
    extras_ns: tuple[int, ...]
    everywhere: bool = True


def pauses_of(stalls: Iterable[Stall], batches: Sequence[RecordedBatch]) -> tuple[Pause, ...]:
    """The pauses that these stalls of a recording show, in order of time. `batches` are all of the recording."""
    groups: list[list[Stall]] = []
    end_ns = 0
    for stall in sorted(stalls, key=lambda one: one.at_ns):
        if groups and stall.at_ns <= end_ns:
            groups[-1].append(stall)
            end_ns = max(end_ns, stall.end_ns)
        else:
            groups.append([stall])
            end_ns = stall.end_ns
    found = []
    for group in groups:
        group.sort(key=lambda one: -one.extra_ns)
        longest = group[0]
        begin_ns = longest.at_ns + _MIDDLE * longest.extra_ns
        late_ns = longest.end_ns - _MIDDLE * longest.extra_ns
        went_on = any(begin_ns < ns < late_ns for one in batches for ns in (one.started_ns, one.computed_ns))
        found.append(Pause(longest.at_ns, tuple(one.extra_ns for one in group), not went_on))
    return tuple(sorted(found, key=lambda one: one.at_ns))


def placed(pauses: Sequence[Pause], recorded_ns: tuple[int, int], now_ns: tuple[int, int]) -> list[Pause]:
    """The pauses where they were among the arrivals, whose first and last are now `now_ns`. Arrivals in less time than
    recorded meet fewer of them, as pauses come by time: evenly chosen ones.
    """
    first_ns, last_ns = recorded_ns
    pace = (now_ns[1] - now_ns[0]) / (last_ns - first_ns) if last_ns > first_ns else 1.0
    share, due = min(1.0, pace), 0.5
    found = []
    for one in pauses:
        due += share
        if due >= 1:
            due -= 1
            found.append(Pause(now_ns[0] + round((one.at_ns - first_ns) * pace), one.extras_ns, one.everywhere))
    return found


@dataclass(slots=True)
class _Coming:
    """A pause of a simulation; without `extras_ns` left it is over. `met`: a batch has taken it."""

    at_ns: int
    extras_ns: deque[int]
    everywhere: bool
    met: bool = False

    def is_over(self, now_ns: int) -> bool:
        return self.met and self.at_ns + self.extras_ns[0] <= now_ns if self.everywhere else not self.extras_ns


class PausedTime:
    """How long batches take with the pauses that they run over."""

    def __init__(self, pauses: Sequence[Pause]) -> None:
        """`pauses` are in order of time."""
        self._coming = deque(_Coming(one.at_ns, deque(one.extras_ns), one.everywhere) for one in pauses)

    def taken_ns(self, now_ns: int, service_ns: int) -> int:
        """The time of a batch that begins now and runs for `service_ns`; `now_ns` never falls. A pause that began when
        none ran comes to the next batch, whole: it belongs to an execution, whatever the times between them are here.
        """
        while self._coming and self._coming[0].is_over(now_ns):
            self._coming.popleft()
        at_ns, left_ns = now_ns, service_ns
        for pause in self._coming:
            if pause.at_ns >= at_ns + left_ns:
                break
            if pause.is_over(at_ns):
                continue
            if not pause.met:
                pause.met, pause.at_ns = True, max(pause.at_ns, at_ns)
            ran_ns = max(0, pause.at_ns - at_ns)
            at_ns, left_ns = at_ns + ran_ns, left_ns - ran_ns
            at_ns = pause.at_ns + pause.extras_ns[0] if pause.everywhere else at_ns + pause.extras_ns.popleft()
        return at_ns + left_ns - now_ns
