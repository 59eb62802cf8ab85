"""The chain of calls that a request is part of: the `lineage` in the record of a request by a model or an ensemble."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import msgpack

from charonia.errors import InvalidRecord
from charonia.tensors import Buffer

_LENGTH = struct.Struct("<H")

Ancestor = tuple[str, bytes]
"""(model, request id of 16 bytes)."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """`ancestors` are the requests that wait for this one, outermost first; `tenant` is theirs, "" for none.

    The innermost `blocked` of them do nothing else until this one is answered. A client's request has no ancestors,
    and a lineage only if its tenant must be known downstream. `step_of` is the ensemble's request that this one is a
    step of, if its model may never end it: a decoupled model, or an ensemble. Older releases do not write it.
    """

    ancestors: tuple[Ancestor, ...] = ()
    tenant: str = ""
    blocked: int = 0
    step_of: Ancestor | None = None

    def with_child(self, model: str, request_id: bytes, *, blocks: bool = False) -> Lineage:
        """The lineage of a request that the request of this lineage makes; `model` and `request_id` are the caller's.

        `blocks`: the caller does nothing else until the answer.
        """
        return Lineage((*self.ancestors, (model, request_id)), self.tenant, self.blocked + 1 if blocks else 0)

    def blocked_ids(self) -> tuple[bytes, ...]:
        """The ids of the `blocked` ancestors, outermost first."""
        return tuple([request_id for _, request_id in self.ancestors[len(self.ancestors) - self.blocked :]])

    def path(self, model: str) -> str:
        """The models from the outermost caller to `model`, as text: `a -> b -> a`."""
        return " -> ".join([*[name for name, _ in self.ancestors], model])

    def pack(self) -> bytes:
        """The lineage, preceded by its length. Raises `InvalidRecord` if it is longer than 64 KB."""
        fields: list[object] = [self.ancestors, self.tenant]
        if self.blocked or self.step_of is not None:
            fields.append(self.blocked)
        if self.step_of is not None:
            fields.append(self.step_of)
        packed = bytes(msgpack.packb(fields))
        if len(packed) > 0xFFFF:
            raise InvalidRecord(f"a lineage of {len(self.ancestors)} requests is too long for a record")
        return _LENGTH.pack(len(packed)) + packed

    @staticmethod
    def unpack(data: Buffer, at: int) -> tuple[Lineage, int]:
        """The lineage at `at`, and its end. Raises `InvalidRecord`."""
        try:
            end = at + _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
            ancestors, tenant, *more = msgpack.unpackb(bytes(data[at + _LENGTH.size : end]), use_list=False)
            blocked = more[0] if more else 0
            step_of = more[1] if len(more) > 1 else None
            named = ancestors if step_of is None else (*ancestors, step_of)
            valid = (
                type(tenant) is str
                and type(blocked) is int
                and 0 <= blocked <= len(ancestors)
                and all(type(model) is str and type(request_id) is bytes for model, request_id in named)
            )
        except Exception as error:
            raise InvalidRecord(f"the lineage of a request cannot be read: {error}") from None
        if not valid:
            raise InvalidRecord("the lineage of a request has a field of another type")
        return Lineage(ancestors, tenant, blocked, step_of), end
