"""What a process says of its tensors is believed only as far as its bytes go."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Never

import msgpack
import numpy as np
import pytest

from charonia.backend import GraphSignature, InstanceSpec, ModelSource, Outcome, TensorSignature
from charonia.datatypes import DataType
from charonia.errors import InternalError
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from executors.backends.python.protocol.frames import Frame, FrameError, Kind
from executors.batches.encoded_strings import EncodedStrings
from executors.isolation.forms import (
    arrays_of,
    described,
    encoded_outputs,
    outcome_content,
    outcome_of,
    signature_content,
    signature_of,
    source_content,
    source_of,
    spec_content,
    spec_of,
)

FP32, BYTES = DataType.FP32.number, DataType.BYTES.number


def test_arrays_come_back() -> None:
    arrays: dict[str, Any] = {
        "n": np.arange(6, dtype=np.int64).reshape(2, 3),
        "empty": np.zeros((0, 4), np.float32),
        "s": np.array([[b"a", b""]], object),
        "strided": np.arange(8, dtype=np.float16)[::2],
    }
    tensors, data = described(arrays)
    found = arrays_of(tensors, [memoryview(bytes(part)) for part in data])
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert found[name].tolist() == array.tolist()


@pytest.mark.parametrize(
    ("tensor", "data"),
    [
        (["y", FP32, [2], 4], bytes(4)),
        (["y", FP32, [1], 4], bytes(3)),
        (["y", FP32, [-1], 4], bytes(4)),
        (["y", FP32, [-1, -1], 4], bytes(4)),
        (["y", FP32, [2**62, 4], 0], b""),
        (["y", BYTES, [1], 5], b"\x09\0\0\0a"),
        (["y", BYTES, [2], 5], b"\x01\0\0\0a"),
        (["y", BYTES, [1], 3], b"\x01\0\0"),
    ],
)
def test_a_description_that_does_not_fit_its_bytes_is_refused(tensor: list[Any], data: bytes) -> None:
    with pytest.raises(FrameError):
        arrays_of([tensor], [memoryview(data)])


def done(content: list[Any], data: bytes) -> Frame:
    return Frame(Kind.DONE, 1, msgpack.packb(content), memoryview(bytearray(data)))


def no_slot(_: Any) -> Never:
    raise AssertionError("nothing lies in a slot")


def test_strings_come_back_encoded_for_their_requests() -> None:
    arrays: dict[str, Any] = {"s": np.array([[b"a"], [b""], [b"bcd"]], object), "n": np.arange(3)}
    sent, ends = encoded_outputs(arrays, [0, 1, 3])
    tensors, data = described(sent)
    frame = done([tensors, False, None, [], ends], b"".join(bytes(part) + bytes(-len(part) % 16) for part in data))
    found: Any = outcome_of(frame, no_slot, [0, 1, 3])
    assert isinstance(found["s"], EncodedStrings)
    assert bytes(found["s"].between(1, 3)) == b"\0\0\0\0\3\0\0\0bcd"
    assert found["n"].tolist() == [0, 1, 2]
    without: Any = outcome_of(done([tensors, False, None, []], bytes(frame.data)), no_slot, [0, 1, 3])
    assert without["s"].tolist() == arrays["s"].tolist(), "from another release"


@pytest.mark.parametrize("ends", [[0, 9], [0, 5, 8], [1, 5, 9], [0, 10, 9], [0, "x", 9], 7])
def test_strings_that_are_cut_otherwise_are_refused(ends: Any) -> None:
    frame = done([[["s", BYTES, [2], 9]], False, None, [], {"s": ends}], b"\1\0\0\0a\0\0\0\0")
    with pytest.raises(FrameError):
        outcome_of(frame, no_slot, [0, 1, 2])


def test_sources_specs_and_signatures_come_back() -> None:
    config = parse('name: "m" backend: "b" input { name: "x" data_type: TYPE_FP32 dims: 2 }')
    source = ModelSource("m", 3, Path("/models/m"), config, {"key": "value"}, native_code=True, isolation="sandbox")
    assert source_of(source_content(source)) == source
    spec = InstanceSpec("m_0", "GPU", 1, source, ModelInterface.of(config), frozenset({2, 3}))
    assert spec_of(spec_content(spec), None) == spec
    graph = GraphSignature((TensorSignature("x", "FP32", (-1, 2)),), ())
    for signature in (graph, config, None):
        assert signature_of(signature_content(signature)) == signature


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (None, "gave a NoneType, not arrays by output name"),
        (Outcome([np.ones(1)]), "gave a list, not arrays by output name"),  # type: ignore[arg-type]
        ({"y": [1.0]}, "gave a list as output 'y', not an array"),
    ],
)
def test_what_is_no_result_is_named(found: Any, text: str) -> None:
    with pytest.raises(InternalError, match=text):
        outcome_content(found)
