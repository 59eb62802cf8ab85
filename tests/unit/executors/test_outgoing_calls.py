"""Who waits for what models call."""

from __future__ import annotations

from instance_pool import record
from msgspec.structs import replace

from charonia.wire import Lineage
from executors.outgoing_calls import callers


def test_all_of_a_batch_wait_for_what_it_calls() -> None:
    called = replace(record(2), lineage=Lineage().with_child("a", bytes(16)).with_child("b", bytes(16)))
    assert callers("m", []) == {"m"}
    assert callers("m", [record(1), called]) == {"m", "a", "b"}
