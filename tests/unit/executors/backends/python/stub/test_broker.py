"""The calls of a model process over a real socket: who waits for an answer may be any thread."""

from __future__ import annotations

import asyncio
import queue
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from executors.backends.python.api.calls import Answer
from executors.backends.python.protocol.frames import Frame, FrameReader, Kind, pack
from executors.backends.python.stub.channel import Broker, Channel, ChannelClosed

PATIENCE_S = 30


class Executor:
    """The other end of the socket, blocking."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.settimeout(PATIENCE_S)
        self._reader = FrameReader()
        self._frames: list[Frame] = []

    def read(self) -> Frame:
        while not self._frames:
            self._frames += self._reader.received(self._socket.recv_into(self._reader.get_buffer()))
        return self._frames.pop(0)

    def say(self, kind: Kind, number: int, content: Any, data: tuple[bytes, ...] = ()) -> None:
        for buffer in pack(kind, number, content, data):
            self._socket.sendall(buffer)

    def close(self) -> None:
        self._socket.close()


class World:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.executor = Executor(ours)
        self.channel = Channel(theirs)
        self.broker = Broker(self.channel)
        self._theirs = theirs

    def call(self) -> tuple[int, queue.SimpleQueue[Answer | None]]:
        answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        return self.broker.call(["m"], [b"abcd"], answers.put), answers

    def close(self) -> None:
        self.executor.close()
        self._theirs.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.broker.returned()  # what its thread runs is the thread's, not the broker's
    made.close()


def test_answers_find_who_waits_for_them(world: World) -> None:
    world.broker.begin(5)
    first, of_first = world.call()
    second, of_second = world.call()
    frame = world.executor.read()
    assert (frame.kind, frame.call, frame.content(), bytes(frame.data[:4])) == (
        Kind.CALL,
        first,
        [5, True, False, "m"],
        b"abcd",
    )
    assert world.executor.read().call == second
    world.executor.say(Kind.ANSWER, second, "two")
    world.executor.say(Kind.LAST_ANSWER, first, "one", (b"xy",))
    world.executor.say(Kind.LAST_ANSWER, second, None)
    world.executor.say(Kind.LAST_ANSWER, 99, "nobody's")
    content, data, last = of_first.get(timeout=PATIENCE_S) or (None, b"", False)
    assert (content, bytes(data[:2]), last) == ("one", b"xy", True)
    assert [answer and (answer[0], answer[2]) for answer in (of_second.get(), of_second.get())] == [
        ("two", False),
        (None, True),
    ]


def test_a_call_that_cannot_be_packed_raises_and_waits_for_nothing(world: World) -> None:
    answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
    for content in ([object()], [1 << 64], ["\udc80"]):
        with pytest.raises((TypeError, OverflowError, UnicodeEncodeError)):
            world.broker.control(content, (), answers.put)
    number, of_next = world.call()
    assert world.executor.read().call == number
    world.executor.close()
    assert of_next.get(timeout=PATIENCE_S) is None
    assert answers.empty()


def test_verbs_and_cancels_come_while_a_thread_of_its_own_receives(world: World) -> None:
    world.executor.say(Kind.EXECUTE, 1, "before")
    assert world.channel.receive().content() == "before"
    _, answers = world.call()
    world.executor.say(Kind.CANCEL, 1, [0])
    world.executor.say(Kind.LAST_ANSWER, 1, "answer")
    world.executor.say(Kind.EXECUTE, 2, "after")
    assert answers.get(timeout=PATIENCE_S)
    assert (world.channel.cancelled(1, 0), world.channel.cancelled(1, 1)) == (True, False)
    assert world.channel.receive().content() == "after"


def test_a_call_from_a_thread_while_the_verbs_are_waited_for(world: World) -> None:
    """The one that waits reads the answer too; from then on another thread reads for both."""
    taken: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    waiting = threading.Thread(target=lambda: taken.put(world.channel.receive()))
    waiting.start()
    number, answers = world.call()
    world.executor.read()
    world.executor.say(Kind.LAST_ANSWER, number, "answer")
    assert answers.get(timeout=PATIENCE_S)
    world.executor.say(Kind.EXECUTE, 1, "verb")
    assert taken.get(timeout=PATIENCE_S).content() == "verb"
    waiting.join(PATIENCE_S)


def test_who_looks_for_a_cancel_may_take_a_verb_from_the_socket(world: World) -> None:
    """It must not be waited for at the socket then."""
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            world.channel.cancelled(0, 0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # threads take turns fifty times as often: more orders in less time
    looking = [threading.Thread(target=look) for _ in range(2)]
    taken: queue.SimpleQueue[Any] = queue.SimpleQueue()
    taking = threading.Thread(target=lambda: [taken.put(world.channel.receive().content()) for _ in range(500)])
    for thread in (*looking, taking):
        thread.start()
    try:
        for number in range(500):
            world.executor.say(Kind.EXECUTE, number, number)
            assert taken.get(timeout=PATIENCE_S) == number
    finally:
        stop.set()
        for thread in looking:
            thread.join(PATIENCE_S)
        sys.setswitchinterval(interval)


def test_what_is_given_up_is_said_while_it_is_open(world: World) -> None:
    number, answers = world.call()
    world.broker.give_up(number)
    assert [world.executor.read().kind for _ in range(2)] == [Kind.CALL, Kind.GIVE_UP]
    world.executor.say(Kind.LAST_ANSWER, number, [[7, ""], {}, []])
    assert answers.get(timeout=PATIENCE_S)
    world.broker.give_up(number)
    assert world.broker.control(["unload"], (), lambda _answer: None) != number
    assert world.executor.read().kind is Kind.CONTROL


def test_when_the_executor_goes_nobody_waits_on(world: World) -> None:
    _, answers = world.call()
    world.executor.close()
    assert answers.get(timeout=PATIENCE_S) is None
    with pytest.raises(ChannelClosed):
        world.channel.receive()
    _, later = world.call()
    assert later.get(timeout=PATIENCE_S) is None


def test_for_which_execute_a_call_is_made(world: World) -> None:
    """Surely for the one that runs: in its thread and in those begun meanwhile; else only perhaps."""

    def said() -> list[Any]:
        world.call()
        return list(world.executor.read().content()[:2])

    def in_thread() -> list[Any]:
        found: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        threading.Thread(target=lambda: found.put(said())).start()
        return found.get(timeout=PATIENCE_S)

    asked: queue.SimpleQueue[None] = queue.SimpleQueue()
    told: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()

    def keep_asking() -> None:
        for _ in range(2):
            asked.get(timeout=PATIENCE_S)
            told.put(said())

    assert said() == [0, False]
    world.broker.begin(1)
    older = threading.Thread(target=keep_asking)
    older.start()
    asked.put(None)
    assert told.get(timeout=PATIENCE_S) == [1, True]
    assert said() == [1, True]
    world.broker.returned()
    assert said() == [1, False]
    world.broker.begin(2)
    asked.put(None)
    assert told.get(timeout=PATIENCE_S) == [2, False]
    assert (said(), in_thread()) == ([2, True], [2, True])
    older.join(PATIENCE_S)


class Wire:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def deliver_answers_to(self, *_: object) -> None: ...

    def receive_in_background(self) -> None: ...

    def send(self, kind: Kind, call: int, content: Any, data: object = ()) -> None:
        self.sent.append(content)


def test_a_coroutine_calls_for_its_own_execute_and_a_thread_for_the_last() -> None:
    wire = Wire()
    broker = Broker(wire)  # type: ignore[arg-type]
    loop = asyncio.new_event_loop()
    running = threading.Thread(target=loop.run_forever)
    running.start()
    begun, go = threading.Event(), asyncio.Event()

    async def model() -> None:
        begun.set()
        await go.wait()
        broker.call(["coroutine"], (), lambda _: None)

    broker.begin(1)
    first = asyncio.run_coroutine_threadsafe(model(), loop)
    assert begun.wait(30)
    broker.begin(2)
    broker.call(["execute"], (), lambda _: None)
    thread = threading.Thread(target=broker.call, args=(["thread"], (), lambda _: None))
    thread.start()
    thread.join(30)
    loop.call_soon_threadsafe(go.set)
    first.result(30)
    loop.call_soon_threadsafe(loop.stop)
    running.join(30)
    loop.close()
    broker.returned()
    assert wire.sent == [[2, True, False, "execute"], [2, True, False, "thread"], [1, True, False, "coroutine"]]


def test_which_calls_hold_their_execute_up(world: World) -> None:
    """Those made where it runs, before it has answered anything."""
    answered = False

    def call(*, blocks: bool = True) -> bool:
        world.broker.call(["m"], [], lambda _: None, blocks=blocks)
        return bool(world.executor.read().content()[2])

    assert not call()  # no EXECUTE
    world.broker.begin(1, lambda: answered)
    assert call()
    assert not call(blocks=False)
    elsewhere: queue.SimpleQueue[bool] = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: elsewhere.put(call()))
    thread.start()
    thread.join(PATIENCE_S)
    assert not elsewhere.get()
    answered = True
    assert not call()
    world.broker.returned()
    assert not call()
