from __future__ import annotations

import numpy as np
import pytest

from charonia.backend import ModelRequest
from charonia.errors import ErrorCode, NotFound
from charonia.tensors import Tensor
from executors.backends.python.exchange import failure_of, requests_content, responses_of
from executors.backends.python.frames import Frame, FrameError, FrameReader, Kind, pack


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
        [None, {}, [["A", 2, [1], 1]]],
    ]
    one, two, three = responses_of(frame(Kind.DONE, content, b"\1\2\3", b"\1\0\0\0z", b"\7"))
    assert [tensor.array().tolist() for tensor in one.outputs] == [[1, 2, 3], [b"z"]]
    assert one.parameters == {"k": True}
    assert isinstance(two.error, NotFound)
    assert three.outputs[0].array().tolist() == [7]


@pytest.mark.parametrize(
    "content",
    [None, [1], [[None, {}]], [[None, {}, [["A", 2, [3], 99]]]], [[None, {}, [["A", 77, [3], 3]]]]],
)
def test_unreadable_replies_are_refused(content: object) -> None:
    with pytest.raises(FrameError):
        responses_of(frame(Kind.DONE, content, b"abc"))


def test_failures_keep_code_and_text() -> None:
    failure = failure_of(frame(Kind.FAILED, [int(ErrorCode.INTERNAL), "why"]))
    assert (failure.code, failure.message) == (ErrorCode.INTERNAL, "why")
    with pytest.raises(FrameError):
        failure_of(frame(Kind.FAILED, 3))
