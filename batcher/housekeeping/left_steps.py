"""Cancels steps of ensembles that outlived their requests.

The owner of an ensemble cancels the steps of requests that end, and repeats that (`charonia.calls.cancels`). The next
owner knows neither these cancels nor the requests that ended while the ensemble had no owner. Their decoupled steps
would go on, perhaps for ever: one with a response window waits until more responses are wanted. So the owner of such a
step's model checks the request that the step names (`Lineage.step_of`).
"""

from __future__ import annotations

import logging

from batcher.entries.carriers import carried_of
from batcher.owner.owned import OwnedModel

_log = logging.getLogger(__name__)

_MAX_IDS = 1000


async def cancel_left_steps(owned: OwnedModel) -> int:
    """Cancel steps whose ensemble's request is no longer in the log; returns how many. Raises what the log raises."""
    steps: dict[str, list[tuple[bytes, bytes]]] = {}
    for request in owned.scheduler.unended():
        if request.wave or request.settled:  # a cancelled one may run on for hours
            continue
        lineage = carried_of(request).record.lineage
        if lineage is not None and lineage.step_of is not None:
            ensemble, caller = lineage.step_of
            steps.setdefault(ensemble, []).append((request.id, caller))
    cancelled = 0
    for ensemble, asked in steps.items():
        for at in range(0, len(asked), _MAX_IDS):
            part = asked[at : at + _MAX_IDS]
            attempts = await owned.log.unsettled(ensemble, [caller for _, caller in part])
            left = [step for (step, _), attempt in zip(part, attempts, strict=True) if attempt < 0]
            found = [step for step in left if owned.scheduler.find(step) is not None]
            if not owned.closed:
                owned.cancel(found)
                cancelled += len(found)
    if cancelled:
        _log.info("cancelled %d steps of ensembles whose requests have ended, of model '%s'", cancelled, owned.model)
    return cancelled
