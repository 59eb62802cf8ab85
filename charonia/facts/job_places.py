"""Where a job stands among the jobs of its model that have not ended, and what is served before it. Pure.

The log counts jobs by line: one priority level and one lane of tenants. What is served before a job follows from how
batchers serve the lines: all of a smaller level first (S8), the lanes of one level in turns by weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Line = tuple[int, int]
"""(level, lane) of a queue stream."""

FIRST_LINE: Line = (0, 0)
"""Of models without priority levels and callers without a tenant: the log keeps no list of its own for it."""


@dataclass(frozen=True, slots=True)
class JobPlace:
    """A job's place as the log has it. `rank` are the active jobs of its own line that were accepted before it.

    `lines` are the active jobs of each line that has some, those that run and this one among them. `requests` are the
    model's unsettled requests, jobs among them; `paused` and `owner` are the model's.
    """

    line: Line
    rank: int
    lines: Mapping[Line, int]
    requests: int
    paused: bool = False
    owner: str = ""

    @property
    def active(self) -> int:
        return sum(self.lines.values())


@dataclass(frozen=True, slots=True)
class Ahead:
    """The jobs that are served before one: of smaller levels, of its own line, of other lanes' turns meanwhile.

    `calls` are the requests that are no jobs and may be among them: more are not there, fewer may be before it.
    """

    higher: int
    own: int
    turns: int
    calls: int = 0

    @property
    def jobs(self) -> int:
        return self.higher + self.own + self.turns


def ahead_of(place: JobPlace, weights: Mapping[int, int]) -> Ahead:
    """What is served before a job if nothing new came; `weights` are those of lanes, 1 where there is none.

    Exact where jobs of one line alone wait. Of another lane of the same level it is off by no more than one turn of it
    (the largest batch, times its weight) and one job, if all jobs have as many rows: whose turn it is now is not known.
    """
    level, lane = place.line
    share = max(1, weights.get(lane, 1))
    higher = turns = 0
    for (of_level, of_lane), count in place.lines.items():
        if of_level < level:
            higher += count
        elif of_level == level and of_lane != lane:
            turns += min(count, place.rank * max(1, weights.get(of_lane, 1)) // share)
    jobs = higher + place.rank + turns
    # calls are served as jobs are, and come and go with the queue: as many of them as there are parts of it before
    calls = max(0, place.requests - place.active)
    return Ahead(higher, place.rank, turns, -(-calls * (jobs + 1) // max(1, place.active)))
