"""Every option of the command line: its name (Triton's, where it has one), the roles that take it, and its bounds.

Pure. Nothing but a table, as long as there are options; `values` reads their values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GATEWAY, BATCHER, EXECUTOR, WEBHOOKS, SERVE = "gateway", "batcher", "executor", "webhooks", "serve"
CONSOLE = "console"
"""Reads the log and the metrics, and is no part: it joins nothing."""
_PARTS = frozenset({GATEWAY, BATCHER, EXECUTOR, WEBHOOKS})
_ALL = _PARTS | {SERVE}
_G = frozenset({GATEWAY, SERVE})
_E = frozenset({EXECUTOR, SERVE})
_B = frozenset({BATCHER, EXECUTOR, SERVE})
"""An executor takes a batcher's options because it may host one: `serve` starts it so (`with_batcher`)."""
_W = frozenset({WEBHOOKS, SERVE})
_S = frozenset({SERVE})
_C = frozenset({CONSOLE})


@dataclass(frozen=True, slots=True)
class Option:
    """`kind` is str, int, float, bool or flag (no value). `repeat` gathers a tuple. `built` False: known, not built."""

    name: str
    kind: str
    default: Any
    roles: frozenset[str]
    help: str
    repeat: bool = False
    built: bool = True

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """The environment variable for its value."""
        return f"CHARONIA_{self.key.upper()}"


def _later(name: str) -> Option:
    return Option(name, "str", None, _S, "known, not built yet", built=False)


PINNED_POOL_BYTES = 268_435_456

OPTIONS: tuple[Option, ...] = (
    # addresses and directories
    Option(
        "model-repository",
        "str",
        (),
        _E,
        "directory of models, or s3://[https://host:port/]bucket/path, gs://bucket/path, as://account/container/path; "
        "may be repeated",
        repeat=True,
    ),
    Option(
        "log-url",
        "str",
        "",
        _ALL | _C,
        "redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// URL of the log; serve has its own",
    ),
    Option("blob-url", "str", "", _ALL | _C, "URL of a server beside the log for large payloads at level memory"),
    Option("blob-password-file", "str", "", _ALL | _C, "file that holds that server's password, if not the URL"),
    Option(
        "shm-dir",
        "str",
        "",
        _G | _B,
        "directory on a memory file system for tensors over 32 KB, shared by the parts of a machine",
    ),
    Option("log-password-file", "str", "", _ALL | _C, "file that holds the log's password, instead of one in the URL"),
    Option(
        "require-secure-log",
        "bool",
        False,
        _ALL | _C,
        "refuse a log over the network without TLS, a verified certificate, a user of its own, or open to anybody",
    ),
    Option(
        "state-dir",
        "str",
        "",
        _E | _C,
        "where serve keeps its log, sockets and process list, and an executor unpacked python environments",
    ),
    Option("log-server", "str", "", _S, "valkey-server or redis-server binary (>= 7.0) for the private log"),
    Option(
        "gateways",
        "int",
        1,
        _S,
        "gateway processes on the same HTTP and gRPC ports, a core each: 1 for up to 4 cores, 3 for 8, 6 for 16",
    ),
    Option("executors", "int", 1, _S, "executor processes to start"),
    Option("batcher", "str", "auto", _S, "auto, separate or colocated (inside the one executor process)"),
    Option("config", "str", "", _ALL | _C, "TOML file of option values"),
    Option("pool", "str", "default", _E, "pool the executor joins"),
    Option("label", "str", (), _E, "<key>=<value> that models may require of an executor; repeatable", repeat=True),
    Option(
        "model-memory-budget",
        "str",
        "",
        _E,
        "load models on demand within so much memory an executor (bytes, or with KiB, MiB, GiB), idle ones make room",
    ),
    Option(
        "max-loaded-models", "int", 0, _E, "load models on demand, at most so many at once an executor; 0: no bound"
    ),
    # identity and process
    Option("id", "str", "triton", _G, "server name in the metadata"),
    Option("exit-timeout-secs", "int", 30, _ALL, "how long a stop waits for running work"),
    Option(
        "heartbeat-ttl-secs",
        "float",
        2.0,
        frozenset({BATCHER, EXECUTOR, WEBHOOKS, SERVE}),
        "seconds without a heartbeat until a batcher, executor or webhook sender is presumed dead and others take its "
        "work",
    ),
    Option(
        "gateway-heartbeat-ttl-secs",
        "float",
        2.0,
        _G,
        "seconds without a heartbeat until a gateway is presumed dead; then its calls without an idempotency key are "
        "dropped",
    ),
    Option(
        "stall-limit-secs",
        "float",
        30.0,
        _ALL,
        "seconds that a process's event loop may stand still before the process is presumed dead although it runs",
    ),
    Option("exit-on-error", "bool", True, _E, "end when a model fails to load at start"),
    Option(
        "listen-while-loading",
        "bool",
        False,
        _S,
        "open the HTTP and gRPC ports while models are loaded at start, so that a slow start can be watched; else they "
        "open when the first loads are over",
    ),
    Option("strict-readiness", "bool", True, _G, "ready only when every model is"),
    Option("executor-grace-secs", "float", 60.0, _G, "how long a gateway stays ready when executors have left"),
    # models
    Option("model-namespacing", "bool", False, _E, "models of different repositories may have the same name"),
    Option("model-control-mode", "str", "none", _E, "none, poll or explicit"),
    Option("repository-poll-secs", "float", 15.0, _E, "seconds between looks in poll mode"),
    Option(
        "load-model", "str", (), _E, "model to load at start in explicit mode; repeatable, '*' for all", repeat=True
    ),
    Option("disable-auto-complete-config", "flag", False, _E, "use configurations as written"),
    Option("strict-model-config", "bool", None, _E, "old spelling of --disable-auto-complete-config"),
    Option("model-load-thread-count", "int", 4, _E, "models loaded at once"),
    Option("model-load-retry-count", "int", 0, _E, "tries again after a failed load"),
    Option("model-config-name", "str", "", _E, "use configs/<name>.pbtxt where a model has it"),
    Option(
        "backend-config", "str", (), _E, "<backend>,<key>=<value>, or <key>=<value> for all; repeatable", repeat=True
    ),
    Option("require-sandbox", "bool", False, _E, "refuse models that want a sandbox where the kernel offers none"),
    Option(
        "allow-native-models",
        "str",
        (),
        _E,
        "model repository whose models may bring machine code (operators, extensions, compiled graphs); repeatable",
        repeat=True,
    ),
    Option("backend-directory", "str", "", _E, "directory of python-based backends: <directory>/<backend>/model.py"),
    Option(
        "repoagent-directory", "str", "", _E, "where agents are looked for: <directory>/<agent>/; checksum is built in"
    ),
    Option("rate-limit", "str", "off", _E, "off, or execution_count: executions wait for their group's resources"),
    Option(
        "rate-limit-resource",
        "str",
        (),
        _E,
        "<name>:<count>[:<device>], how much there is of a resource; repeatable",
        repeat=True,
    ),
    Option(
        "host-policy",
        "str",
        (),
        _E,
        "<policy>,numa-node=<n> or <policy>,cpu-cores=<list>: where instances run; repeatable",
        repeat=True,
    ),
    # only NVIDIA devices use these
    Option(
        "pinned-memory-pool-byte-size",
        "int",
        PINNED_POOL_BYTES,
        _E,
        "pinned memory of a process that runs models on GPUs",
    ),
    Option("cuda-memory-pool-byte-size", "str", (), _E, "<gpu>:<bytes>; accepted for compatibility", repeat=True),
    Option("cuda-virtual-address-size", "str", (), _E, "<gpu>:<bytes>; accepted for compatibility", repeat=True),
    Option("enable-peer-access", "bool", True, _E, "accepted for compatibility"),
    Option("buffer-manager-thread-count", "int", 0, _E, "accepted for compatibility"),
    # HTTP
    Option("allow-http", "bool", True, _G, "serve HTTP"),
    Option("http-address", "str", "0.0.0.0", _G, "address of the HTTP front"),
    Option("http-port", "int", 8000, _G, "port of the HTTP front (HTTP/1.1 and HTTP/2), 0 for a free one"),
    Option("http-socket", "str", "", _G, "path of a Unix socket where HTTP is served as well, without TLS"),
    Option("reuse-http-port", "bool", False, _G, "share the HTTP port with other processes"),
    Option("http-thread-count", "int", 8, _G, "accepted for compatibility; the front is one event loop"),
    Option("http-max-input-size", "int", 67_108_864, _G, "largest request in bytes, also decompressed"),
    Option("http-header-forward-pattern", "str", "", _G, "headers that become request parameters"),
    Option("http-restricted-api", "str", (), _G | _C, "<group>[,<group>]:<header>=<value>; repeatable", repeat=True),
    Option("http-use-ssl", "bool", False, _G, "TLS on the HTTP front; its files are read again when they change"),
    Option("http-use-ssl-mutual", "bool", False, _G, "TLS with client certificates"),
    Option("http-server-cert", "str", "", _G, "PEM file"),
    Option("http-server-key", "str", "", _G, "PEM file"),
    Option("http-root-cert", "str", "", _G, "PEM file of who signs clients' certificates"),
    # gRPC
    Option("allow-grpc", "bool", True, _G, "serve gRPC"),
    Option("grpc-address", "str", "0.0.0.0", _G, "address of the gRPC front"),
    Option("grpc-port", "int", 8001, _G, "port of the gRPC front, 0 for a free one"),
    Option("grpc-front", "str", "native", _G, "native or grpcio: what serves gRPC"),
    Option("grpc-channelz", "bool", True, _G, "serve gRPC's Channelz, counts of each connection (native front)"),
    Option("grpc-socket", "str", "", _G, "path of a Unix socket where gRPC is served as well, without TLS"),
    Option("reuse-grpc-port", "bool", False, _G, "share the gRPC port with other processes"),
    Option("grpc-header-forward-pattern", "str", "", _G, "metadata that become request parameters"),
    Option("grpc-restricted-protocol", "str", (), _G | _C, "<group>[,<group>]:<key>=<value>; repeatable", repeat=True),
    Option("grpc-infer-response-compression-level", "str", "none", _G, "none, low, medium or high"),
    Option("grpc-use-ssl", "bool", False, _G, "TLS on the gRPC front; its files are read again when they change"),
    Option("grpc-use-ssl-mutual", "bool", False, _G, "TLS with client certificates"),
    Option("grpc-server-cert", "str", "", _G, "PEM file"),
    Option("grpc-server-key", "str", "", _G, "PEM file"),
    Option("grpc-root-cert", "str", "", _G, "PEM file of who signs clients' certificates"),
    Option("grpc-infer-thread-count", "int", 2, _G, "accepted for compatibility; the front is one event loop"),
    Option("grpc-infer-allocation-pool-size", "int", 8, _G, "accepted for compatibility"),
    Option("grpc-max-response-pool-size", "int", 2147483647, _G, "accepted for compatibility"),
    Option("grpc-keepalive-time", "int", 7_200_000, _G, "ms"),
    Option("grpc-keepalive-timeout", "int", 20_000, _G, "ms"),
    Option("grpc-keepalive-permit-without-calls", "bool", False, _G, ""),
    Option("grpc-http2-max-pings-without-data", "int", 2, _G, ""),
    Option("grpc-http2-min-recv-ping-interval-without-data", "int", 300_000, _G, "ms"),
    Option("grpc-http2-max-ping-strikes", "int", 2, _G, ""),
    Option("grpc-max-connection-age", "int", 0, _G, "ms, 0 for unlimited"),
    Option("grpc-max-connection-age-grace", "int", 0, _G, "ms, 0 for unlimited"),
    # the fronts of clouds, over HTTP
    Option("allow-sagemaker", "bool", False, _G, "serve SageMaker's HTTP"),
    Option("sagemaker-address", "str", "0.0.0.0", _G, "address of the SageMaker front"),
    Option("sagemaker-port", "int", 8080, _G, "port of the SageMaker front, 0 for a free one"),
    Option("sagemaker-safe-port-range", "str", "", _G, "<least>-<most>: the ports that all other fronts may have"),
    Option("sagemaker-thread-count", "int", 8, _G, "accepted for compatibility; the front is one event loop"),
    Option("allow-vertex-ai", "bool", False, _G, "serve Vertex AI's HTTP; the default with AIP_MODE=PREDICTION"),
    Option("vertex-ai-address", "str", "0.0.0.0", _G, "address of the Vertex AI front"),
    Option("vertex-ai-port", "int", 8080, _G, "port of the Vertex AI front, 0 for a free one; AIP_HTTP_PORT if set"),
    Option("vertex-ai-thread-count", "int", 8, _G, "accepted for compatibility; the front is one event loop"),
    Option("vertex-ai-default-model", "str", "", _G, "model of Vertex AI's predictions; the only one by default"),
    # the OpenAI API
    Option("allow-openai", "bool", False, _G, "serve the OpenAI API on a port of its own"),
    Option("openai-address", "str", "0.0.0.0", _G, "address of the OpenAI front"),
    Option("openai-port", "int", 9000, _G, "port of the OpenAI front, 0 for a free one"),
    Option("openai-on-http-port", "bool", False, _G, "serve the OpenAI API on the HTTP port, beside /v2"),
    Option("lora-separator", "str", ":", _G, "stands between model and adapter in the OpenAI API's model names"),
    Option("drain-delay-secs", "float", 0.0, _G, "how long a gateway that stops still serves, not ready, for proxies"),
    Option(
        "allow-client-shm",
        "bool",
        False,
        _G,
        "clients may register shared memory of the machine for inputs and outputs, and so have it read and written",
    ),
    Option("express-lane", "bool", True, _G, "send small requests in waves, and recognise them by their bytes"),
    Option("stream-buffer-bytes", "int", 16 * 1024**2, _G, "responses held for the reader of one stream"),
    # jobs, journal and tenants
    Option("durability", "str", "memory", _G, "memory, fsync or replicated:<n>: what an accepted request survives"),
    Option("journal", "str", "jobs", _G, "off, jobs or all: whose life is written to the journal"),
    Option("job-retention-secs", "int", 86_400, _G, "how long an ended job and its result are kept"),
    Option("job-retention-bytes", "int", 1024**3, _G, "ended jobs kept of a model, 0 for no bound"),
    Option("journal-retention-secs", "int", 86_400, _G, "how long journal entries are kept, 0 for no bound"),
    Option("journal-retention-bytes", "int", 256 * 1024**2, _G, "journal kept of a model, 0 for no bound"),
    Option("journal-seal-secs", "int", 30, _B, "seconds between seals of a model's journal, 0 for no seals"),
    Option("dead-letter-retention-bytes", "int", 256 * 1024**2, _B, "dead letters kept of a model, 0 for no bound"),
    Option("tenant-header", "str", "", _G | _C, "header or metadata key in which a trusted proxy names the tenant"),
    Option("api-keys", "str", "", _G | _C, "TOML or JSON file of tenants and their keys; read again when it changes"),
    # response cache
    Option(
        "cache-config",
        "str",
        (),
        _G | _B,
        "<cache>,<key>=<value>: local,size=<bytes> caches responses in the log, redis,host=<host> beside; repeatable",
        repeat=True,
    ),
    Option("cache-directory", "str", "", _G | _B, "accepted for compatibility; caches are built in"),
    Option("response-cache-byte-size", "int", None, _G | _B, "old spelling of --cache-config local,size=<bytes>"),
    # webhooks
    Option("allow-webhooks", "bool", True, _G, "take webhooks; serve starts a sender of them"),
    Option("webhook-secrets", "str", "", _W, "file of signing secrets; serve makes one in its state directory without"),
    Option("webhook-allow", "str", (), _W | _G, "network or host that webhooks may reach; repeatable", repeat=True),
    Option("webhook-retry-secs", "float", 5.0, _W, "wait before the second try; later waits grow in proportion"),
    Option("webhook-timeout-secs", "float", 15.0, _W, "how long one call may take"),
    # tracing
    Option(
        "trace-config",
        "str",
        (),
        _G,
        "<mode>,<key>=<value> or <key>=<value>: mode=triton|opentelemetry, level, rate, count; triton,file; "
        "opentelemetry,url; repeatable",
        repeat=True,
    ),
    Option("trace-file", "str", "", _G, "old spelling of --trace-config triton,file=<path>"),
    Option("trace-level", "str", (), _G, "old spelling of --trace-config level=<level>; repeatable", repeat=True),
    Option("trace-rate", "str", "", _G, "old spelling of --trace-config rate=<n>"),
    Option("trace-count", "str", "", _G, "old spelling of --trace-config count=<n>"),
    Option("trace-log-frequency", "str", "", _G, "old spelling of --trace-config triton,log-frequency=<n>"),
    # metrics and logging
    Option("allow-metrics", "bool", True, _ALL, "serve /metrics"),
    Option("allow-cpu-metrics", "bool", True, _ALL, "show the machine's processor time and memory"),
    Option("allow-gpu-metrics", "bool", True, _ALL, "show load, memory and power of NVIDIA GPUs (with nvidia-ml-py)"),
    Option("metrics-address", "str", "", _ALL, "address of /metrics; that of HTTP by default"),
    Option("metrics-port", "int", 8002, _ALL, "port of /metrics, 0 for a free one"),
    Option(
        "metrics-interval-ms", "int", 2000, _ALL, "how long figures of the machine hold; others are read when scraped"
    ),
    Option(
        "metrics-config",
        "str",
        (),
        _ALL,
        "<setting>=<value>: counter_latencies, histogram_latencies, summary_latencies, summary_quantiles; repeatable",
        repeat=True,
    ),
    # console
    Option(
        "allow-console",
        "bool",
        None,  # as ConsolePart's module decides it
        _S,
        "show pages about the server under /console of the metrics port; without a value on, unless APIs are "
        "restricted, tenants are named in a header, or TLS is on",
    ),
    Option(
        "console-actions",
        "flag",
        False,
        _S | _C,
        "let the console pause queues, move and cancel requests, replay and discard dead letters, and load models",
    ),
    Option("console-address", "str", "127.0.0.1", _C, "address of the console"),
    Option("console-name", "str", (), _S | _C, "host name under which the console is opened; repeatable", repeat=True),
    Option("console-port", "int", 8004, _C, "port of the console, 0 for a free one"),
    Option(
        "metrics-url",
        "str",
        (),
        _C,
        "http://host:port/metrics of each part, or of serve, dns+http://... for all that have the name; repeatable; "
        "that of --state-dir's server by default",
        repeat=True,
    ),
    Option("log-verbose", "int", 0, _ALL | _C, "verbosity, 0 for none"),
    Option("log-info", "bool", True, _ALL | _C, "log information"),
    Option("log-warning", "bool", True, _ALL | _C, "log warnings"),
    Option("log-error", "bool", True, _ALL | _C, "log errors"),
    Option("log-format", "str", "default", _ALL | _C, "format of log lines: default or ISO8601"),
    Option("log-file", "str", "", _ALL | _C, "file that log lines are appended to (empty: standard error)"),
    Option(
        "debug-stalls",
        "int",
        0,
        _ALL,
        "report each time an event loop stands still for longer than so many ms, with its stack; 0: off",
    ),
    # internal: how serve controls its children
    Option("metrics-socket", "str", "", _PARTS, "unix socket of /metrics"),
    Option("console-socket", "str", "", _C, "unix socket of the console, in place of its port"),
    Option("joint-metrics-socket", "str", "", frozenset({GATEWAY}), "unix socket of the whole server's /metrics"),
    Option("report-fd", "int", -1, _PARTS | _C, "descriptor that gets the ports and 'ready'"),
    Option("fail-points", "str", "", _ALL, "directory in which a drill arms fail points (off when empty)"),
    Option("await-executors", "int", 0, frozenset({GATEWAY}), "listen once so many executors have loaded their models"),
    Option("with-batcher", "flag", False, frozenset({EXECUTOR}), "host the batcher in the executor process"),
    Option(
        "private-log",
        "flag",
        False,
        _PARTS,
        "internal: set by 'serve' for its children, as only this machine's processes use the log",
    ),
    # known, but not built yet
    _later("min-supported-compute-capability"),
    _later("model-load-gpu-limit"),
)

ALIASES = {"model-store": "model-repository"}
"""Other spellings of options that Triton keeps (V1)."""

ANY = (-(2**63), 2**63 - 1)
RANGES = {
    "gateways": (1, 64),
    "debug-stalls": (0, 60_000),
    "executors": (1, 1024),
    "exit-timeout-secs": (0, ANY[1]),
    "metrics-interval-ms": (0, ANY[1]),
    "repository-poll-secs": (0, ANY[1]),
    "model-load-thread-count": (1, 1024),
    "grpc-infer-thread-count": (2, 128),
    "grpc-max-response-pool-size": (1, ANY[1]),
    "pinned-memory-pool-byte-size": (0, ANY[1]),
    "buffer-manager-thread-count": (0, ANY[1]),
    "model-load-retry-count": (0, ANY[1]),
    "http-max-input-size": (1, ANY[1]),
    "webhook-retry-secs": (0.01, 86_400),
    "webhook-timeout-secs": (0.01, 3_600),
    "job-retention-secs": (1, ANY[1]),
    "stream-buffer-bytes": (1, ANY[1]),
    "job-retention-bytes": (0, ANY[1]),
    "drain-delay-secs": (0, 3_600),
    "executor-grace-secs": (0, 86_400),
    "heartbeat-ttl-secs": (1, 60),
    "gateway-heartbeat-ttl-secs": (1, 60),
    "stall-limit-secs": (1, 3_600),
    "max-loaded-models": (0, ANY[1]),
    "response-cache-byte-size": (0, ANY[1]),
    "journal-retention-secs": (0, ANY[1]),
    "journal-retention-bytes": (0, ANY[1]),
    "journal-seal-secs": (0, 3600),
    "dead-letter-retention-bytes": (0, ANY[1]),
}
