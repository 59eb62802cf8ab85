"""From an admitted request to the record that enters the log."""

from __future__ import annotations

from charonia.clock import wall_ns
from charonia.inference import InferenceRequest
from charonia.wire import Lineage, Reference, SequenceMark, pack_request

from .admission import Admitted
from .sequence_rules import sequence_mark


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
    sequence: SequenceMark | None = None,
    window: int = 0,
) -> bytes:
    """The wire form of an admitted request of a tenant, accepted now. With a `reference` its tensor bytes are there.

    `sequence` is given where the mark is another's. A request of a sequence, and any other with a correlation id, has
    one: models may ask (P9, S52).
    """
    if sequence is None and (admitted.sequential or request.sequence_id):
        sequence = sequence_mark(request, request_id, tenant)
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
        sequence=sequence,
        trace=request.trace.context if request.trace is not None else None,
        window=window,
    )
