"""From an admitted request to the record that enters the log."""

from __future__ import annotations

from charonia.clock import wall_ns
from charonia.inference import InferenceRequest
from charonia.wire import Lineage, Reference, SequenceMark, pack_request

from .admission import Admitted
from .sequence_rules import sequence_mark


def mark_of(request: InferenceRequest, request_id: bytes, admitted: Admitted, tenant: str) -> SequenceMark | None:
    """The mark of a request of a sequence, and of any other with a correlation id: models may ask (P9, S52)."""
    if admitted.sequential or request.sequence_id:
        return sequence_mark(request, request_id, tenant)
    return None


def request_record(
    request_id: bytes,
    endpoint: bytes,
    request: InferenceRequest,
    admitted: Admitted,
    level: int,
    flags: int,
    reference: Reference | None = None,
    lineage: Lineage | None = None,
    *,
    tenant: str = "",
) -> bytes:
    """The wire form of an admitted request of a tenant, accepted now. With a `reference` its tensor bytes are there."""
    if tenant and lineage is None and admitted.passes_on:
        lineage = Lineage(tenant=tenant)
    return pack_request(
        request_id,
        endpoint,
        request.id.encode() if request.id else b"",
        admitted.meta,
        [t.data for t in request.inputs],
        rows=admitted.rows,
        signature=admitted.signature,
        level=level,
        accepted_ns=wall_ns(),
        deadline_ns=request.deadline_ns,
        timeout_us=request.timeout_us,
        flags=flags,
        reference=reference,
        lineage=lineage,
        sequence=mark_of(request, request_id, admitted, tenant),
        trace=request.trace.context if request.trace is not None else None,
    )
