"""What a request of a sequence must say of itself, and the mark it gets on its way (S30, S31, S42). Pure.

Whether its sequence has begun is for the scheduler to know (S32).
"""

from __future__ import annotations

import hashlib

from charonia.datatypes import DataType
from charonia.errors import InvalidArgument
from charonia.inference import InferenceRequest
from charonia.models.sequence_batcher import SequenceBatching
from charonia.wire import MAX_CORRELATION_ID_BYTES, SequenceMark

_UINT64 = (1 << 64) - 1


def check_length(request: InferenceRequest) -> None:
    """S42, for whatever model. Raises `InvalidArgument`."""
    correlation_id = request.sequence_id
    if isinstance(correlation_id, str) and len(correlation_id.encode()) > MAX_CORRELATION_ID_BYTES:
        raise InvalidArgument(f"string correlation ID cannot be longer than {MAX_CORRELATION_ID_BYTES} characters")


def check_sequence(request: InferenceRequest, rows: int, model: str, block: SequenceBatching) -> None:
    """S30, S31, S42. Raises `InvalidArgument`, without a prefix as all errors of sequences."""
    if rows != 1:
        raise InvalidArgument(
            f"inference request to model '{model}' must specify batch-size 1 due to requirements of sequence batcher"
        )
    if not request.sequence_id:
        if block.iterative:
            return
        raise InvalidArgument(
            f"inference request to model '{model}' must specify a non-zero or non-empty correlation ID"
        )
    control = block.correlation_control
    if control is None:
        return
    given = DataType.BYTES if isinstance(request.sequence_id, str) else DataType.UINT64
    if (given is DataType.BYTES) is not (control.datatype is DataType.BYTES):
        raise InvalidArgument(
            f"sequence batching control '{control.name}' data-type is '{given.value}', but model '{model}' expects "
            f"'{control.datatype.value}'"
        )


def sequence_mark(request: InferenceRequest, request_id: bytes, tenant: str) -> SequenceMark:
    """The mark of an admitted request. One without an id is a sequence of its own (S30, S41)."""
    scope = int.from_bytes(hashlib.blake2b(tenant.encode(), digest_size=8).digest(), "little") or 1 if tenant else 0
    correlation_id = request.sequence_id
    if not correlation_id:
        return SequenceMark(int.from_bytes(request_id[:8], "little") | 1, start=True, end=True, scope=scope)
    if not isinstance(correlation_id, str):
        correlation_id &= _UINT64
    return SequenceMark(correlation_id, request.sequence_start, request.sequence_end, scope)
