"""Makes a step of an ensemble the ordinary request of its model that it is: checked, and packed as a record.

Sending it is `submission`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from batcher.entries.carriers import carrier_of
from charonia.calls.admission import Admissions, Admitted
from charonia.calls.payload_transfer import Payloads
from charonia.calls.queue_entrance import request_record
from charonia.catalog.catalog import Catalog, ServedVersion
from charonia.eventlog.payloads import BY_REFERENCE_BYTES, PayloadDirectory
from charonia.inference import InferenceRequest
from charonia.traces.contexts import Traced
from charonia.wire import FLAG_JOURNALLED, FLAG_TIMED, Lineage, Reference, RequestRecord

from .step_flights import Flight
from .step_tensors import renamed


@dataclass(frozen=True, slots=True)
class Checked:
    """A step as its model is asked for it; `reference` is a file that holds just its inputs."""

    request: InferenceRequest
    served: ServedVersion
    admitted: Admitted
    reference: Reference | None


class StepPacker:
    """Of one ensemble. `own` keeps a payload file as long as a request."""

    def __init__(
        self,
        model: str,
        endpoint: bytes,
        catalog: Catalog,
        directory: PayloadDirectory,
        payloads: Payloads,
        own: Callable[[bytes, Reference], None],
    ) -> None:
        self._ensemble = model
        self._endpoint = endpoint
        self._catalog = catalog
        self._directory = directory
        self._payloads = payloads
        self._own = own
        self._admissions = Admissions()

    def check(self, flight: Flight) -> Checked:
        """Raises what its model's callers would get."""
        decision = flight.decision
        step, record = decision.step, carrier_of(decision.request).record
        served = self._served(step.model, step.version)
        admission = self._admissions.of(served)
        tensors, reference = renamed(step, decision.inputs)
        asked = InferenceRequest(
            step.model, served.version, tensors, record.client_id, decision.outputs, record.meta.parameters
        )
        asked.deadline_ns, asked.timeout_us, asked.priority = record.deadline_ns, record.timeout_us, record.level
        mark = flight.mark
        if mark.correlation_id:
            asked.sequence_id, asked.sequence_start, asked.sequence_end = mark.correlation_id, mark.start, mark.end
        flight.level = admission.level(record.level)
        return Checked(asked, served, admission.admit(asked), reference)

    def pack(self, flight: Flight, step: Checked) -> None:
        """Make its record; a large step's tensors lie beside it where all executors of its model can read them."""
        record = carrier_of(flight.request).record
        asked, admitted, reference = step.request, step.admitted, step.reference
        mark = flight.mark
        shared = self._payloads.flags(step.served)
        durable = record.is_job or record.journalled
        if durable or not shared:
            reference = None
        elif reference is None and admitted.meta.size_bytes >= BY_REFERENCE_BYTES:
            # named after the step, so that a successor knows what it inherits
            reference = self._directory.write([tensor.data for tensor in asked.inputs], name=flight.id.hex())
            if reference is not None:
                self._own(flight.request.id, reference)
        flags = FLAG_TIMED | (0 if durable else shared)
        if record.journalled and not record.is_job:
            flags |= FLAG_JOURNALLED
        if record.trace is not None:
            asked.trace = Traced(record.trace.context.child(flight.id[:8]))
        flight.record = request_record(
            *(flight.id, self._endpoint, asked, admitted, flight.level, flags, reference, self._lineage(record)),
            tenant=flight.tenant,
            sequence=mark if mark.correlation_id else None,  # with the scope of the ensemble's own (S52)
            window=flight.decision.window,
        )
        flight.size_bytes = len(flight.record) + (reference.size_bytes if reference is not None else 0)

    def _lineage(self, record: RequestRecord) -> Lineage | None:
        """Of the steps of a request that a model made; else only its tenant goes on."""
        lineage = record.lineage
        if lineage is None or not lineage.ancestors:
            return lineage
        # an ensemble can end before a step of it only by failing
        return lineage.with_child(self._ensemble, record.id, blocks=lineage.blocked > 0)

    def _served(self, model: str, version: int) -> ServedVersion:
        """The version that a step is for: one that is being unloaded still takes those of accepted requests (R27)."""
        held = self._catalog.held(model)
        accepting = self._catalog.served(model) or held
        number = version if version in held or version > 0 else max(accepting, default=-1)
        served = held.get(number)
        return served if served is not None else self._catalog.find(model, version)
