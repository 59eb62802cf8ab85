"""Recorded calls: what a client asked of a model and what it got, for `charonia replay` (ADR 0060).

    header [version, meta length] | meta [recorded us, model version, tenant, client id, inputs, outputs, parameters,
    sequence, unkept, lengths of the responses, job] | input bytes | response records

Responses are those of `responses`, in the order of their arrival, with the outputs that the client asked for. A request
that is answered later is recorded when it is accepted: it has the id of its job and no responses. Its `unkept` is then
`IN_ITS_JOB`, so that older releases, which pass over the id, do not ask it again.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from charonia.errors import InvalidRecord
from charonia.inference import LOWEST_PRIORITY, Parameters
from charonia.tensors import Buffer, Tensor

from .records import WIRE_VERSION, parameters_of, places_of, total_size_bytes
from .responses import ResponseRecord, unpack_response

REPLAY_PRIORITY = LOWEST_PRIORITY
"""The priority of replayed requests, which gateways do not record."""

IN_ITS_JOB = "its answer is with its job"

# version, meta length
_HEADER = struct.Struct("<BxxxI")
_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """Where a request stands in its sequence, as its client said."""

    id: int | str
    start: bool
    end: bool


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A request and its responses. `at_us` is when it was admitted, in us since the epoch, `version` the one that
    answered.

    `unkept` says in words why the tensors were not kept; then there are no inputs and no responses. `job` is the id of
    the job, of 16 bytes, that has the responses; empty for a request whose client waited for them.
    """

    at_us: int
    version: int
    inputs: Sequence[Tensor]
    responses: Sequence[ResponseRecord]
    outputs: tuple[str, ...] = ()
    parameters: Parameters | None = None
    tenant: str = ""
    client_id: str = ""
    sequence: RecordedStep | None = None
    unkept: str = ""
    job: bytes = b""


def pack_recorded_call(call: RecordedCall, responses: Sequence[Buffer]) -> list[Buffer]:
    """The record in pieces; `responses` are the packed forms of those of the call, which are not read."""
    sequence = call.sequence
    meta = msgpack.packb(
        [
            call.at_us,
            call.version,
            call.tenant,
            call.client_id,
            [[t.name, t.datatype.number, t.shape, len(t.data)] for t in call.inputs],
            call.outputs,
            call.parameters or None,
            None if sequence is None else [sequence.id, sequence.start, sequence.end],
            call.unkept or (IN_ITS_JOB if call.job else ""),
            [len(response) for response in responses],
            *([call.job] if call.job else []),
        ]
    )
    return [_HEADER.pack(WIRE_VERSION, len(meta)), meta, *[t.data for t in call.inputs], *responses]


def unpack_recorded_call(record: Buffer) -> RecordedCall:
    """Decode a recorded call; tensors stay views. Raises `InvalidRecord`."""
    view = memoryview(record)
    try:
        wire_version, meta_length = _HEADER.unpack_from(view)
    except struct.error as error:
        raise InvalidRecord(f"recorded call of {len(view)} bytes is too short: {error}") from None
    if wire_version != WIRE_VERSION:
        raise InvalidRecord(f"recorded call of version {wire_version}, expected {WIRE_VERSION}")
    meta_end = _HEADER.size + meta_length
    try:
        fields = msgpack.unpackb(bytes(view[_HEADER.size : meta_end]), use_list=False)
        at_us, version, tenant, client_id, tensors, outputs, parameters, sequence, unkept, lengths, *more = fields
        places = places_of(tensors)
        known = parameters_of(parameters)
        if not (
            type(at_us) is type(version) is int
            and all(type(text) is str for text in (tenant, client_id, unkept))
            and all(type(name) is str for name in outputs)
            and all(type(length) is int and length >= 0 for length in lengths)
        ):
            raise InvalidRecord("recorded call has a field of another type")
        step = None if sequence is None else _step(sequence)
        job = more[0] if more else b""
        if type(job) is not bytes or len(job) not in (0, _ID_BYTES):
            raise InvalidRecord("recorded call has a field of another type")
        if job and unkept == IN_ITS_JOB:
            unkept = ""
    except InvalidRecord:
        raise
    except Exception as error:
        raise InvalidRecord(f"meta of a recorded call cannot be read: {error}") from None
    data_end = meta_end + total_size_bytes(places)
    if data_end + sum(lengths) != len(view):
        raise InvalidRecord(f"recorded call of {len(view)} bytes, its meta describes {data_end + sum(lengths)}")
    inputs = [
        Tensor(p.name, p.datatype, p.shape, view[meta_end + p.offset : meta_end + p.offset + p.size_bytes])
        for p in places
    ]
    responses = []
    for length in lengths:
        responses.append(unpack_response(view[data_end : data_end + length]))
        data_end += length
    return RecordedCall(
        at_us, version, inputs, tuple(responses), tuple(outputs), known, tenant, client_id, step, unkept, job
    )


def _step(sequence: Any) -> RecordedStep:
    number, start, end = sequence
    if type(number) not in (int, str) or type(start) is not bool or type(end) is not bool:
        raise InvalidRecord("the sequence of a recorded call has a field of another type")
    return RecordedStep(number, start, end)
