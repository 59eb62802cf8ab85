"""What an executor says of its machine's processors, about once a second, with the end of a batch. Pure.

`charonia simulate` reads it from journals and trace files, to know how much of the processors is left for instances.
All amounts are totals from an arbitrary beginning on, in nanoseconds of one processor: two of them tell what was used
in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

from charonia.errors import InvalidRecord

Packed = tuple[str | int | float, ...]
"""The fields in their order; a later release may add some at the end."""
BATCHER_HERE, BATCHER_APART = 1, 2
"""The batcher is in the executor's process, or in another one."""


@dataclass(frozen=True, slots=True)
class ProcessorUse:
    """`processors` are those that the executor may use of `host`, `at_ns` is wall clock.

    `busy_ns` is what all processes used of these, without those that give way to the executor. `server_ns` is the part
    of the executor's server: the processes of `charonia serve`, or the executor alone and its children. `tree` is the
    first process of them. `instances_ns` is the part of the executor's instances, which ran for `ran_ns` in so many
    `batches`, of all models. Executors with equal `shared` use the same processors, in whatever containers of the
    machine they run. `batcher` says where the batches come from. Both are 0 where they are not known, as in earlier
    releases.
    """

    host: str
    processors: float
    tree: int
    at_ns: int
    busy_ns: int
    server_ns: int
    instances_ns: int
    ran_ns: int
    batches: int
    shared: int = 0
    batcher: int = 0

    def packed(self) -> Packed:
        return astuple(self)

    def text(self) -> str:
        """The fields in one line, for the attribute of a trace."""
        return " ".join(map(str, astuple(self)))


_FIELDS = len(fields(ProcessorUse))
_LEAST_FIELDS = 9
"""Of earlier releases: all up to `batches`."""


def use_of(packed: Sequence[object]) -> ProcessorUse:
    """Raises `InvalidRecord` for what is none."""
    if len(packed) >= _LEAST_FIELDS:
        host, processors, *amounts = packed[:_FIELDS]
        if isinstance(host, str) and isinstance(processors, int | float) and processors > 0:
            whole = [one for one in amounts if isinstance(one, int) and one >= 0]
            if len(whole) == len(amounts):
                return ProcessorUse(host, float(processors), *whole)
    raise InvalidRecord(f"no use of processors: {str(packed)[:200]}")


def use_in(text: str) -> ProcessorUse:
    """The use that `ProcessorUse.text` wrote. Raises `InvalidRecord`."""
    host, *numbers = text.split() or [""]
    try:
        return use_of((host, float(numbers[0]), *map(int, numbers[1:])))
    except (ValueError, IndexError):
        raise InvalidRecord(f"no use of processors: {text[:200]!r}") from None
