"""Who waits for whom in a stream, without gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from charonia.errors import CharoniaError, NotFound
from gateway.grpc.stream_requests import AnswerStream


class Peer:
    """A client as the stream sees it: messages it sends, answers it takes (or does not, while `taking` is closed)."""

    def __init__(self, *messages: bytes, failure: Exception | None = None, hold: bool = False) -> None:
        self.messages = list(messages)
        self.failure = failure
        self.read = 0
        self.written: list[bytes] = []
        self.taking = asyncio.Event()
        self.more = asyncio.Event()
        self.taking.set()
        if not hold:
            self.more.set()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for message in self.messages:
            await asyncio.sleep(0)  # as a read from a socket does
            self.read += 1
            yield message
        await self.more.wait()
        if self.failure is not None:
            raise self.failure

    async def write(self, answer: bytes) -> None:
        await self.taking.wait()
        self.written.append(answer)


class Work:
    """Answers a message with itself once its gate is open; texts in `errors` are errors."""

    def __init__(self, *closed: bytes) -> None:
        self.gates = {message: asyncio.Event() for message in closed}
        self.errors: set[bytes] = set()
        self.started: list[bytes] = []
        self.cancelled: list[bytes] = []

    async def __call__(self, message: bytes) -> bytes | CharoniaError:
        self.started.append(message)
        try:
            if message in self.gates:
                await self.gates[message].wait()
        except asyncio.CancelledError:
            self.cancelled.append(message)
            raise
        return NotFound(message.decode()) if message in self.errors else message


def stream(work: Work, peer: Peer, **bounds: int) -> AnswerStream:
    answer: Callable[[bytes], Any] = work.__call__
    write: Callable[[bytes], Awaitable[None]] = peer.write
    return AnswerStream(answer, write, **bounds)


async def settle() -> None:
    """Let everything run that can; nothing here waits for anything but the loop."""
    for _ in range(200):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
async def _nothing_left() -> AsyncIterator[None]:
    yield
    await settle()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_answers_leave_in_order_while_requests_run_side_by_side() -> None:
    work, peer = Work(b"0"), Peer(b"0", b"1", b"2")
    running = asyncio.create_task(stream(work, peer).run(peer.__aiter__()))
    await settle()
    assert work.started == [b"0", b"1", b"2"]
    assert peer.written == []
    work.gates[b"0"].set()
    assert await running is None
    assert peer.written == [b"0", b"1", b"2"]


async def test_no_messages_at_all() -> None:
    peer = Peer()
    assert await stream(Work(), peer).run(peer.__aiter__()) is None


async def test_an_answer_leaves_before_the_client_is_done_sending() -> None:
    work, peer = Work(), Peer(b"0", hold=True)
    running = asyncio.create_task(stream(work, peer).run(peer.__aiter__()))
    await settle()
    assert peer.written == [b"0"]
    peer.more.set()
    assert await running is None


async def test_a_returned_error_ends_it_and_cancels_the_others() -> None:
    work, peer = Work(b"1", b"2"), Peer(b"0", b"1", b"2", hold=True)
    work.errors.add(b"1")
    running = asyncio.create_task(stream(work, peer).run(peer.__aiter__()))
    await settle()
    work.gates[b"1"].set()
    assert isinstance(await running, NotFound)
    await settle()
    assert (peer.written, work.cancelled) == ([b"0"], [b"2"])


async def test_cancelling_it_cancels_all_its_requests() -> None:
    work, peer = Work(b"0", b"1"), Peer(b"0", b"1", hold=True)
    running = asyncio.create_task(stream(work, peer).run(peer.__aiter__()))
    await settle()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await settle()
    assert sorted(work.cancelled) == [b"0", b"1"]


async def test_cancelling_it_while_it_writes_cancels_its_requests_too() -> None:
    work, peer = Work(b"1"), Peer(b"0", b"1", hold=True)
    peer.taking.clear()
    running = asyncio.create_task(stream(work, peer).run(peer.__aiter__()))
    await settle()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await settle()
    assert work.cancelled == [b"1"]


@pytest.mark.parametrize("messages", [0, 1, 2, 10])
async def test_a_failing_reader_ends_it_after_the_answers_however_full_it_is(messages: int) -> None:
    peer = Peer(*[b"x"] * messages, failure=RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        await stream(Work(), peer, max_open_requests=2).run(peer.__aiter__())
    assert len(peer.written) == messages


async def test_a_reader_that_fails_after_the_end_disturbs_nobody() -> None:
    work, peer = Work(b"1"), Peer(b"0", b"1", failure=RuntimeError("late"))
    work.errors.add(b"0")
    assert isinstance(await stream(work, peer).run(peer.__aiter__()), NotFound)


async def test_a_failing_write_ends_it() -> None:
    work, peer = Work(b"0", b"1"), Peer(b"0", b"1", hold=True)

    async def write(_answer: bytes) -> None:
        raise ConnectionError

    running = asyncio.create_task(AnswerStream(work.__call__, write).run(peer.__aiter__()))
    await settle()
    work.gates[b"0"].set()
    with pytest.raises(ConnectionError):
        await running
    await settle()
    assert work.cancelled == [b"1"]


async def test_a_client_that_takes_nothing_is_not_read_from() -> None:
    work, peer = Work(), Peer(*[b"x"] * 20)
    peer.taking.clear()
    running = asyncio.create_task(stream(work, peer, max_open_requests=4).run(peer.__aiter__()))
    await settle()
    assert (peer.read, len(work.started)) == (4, 4)
    peer.taking.set()
    assert await running is None
    assert len(peer.written) == 20


async def test_bytes_are_bounded_as_well_as_requests() -> None:
    work, peer = Work(), Peer(*[b"x" * 100] * 20)
    peer.taking.clear()
    running = asyncio.create_task(stream(work, peer, max_held_bytes=250).run(peer.__aiter__()))
    await settle()
    assert peer.read == 3
    peer.taking.set()
    assert await running is None
    assert len(peer.written) == 20


async def test_small_requests_with_large_answers_are_bounded() -> None:
    peer = Peer(*[b"x"] * 20)
    peer.taking.clear()

    async def answer(_message: bytes) -> bytes:
        return b"y" * 1000

    running = asyncio.create_task(AnswerStream(answer, peer.write, max_held_bytes=2500).run(peer.__aiter__()))
    await settle()
    assert peer.read <= 5
    peer.taking.set()
    assert await running is None
    assert peer.written == [b"y" * 1000] * 20


class Rows:
    """Answers that come one by one from a queue for each message; None is their end."""

    def __init__(self) -> None:
        self.rows: dict[bytes, asyncio.Queue[bytes | CharoniaError | None]] = {}
        self.closed: list[bytes] = []

    async def __call__(self, message: bytes) -> AsyncGenerator[bytes | CharoniaError]:
        row = self.rows[message] = asyncio.Queue()
        try:
            while (answer := await row.get()) is not None:
                yield answer
        finally:
            self.closed.append(message)


async def test_answers_in_rows_leave_as_they_come() -> None:
    rows, work, peer = Rows(), Work(b"0"), Peer(b"0", b"row1", b"row2")

    def answer(message: bytes) -> Any:
        return rows(message) if message.startswith(b"row") else work(message)

    running = asyncio.create_task(AnswerStream(answer, peer.write).run(peer.__aiter__()))
    await settle()
    for row, text in ((b"row2", b"a"), (b"row1", b"b"), (b"row2", b"c")):
        rows.rows[row].put_nowait(text)
        await settle()
    assert peer.written == [b"a", b"b", b"c"]
    work.gates[b"0"].set()
    rows.rows[b"row1"].put_nowait(None)
    await settle()
    assert not running.done()
    rows.rows[b"row2"].put_nowait(None)
    assert await running is None
    assert peer.written == [b"a", b"b", b"c", b"0"]


@pytest.mark.parametrize("how", ["error", "cancel", "write", "reader"])
async def test_whatever_ends_it_closes_the_rows(how: str) -> None:
    rows = Rows()
    peer = Peer(b"row1", b"row2", hold=True, failure=ConnectionError() if how == "reader" else None)

    async def write(answer: bytes) -> None:
        if how == "write":
            raise ConnectionError
        await peer.write(answer)

    running = asyncio.create_task(AnswerStream(rows.__call__, write).run(peer.__aiter__()))
    await settle()
    rows.rows[b"row1"].put_nowait(NotFound("x") if how == "error" else b"a")
    await settle()
    if how == "cancel":
        running.cancel()
    if how == "reader":
        # what was asked before is still answered
        peer.more.set()
        await settle()
        assert not running.done()
        for row in rows.rows.values():
            row.put_nowait(None)
    with pytest.raises((ConnectionError, asyncio.CancelledError)) if how != "error" else contextlib.nullcontext():
        assert isinstance(await running, NotFound)
    await settle()
    assert sorted(rows.closed) == [b"row1", b"row2"]


@pytest.mark.parametrize("steps", range(12))
async def test_rows_that_come_as_the_stream_ends_are_not_begun(steps: int) -> None:
    """A row may come in any step between an error and the end of the stream; none leaves work that is never run."""
    rows, work, peer = Rows(), Work(), Peer()
    work.errors.add(b"wrong")

    def answer(message: bytes) -> Any:
        return rows(message) if message == b"row" else work(message)

    async def messages() -> AsyncIterator[bytes]:
        yield b"wrong"
        for _ in range(steps):
            await asyncio.sleep(0)
        yield b"row"

    assert isinstance(await AnswerStream(answer, peer.write).run(messages()), NotFound)
    gc.collect()  # where such work would be found


async def test_a_row_whose_client_takes_nothing_is_not_asked_for_more() -> None:
    rows, peer = Rows(), Peer(b"row1")
    peer.taking.clear()
    running = asyncio.create_task(AnswerStream(rows.__call__, peer.write).run(peer.__aiter__()))
    await settle()
    for _ in range(5):
        rows.rows[b"row1"].put_nowait(b"a")
    rows.rows[b"row1"].put_nowait(None)
    await settle()
    assert rows.rows[b"row1"].qsize() == 5
    peer.taking.set()
    assert await running is None
    assert len(peer.written) == 5
