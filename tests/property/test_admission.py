"""Whatever is admitted is safe to batch: bytes match the shape, the shape matches the configuration (I1-I13)."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from charonia.calls.admission import Admission
from charonia.datatypes import DataType
from charonia.errors import InvalidArgument
from charonia.inference import InferenceRequest
from charonia.models.interface import ModelInterface, TensorSpec
from charonia.tensors import Tensor

TYPES = st.sampled_from([DataType.UINT8, DataType.FP32, DataType.BYTES])
NAMES = ["a", "b"]


@st.composite
def interfaces(draw: st.DrawFn) -> ModelInterface:
    inputs = {
        name: TensorSpec(
            name,
            draw(TYPES),
            tuple(draw(st.lists(st.sampled_from([-1, 1, 2]), min_size=1, max_size=2))),
            optional=draw(st.booleans()),
        )
        for name in NAMES
    }
    required = frozenset(name for name, spec in inputs.items() if not spec.optional)
    most = draw(st.sampled_from([0, 1, 3]))
    outputs = {"y": TensorSpec("y", DataType.FP32, (1,))}
    return ModelInterface("m", "python", "", most, inputs, outputs, required_inputs=required)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = tuple(draw(st.lists(st.integers(-1, 4), max_size=3)))
    datatype = draw(TYPES)
    count = int(np.prod([max(0, d) for d in shape], dtype=np.int64))
    size = draw(st.sampled_from([count * max(1, datatype.size_bytes), count * 4, count * 5, 3]))
    data = draw(st.sampled_from([bytes(size), b"\1\0\0\0x" * (size // 5), bytes(size)[: size // 2]]))
    return Tensor(draw(st.sampled_from([*NAMES, "c"])), datatype, shape, data)


def decodes(tensor: Tensor) -> bool:
    """Whether NumPy, or a walk over the prefixes, can make an array of this shape of exactly these bytes."""
    if any(dim < 0 for dim in tensor.shape):
        return False
    if tensor.datatype is not DataType.BYTES:
        try:
            np.frombuffer(bytes(tensor.data), tensor.datatype.numpy).reshape(tensor.shape)
        except ValueError:
            return False
        return True
    rest, count = bytes(tensor.data), 0
    while rest:
        length = int.from_bytes(rest[:4], "little")
        if len(rest) < 4 + length:
            return False
        rest, count = rest[4 + length :], count + 1
    return count == np.prod(tensor.shape, dtype=np.int64)


def fits(interface: ModelInterface, inputs: list[Tensor]) -> bool:
    names = [t.name for t in inputs]
    if len(set(names)) != len(names) or not set(names) <= set(interface.inputs):
        return False
    if not interface.required_inputs <= set(names):
        return False
    rows = set()
    for tensor in inputs:
        spec = interface.inputs[tensor.name]
        shape = tensor.shape
        if interface.max_batch_size:
            if not shape or not 1 <= shape[0] <= interface.max_batch_size:
                return False
            rows.add(shape[0])
            shape = shape[1:]
        if tensor.datatype is not spec.datatype or len(shape) != len(spec.dims):
            return False
        if any(want not in (-1, got) for want, got in zip(spec.dims, shape, strict=True)):
            return False
    return len(rows) <= 1


@given(interfaces(), st.lists(st.lists(tensors(), max_size=3), min_size=1, max_size=4))
def test_exactly_what_fits_and_decodes_is_admitted(interface: ModelInterface, many: list[list[Tensor]]) -> None:
    gate = Admission(interface, 1, "hash")
    for inputs in [*many, *many]:  # the second time from what the gate remembers
        good = fits(interface, inputs) and all(decodes(t) for t in inputs)
        try:
            admitted = gate.admit(InferenceRequest("m", 1, inputs))
        except InvalidArgument:
            assert not good
            continue
        assert good
        batching = interface.max_batch_size and inputs
        assert admitted.rows == (inputs[0].shape[0] if batching else 1)
        assert [(p.name, p.shape, p.size_bytes) for p in admitted.meta.inputs] == [
            (t.name, t.shape, len(t.data)) for t in inputs
        ]


@given(interfaces(), tensors(), tensors())
def test_what_shares_a_signature_can_be_joined(interface: ModelInterface, one: Tensor, other: Tensor) -> None:
    gate = Admission(interface, 1, "hash")
    try:
        first = gate.admit(InferenceRequest("m", 1, [one]))
        second = gate.admit(InferenceRequest("m", 1, [other]))
    except InvalidArgument:
        return
    at = 1 if interface.max_batch_size else 0
    joinable = (one.name, one.shape[at:]) == (other.name, other.shape[at:])
    assert (first.signature == second.signature) == joinable
