"""Runs a `BatchInstance` in a thread: takes batches from its socket, one after another, and answers them.

An instance that has several batches under way has as many threads and sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from charonia.backend import Array, BatchInstance, InstanceDied, InstanceSpec, Interrupted
from charonia.cuda.lost_contexts import is_lost
from charonia.errors import InvalidArgument, error_of_model
from charonia.tasks import MODEL_ERRORS
from executors.backends.python.protocol.frames import Buffer, Frame, FrameError, FrameReader, Kind, pack
from executors.backends.python.protocol.shared_slots import ModelSlots
from executors.backends.submissions import CancellablePart
from executors.host.host_policy import restrict_thread
from executors.isolation.forms import arrays_of, described, encoded_outputs, in_frame, outcome_content

from .unusable import end_process


class BatchServer:
    """One instance, its socket and the memory that it shares with the executor. `start` starts its thread.

    `part` runs the batches of this socket: the instance, or one of several submissions to it.
    """

    def __init__(
        self,
        instance: BatchInstance,
        part: BatchInstance,
        connection: socket.socket,
        slots: ModelSlots | None,
        spec: InstanceSpec,
    ) -> None:
        self._instance = instance
        self._part = part
        self._connection = connection
        self._slots = slots
        self._spec = spec
        self._call = 0
        """The batch under way, by its number."""

    def cancel(self, call: int) -> None:
        """Cancel this batch, if it is under way and the instance has not begun it; in another thread."""
        if self._call == call and isinstance(self._part, CancellablePart):
            self._part.cancel()

    async def start(self) -> None:
        """Start the thread. Raises what the instance raises when it is notified of that."""
        is_ready: Future[None] = Future()
        threading.Thread(target=self._begin, args=(is_ready,), name=f"instance {self._spec.name}", daemon=True).start()
        await asyncio.wrap_future(is_ready)

    def _begin(self, is_ready: Future[None]) -> None:
        restrict_thread(self._spec.cores)
        started = getattr(self._instance, "started", None)
        try:
            if started is not None:
                started()
        except MODEL_ERRORS as error:  # an exit would end the process without an answer
            self._connection.close()
            is_ready.set_exception(error if isinstance(error, Exception) else error_of_model(error))
            return
        is_ready.set_result(None)
        with contextlib.suppress(OSError):  # the executor has closed its end
            self._serve()

    def _serve(self) -> None:
        reader = FrameReader()
        self._connection.setblocking(True)
        with self._connection:
            while count := self._connection.recv_into(reader.get_buffer()):
                for frame in reader.received(count):
                    self._answer(frame)
                    if frame.kind is Kind.FINALIZE:
                        return

    def _answer(self, frame: Frame) -> None:
        try:
            if frame.kind is Kind.FINALIZE:
                self._instance.close()
                buffers = pack(Kind.DONE, frame.call, None)
            else:
                buffers = pack(Kind.DONE, frame.call, *self._execute(frame))
        except Interrupted:
            buffers = pack(Kind.CANCEL, frame.call, None)
        except MODEL_ERRORS as error:
            if frame.kind is not Kind.FINALIZE and self._ends_process(error):
                end_process(self._spec.source.name, error)
            buffers = pack(Kind.FAILED, frame.call, _failure(error))
            # no variable of this frame keeps the error, and an error that the instance keeps has no frames: they have
            # views of the inputs, whose slot would be in use until the garbage collector runs
            error.__traceback__ = None
        for buffer in buffers:
            self._connection.sendall(buffer)

    def _ends_process(self, error: BaseException) -> bool:
        """Whether no further batch can succeed here: the executor goes by the end of the process."""
        return isinstance(error, InstanceDied) or (self._spec.kind != "CPU" and is_lost(error))

    def _execute(self, frame: Frame) -> tuple[list[Any], Sequence[Buffer]]:
        outputs, tensors, taken, expected, *rows = frame.content()
        sizes = [size for *_, size in tensors]
        try:
            if taken is not None and self._slots is not None:
                parts = self._slots.columns(taken[0], taken[1], sizes)
            else:
                parts = in_frame(frame, sizes)
            self._call = frame.call
            try:
                found = self._part.execute(_arrays(tensors, parts, checked=not rows), outputs)
            finally:
                self._call = 0
            arrays, rest = outcome_content(found)
            if rows:
                arrays, ends = encoded_outputs(arrays, rows[0])
                rest.append(ends)
            answers, data = described(arrays)
            if expected is None or self._slots is None:
                return [answers, False, *rest], data
            views = self._slots.output_views(expected[0], [len(buffer) for buffer in data])
            for view, buffer in zip(views or (), data if views is not None else (), strict=True):
                view[:] = buffer
            return [answers, views is not None, *rest], () if views is not None else data
        finally:
            # also of a batch that failed or was cancelled: the executor uses the slot again only after this
            if expected is not None and self._slots is not None:
                self._slots.done(*expected)


def _failure(error: BaseException) -> list[Any]:
    """The content of a FAILED."""
    known = error_of_model(error)
    return [int(known.code), known.message]


def _arrays(tensors: Sequence[Any], parts: Sequence[memoryview], *, checked: bool) -> dict[str, Array]:
    """The inputs of a batch. Raises `InvalidArgument` for malformed strings that the executor has not `checked`."""
    try:
        return arrays_of(tensors, parts)
    except FrameError as error:
        if checked:
            raise
        raise InvalidArgument(str(error)) from None
