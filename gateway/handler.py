"""The one interface behind every front: what HTTP and gRPC call, protocol-neutral; `gateway.service` implements it.

Fronts translate and do nothing else: no front knows the log, no handler knows a protocol. Errors are
`charonia.errors.CharoniaError`, each front maps the code (E1).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from charonia.catalog.served import ServedVersion
from charonia.facts.jobs import JobEvent
from charonia.inference import InferenceRequest, InferenceResponse
from charonia.offload.pool import Offload
from charonia.tensors import Buffer

from .access.restrictions import RawHeaders
from .requests.delivery import ANYONE, Caller, DeliveryOptions, JobFilter, JobPage, JobReceipt, JobView

if TYPE_CHECKING:
    from charonia.traces.trace_settings import Wanted
    from protos.model_config_pb2 import ModelConfig

    from .lane.express_lane import Lane
    from .regions.client_regions import ClientRegions
    from .tracing.tracer import Tracer


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    """H4 / G3."""

    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """One input or output as metadata shows it: `shape` has the leading -1 of a batching model (H5)."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """H5 / G3. `versions` are all READY versions, ascending, as strings."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


@dataclass(frozen=True, slots=True)
class ModelIndexEntry:
    """One row of the repository index (H40); a model that was never loaded has only a name."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Duration:
    """Cumulative count and nanoseconds (X8)."""

    count: int = 0
    ns: int = 0


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """Executions of one total batch size (X3)."""

    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


@dataclass(frozen=True, slots=True)
class ResponseStatistics:
    """The responses of one index to the requests of a decoupled model (X5)."""

    compute_infer: Duration = Duration()
    compute_output: Duration = Duration()
    success: Duration = Duration()
    fail: Duration = Duration()
    empty_response: Duration = Duration()
    cancel: Duration = Duration()


RESPONSE_DURATIONS = tuple(ResponseStatistics.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """X7: what a version holds of the memories of one kind and device number, at all executors together."""

    kind: str
    device_id: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """X1, X2: one loaded version, cluster-wide. `last_inference_ms` is ms since the epoch, 0 for never."""

    name: str
    version: str
    last_inference_ms: int = 0
    inference_count: int = 0
    execution_count: int = 0
    success: Duration = Duration()
    fail: Duration = Duration()
    queue: Duration = Duration()
    compute_input: Duration = Duration()
    compute_infer: Duration = Duration()
    compute_output: Duration = Duration()
    cache_hit: Duration = Duration()
    cache_miss: Duration = Duration()
    batches: tuple[BatchStatistics, ...] = ()
    failures: dict[str, int] = field(default_factory=dict)
    responses: dict[str, ResponseStatistics] = field(default_factory=dict)
    """By index of the response, as text."""
    memory: tuple[MemoryUsage, ...] = ()


class Handler(Protocol):
    """The gateway's use cases. `version` arguments are the digits of the URL or message, "" for the highest READY one.

    Version strings that are no positive integer raise E6's `InvalidArgument`; unknown models and versions raise E5's
    errors (statistics have their own texts, E5).
    """

    @property
    def lane(self) -> Lane | None:
        """What recognises requests by their bytes; None where nothing does."""

    @property
    def offload(self) -> Offload:
        """Does what would keep the event loop for long."""

    def live(self) -> bool: ...

    def ready(self) -> bool:
        """Server readiness (R40), false while starting, draining or cut off from the log."""

    def model_ready(self, name: str, version: str) -> bool:
        """H3 / G2: never raises for an unknown model."""

    def server_metadata(self) -> ServerMetadata: ...

    def model_metadata(self, name: str, version: str) -> ModelMetadata: ...

    def model_config(self, name: str, version: str) -> ModelConfig:
        """The normalised configuration (H6); JSON form by `charonia.models.json_form.to_json`."""

    def served_model(self, name: str, version: str) -> ServedVersion:
        """The version an inference with this name and version would use. Raises E5's errors.

        A front reads its interface, number and labels, and gives it to the request as `served`.
        """

    async def infer(
        self,
        request: InferenceRequest,
        *,
        flush_interval_s: float = 0.0,
        options: DeliveryOptions | None = None,
    ) -> InferenceResponse:
        """Admit, queue and await one inference. A failed inference raises its error; the response has no `error`.

        Cancelling the awaiting task cancels the request (I10, H25, G26), unless `options` keep it. Only requested
        outputs come back, in order. A front that delivers one call at a time passes `flush_interval_s` > 0, so that its
        requests still share log entries. With an idempotency key the request is a job:
        a known key waits for the earlier one's result (ADR 0004). Raises `DeadlineExceeded` at `request.deadline_ns`.
        """

    def stream(
        self,
        request: InferenceRequest,
        *,
        flush_interval_s: float = 0.0,
        options: DeliveryOptions | None = None,
    ) -> AsyncGenerator[InferenceResponse]:
        """The responses to one inference as they come, of any model; one that answers once gives one response.

        Raises only what refuses the request before it enters the log. The last response is `final`: a failure of the
        request, or an empty one of a decoupled model (G24), or an ordinary one. Others with an `error` are failed
        responses that do not end it. Responses that an executor gave have a `place`. Closing the generator, or
        cancelling who iterates, cancels the request as in `infer`.

        A request ends with `StreamInterrupted` when the run that gave its first responses is lost,
        with `ResourceExhausted` when its reader falls behind by more than `stream_buffer_size_bytes`.
        """

    def allocate_body(self, size_bytes: int, skew: int) -> memoryview | None:
        """Memory to receive a large request into, the byte at `skew` aligned; None where there is none.

        Tensors that lie in it travel to executors of this machine without a copy. It is free again with its last view.
        """

    # -- shared memory ------------------------------------------------------------------------------------------------

    @property
    def regions(self) -> ClientRegions:
        """What clients have registered. Requests name it in `InferenceRequest.regions`."""

    # -- callers and jobs ---------------------------------------------------------------------------------------------

    @property
    def identifies(self) -> bool:
        """Whether tenants are configured; while not, `identify` need not be called."""

    def identify(self, headers: RawHeaders) -> Caller:
        """Whose call this is, by its headers or metadata (names in lower case). Raises `Unauthenticated`."""

    async def submit_job(self, request: InferenceRequest, options: DeliveryOptions) -> JobReceipt:
        """Record the request as a job and return. Raises what `infer` raises before execution, and `KeyReused`.

        Jobs are asked for by their public id; each method below raises `NotFound` with `delivery.JOB_NOT_FOUND` for one
        that is absent, forgotten or not `caller`'s.
        """

    async def job(self, job_id: str, caller: Caller = ANYONE) -> JobView: ...

    async def job_result(
        self, job_id: str, caller: Caller = ANYONE, wait_s: float = 0.0
    ) -> tuple[JobView, list[InferenceResponse] | None]:
        """A job, without its webhook, and the responses it ended with; None when it has not ended within `wait_s`.

        One that failed, was cancelled or expired raises its error; one whose result is not kept any more `NotFound`.
        `InferenceResponse.id` is the id that the job's caller gave.
        """

    def job_responses(
        self, job_id: str, caller: Caller = ANYONE, after_index: int = -1
    ) -> AsyncGenerator[InferenceResponse]:
        """The responses of a job above an index, as they come; one that its model answered once has index 0.

        Raises in the end what the job ended with when it did not succeed. Close it or exhaust it.
        """

    async def job_events(
        self, job_id: str, caller: Caller = ANYONE, after_number: int = 0, after_index: int = -1
    ) -> AsyncGenerator[JobEvent | InferenceResponse]:
        """Awaiting it raises what is to be raised; then the events above `after_number`, as they happen.

        Of a job whose model may answer more than once also the responses above `after_index`, placed. Ends after the
        terminal event. Close it (`aclose`) or exhaust it.
        """

    async def job_timeline(self, job_id: str, caller: Caller = ANYONE) -> tuple[JobView, tuple[JobEvent, ...]]: ...

    async def cancel_job(self, job_id: str, caller: Caller = ANYONE) -> JobView:
        """Cancel it, unless it has ended: the state afterwards tells which."""

    async def cancel_jobs(self, which: JobFilter, caller: Caller = ANYONE) -> int:
        """Cancel all active jobs that match; how many this call cancelled."""

    async def list_jobs(
        self, which: JobFilter, caller: Caller = ANYONE, *, cursor: str = "", limit: int = 100
    ) -> JobPage:
        """Raises `InvalidArgument` for a cursor that is none and a limit outside 1..1000."""

    # -- tracing ------------------------------------------------------------------------------------------------------

    @property
    def tracer(self) -> Tracer | None:
        """Asked by fronts for every request while it is `on`; the trace it gives goes with the request."""

    async def trace_settings(self, model: str) -> dict[str, list[str]]:
        """The full setting of a model, or of all (""), by name (H44). Raises `InvalidArgument` for an unknown model."""

    async def update_trace_settings(self, model: str, wanted: Wanted) -> dict[str, list[str]]:
        """Change it for every gateway, all or nothing; the full setting afterwards."""

    # -- statistics and repository ------------------------------------------------------------------------------------

    async def statistics(self, name: str, version: str) -> list[ModelStatistics]:
        """Cluster-wide; `name` "" for all models (H7)."""

    def repository_index(self, *, ready: bool) -> list[ModelIndexEntry]: ...

    async def load_model(self, name: str, config_json: str | None, files: Mapping[str, Buffer]) -> None:
        """Returns when the model is ready; `files` maps "<version>/<path>" to content (H41, R20-R25)."""

    async def unload_model(self, name: str, *, unload_dependents: bool) -> None:
        """Returns at once, the unload goes on (H42)."""

    def registered_models(self) -> dict[str, str]:
        """The keys of models that `register_model` loaded, until they are unloaded, by alias.

        A key's namespace is the directory that was registered.
        """

    async def register_model(self, alias: str, name: str, directory: str) -> None:
        """Load a model from a directory of the executors that is or holds it (H55). Returns when it is ready."""

    async def unregister_model(self, alias: str, name: str) -> None:
        """Unload it and what it is made of. Returns when its instances have ended."""
