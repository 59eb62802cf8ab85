"""Layouts: where the parts of a request lie that are its own, and that nothing else may differ."""

from __future__ import annotations

import struct
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.lane.layout import Layout, is_plain, protobuf_layout
from protos import grpc_service_pb2 as pb

_plain = st.text("abcXYZ019-_.:", min_size=1, max_size=6)


@st.composite
def messages(draw: st.DrawFn) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=draw(st.sampled_from(["m", "long" * 40])))
    message.model_version = draw(st.sampled_from(["", "1"]))
    message.id = draw(st.one_of(st.just(""), _plain))
    for number in range(draw(st.integers(1, 3))):
        message.inputs.add(name=f"in{number}", datatype="INT8", shape=[1, 2])
        message.raw_input_contents.append(draw(st.binary(min_size=1, max_size=200)))
    if draw(st.booleans()):
        message.parameters["k"].string_param = draw(st.text(max_size=3))
        message.outputs.add(name="out")
    return message


@given(messages(), st.data())
def test_a_layout_finds_the_parts_and_notices_all_else(message: pb.ModelInferRequest, data: st.DataObject) -> None:
    whole = message.SerializeToString(deterministic=True)
    layout = protobuf_layout(whole, len(message.inputs))
    assert layout is not None
    inputs, request_id = tuple(message.raw_input_contents), message.id.encode()
    assert layout.cut(whole, 0) == (inputs, request_id)
    assert layout.join(inputs, request_id) == whole
    behind = layout.behind(b"12345")
    assert behind.cut(b"xy12345" + whole + b"more", 2) == (inputs, request_id)
    assert behind.join(inputs, request_id) == b"12345" + whole
    assert layout.behind(b"") == layout
    assert len({layout, layout.behind(b""), behind}) == 2

    at = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[at] ^= data.draw(st.integers(1, 255))
    found = layout.cut(bytes(changed), 0) if changed.startswith(layout.head) else None
    parts = [range(start, end) for start, end in layout.parts]
    if not any(at in part for part in parts):
        assert found is None, "it differs where requests of a layout do not"
        return
    if message.id and at in parts[0] and not is_plain(bytes(changed[parts[0].start : parts[0].stop])):
        assert found is None, "what such an id may hold is the full way's to judge"
        return
    assert found is not None
    parsed = pb.ModelInferRequest.FromString(bytes(changed))
    assert found == (tuple(parsed.raw_input_contents), parsed.id.encode())


@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.floats(width=32), min_size=1, max_size=40)), min_size=1, max_size=3),
    st.one_of(st.just(""), _plain),
)
def test_typed_floats_lie_in_the_message_as_in_the_tensor(inputs: list[tuple[bool, list[float]]], name: str) -> None:
    message = pb.ModelInferRequest(model_name="m", id=name)
    expected = []
    for is_double, values in inputs:
        tensor = message.inputs.add(name="x", datatype="FP64" if is_double else "FP32", shape=[len(values)])
        field = tensor.contents.fp64_contents if is_double else tensor.contents.fp32_contents
        field.extend(values)
        expected.append(struct.pack(f"<{len(values)}{'d' if is_double else 'f'}", *values))
    whole = message.SerializeToString(deterministic=True)
    layout = protobuf_layout(whole, len(message.inputs))
    assert layout is not None
    assert layout.cut(whole, 0) == (tuple(expected), name.encode())
    assert layout.join(expected, name.encode()) == whole


def test_other_contents_have_no_layout() -> None:
    def layout_of(*fill: tuple[str, list[Any]], raw: bool = False, after: bytes = b"") -> Layout | None:
        message = pb.ModelInferRequest(model_name="m")
        tensor = message.inputs.add(name="x", datatype="FP32", shape=[2])
        for field, values in fill:
            getattr(tensor.contents, field).extend(values)
        if raw:
            message.raw_input_contents.append(b"12345678")
        return protobuf_layout(message.SerializeToString() + after, 1)

    assert layout_of(("fp32_contents", [1.0, 2.0])) is not None
    assert layout_of(("int_contents", [1, 2])) is None
    assert layout_of(("bytes_contents", [b"a"])) is None
    assert layout_of(("fp32_contents", [1.0]), ("fp64_contents", [1.0])) is None
    assert layout_of(("fp32_contents", [1.0, 2.0]), raw=True) is None
    assert layout_of() is None
    second = pb.ModelInferRequest()
    second.inputs.add().contents.fp32_contents.extend([3.0, 4.0])
    assert layout_of(("fp32_contents", [1.0, 2.0]), after=second.SerializeToString()) is None


@given(messages(), messages(), st.binary(max_size=30))
def test_what_is_written_in_another_order_has_no_layout(
    first: pb.ModelInferRequest, second: pb.ModelInferRequest, junk: bytes
) -> None:
    """Whatever has one is read by the library as its parts say."""
    for data in (first.SerializeToString() + second.SerializeToString(), junk, first.SerializeToString() + junk):
        layout = protobuf_layout(data, len(first.inputs))
        if layout is None:
            continue
        found = layout.cut(data, 0)
        assert found is not None
        try:
            parsed = pb.ModelInferRequest.FromString(data)
        except Exception:
            continue  # it does not go the full way, so nothing is learnt of it
        assert found == (tuple(parsed.raw_input_contents), parsed.id.encode())


def test_requests_without_raw_inputs_of_their_own_have_no_layout() -> None:
    message = pb.ModelInferRequest(model_name="m")
    message.inputs.add(name="x", datatype="INT8", shape=[1])
    assert protobuf_layout(message.SerializeToString(), 1) is None
    message.raw_input_contents.append(b"")
    assert protobuf_layout(message.SerializeToString(), 1) is None
    message.raw_input_contents[0] = b"a"
    assert protobuf_layout(message.SerializeToString(), 1) is not None
    assert protobuf_layout(message.SerializeToString(), 2) is None
    message.id = "with space"
    assert protobuf_layout(message.SerializeToString(), 1) is None


def test_layouts_are_alike_when_nothing_but_the_parts_differs() -> None:
    one = Layout.of(b"head-id-AB-tail", [(5, 7), (8, 10)], 2)
    assert one == Layout.of(b"head-xy-CD-tail", [(5, 7), (8, 10)], 2)
    assert one != Layout.of(b"head-xy-CD-tale", [(5, 7), (8, 10)], 2)
    assert one.head == b"head-"
    assert Layout.of(b"AB", [(0, 2)], 0).head == b""
