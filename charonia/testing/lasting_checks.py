"""Further checks of the contract suite: what shows in use only, as leaks, memory that is kept, locks and late calls."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import threading
import time
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path

import numpy as np

from charonia.backend import (
    Array,
    Backend,
    CancellableInstance,
    Interrupted,
    InterruptibleInstance,
    ModelRequest,
    StreamingInstance,
)
from charonia.tensors import Tensor

from .driven_instance import DrivenInstance, Inputs, require
from .reference_model import ReferenceModel, check_answer, check_material, instance_of, round_trip

_FEW_LOADS, _FEWEST_LOADS = 3, 40
"""More loads than the first may leave something that is made once, late; memory is measured from the other one on."""
_PERIODS, _MOST_PERIODS = 4, 8
_KEPT_BYTES = 8192
"""Growth by a load that is a leak: a smaller one is lost in what an allocator does."""
_ENDS_WITHIN_S = 10.0
"""For threads of something that was closed; they end by themselves."""
_CLOSES_WITHIN_S = 60.0
_MEASURABLE_S = 0.05
"""What takes less holds up nothing that is worth a thread."""
_MOST_OF_A_CALL = 0.8
_TRIES = 5


async def check_sizes(backend: Backend, model: ReferenceModel) -> None:
    """A batching model runs one row, and as many as it may have."""
    check_material(model)
    if not model.interface.batching:
        return
    async with AsyncExitStack() as stack:
        instance = await instance_of(stack, backend, model)
        most = model.interface.max_batch_size
        await round_trip(instance, model, [_rows(model, 0, 1)], "a request of one row")
        await round_trip(instance, model, [_rows(model, 0, most)], f"a request of {most} rows")
        singles = [_rows(model, row, 1) for row in range(min(most, 4))]
        await round_trip(instance, model, singles, "requests of one row each")


async def check_reused_inputs(backend: Backend, model: ReferenceModel) -> None:
    """Memory of inputs is used again after a call: nothing of it is kept, and its address says nothing."""
    check_material(model)
    async with AsyncExitStack() as stack:
        instance = await instance_of(stack, backend, model)
        memory = {name: np.array(array) for name, array in model.requests[0].items()}
        for number, request in enumerate(_in_the_form_of(model.requests[0], model), start=1):
            for name, array in memory.items():
                np.copyto(array, request[name])
            what = f"request {number} of several in the same memory"
            (answer,) = await instance.run([memory], ())
            check_answer(model, request, answer, tuple(model.interface.outputs), what)


async def check_lock(backend: Backend, model: ReferenceModel) -> None:
    """A `BatchInstance` releases the interpreter's lock while it works. One that takes under 50 ms is not measured."""
    check_material(model)
    async with AsyncExitStack() as stack:
        instance = await instance_of(stack, backend, model)
        if not instance.is_batch:
            return
        request = _rows(model, 0, model.interface.max_batch_size) if model.interface.batching else model.requests[0]
        await instance.run([request], ())
        least = 1.0
        for _ in range(_TRIES):  # of several, as other work on the machine holds threads up as well
            ticker = _Ticker()
            began = time.perf_counter()
            await instance.run([request], ())
            took_s = time.perf_counter() - began
            gap_s = ticker.end()
            if took_s < _MEASURABLE_S:
                return
            least = min(least, gap_s / took_s)
        require(
            least < _MOST_OF_A_CALL,
            f"execute took {took_s:.2f} s and held the interpreter's lock for {100 * least:.0f} % of it: the executor "
            "could answer nobody meanwhile; release it, or have the backend isolated in a process",
        )


async def check_repeated_loads(backend: Backend, model: ReferenceModel) -> None:
    """Loading and unloading again and again, `loads` times, leaves no files open, no threads and no memory."""
    check_material(model)
    before, loads = (0, 0), max(1, model.loads)
    period, resident = max(1, loads // _PERIODS), list[int]()
    number = 0
    # by chance memory may have grown in each of a few periods: then more follow, in which a leak grows as well
    while number <= loads or (_growth(resident, period) >= _KEPT_BYTES and len(resident) < _MOST_PERIODS):
        async with AsyncExitStack() as stack:
            instance = await instance_of(stack, backend, model)
            await round_trip(instance, model, model.requests[:1], f"requests of load {number + 1}")
        if number == 0:  # what a backend keeps for itself it has by now
            before = _held()
        elif loads >= _FEWEST_LOADS and number % period == 0:
            resident.append(_resident_bytes())
        number += 1
    bounds = max(_FEW_LOADS, loads // _PERIODS) if loads > _FEW_LOADS else loads
    deadline = time.monotonic() + _ENDS_WITHIN_S
    while _more_than(before, bounds) and time.monotonic() < deadline:
        gc.collect()
        await asyncio.sleep(0.01)
    after = _held()
    for kind, one, other in zip(("open files", "threads"), before, after, strict=True):
        require(
            other - one < bounds,
            f"{loads} loads and unloads left {other - one} more {kind}; close of an instance or a model gives up all",
        )
    least = _growth(resident, period)
    require(
        least < _KEPT_BYTES,
        f"memory grew by {least} bytes or more with each of {loads} loads and unloads, and of {number - 1 - loads} "
        "more; close of an instance or a model gives up all",
    )


async def check_late_calls(backend: Backend, model: ReferenceModel) -> None:
    """Interrupting and cancelling what has ended does no harm."""
    check_material(model)
    async with AsyncExitStack() as stack:
        instance = await instance_of(stack, backend, model)
        for _ in range(2):
            await round_trip(instance, model, model.requests, "requests after a cancellation that came too late")
            _cancel_late(instance, model.requests[0])
            if isinstance(instance.instance, InterruptibleInstance):
                (answer,) = await instance.run(model.requests[:1], ())
                require(
                    isinstance(answer, Interrupted) or not isinstance(answer, Exception),
                    f"execute raised {type(answer).__name__} after interrupt; it must be Interrupted, or run",
                )


async def check_close_in_a_call(backend: Backend, model: ReferenceModel) -> None:
    """Closing a `StreamingInstance` ends the calls under way."""
    check_material(model)
    async with AsyncExitStack() as stack:
        instance = await instance_of(stack, backend, model)
        if not isinstance(instance.instance, StreamingInstance):
            return
        running = asyncio.ensure_future(instance.run(model.requests, ()))
        await asyncio.sleep(0)
        await instance.close()
        done, _ = await asyncio.wait({running}, timeout=_CLOSES_WITHIN_S)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        require(bool(done), "execute_stream went on after close_instance; calls under way end")


async def check_refusals(backend: Backend, model: ReferenceModel) -> None:
    """A `strict` model refuses inputs of another rank, width or datatype than configured, and goes on working."""
    check_material(model)
    if not model.strict:
        return
    async with AsyncExitStack() as stack:
        instance = await instance_of(stack, backend, model)
        for what, wrong in _wrong(model):
            (answer,) = await instance.run([wrong], ())
            require(isinstance(answer, Exception), f"{what} was answered as if it had succeeded; it must be refused")
            await round_trip(instance, model, model.requests, f"requests after {what}")


def _rows(model: ReferenceModel, start: int, count: int) -> dict[str, Array]:
    """A request of so many rows, made of all requests' rows over and over."""
    joined = {name: np.concatenate([one[name] for one in model.requests]) for name in model.requests[0]}
    return {name: array[np.arange(start, start + count) % len(array)] for name, array in joined.items()}


def _in_the_form_of(first: Inputs, model: ReferenceModel) -> list[Inputs]:
    """Requests of other values with the shapes of the first."""
    if not model.interface.batching:
        shapes = {name: array.shape for name, array in first.items()}
        return [one for one in model.requests if {name: array.shape for name, array in one.items()} == shapes]
    count = len(next(iter(first.values())))
    return [_rows(model, start, count) for start in range(4)]


def _wrong(model: ReferenceModel) -> list[tuple[str, Inputs]]:
    first = model.requests[0]
    found: list[tuple[str, Inputs]] = []
    for name, array in first.items():
        made: list[tuple[str, Array]] = [("rank", array[..., None])]
        if model.interface.inputs[name].backend_dims[-1:] not in ((), (-1,)):
            made.append(("width", np.concatenate([array, array[..., :1]], axis=-1)))
        if array.dtype.kind in "fiu":
            made.append(("datatype", array.astype(np.float64 if array.dtype != np.float64 else np.float32)))
        found += [(f"input '{name}' of another {what}", {**first, name: wrong}) for what, wrong in made]
    return found


def _cancel_late(instance: DrivenInstance, inputs: Inputs) -> None:
    one = instance.instance
    if isinstance(one, InterruptibleInstance):
        one.interrupt()
    if isinstance(one, CancellableInstance):
        tensors = [Tensor.of(name, array) for name, array in inputs.items()]
        request = ModelRequest("late", 0, tensors, (), {})
        one.cancel_requests([request])
        one.cancel_requests([request])


def _held() -> tuple[int, int]:
    """Open files and threads of this process; nothing where the kernel does not list files."""
    files = Path("/proc/self/fd")
    return len(os.listdir(files)) if files.exists() else 0, threading.active_count()


def _more_than(before: tuple[int, int], bound: int) -> bool:
    return any(now - one >= bound for one, now in zip(before, _held(), strict=True))


def _growth(resident: list[int], period: int) -> int:
    """By how many bytes memory grew with each load in the period in which it grew least.

    What is freed late, or kept once, grows in one period or another; a leak grows in each.
    """
    return min((now - then for then, now in pairwise(resident)), default=0) // period


def _resident_bytes() -> int:
    """The memory of this process that is in use; 0 where the kernel does not say it."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # of other C libraries
        ctypes.CDLL(None).malloc_trim(0)
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


class _Ticker:
    """A thread that measures for how long it was kept from running."""

    def __init__(self) -> None:
        self._ended = False
        self._gap_s = 0.0
        self._thread = threading.Thread(target=self._tick, daemon=True)
        self._thread.start()

    def end(self) -> float:
        """Stop, and return the longest time between two ticks."""
        self._ended = True
        self._thread.join()
        return self._gap_s

    def _tick(self) -> None:
        last = time.perf_counter()
        while not self._ended:
            time.sleep(0.001)
            now = time.perf_counter()
            self._gap_s, last = max(self._gap_s, now - last), now
