"""The protocol-neutral interface behind every front; `gateway.service` implements it.

Fronts only translate: no front knows the log, and the handler knows no protocol. Errors are
`charonia.errors.CharoniaError`; each front maps their codes (E1).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from charonia.catalog.served import ServedVersion
from charonia.facts.jobs import JobEvent
from charonia.inference import InferenceRequest, InferenceResponse
from charonia.offload.pool import Offload
from charonia.releases.route_rule import RouteRule
from charonia.tensors import Buffer

from .access.restrictions import RawHeaders
from .access.token_bounds import TokenBounds
from .requests.delivery import ANYONE, Caller, DeliveryOptions, JobFilter, JobPage, JobReceipt, JobView

if TYPE_CHECKING:
    from charonia.traces.trace_settings import Wanted
    from protos.model_config_pb2 import ModelConfig

    from .lane.doors import Doors
    from .regions.client_regions import ClientRegions
    from .tracing.tracer import Tracer


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    """The server's metadata (H4, G3)."""

    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """One input or output; `shape` has the leading -1 of a batching model (H5)."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """A model's metadata (H5, G3). `versions` are all READY versions, ascending, as strings."""

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
    """Memory of one kind and device number that a version uses, over all executors (X7)."""

    kind: str
    device_id: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """Statistics of one loaded version, cluster-wide (X1, X2). `last_inference_ms` is since the epoch, 0 for never."""

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
    """By response index, as text."""
    memory: tuple[MemoryUsage, ...] = ()


class JobQueries(Protocol):
    """Reads jobs by their public ids. Raises `NotFound` with `delivery.JOB_NOT_FOUND` for one that is unknown,
    forgotten or not `caller`'s.
    """

    async def of_keys(self, model: str, keys: Sequence[str], caller: Caller) -> list[str]:
        """The ids of the jobs that these idempotency keys of the caller's stand for; keys of no job are left out."""

    async def models(self) -> list[str]:
        """The models that have had jobs."""

    async def view(self, job_id: str, caller: Caller = ANYONE) -> JobView: ...

    async def wait(self, job_id: str, caller: Caller, wait_s: float) -> None:
        """Wait for a job to end, `wait_s` at most. Raises `ResourceExhausted` if too many callers wait here."""

    async def result(
        self, job_id: str, caller: Caller = ANYONE, wait_s: float = 0.0
    ) -> tuple[JobView, list[InferenceResponse] | None]:
        """A job, without its webhook, and its responses; None if it has not ended within `wait_s`.

        Raises the error of a job that failed, was cancelled or expired, and `NotFound` if the result is not kept any
        more. `InferenceResponse.id` is the id in the job's request.
        """

    async def single(
        self, job_id: str, caller: Caller = ANYONE, wait_s: float = 0.0
    ) -> tuple[JobView, InferenceResponse | None]:
        """As `result`, for a caller that can take one response. Raises its error, and `Unsupported` for a job that has
        none or several.
        """

    def responses(
        self, job_id: str, caller: Caller = ANYONE, after_index: int = -1
    ) -> AsyncGenerator[InferenceResponse]:
        """The responses of a job above an index, as they come; a single response has index 0.

        Raises the job's error at the end. Close the generator or exhaust it.
        """

    async def events(
        self, job_id: str, caller: Caller = ANYONE, after_number: int = 0, after_index: int = -1
    ) -> AsyncGenerator[JobEvent | InferenceResponse]:
        """The events of a job above `after_number`, as they happen. Awaiting the call raises errors about the job.

        Of a decoupled model also the responses above `after_index`, with their place. Ends after the terminal event.
        Close the generator or exhaust it.
        """

    async def timeline(self, job_id: str, caller: Caller = ANYONE) -> tuple[JobView, tuple[JobEvent, ...]]: ...

    async def page(self, which: JobFilter, caller: Caller = ANYONE, *, cursor: str = "", limit: int = 100) -> JobPage:
        """One page of jobs. Raises `InvalidArgument` for an invalid cursor, and a limit outside 1..1000."""


class JobCalls(Protocol):
    """Reads and cancels jobs; raises as `JobQueries`."""

    @property
    def queries(self) -> JobQueries: ...

    async def cancel(self, job_id: str, caller: Caller = ANYONE) -> JobView:
        """Cancel a job, unless it has ended; its state afterwards shows which."""

    async def cancel_all(self, which: JobFilter, caller: Caller = ANYONE) -> int:
        """Cancel all active jobs that match; returns how many this call cancelled."""


class Handler(Protocol):
    """The operations of a gateway. `version` arguments are the digits of the URL or message, "" for the highest READY
    one.

    Version strings that are no positive integer raise E6's `InvalidArgument`; unknown models and versions raise E5's
    errors (statistics have their own texts, E5).
    """

    @property
    def lane(self) -> Doors | None:
        """The express lane; None where it is off."""

    @property
    def offload(self) -> Offload:
        """Runs work that would block the event loop."""

    def live(self) -> bool: ...

    def ready(self) -> bool:
        """Server readiness (R40): False while starting, draining or disconnected from the log."""

    def model_ready(self, name: str, version: str) -> bool:
        """Whether a model is ready (H3, G2); False for an unknown one."""

    def server_metadata(self) -> ServerMetadata: ...

    def model_metadata(self, name: str, version: str) -> ModelMetadata: ...

    def model_config(self, name: str, version: str) -> ModelConfig:
        """The normalised configuration (H6); `charonia.models.config_forms.to_json` gives its JSON form."""

    def served_model(self, name: str, version: str) -> ServedVersion:
        """The version that an inference with this name and version would use. Raises E5's errors.

        A front reads its interface and labels, and sets it as `served` of the request.
        """

    def version_for(self, name: str, headers: Iterable[tuple[bytes, bytes]], tenant: str) -> ServedVersion:
        """The version of a model that a caller who names none gets, where what is sent depends on it, as a prompt on
        the tokenizer: the candidate of its rule if a header or the tenant names that, else the present version. Raises
        E5's errors.
        """

    async def infer(
        self,
        request: InferenceRequest,
        *,
        flush_interval_s: float = 0.0,
        options: DeliveryOptions | None = None,
    ) -> InferenceResponse:
        """Admit, queue and await one inference. Raises the error of a failed inference; the response has no `error`.

        Cancelling the task cancels the request (I10, H25, G26), unless `options` keep it. The response has the
        requested outputs in their order. A front that delivers calls one by one passes `flush_interval_s` > 0, so that
        its requests share log entries. With an idempotency key the request is a job; with a known key this waits for
        the earlier one's result (ADR 0004). Raises `DeadlineExceeded` at `request.deadline_ns`.
        """

    def stream(
        self,
        request: InferenceRequest,
        *,
        flush_interval_s: float = 0.0,
        options: DeliveryOptions | None = None,
    ) -> AsyncGenerator[InferenceResponse]:
        """The responses to one inference as they come; a model that answers once yields one response.

        Raises only the error that refuses the request before it enters the log. The last response is `final`: an error
        of the request, an empty response of a decoupled model (G24), or an ordinary one. Other responses with an
        `error` do not end the request. Responses of an executor have a `place`. Closing the generator, or cancelling
        its reader, cancels the request as in `infer`.

        The request ends with `StreamInterrupted` if the run that gave its first responses is lost, and with
        `ResourceExhausted` if its reader falls behind by more than `stream_buffer_size_bytes`.
        """

    def allocate_body(self, size_bytes: int, skew: int) -> memoryview | None:
        """Memory to receive a large request into, with the byte at `skew` aligned; None where there is none.

        Executors of this machine read tensors in it without a copy. It is released with its last view.
        """

    # -- shared memory ------------------------------------------------------------------------------------------------

    @property
    def regions(self) -> ClientRegions:
        """The shared memory of clients, which requests refer to in `InferenceRequest.regions`."""

    # -- callers and jobs ---------------------------------------------------------------------------------------------

    @property
    def identifies(self) -> bool:
        """Whether tenants are configured; otherwise `identify` need not be called."""

    def identify(self, headers: RawHeaders) -> Caller:
        """The caller of a request, by its headers or metadata (names in lower case). Raises `Unauthenticated`."""

    def request_bound(self, caller: Caller) -> int:
        """How many unsettled requests of one model the caller's tenant may have; 0 for no bound of its own."""

    def token_bounds(self, tenant: str) -> TokenBounds:
        """How many tokens of language models the calls of a tenant may have."""

    async def submit_job(self, request: InferenceRequest, options: DeliveryOptions) -> JobReceipt:
        """Record the request as a job and return. Raises as `infer` before execution, and `KeyReused`."""

    @property
    def jobs(self) -> JobCalls: ...

    # -- tracing ------------------------------------------------------------------------------------------------------

    @property
    def tracer(self) -> Tracer | None:
        """Begins traces; while it is `on`, fronts call it for every request and pass the trace with the request."""

    async def trace_settings(self, model: str) -> dict[str, list[str]]:
        """The full setting of a model, or of all (""), by name (H44). Raises `InvalidArgument` for an unknown model."""

    async def update_trace_settings(self, model: str, wanted: Wanted) -> dict[str, list[str]]:
        """Change settings for every gateway, all or nothing; returns the full setting."""

    # -- statistics and repository ------------------------------------------------------------------------------------

    async def text_assets(self, digest: str) -> bytes | None:
        """The blob with a model's tokenizer and chat template; None if the log does not have it."""

    async def statistics(self, name: str, version: str) -> list[ModelStatistics]:
        """Statistics of model versions, cluster-wide; `name` "" for all models (H7)."""

    def repository_index(self, *, ready: bool) -> list[ModelIndexEntry]: ...

    def loads_by_call(self) -> bool:
        """Whether an executor loads and unloads models when it is asked to (R9).

        Raises `Unavailable` as a load does where no executor is connected.
        """

    async def load_model(self, name: str, config_json: str | None, files: Mapping[str, Buffer]) -> None:
        """Load a model; returns when it is ready. `files` maps "<version>/<path>" to content (H41, R20-R25)."""

    async def unload_model(self, name: str, *, unload_dependents: bool) -> None:
        """Begin to unload a model, and return (H42)."""

    @property
    def routes(self) -> Mapping[str, RouteRule]:
        """The routing rules of models by key, changed in place. While there are any, fronts pass the headers of
        requests that name no version (`InferenceRequest.headers`).
        """

    def route(self, name: str) -> RouteRule | None:
        """The routing rule of a model; None without one. Where models are not loaded on request, the values of its
        headers are "". Raises `InvalidArgument` for an ambiguous name.
        """

    async def change_route(self, name: str, wanted: Mapping[str, Any] | None) -> RouteRule | None:
        """Change a model's routing rule for all gateways, or take it away with None; returns when this one applies it.

        Raises `InvalidArgument` for a rule that cannot be, `NotFound` for an unknown model, and `Unavailable` as a load
        does where models are not loaded on request.
        """

    def registered_models(self) -> dict[str, str]:
        """The keys of models that `register_model` loaded and that are not unloaded, by alias.

        A key's namespace is the directory that was registered.
        """

    async def register_model(self, alias: str, name: str, directory: str) -> None:
        """Load a model from a directory of the executors that is its own or contains it (H55). Returns when ready."""

    async def unregister_model(self, alias: str, name: str) -> None:
        """Unload it with the models that it consists of. Returns when its instances have ended."""
