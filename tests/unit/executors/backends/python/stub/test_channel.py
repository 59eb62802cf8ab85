"""The model process's end of the socket: who receives while others wait for what they may send."""

from __future__ import annotations

import math
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from executors.backends.python.protocol.frames import Frame, Kind, pack
from executors.backends.python.stub.channel import Channel, ChannelClosed

_PATIENCE_S = 30


class Unfair:
    """A lock that whoever releases it gets again before anybody who waits: what locks may do, and mostly do."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.waiting = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._lock.acquire(blocking=False):
            return True
        end = math.inf if timeout < 0 else time.monotonic() + timeout
        self.waiting += 1
        try:
            while blocking and time.monotonic() < end:
                time.sleep(0.01)
                if self._lock.acquire(blocking=False):
                    return True
        finally:
            self.waiting -= 1
        return False

    def release(self) -> None:
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def until(met: Callable[[], bool]) -> None:
    end = time.monotonic() + _PATIENCE_S
    while not met():
        assert time.monotonic() < end
        time.sleep(0.001)


class Taking(threading.Thread):
    """The thread of a model that takes the verbs."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(daemon=True)
        self.frames: queue.SimpleQueue[Frame | Exception] = queue.SimpleQueue()
        self._channel = channel

    def run(self) -> None:
        try:
            while True:
                self.frames.put(self._channel.receive())
        except ChannelClosed as error:
            self.frames.put(error)

    def got(self, call: int) -> None:
        frame = self.frames.get(timeout=_PATIENCE_S)
        assert isinstance(frame, Frame)
        assert (frame.kind, frame.call) == (Kind.EXECUTE, call)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel]]:
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    yield ours, channel
    ours.close()


def tell(end: socket.socket, kind: Kind, call: int, content: object) -> None:
    for buffer in pack(kind, call, content):
        end.sendall(buffer)


def test_who_waits_for_its_window_keeps_no_frame_from_who_takes_the_verbs(ends: tuple[socket.socket, Channel]) -> None:
    """S55: a sender's thread waits while the model's own thread is to begin the next batch."""
    ours, channel = ends
    channel.limit(1, 0, 1)
    channel.lingers(1)
    receiving = channel._receiving = Unfair()  # type: ignore[assignment]
    waited = threading.Event()

    def sender() -> None:
        channel.wait_for_window(1, 0, 1)
        waited.set()

    sending, taking = threading.Thread(target=sender, daemon=True), Taking(channel)
    sending.start()
    until(receiving.locked)
    taking.start()
    for call in (2, 3, 4):
        tell(ours, Kind.EXECUTE, call, None)
        taking.got(call)
    assert not waited.is_set()
    tell(ours, Kind.WINDOW, 1, [[0, 2]])
    assert waited.wait(_PATIENCE_S)
    ours.close()
    assert isinstance(taking.frames.get(timeout=_PATIENCE_S), ChannelClosed)


def test_who_takes_the_verbs_gets_them_when_another_thread_begins_to_receive(
    ends: tuple[socket.socket, Channel],
) -> None:
    ours, channel = ends
    receiving = channel._receiving = Unfair()  # type: ignore[assignment]
    receiving.acquire()  # as who looks for a cancel
    taking = Taking(channel)
    taking.start()
    until(lambda: receiving.waiting == 1)
    channel._background = True  # as in `receive_in_background`, whose thread is this one
    for call in (2, 3):
        tell(ours, Kind.EXECUTE, call, None)
        channel._read(0)
        taking.got(call)
    receiving.release()


@pytest.mark.parametrize("what", ["window", "cancel", "end"])
def test_one_thread_waits_for_its_window_and_takes_the_verbs_after_it(
    ends: tuple[socket.socket, Channel], what: str
) -> None:
    """As when `execute` itself sends the responses."""
    ours, channel = ends
    channel.limit(1, 0, 1)
    channel.wait_for_window(1, 0, 0)  # one may be sent
    tell(ours, Kind.EXECUTE, 2, None)
    if what == "window":
        tell(ours, Kind.WINDOW, 1, [[0, 2]])
    elif what == "cancel":
        tell(ours, Kind.CANCEL, 1, [0])
    else:
        ours.close()
    if what == "end":
        try:
            channel.wait_for_window(1, 0, 1)
        except ChannelClosed:
            return
    else:
        channel.wait_for_window(1, 0, 1)
    frame = channel.receive()
    assert (frame.kind, frame.call) == (Kind.EXECUTE, 2)
    assert channel.cancelled(1, 0) is (what == "cancel")
