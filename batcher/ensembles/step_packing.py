"""Makes a step of an ensemble the ordinary request of its model that it is: checked, and packed as a record.

Sending it is `submission`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from batcher.entries.carriers import carrier_of
from charonia import keys
from charonia.calls.admission import Admission, Admitted
from charonia.calls.request_packing import mark_of
from charonia.catalog.catalog import Catalog, ServedVersion
from charonia.clock import wall_ns
from charonia.eventlog.payloads import BY_REFERENCE_BYTES, PayloadDirectory
from charonia.inference import InferenceRequest
from charonia.wire import (
    FLAG_JOURNALLED,
    FLAG_REPLY_BY_REFERENCE,
    FLAG_TIMED,
    Lineage,
    Reference,
    RequestRecord,
    SequenceMark,
    pack_request,
)

from .step_flights import Flight
from .step_tensors import renamed


@dataclass(frozen=True, slots=True)
class Checked:
    """A step as its model is asked for it; `shared`: its executors read the ensemble's payload directory."""

    request: InferenceRequest
    served: ServedVersion
    admitted: Admitted
    shared: bool
    reference: Reference | None


class StepPacker:
    """Of one ensemble. `own` keeps a payload file as long as a request."""

    def __init__(
        self, model: str, catalog: Catalog, directory: PayloadDirectory, own: Callable[[bytes, Reference], None]
    ) -> None:
        self._ensemble = model
        self._catalog = catalog
        self._directory = directory
        self._own = own
        self._endpoint = keys.ensemble_endpoint(model).encode()
        self._admissions: dict[tuple[str, int], tuple[ServedVersion, Admission, bool]] = {}

    def check(self, flight: Flight) -> Checked:
        """Raises what its model's callers would get."""
        decision = flight.decision
        step, record = decision.step, carrier_of(decision.request).record
        served, admission, shared = self._admission(step.model, step.version)
        tensors, reference = renamed(decision.inputs)
        asked = InferenceRequest(
            step.model, served.version, tensors, record.client_id, decision.outputs, record.meta.parameters
        )
        asked.deadline_ns, asked.timeout_us = record.deadline_ns, record.timeout_us
        if record.sequence is not None:
            mark = record.sequence
            asked.sequence_id, asked.sequence_start, asked.sequence_end = mark.correlation_id, mark.start, mark.end
        flight.level = admission.level(record.level)
        return Checked(asked, served, admission.admit(asked), shared, reference)

    def pack(self, flight: Flight, step: Checked) -> None:
        """Make its record; a large step's tensors lie beside it where all executors of its model can read them."""
        request = flight.request
        record = carrier_of(request).record
        asked, admitted, shared, reference = step.request, step.admitted, step.shared, step.reference
        tensors = asked.inputs
        flags = FLAG_TIMED
        durable = record.is_job or record.journalled
        if record.journalled and not record.is_job:
            flags |= FLAG_JOURNALLED
        if shared and not durable:
            flags |= FLAG_REPLY_BY_REFERENCE
        if durable or (reference is not None and not shared):
            reference = None
        elif reference is None and shared and admitted.meta.size_bytes >= BY_REFERENCE_BYTES:
            # named after the step, so that a successor knows what it inherits
            reference = self._directory.write([tensor.data for tensor in tensors], name=flight.id.hex())
            if reference is not None:
                self._own(request.id, reference)
        flight.beside_bytes = reference.size_bytes if reference is not None else 0
        flight.record = pack_request(
            flight.id,
            self._endpoint,
            record.client_id.encode(),
            admitted.meta,
            [tensor.data for tensor in tensors],
            rows=admitted.rows,
            signature=admitted.signature,
            level=flight.level,
            accepted_ns=wall_ns(),
            deadline_ns=record.deadline_ns,
            timeout_us=record.timeout_us,
            flags=flags,
            reference=reference,
            lineage=self._lineage(record),
            sequence=_mark(record, asked, flight.id, admitted),
            trace=record.trace.context.child(flight.id[:8]) if record.trace is not None else None,
            window=flight.decision.window,
        )

    def _lineage(self, record: RequestRecord) -> Lineage | None:
        """Of the steps of a request that a model made; else only its tenant goes on."""
        lineage = record.lineage
        if lineage is None or not lineage.ancestors:
            return lineage
        # an ensemble can end before a step of it only by failing
        return lineage.with_child(self._ensemble, record.id, blocks=lineage.blocked > 0)

    def _admission(self, model: str, version: int) -> tuple[ServedVersion, Admission, bool]:
        """What a version is checked by, and whether its executors share the payload directory.

        A version that is being unloaded still takes the steps of requests that were accepted before (R27).
        """
        held = self._catalog.held(model)
        accepting = self._catalog.served(model) or held
        number = version if version in held or version > 0 else max(accepting, default=-1)
        served = held.get(number)
        if served is None:
            served = self._catalog.find(model, version)
        known = self._admissions.get((model, served.version))
        if known is None or known[0] is not served:
            admission = Admission(served.interface, served.version, served.content_hash)
            known = self._admissions[(model, served.version)] = (served, admission, self._shared_with_all(served))
        return known

    def _shared_with_all(self, served: ServedVersion) -> bool:
        joined = [self._catalog.processes.get(executor) for executor in served.slots]
        return bool(joined) and all(
            process is not None and self._directory.shares_with(process.incarnation, process.payload_token)
            for process in joined
        )


def _mark(record: RequestRecord, asked: InferenceRequest, step_id: bytes, admitted: Admitted) -> SequenceMark | None:
    """The ensemble's own (S52)."""
    if record.sequence is None:
        return mark_of(asked, step_id, admitted, record.lineage.tenant if record.lineage is not None else "")
    return record.sequence
