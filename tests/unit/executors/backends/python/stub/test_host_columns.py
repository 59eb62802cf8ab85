from __future__ import annotations

import numpy as np

from executors.backends.python.api import InferenceRequest, InferenceResponse, Tensor, TritonError
from executors.backends.python.stub.host_columns import Column, ColumnsAsked, columns_of, inputs_of

FP32, BYTES = 11, 13


def column(count: int, number: int, shape: list[int], data: bytes, sizes: list[int] | None = None) -> list[Tensor]:
    asked = ColumnsAsked([count, [], "", 0, None, [["IN", number, shape, len(data), sizes]], None, None])
    (tensors,) = inputs_of(count, asked.described, [memoryview(bytearray(data))])
    return tensors


def request(*outputs: str) -> InferenceRequest:
    return InferenceRequest(model_name="m", inputs=[], requested_output_names=outputs)


def found(*answers: InferenceResponse | None, outputs: tuple[str, ...] = ()) -> list[Column] | None:
    return columns_of([request(*outputs) for _ in answers], answers)


def answer(*arrays: np.ndarray) -> InferenceResponse:
    return InferenceResponse([Tensor(name, array) for name, array in zip("ABC", arrays, strict=False)])


def test_each_request_gets_its_own_part_to_write_in() -> None:
    tensors = column(3, FP32, [1, 2], np.arange(6, dtype=np.float32).tobytes())
    assert [tensor.as_numpy().tolist() for tensor in tensors] == [[[0, 1]], [[2, 3]], [[4, 5]]]
    tensors[1].as_numpy()[:] = 9
    assert [tensor.as_numpy().tolist() for tensor in tensors] == [[[0, 1]], [[9, 9]], [[4, 5]]]


def test_parts_of_different_sizes_are_cut_by_them() -> None:
    tensors = column(2, BYTES, [1], b"\1\0\0\0a\3\0\0\0bcd", [5, 7])
    assert [tensor.as_numpy().tolist() for tensor in tensors] == [[b"a"], [b"bcd"]]


def test_scalars_and_tensors_without_elements_are_arrays() -> None:
    assert [tensor.as_numpy().shape for tensor in column(2, FP32, [], bytes(8))] == [(), ()]
    assert [tensor.as_numpy().shape for tensor in column(2, FP32, [3, 0], b"")] == [(3, 0), (3, 0)]


def test_columns_of_a_frame_begin_where_it_says() -> None:
    data = memoryview(b"abc" + bytes(13) + b"defg" + bytes(12))
    asked = ColumnsAsked([1, [], "", 0, None, [["A", 2, [3], 3, None], ["B", 2, [4], 4, None]], None, None])
    assert [bytes(data[begin:end]) for begin, end in asked.places] == [b"abc", b"defg"]


def test_answers_of_one_form_are_columns_of_the_wanted_outputs() -> None:
    answers = [answer(np.full((1, 2), n, np.int16), np.array([b"%d" % n])) for n in range(3)]
    both = found(*answers)
    assert both is not None
    assert [one.described for one in both] == [("A", 7, (1, 2), 12), ("B", BYTES, (1,), 15)]
    assert [bytes(one.joined()) for one in both] == [
        b"\0\0\0\0\1\0\1\0\2\0\2\0",
        b"\1\0\0\0000\1\0\0\0001\1\0\0\0002",
    ]
    room = memoryview(bytearray(12))
    both[0].join_into(room)
    assert bytes(room) == bytes(both[0].joined())
    room = memoryview(bytearray(15))
    both[1].join_into(room)
    assert bytes(room) == bytes(both[1].joined())
    wanted = found(*answers, outputs=("B",))
    assert wanted is not None
    assert [one.described[0] for one in wanted] == ["B"]


def test_answers_that_differ_are_no_columns() -> None:
    one = answer(np.zeros(2, np.int8))
    assert found(one, answer(np.zeros(3, np.int8))) is None
    assert found(one, answer(np.zeros(2, np.int16))) is None
    assert found(one, answer(np.zeros(2, np.int8), np.zeros(1))) is None
    assert found(one, None) is None
    assert found(one, InferenceResponse(error=TritonError("x"))) is None
    assert found(one, InferenceResponse(one.output_tensors(), parameters={"a": 1})) is None
    assert found(InferenceResponse(), InferenceResponse()) is None
    assert found(one, one, outputs=("B",)) is None
    assert found(answer(np.array([b"a"])), answer(np.array([b"ab"]))) is None
    again = request()
    again.set_release_flags(2)
    assert columns_of([request(), again], [one, one]) is None


def test_an_array_that_changed_its_shape_is_no_column() -> None:
    arrays = [np.zeros((2, 3)), np.zeros((2, 3))]
    answers = [answer(array) for array in arrays]
    arrays[0].shape = (3, 2)
    assert found(*answers) is None
