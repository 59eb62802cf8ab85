"""What a process says of its tensors is believed only as far as its bytes go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from charonia.backend import GraphSignature, InstanceSpec, ModelSource, TensorSignature
from charonia.datatypes import DataType
from charonia.models.interface import ModelInterface
from executors.backends.python.protocol.frames import FrameError
from executors.isolation.forms import (
    arrays_of,
    described,
    signature_content,
    signature_of,
    source_content,
    source_of,
    spec_content,
    spec_of,
)
from executors.repository.pbtxt import parse

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


def test_sources_specs_and_signatures_come_back() -> None:
    config = parse('name: "m" backend: "b" input { name: "x" data_type: TYPE_FP32 dims: 2 }')
    source = ModelSource("m", 3, Path("/models/m"), config, {"key": "value"}, native_code=True, isolation="sandbox")
    assert source_of(source_content(source)) == source
    spec = InstanceSpec("m_0", "GPU", 1, source, ModelInterface.of(config), frozenset({2, 3}))
    assert spec_of(spec_content(spec), None) == spec
    graph = GraphSignature((TensorSignature("x", "FP32", (-1, 2)),), ())
    for signature in (graph, config, None):
        assert signature_of(signature_content(signature)) == signature
