"""The dispatched batches of an owner: what a batch takes on its way, and that nothing is kept of one that is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from batcher.entries.carriers import Carried, CarrierEntry
from batcher.owner.dispatched_batches import DispatchedBatches
from batcher.owner.quarantine import Quarantine
from batcher.scheduling.decisions import DispatchBatch
from batcher.scheduling.observations import RequestQueued

_RECORD = SimpleNamespace(id=b"r" * 16, is_job=False, flags=0, record=b"", journalled=False)


class Log:
    """What is written, and what is asked on the way."""

    def __init__(self) -> None:
        self.appended: list[bytes] = []
        self.asked: Callable[[], None] = lambda: None

    async def append(self, stream: bytes, _fields: object) -> None:
        self.appended.append(stream)

    async def begin_attempt(self, _model: str, _token: int, ids: list[bytes], *_: object, **__: object) -> list[bool]:
        return [True] * len(ids)

    async def job_responses(self, *_: object, **__: object) -> list[bytes]:
        self.asked()
        return []


class Owner:
    def __init__(self) -> None:
        self.closed = False
        self.tasks: list[asyncio.Task[None]] = []
        self.log = Log()
        self.quarantine = Quarantine()
        note = SimpleNamespace(aboard={})
        arguments: Any = (self, self.log, None, "m", 1, note, self.quarantine, None)
        self.dispatched = DispatchedBatches(*arguments)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(coroutine))

    def requests_settled(self, _requests: object) -> None: ...

    async def done(self) -> None:
        async with asyncio.timeout(5):
            await asyncio.gather(*self.tasks)


@pytest.fixture
async def owner() -> Owner:
    return Owner()


def batch(batch_id: str, executor: str, *, attempt: int = 1, is_job: bool = False, suspects: Any = "") -> DispatchBatch:
    record = SimpleNamespace(**{**vars(_RECORD), "is_job": is_job})
    carried = Carried(cast(Any, record), CarrierEntry(b"q", b"1-0", 1), 1)
    request = RequestQueued(record.id, 1, 0, 1, 7, 0, 0, 0, carrier=carried)
    return DispatchBatch(batch_id, executor, 1, "h", [request], (attempt,), False, suspects)


async def test_a_batch_is_unsent_then_sent_then_over_once(owner: Owner) -> None:
    dispatched, one = owner.dispatched, batch("1", "a")
    dispatched.dispatch(one)
    dispatched.dispatch(batch("2", "b"))
    assert (dispatched.unsent("a"), dispatched.unsent("b")) == (["1"], ["2"])
    assert dispatched.older_than(0) == {}
    await owner.done()
    assert owner.log.appended == [b"x:a", b"x:b"]
    assert dispatched.unsent("a") == dispatched.unsent("b") == []
    assert dispatched.older_than(0) == {"a": ["1"], "b": ["2"]}
    assert dispatched.older_than(10**18) == {}
    dispatched.verified("1")
    assert dispatched.requests("1") == one.requests
    assert dispatched.end("1") == one.requests
    assert dispatched.end("1") == dispatched.requests("1") == []
    dispatched.verified("1")
    dispatched.lose("b", "drained")
    assert len(dispatched) == 0
    assert dispatched.older_than(0) == {}


async def test_a_former_owners_batch_counts_as_sent(owner: Owner) -> None:
    one = batch("old-1", "a")
    owner.dispatched.restore("old-1", "a", one.requests)
    assert owner.dispatched.unsent("a") == []
    assert owner.dispatched.older_than(0) == {"a": ["old-1"]}
    owner.dispatched.close()
    assert "old-1" not in owner.dispatched


async def test_a_batch_that_is_given_up_before_it_enters_quarantine_never_does(owner: Owner) -> None:
    """Its executor was lost, and is heard of again: the next suspect would wait for this one's end."""
    owner.log.asked = lambda: owner.dispatched.lose("executor-1", "the executor was lost")  # while the log is asked
    owner.dispatched.streams_once = True
    owner.dispatched.dispatch(batch("b-1", "executor-1", attempt=2, is_job=True, suspects="apart"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner.dispatched, "came_back", lambda *_: None)
        await owner.done()
    async with asyncio.timeout(5):
        await owner.quarantine.enter("executor-1", "b-2")
    assert owner.quarantine.holders == {"executor-1": "b-2"}
    assert owner.log.appended == []
