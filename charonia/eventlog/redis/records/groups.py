"""How `u:{m}` names requests: in groups whose ids differ in the last byte alone. Pure.

The requests of one log entry have such ids, so that a whole entry is one field of the hash and is counted, settled and
deleted as one. What a group's value looks like is said in charonia/eventlog/scripts/group_values.lua.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

_SETTLED = ord(".")
_FRESH = 128
_SEQUENCE = bytes(range(256))


@dataclass(slots=True)
class Groups:
    """Ids by group: `names[i]` begins all ids whose last bytes are `lasts[i]`.

    `order` is None when the ids follow one another as given, else the place each had before.
    """

    names: list[bytes]
    lasts: list[bytes]
    order: list[int] | None = None


def grouped(ids: Sequence[bytes]) -> Groups:
    """Ids by group, each group named once."""
    prefixes = [one[:-1] for one in ids]
    tails = bytes([one[-1] for one in ids])
    if ids and prefixes.count(prefixes[0]) == len(prefixes):  # most entries and batches
        return Groups(prefixes[:1], [tails])
    names: list[bytes] = []
    lasts: list[bytes] = []
    at = 0
    for name, members in groupby(prefixes):
        count = len(list(members))
        names.append(name)
        lasts.append(tails[at : at + count])
        at += count
    if len(names) > 1 and len(set(names)) < len(names):
        order = sorted(range(len(ids)), key=lambda place: ids[place][:-1])
        together = grouped([ids[place] for place in order])
        return Groups(together.names, together.lasts, order)
    return Groups(names, lasts)


def value_of(lasts: bytes, sizes: Sequence[int], tenant: bytes) -> bytes:
    """The value of a group whose requests were accepted just now; `tenant` is as `charonia.keys.tenant` quotes it."""
    count = len(sizes)
    text = b"%d" % sum(sizes)
    if count > 1 and sizes.count(sizes[0]) != count:
        text = b"%b,%b" % (text, b",".join([b"%d" % size for size in sizes]))
    if tenant:
        text = b"%b:%b" % (text, tenant)
    marks = b"\x80" * count
    if lasts == _SEQUENCE[:count]:
        return b"%b:%b" % (marks, text)
    return b"%b;%b%b" % (marks, lasts, text)


def attempt_in(value: bytes | None, last: int) -> int:
    """The attempt that the request with this last byte is at, -1 when it is not unsettled."""
    if value is None:
        return -1
    count = 0
    while value[count] >= _FRESH or value[count] == _SETTLED:
        count += 1
    place = last if value[count : count + 1] == b":" else value.find(last, count + 1, 2 * count + 1) - count - 1
    if not 0 <= place < count or value[place] == _SETTLED:
        return -1
    return value[place] - _FRESH


def lasts_in(value: bytes) -> bytes:
    """The last bytes of the requests of a group that are unsettled."""
    count = 0
    while value[count] >= _FRESH or value[count] == _SETTLED:
        count += 1
    lasts = _SEQUENCE[:count] if value[count : count + 1] == b":" else value[count + 1 : 2 * count + 1]
    return bytes([last for mark, last in zip(value[:count], lasts, strict=True) if mark != _SETTLED])
