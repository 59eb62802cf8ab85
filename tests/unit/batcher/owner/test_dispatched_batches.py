"""The dispatched batches of an owner: what a batch takes on its way, and that nothing is kept of one that is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from batcher.entries.carriers import Carried, CarrierEntry, carried_of
from batcher.owner.dispatched_batches import DispatchedBatches
from batcher.owner.quarantine import Quarantine
from batcher.scheduling.decisions import DispatchBatch
from batcher.scheduling.observations import RequestQueued
from charonia.errors import InvalidArgument
from charonia.eventlog import port
from charonia.facts.events import BatchFinished


class Log:
    """What is written, and what is asked on the way."""

    def __init__(self) -> None:
        self.appended: list[bytes] = []
        self.asked: Callable[[], None] = lambda: None
        self.settled: set[bytes] = set()

    async def append(self, stream: bytes, _fields: object) -> None:
        self.appended.append(stream)

    async def begin_attempt(self, _model: str, _token: int, ids: list[bytes], *_: object, **__: object) -> list[bool]:
        return [request_id not in self.settled for request_id in ids]

    async def job_responses(self, *_: object, **__: object) -> list[bytes]:
        self.asked()
        return []


class Owner:
    def __init__(self) -> None:
        self.closed = False
        self.tasks: list[asyncio.Task[None]] = []
        self.log = Log()
        self.settled: list[bytes] = []
        self.finished: list[str] = []
        self.too_large: dict[str, str] = {}
        self.quarantine = Quarantine()
        note = SimpleNamespace(aboard={})
        arguments: Any = (self, self.log, None, "m", 1, note, self.quarantine, None)
        self.dispatched = DispatchedBatches(*arguments)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(coroutine))

    def requests_settled(self, requests: list[RequestQueued]) -> None:
        self.settled += [request.id for request in requests]

    def batch_too_large(self, batch_id: str, _executor: str, message: str) -> None:
        self.too_large[batch_id] = message

    def batch_finished(self, batch_id: str, _executor: str) -> None:
        self.finished.append(batch_id)
        self.dispatched.end(batch_id)

    async def done(self) -> None:
        async with asyncio.timeout(30):
            await asyncio.gather(*self.tasks)


@pytest.fixture
async def owner() -> Owner:
    return Owner()


def request(number: int, *, is_job: bool = False) -> RequestQueued:
    request_id = bytes([number]) * 16
    record = SimpleNamespace(id=request_id, is_job=is_job, flags=0, record=b"", journalled=False)
    carried = Carried(cast(Any, record), CarrierEntry(b"q", b"1-0", 1), 1)
    return RequestQueued(request_id, 1, 0, 1, 7, 0, 0, 0, carrier=carried)


def batch(
    batch_id: str, executor: str, *requests: RequestQueued, attempt: int = 1, suspects: Any = ""
) -> DispatchBatch:
    members = list(requests) or [request(1)]
    return DispatchBatch(batch_id, executor, 1, "h", members, (attempt,) * len(members), False, suspects)


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


async def test_the_end_of_burst_waves_waits_for_their_requests(owner: Owner) -> None:
    dispatched, requests = owner.dispatched, [request(1), request(2)]
    dispatched.restore("old-1", "a", requests, is_burst=True)
    dispatched.restore("old-2", "a", [request(3)])
    assert dispatched.older_than(0) == {"a": ["old-1", "old-2"]}
    fact = BatchFinished("a", "old-1")
    assert not dispatched.puts_off(BatchFinished("a", "old-2"))
    assert not dispatched.puts_off(BatchFinished("a", "unknown"))
    assert dispatched.puts_off(fact)
    assert dispatched.older_than(0) == {"a": ["old-2"]}, "its requests are being settled"
    carried_of(requests[0]).settled = True
    assert dispatched.take_put_off() == []
    carried_of(requests[1]).settled = True
    assert dispatched.take_put_off() == [fact]
    assert dispatched.take_put_off() == []
    assert not dispatched.puts_off(fact)


async def test_burst_waves_of_a_lost_executor_are_not_waited_for(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner.dispatched, "came_back", lambda *_: None)
    one = request(1)
    owner.dispatched.restore("old-1", "a", [one], is_burst=True)
    assert owner.dispatched.puts_off(BatchFinished("a", "old-1"))
    owner.dispatched.lose("a", "it was lost")
    carried_of(one).settled = True
    assert owner.dispatched.take_put_off() == []


async def test_a_batch_that_is_given_up_before_it_enters_quarantine_never_does(owner: Owner) -> None:
    """Its executor was lost, and is heard of again: the next suspect would wait for this one's end."""
    owner.log.asked = lambda: owner.dispatched.lose("executor-1", "the executor was lost")  # while the log is asked
    owner.dispatched.streams_once = True
    owner.dispatched.dispatch(batch("b-1", "executor-1", request(1, is_job=True), attempt=2, suspects="apart"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner.dispatched, "came_back", lambda *_: None)
        await owner.done()
    async with asyncio.timeout(30):
        await owner.quarantine.enter("executor-1", "b-2")
    assert owner.quarantine.holders == {"executor-1": "b-2"}
    assert owner.log.appended == []


async def test_members_that_were_settled_meanwhile_are_not_sent(owner: Owner) -> None:
    first, second = request(1), request(2)
    owner.log.settled = {second.id}
    owner.dispatched.dispatch(batch("1", "a", first, second, attempt=2))
    owner.dispatched.dispatch(batch("2", "b", second, attempt=2))
    await owner.done()
    assert owner.settled == [second.id, second.id]
    assert owner.dispatched.requests("1") == [first]
    assert owner.log.appended == [b"x:a"]
    assert owner.finished == ["2"], "nothing of it is left"
    assert "2" not in owner.dispatched


async def test_a_batch_that_the_log_would_not_take_is_not_sent_and_its_owner_is_told(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port, "MAX_RECORD_BYTES", 10)
    monkeypatch.setattr(port, "MAX_ENTRY_BYTES", 20)
    requests = [request(number) for number in range(1, 4)]
    for one in requests:
        one.carrier.record.record = bytes(5)
    owner.dispatched.dispatch(batch("1", "a", *requests[:2]))
    owner.dispatched.dispatch(batch("2", "a", *requests))
    requests[0].carrier.record.record = bytes(11)
    owner.dispatched.dispatch(batch("3", "a", requests[0]))
    await owner.done()
    text = "a batch of {} requests of model 'm' has {} bytes, which is more than the log takes at once ({} bytes)"
    assert owner.too_large == {"1": text.format(2, 16, 10), "2": text.format(3, 21, 10)}
    assert owner.log.appended == [b"x:a"], "a record alone came through the log before"

    waves = [request(number) for number in range(4, 9)]
    for one in waves:
        one.wave, one.carrier.record.record = True, bytes(5)
    owner.dispatched.dispatch(batch("4", "a", *waves[:4]))
    owner.dispatched.dispatch(batch("5", "a", *waves))
    await owner.done()
    assert owner.too_large.pop("5") == text.format(5, 25, 20)
    assert "4" not in owner.too_large


async def test_a_request_that_the_log_refuses_by_itself_is_said_to_its_owner(owner: Owner) -> None:
    async def append(_stream: bytes, _fields: object) -> None:
        raise InvalidArgument("7 bytes are more than the event log takes at once (6)")

    owner.log.append = append  # type: ignore[method-assign]
    owner.dispatched.dispatch(batch("1", "a"))
    await owner.done()
    assert owner.too_large == {"1": "7 bytes are more than the event log takes at once (6)"}
