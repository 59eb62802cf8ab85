"""What runs the batches of an instance that has several under way."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest

from charonia.backend import Array, Interrupted, Outcome, SubmittingInstance
from charonia.errors import InternalError, InvalidArgument
from executors.backends.submissions import Submission, depth_of, parts_of

Result = Future[Mapping[str, Array] | Outcome]


class Device:
    """Keeps what was submitted until the test ends it."""

    depth = 2
    rows_fail_alone = True
    batch_sizes = (4,)

    def __init__(self) -> None:
        self.futures: list[Result] = []
        self.came = threading.Semaphore(0)

    def submit(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Result:
        future: Result = Future()
        self.futures.append(future)
        self.came.release()
        return future

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Any:
        raise AssertionError

    def close(self) -> None: ...


class Plain:
    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Any:
        raise AssertionError

    def close(self) -> None: ...


def test_only_what_submits_has_a_depth() -> None:
    plain, device, shallow = Plain(), Device(), Device()
    shallow.depth = 0
    assert [depth_of(one) for one in (plain, device, shallow)] == [1, 2, 1]
    assert parts_of(plain) == [plain]
    first, second = (cast(Submission, part) for part in parts_of(device))
    assert first is not second
    assert (first.batch_sizes, first.rows_fail_alone) == ((4,), True)


def test_results_belong_to_their_batches_in_whatever_order_they_come() -> None:
    device = Device()
    assert isinstance(device, SubmittingInstance)
    first, second = parts_of(device)
    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(first.execute, {}, ["y"])
        assert device.came.acquire(timeout=30)
        other = threads.submit(second.execute, {}, ["y"])
        assert device.came.acquire(timeout=30)
        device.futures[1].set_exception(InvalidArgument("not this one"))
        with pytest.raises(InvalidArgument, match="not this one"):
            other.result(30)
        device.futures[0].set_result({"y": np.ones(1)})
        assert one.result(30) == {"y": np.ones(1)}


def test_a_batch_is_cancelled_unless_it_has_begun() -> None:
    device = Device()
    first, second = (cast(Submission, part) for part in parts_of(device))
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(first.execute, {}, ["y"])
        assert device.came.acquire(timeout=30)
        begun = threads.submit(second.execute, {}, ["y"])
        assert device.came.acquire(timeout=30)
        device.futures[1].set_running_or_notify_cancel()
        while not (waiting.done() and waiting.exception()):
            first.cancel()  # it may not wait yet
            second.cancel()
        assert isinstance(waiting.exception(), Interrupted)
        device.futures[1].set_result({"y": np.ones(1)})
        assert begun.result(30) == {"y": np.ones(1)}
    first.cancel()  # nothing is under way


def test_what_a_backend_cancels_itself_is_its_error() -> None:
    device = Device()
    (first, _) = parts_of(device)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(first.execute, {}, ["y"])
        assert device.came.acquire(timeout=30)
        device.futures[0].cancel()
        with pytest.raises(InternalError, match="the backend cancelled a batch"):
            running.result(30)


def test_something_else_than_a_future_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(device, "submit", lambda _inputs, _outputs: {})
    with pytest.raises(InternalError, match=r"submit returned a dict; it must be a concurrent\.futures\.Future"):
        parts_of(device)[0].execute({}, ["y"])
