"""Detects configuration changes that only add or remove instances, which is done in place (R23). Pure.

Any other change is a reload (R22).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from charonia.models.interface import InstanceGroup


def change_of(before: Sequence[InstanceGroup], after: Sequence[InstanceGroup], *, bound: bool) -> int:
    """Return how many instances the last group gains or loses (negative); 0 when anything else differs.

    With a sequence batcher (`bound`), instances are known by number and the last ones leave. Otherwise any free
    instance may leave, so all must be alike.
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
