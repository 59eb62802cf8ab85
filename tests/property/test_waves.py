"""Waves and the requests they stand for are the same, and bytes that are no wave are refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.datatypes import DataType
from charonia.errors import InvalidRecord
from charonia.tensors import Tensor, join_bytes_elements
from charonia.wire import (
    FIELD_RECORD,
    FIELD_WAVE,
    FILE,
    FLAG_REPLY_BY_REFERENCE,
    MAX_WAVE_REQUESTS,
    Reference,
    pack_request,
    pack_wave_reply,
    reply_meta,
    request_meta,
    unpack_request,
    unpack_wave,
    unpack_wave_reply,
    wave_head,
)
from charonia.wire.waves import requests_in, work_in

PREFIX = bytes(range(100, 115))
_text = st.text(max_size=6)
_numbers = st.integers(0, 2**64 - 1)


@st.composite
def waves(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """A packed wave, and the records of its requests as a gateway would have written them."""
    count = draw(st.integers(1, MAX_WAVE_REQUESTS if draw(st.booleans()) else 4))
    rows = draw(st.integers(1, 3))
    kinds = draw(st.lists(st.sampled_from([DataType.INT8, DataType.FP32, DataType.BYTES]), min_size=1, max_size=3))
    has_strings = DataType.BYTES in kinds
    tensors: list[list[Tensor]] = []
    for index in range(count):
        inputs = []
        for number, kind in enumerate(kinds):
            if kind is DataType.BYTES:
                data = join_bytes_elements(draw(st.lists(st.binary(max_size=3), min_size=rows, max_size=rows)))
            else:
                data = bytes([index * 7 + number & 0xFF]) * (2 * rows * kind.size_bytes)
            shape = (rows,) if kind is DataType.BYTES else (rows, 2)
            inputs.append(Tensor(f"in{number}", kind, shape, data))
        tensors.append(inputs)
    outputs = tuple(draw(st.lists(_text, max_size=2, unique=True)))
    parameters: dict[str, Any] = draw(st.dictionaries(_text, st.one_of(_text, st.booleans(), st.integers(0, 9))))
    about = {
        "rows": rows,
        "signature": draw(_numbers),
        "level": draw(_numbers),
        "accepted_ns": draw(_numbers),
        "timeout_us": draw(_numbers),
    }
    endpoint = draw(_text).encode()
    some = st.lists(_text, min_size=count, max_size=count)
    client_ids = [name.encode() for name in draw(some)] if draw(st.booleans()) else []
    deadlines = draw(st.lists(_numbers, min_size=count, max_size=count)) if draw(st.booleans()) else []
    metas = [request_meta(3, "hash", inputs, outputs, parameters) for inputs in tensors]
    sizes = [[len(inputs[at].data) for inputs in tensors] for at in range(len(kinds))] if has_strings else []
    head = wave_head(
        *(PREFIX, count, endpoint, metas[0]), **about, client_ids=client_ids, deadlines=deadlines, sizes=sizes
    )
    columns = [b"".join(bytes(inputs[at].data) for inputs in tensors) for at in range(len(kinds))]
    records = [
        pack_request(
            *(PREFIX + bytes((index,)), endpoint, client_ids[index] if client_ids else b"", metas[index]),
            [tensor.data for tensor in inputs],
            **about,
            deadline_ns=deadlines[index] if deadlines else 0,
        )
        for index, inputs in enumerate(tensors)
    ]
    return b"".join([head, *columns]), records


@given(waves())
def test_a_wave_stands_for_the_records_of_its_requests(made: tuple[bytes, list[bytes]]) -> None:
    packed, records = made
    wave = unpack_wave(packed)
    assert [bytes(request.record) for request in wave.requests()] == records
    assert wave.ids() == [unpack_request(record).id for record in records]
    assert wave.request_bytes() == [unpack_request(record).meta.size_bytes for record in records]
    assert wave.id not in wave.ids()
    alone = records[0]
    fields = [FIELD_WAVE, packed, FIELD_RECORD, alone, FIELD_WAVE, wave]
    assert [bytes(request.record) for request in requests_in(fields)] == [*records, alone, *records]
    kinds = [type(one).__name__ for one in work_in(fields)]
    assert kinds == ["Wave", "RequestRecord", "Wave"]


@given(waves(), st.data())
def test_bytes_that_are_no_wave_are_refused(made: tuple[bytes, list[bytes]], data: st.DataObject) -> None:
    packed, _ = made
    end = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(InvalidRecord):
        unpack_wave(packed[:end])
    with pytest.raises(InvalidRecord):
        unpack_wave(packed + b"x")
    changed = bytearray(packed)
    changed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        wave = unpack_wave(bytes(changed))
    except InvalidRecord:
        return
    try:
        assert len(wave.requests()) == wave.count
    except InvalidRecord:
        pass


_PLACES = st.from_regex(r"[a-z]{1,9}/s[0-9a-f]-[0-9a-f]{1,4}-[0-9a-f]{1,4}", fullmatch=True)


@given(st.lists(_PLACES, min_size=1, max_size=8), st.booleans(), st.booleans(), st.data())
def test_a_wave_by_reference_stands_for_requests_by_reference(
    places: list[str], named: bool, shares: bool, data: st.DataObject
) -> None:
    inputs = [Tensor("a", DataType.INT8, (2,), b"ab"), Tensor("b", DataType.FP32, (1,), b"0123")]
    meta = request_meta(3, "hash", inputs, (), {})
    references = [Reference(FILE, place, 6) for place in places]
    client_ids = [b"%d" % number for number in range(len(places))] if named else []
    about = {"rows": 1, "signature": 5, "level": 0, "accepted_ns": 7}
    packed = wave_head(
        *(PREFIX, len(places), b"g", meta),
        **about,
        client_ids=client_ids,
        references=references,
        reply_by_reference=shares,
    )
    wave = unpack_wave(packed)
    flags = FLAG_REPLY_BY_REFERENCE if shares else 0
    expected = [
        pack_request(
            *(PREFIX + bytes((index,)), b"g", client_ids[index] if named else b"", meta, []),
            **about,
            flags=flags,
            reference=reference,
        )
        for index, reference in enumerate(references)
    ]
    assert [bytes(request.record) for request in wave.requests()] == expected
    wave.payloads = tuple([b"%02d" % number + b"0123" for number in range(len(places))])
    assert wave.parts(0) == [b"%02d" % number for number in range(len(places))]
    assert wave.parts(1) == [b"0123"] * len(places)
    assert [bytes(r.inputs()[0].data) for r in wave.requests()] == wave.parts(0)
    with pytest.raises(InvalidRecord):
        unpack_wave(packed[: data.draw(st.integers(0, len(packed) - 1))])
    with pytest.raises(InvalidRecord):
        unpack_wave(packed + b"/")
    wrong = [Reference(FILE, places[0], 5), *references[1:]]
    with pytest.raises(InvalidRecord, match="refers to 5 bytes, expected 6"):
        unpack_wave(wave_head(PREFIX, len(places), b"g", meta, **about, references=wrong))


@given(_PLACES, st.integers(1, 8), st.binary(min_size=2, max_size=2), st.data())
def test_a_wave_in_a_slot_stands_for_requests_in_parts_of_it(
    place: str, count: int, value: bytes, data: st.DataObject
) -> None:
    meta = request_meta(3, "hash", [Tensor("a", DataType.INT8, (2,), value)], (), {})
    about = {"rows": 1, "signature": 5, "level": 0, "accepted_ns": 7}
    column = bytes(range(2 * count))
    packed = wave_head(*(PREFIX, count, b"g", meta), **about, column_at=Reference(FILE, place, len(column)))
    wave = unpack_wave(packed)
    assert wave.lacks_tensors
    slot, _, offset = place.rpartition("-")
    parts = [Reference(FILE, f"{slot}-{int(offset, 16) + 2 * index:x}", 2) for index in range(count)]
    unread = wave.requests()
    assert [request.reference for request in unread] == parts
    wave.columns = (column,)
    assert not wave.lacks_tensors
    requests = wave.requests()
    assert [bytes(request.record) for request in requests] == [bytes(request.record) for request in unread]
    assert b"".join([bytes(request.inputs()[0].data) for request in requests]) == bytes(wave.parts(0)[0]) == column
    wave.release()
    assert wave.lacks_tensors
    with pytest.raises(InvalidRecord):
        unpack_wave(packed[: data.draw(st.integers(0, len(packed) - 1))])
    for wrong in (Reference(FILE, place, len(column) + 1), Reference(FILE, "g/file", len(column))):
        with pytest.raises(InvalidRecord, match="refers to"):
            unpack_wave(wave_head(PREFIX, count, b"g", meta, **about, column_at=wrong))


@given(
    count=st.integers(1, MAX_WAVE_REQUESTS),
    sizes=st.lists(st.integers(0, 9), max_size=3),
    infer_ns=_numbers,
    data=st.data(),
)
def test_replies_to_waves(count: int, sizes: list[int], infer_ns: int, data: st.DataObject) -> None:
    places = tuple((f"out{number}", DataType.UINT8, (1, size), size) for number, size in enumerate(sizes))
    columns = tuple(bytes([number]) * (size * count) for number, size in enumerate(sizes))
    packed = pack_wave_reply(PREFIX, count, reply_meta("m", 2, places), columns, infer_ns)
    reply = unpack_wave_reply(packed)
    assert (reply.prefix, reply.count, reply.model, reply.version, reply.infer_ns) == (PREFIX, count, "m", 2, infer_ns)
    assert tuple((p.name, p.datatype, p.shape, p.size_bytes) for p in reply.outputs) == places
    assert reply.columns == columns
    with pytest.raises(InvalidRecord):
        unpack_wave_reply(packed + b"x")
    with pytest.raises(InvalidRecord):
        unpack_wave_reply(packed[: data.draw(st.integers(0, len(packed) - 1))])
    changed = bytearray(packed)
    changed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        unpack_wave_reply(bytes(changed))
    except InvalidRecord:
        pass
