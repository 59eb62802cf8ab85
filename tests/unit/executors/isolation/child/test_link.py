"""Frames that are held go with one write, in order, and large ones do not wait."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from charonia.backend import ModelResponse
from charonia.datatypes import DataType
from charonia.errors import InvalidArgument
from charonia.tensors import Tensor
from executors.backends.python.frame_content import responses_together
from executors.backends.python.protocol.frames import Frame, FrameReader, Kind
from executors.isolation.child.link import Link


class Writes:
    """Stands in for the transport's `write`, and keeps what it got."""

    def __init__(self, link: Link) -> None:
        self.kept: list[bytes] = []
        transport: Any = link._transport
        self._write = transport.write
        transport.write = self

    def __call__(self, data: Any) -> None:
        self.kept.append(bytes(data))

    def frames(self) -> list[Frame]:
        reader, data, found = FrameReader(), b"".join(self.kept), []
        while data:
            view = reader.get_buffer()
            count = min(len(view), len(data))
            view[:count] = data[:count]
            found += reader.received(count)
            data = data[count:]
        return found


class _Transport(asyncio.Transport):
    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def write(self, data: Any) -> None: ...


def linked() -> tuple[Link, Writes]:
    link = Link(lambda frame: None, lambda: None)
    link.connection_made(_Transport())
    return link, Writes(link)


async def test_held_frames_go_with_one_write() -> None:
    link, writes = linked()
    link.send(Kind.DONE, 1, None)
    with link.hold():
        for call in (2, 3, 4):
            link.send(Kind.RESPONSE, call, [0, False, None], [b"abc"])
        assert len(writes.kept) == 1
    assert len(writes.kept) == 2
    link.send(Kind.DONE, 5, None)
    assert [frame.call for frame in writes.frames()] == [1, 2, 3, 4, 5]


async def test_a_large_frame_does_not_wait_and_keeps_its_place() -> None:
    link, writes = linked()
    large = bytearray(1 << 20)
    with link.hold(), link.hold():
        link.send(Kind.RESPONSE, 1, [0, False, None], [b"abc"])
        link.send(Kind.RESPONSE, 2, [0, False, None], [large])
        large[:] = b"x" * len(large)  # its sender may use the memory again
        link.send(Kind.RESPONSE, 3, [0, True, None])
    found = writes.frames()
    assert [frame.call for frame in found] == [1, 2, 3]
    assert bytes(found[1].data[:3]) == bytes(3)


async def test_what_is_held_arrives() -> None:
    ours, theirs = socket.socketpair()
    link = Link(lambda frame: None, lambda: None)
    await link.connect(ours)
    with theirs:
        with link.hold():
            link.send(Kind.DONE, 7, "a")
            link.send(Kind.DONE, 8, "b")
        theirs.settimeout(20)
        reader, calls = FrameReader(), []
        while len(calls) < 2:
            calls += [frame.call for frame in reader.received(theirs.recv_into(reader.get_buffer()))]
        assert calls == [7, 8]
    link.close()


async def test_small_responses_of_a_step_share_a_frame_and_keep_their_place() -> None:
    link, writes = linked()
    text = ModelResponse([Tensor("text", DataType.BYTES, (1,), b"\1\0\0\0a")], progress=b"p", tokens=1)
    large = ModelResponse([Tensor("text", DataType.BYTES, (1,), bytes(5000))])
    assert not link.respond(1, 0, text, final=False)  # it would wait for nothing
    with link.hold():
        assert link.respond(1, 0, text, final=False)
        assert link.respond(2, 3, ModelResponse(error=InvalidArgument("no")), final=True)
        assert not link.respond(2, 1, large, final=False)
        link.send(Kind.DONE, 9, None)
        assert link.respond(1, 0, None, final=True)
        assert not writes.kept
    assert len(writes.kept) == 1
    first, done, last = writes.frames()
    assert (first.kind, done.kind, last.kind) == (Kind.RESPONSES, Kind.DONE, Kind.RESPONSES)
    (call, index, final, told), (other, at, ended, failed) = responses_together(first)
    assert (call, index, final, other, at, ended) == (1, 0, False, 2, 3, True)
    assert told == text
    assert failed is not None
    assert isinstance(failed.error, InvalidArgument)
    assert responses_together(last) == [(1, 0, True, None)]
