"""What a server may be told: Triton's `Options`, and the options of `charonia serve` that they stand for.

An option without a meaning here is taken where no user can tell the difference, and refused where one would believe it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from charonia.errors import StartupError
from charonia.options.values import SERVE, Values, options_of, parse

from .kinds import InstanceGroupKind, InvalidArgumentError, LogFormat, ModelControlMode, RateLimitMode

_BACKENDS = "/opt/tritonserver/backends"
_AGENTS = "/opt/tritonserver/repoagents"
_CAPABILITY = 6.0
_MOST = 2**32 - 1

_MODES = {ModelControlMode.NONE: "none", ModelControlMode.POLL: "poll", ModelControlMode.EXPLICIT: "explicit"}
_RATES = {RateLimitMode.OFF: "off", RateLimitMode.EXEC_COUNT: "execution_count"}
_FORMATS = {LogFormat.DEFAULT: "default", LogFormat.ISO8601: "ISO8601"}

_FIXED = {
    "allow_http": False,
    "allow_grpc": False,
    "allow_sagemaker": False,
    "allow_vertex_ai": False,
    "allow_openai": False,
    "openai_on_http_port": False,
    "allow_webhooks": False,
    "gateways": 1,
    "listen_while_loading": False,
    "config": "",
    "shm_dir": "",
}
"""The gateway lives in this process and listens nowhere."""

_FOR_LISTENERS = (
    *("http_", "grpc_", "sagemaker_", "vertex_ai_", "openai_", "reuse_", "webhook_"),
    *("metrics_address", "metrics_port", "allow_client_shm"),
)


@dataclass(slots=True)
class RateLimiterResource:
    """How much there is of a resource that instance groups ask for, on a device or (-1) in all."""

    name: str
    count: int
    device: int


@dataclass(slots=True)
class ModelLoadDeviceLimit:
    """How much of a device's memory loads may take. No device is bounded here: a limit is refused."""

    kind: InstanceGroupKind
    device: int
    fraction: float


@dataclass(slots=True)
class Options:
    """Triton's server options, with its names and defaults, and `serve_options`.

    Those are further options of `charonia serve`, by their names with `_` for `-`: `state_dir` keeps what the log holds
    from one start to the next (without it nothing is kept), `executors`, `durability`, `journal`, `log_url`, ...
    """

    model_repository: str | list[str] | None = field(default_factory=list)
    server_id: str = "triton"
    model_control_mode: ModelControlMode = ModelControlMode.NONE
    startup_models: list[str] = field(default_factory=list)
    strict_model_config: bool = False
    rate_limiter_mode: RateLimitMode = RateLimitMode.OFF
    rate_limiter_resources: list[RateLimiterResource] = field(default_factory=list)
    pinned_memory_pool_size: int = 1 << 28
    cuda_memory_pool_sizes: dict[int, int] = field(default_factory=dict)
    cache_config: dict[str, dict[str, Any]] = field(default_factory=dict)
    cache_directory: str = "/opt/tritonserver/caches"
    min_supported_compute_capability: float = _CAPABILITY
    exit_on_error: bool = True
    strict_readiness: bool = True
    exit_timeout: int = 30
    buffer_manager_thread_count: int = 0
    model_load_thread_count: int = 4
    model_load_retry_count: int = 0
    model_namespacing: bool = False
    enable_peer_access: bool = True
    log_file: str | None = None
    log_info: bool = False
    log_warn: bool = False
    log_error: bool = False
    log_format: LogFormat = LogFormat.DEFAULT
    log_verbose: int = 0
    metrics: bool = True
    gpu_metrics: bool = True
    cpu_metrics: bool = True
    metrics_interval: int = 2000
    backend_directory: str = _BACKENDS
    repo_agent_directory: str = _AGENTS
    model_load_device_limits: list[ModelLoadDeviceLimit] = field(default_factory=list)
    backend_configuration: dict[str, dict[str, str]] = field(default_factory=dict)
    host_policies: dict[str, dict[str, str]] = field(default_factory=dict)
    metrics_configuration: dict[str, dict[str, str]] = field(default_factory=dict)
    serve_options: dict[str, Any] = field(default_factory=dict)


def serve_values(options: Options, environment: Mapping[str, str] = os.environ) -> Values:
    """The option values of `charonia serve`. Raises `InvalidArgumentError`, and `TypeError` for a value's type."""
    if options.model_repository is None:
        raise InvalidArgumentError("Model repository must be specified.")
    _check_types(options)
    _check_meanings(options)
    given = _of_triton(options)
    known = {option.key: option.name for option in options_of(SERVE)}
    for key, value in options.serve_options.items():
        if key in given:
            raise InvalidArgumentError(f"serve option '{key}' has a field of its own in Options")
        if key in _FIXED or key.startswith(_FOR_LISTENERS):
            raise InvalidArgumentError(f"serve option '{key}' has no meaning for a server that listens nowhere")
        if key not in known:
            raise InvalidArgumentError(f"charonia serve has no option '{key}'")
        given[key] = value
    try:
        values = parse(SERVE, _flags(given, known), environment, {})
    except StartupError as error:
        raise InvalidArgumentError(str(error)) from None
    # what the environment says of the command's listeners and its state is not about this server
    return {**values, **_FIXED, "state_dir": os.fspath(options.serve_options.get("state_dir", ""))}


def _of_triton(options: Options) -> dict[str, Any]:
    """Option values by the keys of `charonia serve`, the repeated ones as lists."""
    paths = options.model_repository
    info = options.log_info or options.log_verbose > 0
    warn = options.log_warn or info
    explicit = options.model_control_mode is ModelControlMode.EXPLICIT
    return {
        "model_repository": paths if isinstance(paths, list) else [paths],
        "id": options.server_id,
        "model_control_mode": _MODES[options.model_control_mode],
        "load_model": options.startup_models if explicit else [],
        "disable_auto_complete_config": options.strict_model_config,
        "rate_limit": _RATES[options.rate_limiter_mode],
        "rate_limit_resource": [
            f"{each.name}:{each.count}" + (f":{each.device}" if each.device >= 0 else "")
            for each in options.rate_limiter_resources
        ],
        "pinned_memory_pool_byte_size": options.pinned_memory_pool_size,
        "cuda_memory_pool_byte_size": [f"{gpu}:{size}" for gpu, size in options.cuda_memory_pool_sizes.items()],
        "cache_config": _settings(options.cache_config),
        "cache_directory": options.cache_directory,
        "exit_on_error": options.exit_on_error,
        "strict_readiness": options.strict_readiness,
        "exit_timeout_secs": options.exit_timeout,
        "buffer_manager_thread_count": options.buffer_manager_thread_count,
        "model_load_thread_count": options.model_load_thread_count,
        "model_load_retry_count": options.model_load_retry_count,
        "model_namespacing": options.model_namespacing,
        "enable_peer_access": options.enable_peer_access,
        "log_info": info,
        "log_warning": warn,
        "log_error": options.log_error or warn,
        "log_format": _FORMATS[options.log_format],
        "log_verbose": options.log_verbose,
        "allow_metrics": options.metrics,
        "allow_gpu_metrics": options.gpu_metrics,
        "allow_cpu_metrics": options.cpu_metrics,
        "metrics_interval_ms": options.metrics_interval,
        # Triton's own places need not exist
        "backend_directory": _directory(options.backend_directory, _BACKENDS),
        "repoagent_directory": _directory(options.repo_agent_directory, _AGENTS),
        "backend_config": _settings(options.backend_configuration),
        "host_policy": _settings(options.host_policies),
        "metrics_config": [pair.lstrip(",") for pair in _settings(options.metrics_configuration)],
    }


def _settings(of: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [f"{name},{key}={value}" for name, settings in of.items() for key, value in settings.items()]


def _directory(path: str, default: str) -> str:
    return "" if path == default and not Path(path).is_dir() else path


def _flags(given: Mapping[str, Any], known: Mapping[str, str]) -> list[str]:
    flags = []
    for key, value in given.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            text = str(int(each)) if isinstance(each, bool) else str(each)
            flags.append(f"--{known[key]}={text}")
    return flags


def _check_meanings(options: Options) -> None:
    """Refuse what would be believed and has no effect."""
    if not options.model_repository:
        raise InvalidArgumentError("--model-repository must be specified")
    if options.log_file:
        raise InvalidArgumentError("log_file is not supported: the server's processes log to standard error")
    if options.min_supported_compute_capability != _CAPABILITY:
        raise InvalidArgumentError("min_supported_compute_capability is not supported: every GPU that is found is used")
    if options.model_load_device_limits:
        raise InvalidArgumentError("model_load_device_limits are not supported: loads are not bounded by device memory")


_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "str | None": (str, type(None)),
    "bool": (int,),
    "int": (int,),
    "float": (int, float),
    "list": (list,),
    "dict": (dict,),
    "ModelControlMode": (ModelControlMode,),
    "RateLimitMode": (RateLimitMode,),
    "LogFormat": (LogFormat,),
}


def _check_types(options: Options) -> None:
    """Raise `TypeError` as the binding to Triton's library does; a negative or too large number is none of its type."""
    for name, declared in Options.__annotations__.items():
        value = getattr(options, name)
        kinds = _TYPES.get(declared.partition("[")[0]) or (str, list, type(None))
        is_out_of_range = declared == "int" and isinstance(value, int) and not 0 <= value <= _MOST
        if is_out_of_range or not isinstance(value, kinds):
            raise TypeError(f"Options.{name} must be {declared}, got {value!r}")
    for name, words in (("model_repository", options.model_repository), ("startup_models", options.startup_models)):
        if isinstance(words, list) and not all(isinstance(word, str) for word in words):
            raise TypeError(f"Options.{name} must hold strings, got {words!r}")
