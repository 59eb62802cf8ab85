"""The state of a delivery as it is kept and shown."""

from __future__ import annotations

import msgpack
from memory_log.log import MemoryLog

from charonia import keys
from charonia.clock import wall_ns
from charonia.facts.jobs import JobRecord, JobState
from gateway.webhooks.deliveries import Delivery, delivery_of, keep, pack, unpack
from gateway.webhooks.retries import DeliveryState

ID = b"j" * 16


async def test_a_state_is_kept_beside_the_job() -> None:
    log = MemoryLog()
    assert await delivery_of(log, "m", ID) is None
    job = JobRecord("m", ID, JobState.FAILED, "", 1, 1, 0, 1, wall_ns() // 1000, 60, "memory", {})
    state = Delivery(DeliveryState.PENDING, 2, 503, "", 1_763_700_000_000_000, 1_763_700_005_000_000)
    await keep(log, job, state)
    found = await delivery_of(log, "m", ID)
    assert found == state
    assert found.view() == {
        "state": "pending",
        "attempts": 2,
        "last_status": 503,
        "last_error": None,
        "last_attempt": "2025-11-21T04:40:00.000000Z",
        "next_attempt": "2025-11-21T04:40:05.000000Z",
    }
    assert await log.notes([keys.webhook_state("m", ID)]) == [pack(state)]


def test_a_state_of_another_release_is_read_as_far_as_it_goes() -> None:
    newer = msgpack.packb({"state": "delivered", "attempts": 3, "mood": "good"})
    assert unpack(newer) == Delivery(DeliveryState.DELIVERED, 3)
    for data in (b"", b"\xc1", msgpack.packb([1]), msgpack.packb({"state": "odd"}), msgpack.packb({})):
        assert unpack(data) == Delivery()
