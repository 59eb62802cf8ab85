from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from charonia.backend import ColumnInput, ModelRequest, ModelResponse, RequestColumns
from charonia.datatypes import DataType
from charonia.errors import ErrorCode, NotFound
from charonia.tensors import Tensor
from executors.backends.python.frame_content import (
    answer_content,
    columns_content,
    failure_of,
    outputs_of,
    requests_content,
    responses_of,
    whole_content,
)
from executors.backends.python.protocol.frames import Frame, FrameError, FrameReader, Kind, pack


def frame(kind: Kind, content: object, *data: bytes) -> Frame:
    reader = FrameReader()
    stream = b"".join(pack(kind, 1, content, data))
    reader.get_buffer()[: len(stream)] = stream
    (received,) = reader.received(len(stream))
    return received


def test_requests_carry_everything_a_model_may_ask_for() -> None:
    tensor = Tensor.of("IN", np.array([[1, 2]], np.int32))
    full = ModelRequest("id", "s", [tensor], ("OUT",), {"a": 1, "b": "x"}, 9, 3)
    content, data = requests_content([full, ModelRequest("", 0, [], (), {})])
    assert content == [
        ("id", "s", ("OUT",), '{"a":1,"b":"x"}', 9, 3, [("IN", 8, (1, 2), 8)]),
        ("", 0, (), "", 0, 0, []),
    ]
    assert data == [tensor.data]


def test_responses_are_cut_apart() -> None:
    content = [
        [None, {"k": True}, [["A", 2, [3], 3], ["B", 13, [1], 5]]],
        [[2, "gone"], {}, []],
        [None, {}, [["A", 2, [1], 1]], False, b"p", 12],
    ]
    one, two, three = responses_of(frame(Kind.DONE, content, b"\1\2\3", b"\1\0\0\0z", b"\7"))
    assert [tensor.array().tolist() for tensor in one.outputs] == [[1, 2, 3], [b"z"]]
    assert one.parameters == {"k": True}
    assert isinstance(two.error, NotFound)
    assert three.outputs[0].array().tolist() == [7]
    assert (three.again, three.progress, three.tokens) == (False, b"p", 12)
    assert (one.again, one.progress, one.tokens) == (False, b"", 0)


@pytest.mark.parametrize(
    "content",
    [None, [1], [[None, {}]], [[None, {}, [["A", 2, [3], 99]]]], [[None, {}, [["A", 77, [3], 3]]]], [{"A": 1}]],
)
def test_unreadable_replies_are_refused(content: object) -> None:
    with pytest.raises(FrameError):
        responses_of(frame(Kind.DONE, content, b"abc"))


def test_failures_keep_code_and_text() -> None:
    failure = failure_of(frame(Kind.FAILED, [int(ErrorCode.INTERNAL), "why"]))
    assert (failure.code, failure.message) == (ErrorCode.INTERNAL, "why")
    with pytest.raises(FrameError):
        failure_of(frame(Kind.FAILED, 3))


def test_columns_carry_what_all_requests_share_once() -> None:
    column = ColumnInput("IN", DataType.INT8, (2,), b"1234")
    content, data = columns_content(RequestColumns(2, [column], ("OUT",), {"a": 1}, ["x", ""], 9))
    assert content == [2, ("OUT",), '{"a":1}', 9, ["x", ""], [("IN", 6, (2,), 4, None)]]
    assert data == [b"1234"]
    uneven = ColumnInput("IN", DataType.BYTES, (1,), b"12345", [2, 3])
    content, _ = columns_content(RequestColumns(2, [uneven], ()))
    assert content == [2, (), "", 0, None, [("IN", 13, (1,), 5, [2, 3])]]


@pytest.mark.parametrize(("data", "sizes"), [(b"123", None), (b"1234", [4]), (b"1234", [2, 1])])
def test_columns_of_another_number_of_requests_are_refused(data: bytes, sizes: list[int] | None) -> None:
    with pytest.raises(ValueError, match="column 'IN' is not of 2 requests"):
        columns_content(RequestColumns(2, [ColumnInput("IN", DataType.INT8, (2,), data, sizes)], ()))


def test_ids_of_another_number_of_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="1 ids of 2 requests"):
        columns_content(RequestColumns(2, [], (), {}, ["x"]))


def no_slot(sizes: Sequence[int]) -> list[memoryview]:
    raise ValueError("there is no slot")


def test_outputs_come_as_columns() -> None:
    content = [False, [["A", 2, [3], 6], ["B", 6, [], 2]]]
    one, two = outputs_of(frame(Kind.COLUMNS, content, b"\1\2\3\4\5\6", b"\7\7"), 2, no_slot)
    assert (one.name, one.datatype, one.shape, bytes(one.data)) == ("A", DataType.UINT8, (3,), b"\1\2\3\4\5\6")
    assert (two.name, two.datatype, two.shape, bytes(two.data)) == ("B", DataType.INT8, (), b"\7\7")
    shared = outputs_of(frame(Kind.COLUMNS, [True, content[1]]), 2, lambda sizes: [memoryview(bytes(n)) for n in sizes])
    assert [len(output.data) for output in shared] == [6, 2]


@pytest.mark.parametrize(
    "content",
    [
        None,
        [False],
        [True, [["A", 2, [1], 2]]],
        [False, [["A", 2, [1], 20]]],
        [False, [["A", 2, [1], 1]]],
        [False, [["A", 99, [1], 2]]],
        [False, [["A", 2, [1]]]],
        [False, []],
    ],
)
def test_columns_that_cannot_be_are_frame_errors(content: object) -> None:
    with pytest.raises(FrameError):
        outputs_of(frame(Kind.COLUMNS, content, b"12"), 2, no_slot)


def test_an_error_that_is_none_of_ours_is_internal() -> None:
    response = ModelResponse(error=ValueError("odd"))  # type: ignore[arg-type]
    expected = [int(ErrorCode.INTERNAL), "ValueError: odd"]
    assert answer_content(response)[0][0] == whole_content(response)[0] == expected
