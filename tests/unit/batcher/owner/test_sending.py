"""What a batch takes on its way to its executor, and that nothing of it is kept when it is given up meanwhile."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from batcher.entries.carriers import Carried, CarrierEntry
from batcher.owner.given import GivenBatches
from batcher.owner.sending import Sending
from batcher.owner.turns_apart import TurnsApart
from batcher.scheduling.decisions import DispatchBatch


async def test_a_batch_that_is_given_up_before_its_turn_takes_none() -> None:
    """Its executor was lost, and is heard of again: the next suspect would wait for this one's end."""
    turns = TurnsApart()
    given = GivenBatches(turns.give)
    sent: list[str] = []

    async def send(decision: DispatchBatch) -> None:
        sent.append(decision.batch_id)

    async def begin_attempts(decision: DispatchBatch) -> tuple[DispatchBatch, list[Any]]:
        return decision, []

    async def job_responses(*_: object, **__: object) -> list[bytes]:
        given.lose("executor-1")  # while the log is asked
        return []

    dispatcher = SimpleNamespace(must_begin=lambda _decision: True, begin_attempts=begin_attempts, send=send)
    record = SimpleNamespace(id=b"r" * 16, is_job=True)
    carried = Carried(cast(Any, record), CarrierEntry(b"q", b"1-0", 1), 1)
    request = SimpleNamespace(id=record.id, settled=False, carrier=carried)
    decision = DispatchBatch("b-1", "executor-1", 1, "h", cast(list[Any], [request]), (2,), False, "apart")
    owner = SimpleNamespace(
        dispatcher=dispatcher,
        given=given,
        closed=False,
        model="m",
        wanted={},
        log=SimpleNamespace(job_responses=job_responses),
        streams_once=True,
        notes=SimpleNamespace(concern=lambda _decision: False),
        requests_settled=lambda _requests: None,
    )
    given.add("b-1", "executor-1", decision.requests)
    sending = Sending(cast(Any, owner), "", cast(Any, None), turns, lambda _model: None)
    await sending.send(decision)
    async with asyncio.timeout(5):
        await turns.take("executor-1", "b-2")
    assert turns._holders == {"executor-1": "b-2"}
    assert sent == []
