"""The settings of each role as values, made once by a composition root. `charonia.options.values` parses options.

Names are Triton's where it has the option; defaults are those of its newest version. Precedence: flag >
environment (`CHARONIA_`) > file > default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from charonia.traces.trace_settings import TraceOptions

SERVER_NAME = "triton"
"""The default of `--id` (H4): clients and dashboards expect it."""

SERVER_VERSION = "2.73.0"
"""The protocol version in server metadata: the newest interface that this release was checked against."""

EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)
"""The extensions in server metadata, in this order (H4)."""

_LONGEST_INTERVAL_MS = 400

EVERY_DEVICE = -2
"""The device of a rate limit that applies to each device separately (Q1)."""


@dataclass(frozen=True, slots=True)
class LogSettings:
    """`url` is redis://, rediss:// or unix://. Heartbeats are leases: a process is presumed dead `heartbeat_ttl_ms`
    after its last heartbeat, a gateway `gateway_ttl_ms` after it.

    A process whose event loop stalls for `stall_limit_s` is presumed dead, too. `private`: only processes of this
    machine use the log, so that one whose pid is gone is known to be dead at once.
    """

    url: str = ""
    private: bool = False
    heartbeat_ttl_ms: int = 2000
    gateway_ttl_ms: int = 2000
    stall_limit_s: float = 30.0

    @property
    def heartbeat_interval_ms(self) -> int:
        """Interval at which a process beats and checks others: a third of the shortest lease, 400 ms at most."""
        return min(_LONGEST_INTERVAL_MS, self.heartbeat_ttl_ms // 3, self.gateway_ttl_ms // 3)


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """The measured latencies (`--metrics-config`, M3-M5), and the quantiles of summaries, each in 0..1.

    `cpu`, `gpu`: show the machine's processors and memory, and its GPUs, read again after `interval_ms` (M9).
    """

    counters: bool = True
    histograms: bool = False
    summaries: bool = False
    quantiles: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99, 0.999)
    cpu: bool = True
    gpu: bool = True
    interval_ms: int = 2000


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """TLS of a front (`http` or `grpc`): paths of PEM files.

    `is_mutual`: clients must present a certificate signed by `root`.
    """

    front: str
    certificate: str = ""
    key: str = ""
    root: str = ""
    is_mutual: bool = False


@dataclass(frozen=True, slots=True)
class GrpcDelays:
    """Delays of the gRPC front's steps, for tests of clients (G33).

    Before a request is read, after the answer to a unary inference is made, before a response of a stream is sent,
    before the end of a call whose client has left is noticed, and before the answer to any other call is sent.
    """

    request_s: float = 0.0
    answer_s: float = 0.0
    response_s: float = 0.0
    cancellation_s: float = 0.0
    control_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SageMakerSettings:
    """The SageMaker front (H55). `ping_mode` is live or ready.

    `inference` is what `/invocations` does with `default_model`: infer, generate or generate_stream.
    """

    address: str = "0.0.0.0"
    port: int = 8080
    ping_mode: str = "ready"
    default_model: str = "unspecified_SAGEMAKER_TRITON_DEFAULT_MODEL_NAME"
    inference: str = "infer"
    models: str = "/opt/ml/models"
    """The directory where SageMaker unpacks the models of multi-model endpoints."""


@dataclass(frozen=True, slots=True)
class VertexAiSettings:
    """The Vertex AI front (H55): two paths, and the model for predictions, "" for the only one that is loaded."""

    predict_route: str
    health_route: str
    address: str = "0.0.0.0"
    port: int = 8080
    default_model: str = ""
    metrics_socket: str = ""
    """The socket of the whole server's metrics; "" for this process's own."""


@dataclass(frozen=True, slots=True)
class OpenAiSettings:
    """The OpenAI API: on a port of its own (-1: none, 0 picks a free one), on the HTTP port, or both.

    `lora_separator` stands between the names of a model and of an adapter; "": adapters have no names.
    """

    address: str = "0.0.0.0"
    port: int = -1
    on_http_port: bool = False
    lora_separator: str = ":"
    metrics_socket: str = ""
    """The socket of the whole server's metrics; "" for this process's own."""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Settings of one gateway. Port 0 picks a free port, -1 turns the front off. Sizes in bytes."""

    incarnation: str
    server_id: str = SERVER_NAME
    http_address: str = "0.0.0.0"
    http_port: int = 8000
    grpc_address: str = "0.0.0.0"
    grpc_port: int = 8001
    metrics_address: str = "0.0.0.0"
    metrics_port: int = 8002
    metrics_socket: str = ""
    metrics: MetricsSettings = MetricsSettings()
    http_socket: str = ""
    grpc_socket: str = ""
    reuse_http_port: bool = False
    grpc_front: str = "native"
    grpc_channelz: bool = True
    reuse_grpc_port: bool = False
    http_max_input_size: int = 67_108_864
    http_header_forward_pattern: str = ""
    grpc_header_forward_pattern: str = ""
    http_restricted_api: tuple[tuple[tuple[str, ...], str, str], ...] = ()
    grpc_restricted_protocol: tuple[tuple[tuple[str, ...], str, str], ...] = ()
    sagemaker: SageMakerSettings | None = None
    vertex_ai: VertexAiSettings | None = None
    openai: OpenAiSettings | None = None
    http_tls: TlsSettings | None = None
    grpc_tls: TlsSettings | None = None
    grpc_infer_response_compression_level: str = "none"
    grpc_keepalive: Mapping[str, int] = field(default_factory=dict)
    grpc_delays: GrpcDelays = GrpcDelays()
    strict_readiness: bool = True
    await_executors: int = 0
    """Number of executors that must have ended their first loads before the fronts listen."""
    executor_grace_s: float = 60.0
    exit_timeout_secs: int = 30
    drain_delay_secs: float = 0.0
    shm_dir: str = ""
    coalesce_requests: int = 64
    coalesce_size_bytes: int = 65_536
    grpc_flush_interval_us: int = 1000
    express_lane: bool = True
    allow_client_shm: bool = False
    max_pending_requests: int = 100_000
    max_pending_bytes: int = 4 * 1024**3
    max_pending_per_gateway_bytes: int = 1024**3
    stream_buffer_size_bytes: int = 16 * 1024**2
    allow_webhooks: bool = True
    webhook_allow: tuple[str, ...] = ()
    durability: str = "memory"
    journal: str = "jobs"
    job_retention_s: int = 86_400
    job_retention_size_bytes: int = 1024**3
    journal_retention_s: int = 86_400
    journal_retention_size_bytes: int = 256 * 1024**2
    tenant_header: str = ""
    api_keys: str = ""
    response_cache_size_bytes: int = 0
    """0 for no cache."""
    tracing: TraceOptions = field(default_factory=TraceOptions)


@dataclass(frozen=True, slots=True)
class BatcherSettings:
    """Settings of one batcher. `window_requests` bounds the queued requests of a model that it holds in memory.

    `dead_letter_retention_size_bytes` bounds a model's dead letters, 0 for no bound. `journal_seal_s`: seconds between
    seals of a model's journal, 0 for none. `joint_metrics`: its metrics are added to those of other parts. `prefetch`
    follows from where it runs, and is no option.
    """

    incarnation: str
    exit_timeout_secs: int = 30
    prefetch: int = 1
    window_requests: int = 8192
    shm_dir: str = ""
    dead_letter_retention_size_bytes: int = 256 * 1024**2
    journal_seal_s: int = 30
    metrics_port: int = -1
    metrics_address: str = "127.0.0.1"
    metrics_socket: str = ""
    metrics: MetricsSettings = MetricsSettings()
    response_cache_size_bytes: int = 0
    joint_metrics: bool = False


@dataclass(frozen=True, slots=True)
class WebhookSettings:
    """Settings of one webhook sender. `secrets` is a file, `allow` lists networks and hosts beside the public internet.

    The waits between tries are multiples of `first_retry_s`.
    """

    incarnation: str
    secrets: str = ""
    allow: tuple[str, ...] = ()
    first_retry_s: float = 5.0
    timeout_s: float = 15.0
    concurrency: int = 256
    concurrency_per_host: int = 4
    agent: str = "charonia"
    exit_timeout_secs: int = 30
    metrics_port: int = -1
    metrics_address: str = "127.0.0.1"
    metrics_socket: str = ""


@dataclass(frozen=True, slots=True)
class ExecutorSettings:
    """Settings of one executor and its repository. `backend_config` is backend -> key -> value ("" for all backends).

    With `rate_limit`, executions are limited by the resources of their instance groups; `rate_limit_resources` is
    (device, name) -> count (Q1). `host_policies` is policy -> setting -> value (C11).
    """

    incarnation: str
    model_repository: tuple[str, ...] = ()
    repository_copies: str = ""
    """Directory for copies of models in remote repositories, unless an environment variable names it (R7)."""
    pool: str = "default"
    labels: Mapping[str, str] = field(default_factory=dict)
    model_memory_budget_bytes: int = 0
    max_loaded_models: int = 0
    model_control_mode: str = "none"
    repository_poll_secs: float = 15.0
    load_model: tuple[str, ...] = ()
    exit_on_error: bool = True
    exit_timeout_secs: int = 30
    shm_dir: str = ""
    disable_auto_complete_config: bool = False
    model_load_thread_count: int = 4
    model_load_retry_count: int = 0
    require_sandbox: bool = False
    allow_native_models: tuple[str, ...] = ()
    model_config_name: str = ""
    repoagent_directory: str = ""
    model_namespacing: bool = False
    backend_config: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    metrics_port: int = -1
    metrics_address: str = "127.0.0.1"
    metrics_socket: str = ""
    metrics: MetricsSettings = MetricsSettings()
    response_cache_size_bytes: int = 0
    hosts_batcher: bool = False
    rate_limit: bool = False
    rate_limit_resources: Mapping[tuple[int, str], int] = field(default_factory=dict)
    host_policies: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
