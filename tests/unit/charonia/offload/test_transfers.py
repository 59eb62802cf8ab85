"""Turns of large data through real sockets: how far one comes, and when it waits for the peer."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from charonia.offload import transfers
from charonia.offload.transfers import move, sends, sends_file

PIECE = transfers._PIECE_BYTES
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time that a slow machine needs."""
    monkeypatch.setattr(transfers, "_TURN_S", 60.0)
    monkeypatch.setattr(transfers, "_PATIENCE_MS", 60_000)


def receives(connection: int, into: bytearray) -> transfers.Step:
    view = memoryview(into)
    return lambda at, end: os.readv(connection, [view[at:end]])


def file_with(data: bytes) -> int:
    file = os.memfd_create("test", os.MFD_CLOEXEC)
    os.write(file, data)
    return file


def read_all(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        data += connection.recv(PIECE)
    return bytes(data)


@pytest.mark.parametrize("from_file", [False, True])
def test_a_turn_goes_on_while_the_peer_reads(pair: Pair, patient: None, from_file: bool) -> None:
    ours, theirs = pair
    data = os.urandom(40 * PIECE + 3)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(read_all(theirs, len(data))))
    reader.start()
    if from_file:
        file = file_with(b"before" + data)
        step = sends_file(ours.fileno(), file, 6)
    else:
        step = sends(ours.fileno(), memoryview(data))
    at, waits = 0, False
    while at < len(data):  # not in one turn only if the socket is full before it has taken a piece
        at, waits = move(step, at, len(data), ours.fileno(), select.POLLOUT)
    reader.join()
    assert (got, waits) == ([data], False)
    if from_file:
        os.close(file)


def test_a_turn_receives_up_to_its_end_and_no_more(pair: Pair, patient: None) -> None:
    ours, theirs = pair
    theirs.sendall(b"x" * 300 + b"next")
    into = bytearray(400)
    assert move(receives(ours.fileno(), into), 100, 400, ours.fileno(), select.POLLIN) == (400, False)
    assert into == bytes(100) + b"x" * 300
    assert ours.recv(10) == b"next"


def test_a_peer_that_sends_little_is_not_waited_for(pair: Pair, patient: None) -> None:
    ours, theirs = pair
    theirs.sendall(b"x" * 300)
    into = bytearray(10 * PIECE)
    assert move(receives(ours.fileno(), into), 0, len(into), ours.fileno(), select.POLLIN) == (300, True)
    assert move(receives(ours.fileno(), into), 300, len(into), ours.fileno(), select.POLLIN) == (300, True)


def test_one_that_has_sent_a_piece_is_waited_for_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "_TURN_S", 60.0)
    waits: list[int] = []

    class Poll:
        def register(self, *_: int) -> None:
            pass

        def poll(self, wait_ms: int) -> list[int]:
            waits.append(wait_ms)
            return [1]

    monkeypatch.setattr(select, "poll", Poll)
    ours, theirs = pair
    theirs.sendall(b"x" * PIECE)
    into = bytearray(10 * PIECE)
    assert move(receives(ours.fileno(), into), 0, len(into), ours.fileno(), select.POLLIN) == (PIECE, True)
    assert waits == [transfers._PATIENCE_MS]


def test_a_turn_ends(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.0, 0.009, 0.011])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    ours, _ = pair
    step: Callable[[int, int], int] = lambda at, end: end - at  # noqa: E731
    assert move(step, 0, 9 * PIECE, ours.fileno(), select.POLLOUT) == (2 * PIECE, False)


def test_an_early_end_is_told(pair: Pair) -> None:
    ours, theirs = pair
    theirs.sendall(b"x" * 3)
    theirs.close()
    into = bytearray(10)
    with pytest.raises(EOFError, match="7 bytes early"):
        move(receives(ours.fileno(), into), 0, 10, ours.fileno(), select.POLLIN)
    file = file_with(b"abc")
    with pytest.raises((EOFError, OSError)):
        move(sends_file(ours.fileno(), file, 0), 3, 10, ours.fileno(), select.POLLOUT)
    os.close(file)
