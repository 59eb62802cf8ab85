"""Whether a changed configuration asks for nothing but more or fewer instances, which come and go in place (R23). Pure.

Everything else is a load beside what is served (R22). Making and ending instances is `instance_pool`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from charonia.models.interface import InstanceGroup


def change_of(before: Sequence[InstanceGroup], after: Sequence[InstanceGroup], *, bound: bool) -> int:
    """How many instances come to the last group, or leave it (negative); 0 when more or other things differ.

    Instances of a sequence batcher are known by their numbers (`bound`): the last ones leave. Of others those leave
    that are free first, which must be all alike.
    """
    if len(before) != len(after) or not before or any(group.passive for group in (*before, *after)):
        return 0
    if [replace(g, name="") for g in before[:-1]] != [replace(g, name="") for g in after[:-1]]:
        return 0
    last, wanted = before[-1], after[-1]
    if replace(last, name="", count=0) != replace(wanted, name="", count=0) or len(wanted.gpus) > 1:
        return 0
    change = wanted.count - last.count
    return 0 if change < 0 and not bound and len(before) > 1 else change
