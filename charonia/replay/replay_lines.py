"""Which recorded requests can be asked again, and in which order. Pure.

Requests of no sequence are independent. Those of one correlation id follow one another, of whatever tenant: the
candidate knows a sequence by its id alone. A sequence is asked again from its beginning up to its first gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from charonia.wire.recorded_calls import RecordedStep

NO_BEGINNING = "the beginning of its sequence was not recorded"
BEHIND_A_GAP = "an earlier request of its sequence cannot be asked again"
EXPIRED = "its recording has expired"


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recording without its tensors, which are read when it is asked again. `id` is its key in the log."""

    id: bytes
    at_us: int
    version: int
    tenant: str = ""
    client_id: str = ""
    sequence: RecordedStep | None = None
    unkept: str = ""

    @property
    def name(self) -> str:
        """What reports call it: 32 hexadecimal digits."""
        return self.id.hex()


Line = list[Recorded]
"""Requests that are asked one after the other."""


@dataclass(slots=True)
class Lines:
    """`unreplayable` has those that cannot be asked again, each with the reason in words."""

    lines: list[Line] = field(default_factory=list)
    unreplayable: list[tuple[Recorded, str]] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return sum(map(len, self.lines))


def lines_of(recorded: Sequence[Recorded], limit: int = 0) -> Lines:
    """The lines in the order of their first requests. `limit` is how many requests are asked at most, those that were
    recorded first; 0 for all.
    """
    found = Lines()
    chosen: list[Recorded] = []
    runs: dict[Recorded, Line] = {}
    """By the request that begins it, each run of a sequence."""
    latest: dict[tuple[str, int | str], Line | str] = {}
    """The run of each tenant's sequence that is not over, or why it cannot go on."""
    for one in sorted(recorded, key=lambda one: (one.at_us, one.id)):
        reason = one.unkept
        if one.sequence is not None:
            key = (one.tenant, one.sequence.id)
            run: Line | str = [] if one.sequence.start else latest.get(key, NO_BEGINNING)
            if isinstance(run, str):
                reason = reason or run
            elif reason:
                run = BEHIND_A_GAP
            else:
                run.append(one)
                runs[run[0]] = run
            latest[key] = run
            if one.sequence.end:
                del latest[key]
        if reason:
            found.unreplayable.append((one, reason))
        elif not limit or len(chosen) < limit:
            chosen.append(one)
    wanted = set(chosen)
    of_ids: dict[int | str, Line] = {}
    for one in chosen:
        if one.sequence is None:
            found.lines.append([one])
        elif one in runs:
            line = of_ids.get(one.sequence.id)
            if line is None:
                line = of_ids[one.sequence.id] = []
                found.lines.append(line)
            line += [step for step in runs[one] if step in wanted]
    return found
