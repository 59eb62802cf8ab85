"""Records survive the log as they are, and hostile bytes are refused as records and nothing else."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.datatypes import DataType
from charonia.errors import CharoniaError, ErrorCode, InvalidRecord
from charonia.facts.events import BatchFinished, pack_fact, unpack_fact
from charonia.tensors import Tensor, join_bytes_elements
from charonia.traces.contexts import Context
from charonia.wire import (
    FILE,
    FLAG_JOB,
    FLAG_JOURNALLED,
    FLAG_TIMED,
    BatchHeader,
    Lineage,
    Reference,
    SequenceMark,
    pack_failure,
    pack_request,
    pack_response,
    record_fields,
    records_of,
    request_meta,
    requests_in,
    unpack_request,
    unpack_response,
)

NAMES = st.text(min_size=1, max_size=8)
PARAMETERS = st.dictionaries(
    NAMES,
    st.text(max_size=8) | st.integers(-(2**63), 2**64 - 1) | st.booleans() | st.floats(allow_nan=False),
    max_size=3,
)
IDS = st.binary(min_size=16, max_size=16)
U64 = st.integers(0, 2**64 - 1)


@st.composite
def tensors(draw: st.DrawFn) -> list[Tensor]:
    found = []
    for name in draw(st.lists(NAMES, max_size=3, unique=True)):
        datatype = draw(st.sampled_from(list(DataType)))
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
        if datatype is DataType.BYTES:
            data = join_bytes_elements(draw(st.binary(max_size=5)) for _ in range(prod(shape)))
        else:
            size = prod(shape) * datatype.size_bytes
            data = draw(st.binary(min_size=size, max_size=size))
        found.append(Tensor(name, datatype, shape, data))
    return found


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    inputs = draw(tensors())
    meta = request_meta(draw(st.integers(1, 9)), draw(NAMES), inputs, tuple(draw(st.lists(NAMES))), draw(PARAMETERS))
    return pack_request(
        draw(IDS),
        draw(NAMES).encode(),
        draw(st.text(max_size=9)).encode(),
        meta,
        [t.data for t in inputs],
        rows=draw(st.integers(0, 2**32 - 1)),
        signature=draw(U64),
        level=draw(U64),
        accepted_ns=draw(U64),
    )


@given(IDS, NAMES, st.text(max_size=20), tensors(), st.lists(NAMES), PARAMETERS, U64, U64)
def test_a_request_comes_back(
    request_id: bytes,
    endpoint: str,
    client_id: str,
    inputs: list[Tensor],
    outputs: list[str],
    parameters: dict[str, object],
    number: int,
    other: int,
) -> None:
    meta = request_meta(7, "hash", inputs, tuple(outputs), parameters)  # type: ignore[arg-type]
    packed = pack_request(
        request_id,
        endpoint.encode(),
        client_id.encode(),
        meta,
        [t.data for t in inputs],
        rows=3,
        signature=number,
        level=other,
        accepted_ns=number,
        deadline_ns=other,
        timeout_us=number,
    )
    record = unpack_request(packed)
    assert (record.id, record.endpoint, record.client_id) == (request_id, endpoint, client_id)
    assert (record.signature, record.accepted_ns, record.timeout_us) == (number, number, number)
    assert (record.level, record.deadline_ns, record.rows) == (other, other, 3)
    assert record.inputs() == inputs
    assert record.meta == meta
    assert {k: (type(v), v) for k, v in record.meta.parameters.items()} == {
        k: (type(v), v) for k, v in parameters.items()
    }


@given(IDS, NAMES, tensors(), PARAMETERS, st.booleans())
def test_a_response_comes_back(
    request_id: bytes, model: str, outputs: list[Tensor], parameters: dict[str, object], final: bool
) -> None:
    packed = pack_response(request_id, model, 2, outputs, parameters, final=final)  # type: ignore[arg-type]
    record = unpack_response(packed)
    assert (record.id, record.model, record.version, record.final) == (request_id, model, 2, final)
    assert (record.outputs, record.parameters, record.error) == (outputs, parameters, None)
    record.parameters["mine"] = 1
    assert unpack_response(packed).parameters == parameters, "responses share nothing a caller may change"


@given(IDS, NAMES, st.sampled_from(list(ErrorCode)), st.text())
def test_a_failure_comes_back(request_id: bytes, model: str, code: ErrorCode, message: str) -> None:
    record = unpack_response(pack_failure(request_id, model, 2, CharoniaError.of(code, message)))
    assert record.error is not None
    assert (record.id, record.error.code, record.error.message, record.outputs) == (request_id, code, message, [])


@given(st.lists(st.integers(0, 9)), st.binary(max_size=9), st.booleans(), NAMES)
def test_a_batch_header_comes_back(attempts: list[int], report_to: bytes, via_owner: bool, name: str) -> None:
    header = BatchHeader(name, name, 3, name, 2**63, tuple(attempts), report_to, via_owner)
    assert BatchHeader.unpack(header.pack()) == header


def spoil(data: st.DataObject, packed: bytes) -> bytes:
    kind = data.draw(st.sampled_from(["flip", "cut", "grow", "insert"]))
    at = data.draw(st.integers(0, max(0, len(packed) - 1)))
    if kind == "flip":
        return packed[:at] + bytes([packed[at] ^ data.draw(st.integers(1, 255))]) + packed[at + 1 :]
    if kind == "cut":
        return packed[:at]
    more = data.draw(st.binary(min_size=1, max_size=8))
    return packed + more if kind == "grow" else packed[:at] + more + packed[at:]


@given(st.data(), requests())
def test_a_spoilt_request_is_refused_or_consistent(data: st.DataObject, packed: bytes) -> None:
    hostile = spoil(data, packed)
    try:
        record = unpack_request(hostile)
    except InvalidRecord:
        return
    assert sum(len(t.data) for t in record.inputs()) == len(record.data)
    assert all(dim >= 0 for t in record.inputs() for dim in t.shape)


@given(st.data(), IDS, NAMES, tensors(), PARAMETERS)
def test_a_spoilt_response_is_refused_or_consistent(
    data: st.DataObject, request_id: bytes, model: str, outputs: list[Tensor], parameters: dict[str, object]
) -> None:
    hostile = spoil(data, pack_response(request_id, model, 2, outputs, parameters))  # type: ignore[arg-type]
    try:
        record = unpack_response(hostile)
    except InvalidRecord:
        return
    assert isinstance(record.model, str)
    assert all(type(t.size_bytes) is int for t in record.outputs)


@given(st.data())
def test_a_spoilt_failure_header_or_fact_is_refused_or_well_typed(data: st.DataObject) -> None:
    failed = pack_failure(bytes(16), "m", 1, CharoniaError.of(3, "why"))
    try:
        record = unpack_response(spoil(data, failed))
        assert record.error is None or isinstance(record.error.message, str)
    except InvalidRecord:
        pass
    try:
        header = BatchHeader.unpack(spoil(data, BatchHeader("b", "m", 1, "h", 2, (1, 2), b"f:{m}").pack()))
        assert isinstance(header.batch_id, str)
        assert all(isinstance(attempt, int) for attempt in header.attempts)
    except InvalidRecord:
        pass
    try:
        fact = unpack_fact(spoil(data, pack_fact(BatchFinished("e", "b", (("g", b"r"),)))))
        assert fact is None or (isinstance(fact, BatchFinished) and isinstance(fact.batch_id, str))
    except InvalidRecord:
        pass


@given(st.lists(st.binary(max_size=9), min_size=1, max_size=5))
def test_the_records_of_an_entry_come_back(records: list[bytes]) -> None:
    fields = [b"h", b"header", *record_fields(records), b"new", b"field"]
    assert [bytes(record) for record in records_of(fields)] == records


@given(st.data(), st.lists(st.binary(max_size=9), min_size=2, max_size=5))
def test_spoilt_joined_records_are_refused_or_add_up(data: st.DataObject, records: list[bytes]) -> None:
    name, joined = record_fields(records)
    hostile = spoil(data, bytes(joined))
    try:
        found = records_of([name, hostile])
    except InvalidRecord:
        return
    assert sum(map(len, found)) + 4 * (len(found) + 1) == len(hostile)


UNLIKE: list[dict[str, Any]] = [
    {"rows": 2},
    {"level": 7},
    {"deadline_ns": 1},
    {"timeout_us": 2**64 - 1},
    {"signature": 8},
    {"flags": FLAG_JOB},
    {"flags": FLAG_JOURNALLED | FLAG_TIMED, "level": 7},
    {"endpoint": b"gw2"},
    {"endpoint": b"a gateway of a longer name"},
    {"version": 2},
    {"reference": Reference(FILE, "gw1/x", 0)},
    {"sequence": SequenceMark(3, start=True)},
    {"lineage": Lineage((("m", bytes(16)),))},
    {"lineage": Lineage(step_of=("m", bytes(16)))},
    {"trace": Context(1, bytes(16), bytes(8))},
    {"window": 4},
]
"""What may differ from one request of an entry to the next, beside ids, times and tensor bytes."""


def packed_alike(own: dict[str, Any], inputs: list[Tensor], length: int) -> bytes:
    """A record of this length: the client id fills it."""
    about = {"rows": 1, "level": 0, "signature": 9, "endpoint": b"gw1", "version": 1} | own
    request_id, endpoint, version = about.pop("id"), about.pop("endpoint"), about.pop("version")
    meta, data = request_meta(version, "h", inputs, (), {}), [t.data for t in inputs]
    if "reference" in about:
        about["reference"] = replace(about["reference"], size_bytes=meta.size_bytes)
    missing = length - len(pack_request(request_id, endpoint, b"", meta, data, **about))
    return pack_request(request_id, endpoint, b"c" * missing, meta, data, **about)


@given(
    data=st.data(),
    inputs=tensors(),
    length=st.sampled_from((700, 1024, 1025, 3000)),
    usual=st.just({}) | st.sampled_from(UNLIKE),
    odd=st.lists(st.none() | st.sampled_from(UNLIKE), min_size=2, max_size=7),
    others=st.booleans(),
)
def test_the_requests_of_an_entry_are_those_of_its_records(
    data: st.DataObject,
    inputs: list[Tensor],
    length: int,
    usual: dict[str, Any],
    odd: list[dict[str, Any] | None],
    others: bool,
) -> None:
    """However alike they are, all of one length: ids, times and bytes differ, now and then something else."""
    records = []
    for number, own in enumerate(odd):
        mine = [t if data.draw(st.booleans()) else replace(t, data=t.data[::-1]) for t in inputs]
        about = {"id": bytes([number]) * 16, "accepted_ns": data.draw(U64)} | (own or usual)
        records.append(packed_alike(about, mine, length))
    if others:
        records.insert(data.draw(st.integers(0, len(odd))), spoil(data, records[0]))
    fields = [b"h", b"header", *record_fields(records)]
    try:
        expected = [unpack_request(one) for one in records]
    except InvalidRecord:
        with pytest.raises(InvalidRecord):
            requests_in(fields)
        return
    found = requests_in(fields)
    assert found == expected
    assert [bytes(one.record) for one in found] == records
    assert [one.inputs() for one in found] == [one.inputs() for one in expected]


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(junk: bytes) -> None:
    for read in (
        unpack_request,
        unpack_response,
        BatchHeader.unpack,
        unpack_fact,
        lambda b: records_of([b"m", b]),
        lambda b: requests_in([b"m", b]),
    ):
        try:
            read(junk)
        except InvalidRecord:
            continue
