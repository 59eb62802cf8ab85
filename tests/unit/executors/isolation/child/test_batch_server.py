"""What ends the process of an isolated model; `tests/integration/test_isolated_depth.py` has the executor's side."""

from __future__ import annotations

import asyncio
import gc
import itertools
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from instance_pool import SPEC, Doubling

from charonia.backend import DeviceLost, InstanceDied, Interrupted
from charonia.errors import InternalError, InvalidArgument
from executors.backends.python.protocol.frames import Frame, FrameReader, Kind, pack
from executors.backends.python.protocol.shared_slots import (
    INPUT_SLOTS,
    OUTPUT_SLOTS,
    SHARED_BYTES,
    ExecutorSlots,
    ModelSlots,
)
from executors.isolation.child import batch_server
from executors.isolation.child.batch_server import BatchServer
from executors.isolation.forms import described


class Ended(BaseException):
    """The process has ended."""


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, socket.socket]]:
    def end_process(model: str, death: BaseException) -> None:
        raise Ended(f"{model}: {death}")

    monkeypatch.setattr(batch_server, "end_process", end_process)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


class Failing(Doubling):
    """Raises what it is given."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def execute(self, inputs: Any, outputs: Any) -> Any:
        raise self.error


def answer(pair: tuple[socket.socket, socket.socket], kind: str, error: BaseException) -> Frame:
    """What the executor gets for a batch of an instance on such a device that raises this."""
    ours, theirs = pair
    instance = Failing(error)
    server = BatchServer(instance, instance, theirs, None, replace(SPEC, kind=kind))
    tensors, _ = described({})
    (frame,) = frames(b"".join(pack(Kind.EXECUTE, 7, [["y"], tensors, None, None], ())))
    server._answer(frame)
    (sent,) = frames(ours.recv(65536))
    return sent


SIZE = SHARED_BYTES // 4


@pytest.mark.parametrize(
    ("fail", "kind"),
    [
        (lambda: InvalidArgument("no"), Kind.FAILED),
        (lambda: ValueError("no"), Kind.FAILED),
        (lambda: Interrupted("left out"), Kind.CANCEL),
        (itertools.repeat(InvalidArgument("one for all batches")).__next__, Kind.FAILED),
    ],
)
def test_a_batch_without_outputs_gives_its_slots_back(
    pair: tuple[socket.socket, socket.socket], fail: Callable[[], Exception], kind: Kind
) -> None:
    """At once, not when the garbage collector runs: more such batches than there are slots."""
    ours, theirs = pair
    slots = ExecutorSlots()
    failing = True

    class Instance(Doubling):
        def execute(self, inputs: Any, outputs: Any) -> Any:
            if failing:
                raise fail()
            return super().execute(inputs, outputs)

    instance = Instance()
    server = BatchServer(instance, instance, theirs, ModelSlots(slots.descriptor), SPEC)

    def run() -> Frame:
        tensors, data = described({"x": np.ones(SIZE, np.int32)})
        taken, expected = slots.put(data), slots.expect()
        assert taken is not None
        assert expected is not None
        (frame,) = frames(b"".join(pack(Kind.EXECUTE, 7, [["y"], tensors, taken, expected], ())))
        server._answer(frame)
        (sent,) = frames(ours.recv(65536))
        slots.drop(expected[0])
        return sent

    gc.disable()
    try:
        for _ in range(2 * max(INPUT_SLOTS, OUTPUT_SLOTS)):
            assert run().kind is kind
        failing = False
        sent = run()
    finally:
        gc.enable()
        slots.close_descriptor()
    assert (sent.kind, sent.content()[1]) == (Kind.DONE, True)


def frames(data: bytes) -> list[Frame]:
    reader = FrameReader()
    reader.get_buffer()[: len(data)] = data
    return list(reader.received(len(data)))


@pytest.mark.parametrize("kind", ["CPU", "GPU"])
@pytest.mark.parametrize("death", [InstanceDied("worn out"), DeviceLost("worn out")])
def test_an_instance_that_cannot_be_used_any_more_ends_its_process(pair: Any, kind: str, death: Exception) -> None:
    with pytest.raises(Ended, match="m: worn out"):
        answer(pair, kind, death)


def test_so_does_a_gpu_that_is_lost_whatever_the_backend_makes_of_it(pair: Any) -> None:
    text = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(Ended, match="m: CUDA error"):
        answer(pair, "GPU", RuntimeError(text))
    with pytest.raises(Ended, match="m: CUDA error"):
        answer(pair, "MODEL", InternalError(text))
    sent = answer(pair, "CPU", RuntimeError(text))
    assert (sent.kind, sent.content()) == (Kind.FAILED, [1, f"RuntimeError: {text}"])


def test_other_errors_are_those_of_their_batch(pair: Any) -> None:
    sent = answer(pair, "GPU", InvalidArgument("no"))
    assert (sent.kind, sent.call, sent.content()) == (Kind.FAILED, 7, [3, "no"])
    assert answer(pair, "GPU", Interrupted("left out")).kind is Kind.CANCEL


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError("inner")])
async def test_an_exit_is_an_error_of_its_batch_or_its_start(
    error: BaseException, pair: tuple[socket.socket, socket.socket]
) -> None:
    text = f"{type(error).__name__}: {error}"
    assert answer(pair, "CPU", error).content()[1] == text

    class Starting(Failing):
        def started(self) -> None:
            raise self.error

    instance = Starting(error)
    with pytest.raises(InternalError, match=text):
        await BatchServer(instance, instance, pair[1], None, SPEC).start()
