"""Digests of an Idempotency-Key, and of a request: equal digests are the same request. Pure.

Digests are 16 bytes. The length precedes every part, so that different requests never have the same text.
"""

from __future__ import annotations

import hashlib
import struct

from charonia.errors import InvalidArgument
from charonia.facts.jobs import MAX_IDEMPOTENCY_KEY_BYTES
from charonia.inference import InferenceRequest
from charonia.tensors import Buffer

_LENGTH = struct.Struct("<Q")
_SHAPE = struct.Struct("<q")


def check_key(key: str) -> None:
    """Raises `InvalidArgument` for a key that is too long."""
    size = len(key.encode("utf-8", "surrogateescape"))
    if size > MAX_IDEMPOTENCY_KEY_BYTES:
        raise InvalidArgument(f"Idempotency-Key of {size} bytes exceeds the maximum of {MAX_IDEMPOTENCY_KEY_BYTES}")


def key_digest(tenant: str, model: str, key: str) -> bytes:
    """The digest of a key, which belongs to one tenant and one model."""
    digest = _Digest()
    for text in (tenant, model, key):
        digest.text(text)
    return digest.value()


def request_digest(request: InferenceRequest) -> bytes:
    """The digest of what determines the answer: model, requested version, tensors, outputs, parameters and priority.

    The request's id, deadline and timeout are not included: a retry may have others.
    """
    digest = _Digest()
    digest.text(request.model)
    digest.text(str(request.version))
    digest.count(len(request.inputs))
    for tensor in request.inputs:
        digest.text(tensor.name)
        digest.text(tensor.datatype.value)
        digest.part(b"".join([_SHAPE.pack(dim) for dim in tensor.shape]))
        digest.part(tensor.data)
    digest.count(len(request.outputs))
    for name in request.outputs:
        digest.text(name)
    digest.count(len(request.parameters))
    for name, value in sorted(request.parameters.items()):
        digest.text(name)
        digest.text(type(value).__name__)
        digest.text(str(value))
    for number in (request.priority, request.sequence_id, request.sequence_start, request.sequence_end):
        digest.text(str(number))
    return digest.value()


class _Digest:
    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def count(self, number: int) -> None:
        self._hash.update(_LENGTH.pack(number))

    def part(self, data: Buffer) -> None:
        self._hash.update(_LENGTH.pack(len(data)))
        self._hash.update(data)

    def text(self, text: str) -> None:
        self.part(text.encode("utf-8", "surrogatepass"))

    def value(self) -> bytes:
        return self._hash.digest()
