"""The memory of columns, both ends of it in one process."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest

from executors.backends.python.protocol.shared_slots import (
    ALIGNMENT,
    INPUT_SLOTS,
    OUTPUT_SLOTS,
    SHARED_BYTES,
    SLOT_BYTES,
    ExecutorSlots,
    ModelSlots,
)

LARGE = b"abcdefgh" * (SHARED_BYTES // 8)


@pytest.fixture
def ends() -> tuple[ExecutorSlots, ModelSlots]:
    executor = ExecutorSlots()
    model = ModelSlots(executor.descriptor)
    executor.close_descriptor()
    return executor, model


Ends = tuple[ExecutorSlots, ModelSlots]


def fill(model: ModelSlots, place: tuple[int, int], *outputs: bytes) -> None:
    """What a model process does with outputs."""
    room = model.output_views(place[0], [len(one) for one in outputs])
    assert room is not None
    for view, output in zip(room, outputs, strict=True):
        view[:] = output
    model.done(*place)


def test_columns_lie_aligned_and_writable_where_they_were_put(ends: Ends) -> None:
    executor, model = ends
    place = executor.put([LARGE, b"123", b"", b"4567"])
    assert place == (0, 1)
    views = model.columns(*place, [len(LARGE), 3, 0, 4])
    assert [bytes(view) for view in views] == [LARGE, b"123", b"", b"4567"]
    for view in views:
        assert not view.readonly
        assert len(view) == 0 or np.frombuffer(view, np.uint8).ctypes.data % ALIGNMENT == 0


def test_inputs_are_kept_until_the_last_view_of_them_is_gone(ends: Ends) -> None:
    executor, model = ends
    kept = []
    for index in range(INPUT_SLOTS):
        place = executor.put([LARGE, bytes([index] * 16)])
        assert place == (index, 1)
        array = np.frombuffer(model.columns(*place, [len(LARGE), 16])[1], np.uint8)
        kept.append(array.reshape(4, 4)[1:, 2])
        del array
    assert executor.put([LARGE]) is None
    assert [one.tolist() for one in kept] == [[index] * 3 for index in range(INPUT_SLOTS)]
    del kept[0]
    assert executor.put([LARGE]) == (0, 2)


def test_a_slot_the_model_has_not_read_is_not_free(ends: Ends) -> None:
    executor, _ = ends
    assert executor.put([LARGE]) == (0, 1)
    assert executor.put([LARGE]) == (1, 1)
    assert executor.put([LARGE]) is None


def test_outputs_are_kept_until_the_last_view_of_them_is_gone(ends: Ends) -> None:
    executor, model = ends
    first = executor.expect()
    assert first is not None
    fill(model, first, LARGE, b"12")
    large, small = executor.take(first[0], [len(LARGE), 2])
    executor.drop(first[0])
    assert small.readonly
    del large
    others = [executor.expect() for _ in range(OUTPUT_SLOTS - 1)]
    assert None not in others
    assert executor.expect() is None
    assert bytes(small) == b"12"
    del small
    assert executor.expect() == (first[0], first[1] + 1)


def test_a_slot_that_is_expected_no_more_waits_for_the_model(ends: Ends) -> None:
    executor, model = ends
    place = executor.expect()
    assert place is not None
    executor.drop(place[0])
    second = executor.expect()
    assert second is not None
    assert second[0] != place[0]
    model.done(*place)
    assert executor.expect() == (place[0], place[1] + 1)


def test_outputs_that_are_not_there_are_refused(ends: Ends) -> None:
    executor, model = ends
    place = executor.expect()
    assert place is not None
    with pytest.raises(ValueError, match="not in the slot"):
        executor.take(place[0], [4])
    model.done(place[0], place[1] + 7)  # another use than this one
    with pytest.raises(ValueError, match="not in the slot"):
        executor.take(place[0], [4])
    model.done(*place)
    for sizes in ([SLOT_BYTES], [-1], [SLOT_BYTES // 2, SLOT_BYTES // 2]):
        with pytest.raises(ValueError, match="not in the slot"):
            executor.take(place[0], sizes)
    assert len(executor.take(place[0], [4])[0]) == 4


def test_what_is_small_or_does_not_fit_goes_another_way(ends: Ends) -> None:
    executor, model = ends
    assert executor.put([LARGE[: SHARED_BYTES // 2]]) is None
    assert executor.put([bytes(SLOT_BYTES)]) is None
    assert model.output_views(INPUT_SLOTS, [10]) is None
    assert model.output_views(INPUT_SLOTS, [SLOT_BYTES]) is None


def test_a_model_cannot_take_the_memory_away(ends: Ends) -> None:
    executor = ExecutorSlots()
    with pytest.raises(PermissionError):
        os.ftruncate(executor.descriptor, 0)
    executor.close_descriptor()
    executor.close_descriptor()


@pytest.mark.skipif(not hasattr(mmap, "MADV_REMOVE"), reason="the system gives no memory back")
def test_a_slot_gives_back_what_only_a_large_batch_needed() -> None:
    executor = ExecutorSlots()
    model = ModelSlots(executor.descriptor)

    def used() -> int:
        return os.fstat(executor.descriptor).st_blocks * 512

    place = executor.put([bytes(SLOT_BYTES - ALIGNMENT)])
    assert place is not None
    model.columns(*place, [10])
    assert used() >= SLOT_BYTES
    place = executor.put([LARGE])
    assert place == (0, 2)
    assert used() < 8 << 20
    assert bytes(model.columns(*place, [len(LARGE)])[0]) == LARGE
    executor.close_descriptor()


def test_what_was_forked_with_inputs_keeps_them(ends: Ends) -> None:
    executor, model = ends
    place = executor.put([LARGE])
    assert place is not None
    view = model.columns(*place, [len(LARGE)])
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    del view
    assert executor.put([LARGE]) == (1, 1)
    model.columns(1, 1, [len(LARGE)])
    assert executor.put([LARGE]) == (1, 2)


def test_the_begin_of_a_slot_is_pinned_before_its_inputs_are_used(ends: Ends) -> None:
    executor, model = ends
    pinned: list[tuple[int, int]] = []
    model.pin = lambda address, size: pinned.append((address, size))
    for column in (LARGE, LARGE * 3):
        place = executor.put([column])
        assert place is not None
        (view,) = model.columns(*place, [len(column)])
        address, size = pinned[-1]
        at = np.frombuffer(view, np.uint8).ctypes.data
        assert address % mmap.PAGESIZE == 0
        assert address < at
        assert at + len(column) <= address + size
        del view
    assert [size for _, size in pinned] == [65536, 131072]


def test_pages_that_a_driver_knows_stay(ends: Ends) -> None:
    executor, model = ends
    executor.keeps_pages = True
    for size in (SLOT_BYTES // 2, SHARED_BYTES):
        place = executor.put([bytes([1]) * size])
        assert place is not None
        model.columns(*place, [size])
    assert executor._memory[SLOT_BYTES // 2] == 1
