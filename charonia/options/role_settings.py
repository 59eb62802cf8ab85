"""The settings of each role, made and checked once from the values of its options.

`charonia.options.values` reads the values; the other modules here read options of caches, metrics and traces.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from charonia.errors import InvalidArgument, StartupError
from charonia.models.placement import check_pool, label_of

from .cache_options import cache_options
from .cloud_options import check_ports, sagemaker_settings, vertex_ai_settings
from .metrics_options import metrics_settings
from .settings import (
    EVERY_DEVICE,
    BatcherSettings,
    ExecutorSettings,
    GatewaySettings,
    GrpcDelays,
    LogSettings,
    OpenAiSettings,
    TlsSettings,
    WebhookSettings,
)
from .table import PINNED_POOL_BYTES
from .trace_options import trace_options
from .values import BATCHER, EXECUTOR, GATEWAY, WEBHOOKS, Values, parse, render

_log = logging.getLogger(__name__)


def incarnation(role: str) -> str:
    """A name that no other start of any process has: role, host, pid and 32 random bits."""
    host = "".join(c if c.isalnum() or c == "-" else "-" for c in socket.gethostname())[:40]
    return f"{role}-{host}-{os.getpid()}-{secrets.token_hex(4)}"


def log_settings(values: Values) -> LogSettings:
    """How a part connects to the log, and its leases; a gateway's lease has its own length."""
    return LogSettings(
        url=values["log_url"],
        private=values["private_log"],
        heartbeat_ttl_ms=round(values.get("heartbeat_ttl_secs", 2.0) * 1000),
        gateway_ttl_ms=round(values.get("gateway_heartbeat_ttl_secs", 2.0) * 1000),
        stall_limit_s=values["stall_limit_secs"],
    )


def tls_settings(front: str, values: Values) -> TlsSettings | None:
    """TLS of a front, http or grpc, from the options that begin with its name; None where it is off."""
    is_mutual = values[f"{front}_use_ssl_mutual"]
    if not (is_mutual or values[f"{front}_use_ssl"]):
        return None
    certificate, key, root = (values[f"{front}_{what}"] for what in ("server_cert", "server_key", "root_cert"))
    return TlsSettings(front, certificate, key, root, is_mutual)


def grpc_delays(environment: Mapping[str, str]) -> GrpcDelays:
    """The delays in Triton's variables (G33). Raises `StartupError` for a value that is no number."""

    def together(*names: str, seconds: float = 0.001) -> float:
        for name in names:
            text = environment.get(f"TRITONSERVER_{name}", "0")
            if not (text.isascii() and text.isdecimal()):
                raise StartupError(f"TRITONSERVER_{name} in the environment must be a whole number, got '{text}'")
        return sum(int(environment.get(f"TRITONSERVER_{name}", "0")) for name in names) * seconds

    return GrpcDelays(
        together("DELAY_GRPC_PROCESS_ENTRY", "DELAY_GRPC_PROCESS"),
        together("DELAY_RESPONSE_COMPLETE_EXEC", "DELAY_RESPONSE_COMPLETION"),
        together("DELAY_GRPC_RESPONSE", "DELAY_GRPC_COMPLETE"),
        together("DELAY_GRPC_NOTIFICATION", "DELAY_GRPC_ENQUEUE"),
        together("SERVER_DELAY_GRPC_RESPONSE_SEC", seconds=1.0),
    )


def _grpc_front(name: str) -> str:
    if name not in ("native", "grpcio"):
        raise StartupError(f"--grpc-front must be native or grpcio, got '{name}'")
    return name


def _grpc_compression(level: str) -> str:
    if level not in ("none", "low", "medium", "high"):
        raise StartupError(f"--grpc-infer-response-compression-level must be none, low, medium or high, got '{level}'")
    return level


def _openai(values: Values) -> OpenAiSettings | None:
    if not (values["allow_openai"] or values["openai_on_http_port"]):
        return None
    return OpenAiSettings(
        values["openai_address"],
        values["openai_port"] if values["allow_openai"] else -1,
        values["openai_on_http_port"],
        values["lora_separator"],
        values.get("joint_metrics_socket", ""),
    )


def gateway_settings(values: Values) -> GatewaySettings:
    """`GatewaySettings` from option values. Raises `StartupError` for malformed restrictions and conflicting ports."""
    check_ports(values)
    keepalive = {
        "grpc.keepalive_time_ms": values["grpc_keepalive_time"],
        "grpc.keepalive_timeout_ms": values["grpc_keepalive_timeout"],
        "grpc.keepalive_permit_without_calls": int(values["grpc_keepalive_permit_without_calls"]),
        "grpc.http2.max_pings_without_data": values["grpc_http2_max_pings_without_data"],
        "grpc.http2.min_ping_interval_without_data_ms": values["grpc_http2_min_recv_ping_interval_without_data"],
        "grpc.http2.max_ping_strikes": values["grpc_http2_max_ping_strikes"],
    }
    if values["grpc_max_connection_age"]:
        keepalive["grpc.max_connection_age_ms"] = values["grpc_max_connection_age"]
    if values["grpc_max_connection_age_grace"]:
        keepalive["grpc.max_connection_age_grace_ms"] = values["grpc_max_connection_age_grace"]
    return GatewaySettings(
        incarnation=incarnation("gateway"),
        server_id=values["id"],
        http_address=values["http_address"],
        http_port=values["http_port"] if values["allow_http"] else -1,
        grpc_address=values["grpc_address"],
        grpc_port=values["grpc_port"] if values["allow_grpc"] else -1,
        metrics_address=values["metrics_address"] or values["http_address"],
        metrics_port=values["metrics_port"] if values["allow_metrics"] and not values["metrics_socket"] else -1,
        metrics_socket=values["metrics_socket"] if values["allow_metrics"] else "",
        metrics=metrics_settings(values),
        http_socket=values["http_socket"] if values["allow_http"] else "",
        grpc_socket=values["grpc_socket"] if values["allow_grpc"] else "",
        reuse_http_port=values["reuse_http_port"],
        grpc_front=_grpc_front(values["grpc_front"]),
        grpc_channelz=values["grpc_channelz"],
        reuse_grpc_port=values["reuse_grpc_port"],
        http_max_input_size=values["http_max_input_size"],
        http_header_forward_pattern=values["http_header_forward_pattern"],
        grpc_header_forward_pattern=values["grpc_header_forward_pattern"],
        http_restricted_api=restricted_groups("http-restricted-api", values["http_restricted_api"]),
        grpc_restricted_protocol=restricted_groups("grpc-restricted-protocol", values["grpc_restricted_protocol"]),
        sagemaker=sagemaker_settings(values, os.environ),
        vertex_ai=vertex_ai_settings(values, os.environ),
        openai=_openai(values),
        http_tls=tls_settings("http", values),
        grpc_tls=tls_settings("grpc", values),
        grpc_infer_response_compression_level=_grpc_compression(
            values["grpc_infer_response_compression_level"].lower()
        ),
        grpc_keepalive=keepalive,
        grpc_delays=grpc_delays(os.environ),
        strict_readiness=values["strict_readiness"],
        await_executors=values["await_executors"],
        executor_grace_s=values["executor_grace_secs"],
        exit_timeout_secs=values["exit_timeout_secs"],
        drain_delay_secs=values["drain_delay_secs"],
        shm_dir=values["shm_dir"],
        express_lane=values["express_lane"],
        allow_client_shm=values["allow_client_shm"],
        stream_buffer_size_bytes=values["stream_buffer_bytes"],
        allow_webhooks=values["allow_webhooks"],
        webhook_allow=values["webhook_allow"],
        durability=values["durability"],
        journal=_journal(values["journal"]),
        job_retention_s=values["job_retention_secs"],
        job_retention_size_bytes=values["job_retention_bytes"],
        journal_retention_s=values["journal_retention_secs"],
        journal_retention_size_bytes=values["journal_retention_bytes"],
        tenant_header=values["tenant_header"],
        api_keys=values["api_keys"],
        response_cache_size_bytes=cache_options(values, os.environ).size_bytes,
        tracing=trace_options(values),
    )


def _journal(mode: str) -> str:
    if mode not in ("off", "jobs", "all"):
        raise StartupError(f"--journal must be off, jobs or all, got '{mode}'")
    return mode


def restricted_groups(option: str, entries: tuple[str, ...]) -> tuple[tuple[tuple[str, ...], str, str], ...]:
    """`<group>[,<group>]:<header>=<value>` (H53): ((groups, header, value), ...); the gateway checks the groups."""
    parsed = []
    for entry in entries:
        groups, colon, rest = entry.partition(":")
        header, equals, value = rest.partition("=")
        if not colon or not equals or not header or not value:
            raise StartupError(f"--{option} must be <group>[,<group>]:<header>=<value>, got '{entry}'")
        parsed.append((tuple(groups.split(",")), header, value))
    return tuple(parsed)


def batcher_settings(values: Values, *, colocated: bool = False) -> BatcherSettings:
    own_metrics = values["allow_metrics"] and not colocated
    return BatcherSettings(
        incarnation=incarnation("batcher"),
        exit_timeout_secs=values["exit_timeout_secs"],
        prefetch=0 if colocated else 1,
        shm_dir=values["shm_dir"],
        dead_letter_retention_size_bytes=values["dead_letter_retention_bytes"],
        journal_seal_s=values["journal_seal_secs"],
        metrics_port=values["metrics_port"] if own_metrics and not values["metrics_socket"] else -1,
        metrics_address=values["metrics_address"] or "127.0.0.1",
        metrics_socket=values["metrics_socket"] if own_metrics else "",
        metrics=metrics_settings(values),
        joint_metrics=bool(values["metrics_socket"]),
        response_cache_size_bytes=cache_options(values, os.environ).size_bytes,
    )


def webhook_settings(values: Values) -> WebhookSettings:
    """`WebhookSettings` from option values. Raises `StartupError` without secrets to sign with."""
    if not values["webhook_secrets"]:
        raise StartupError("charonia webhooks needs --webhook-secrets, the file of secrets that calls are signed with")
    return WebhookSettings(
        incarnation=incarnation("webhooks"),
        secrets=values["webhook_secrets"],
        allow=values["webhook_allow"],
        first_retry_s=values["webhook_retry_secs"],
        timeout_s=values["webhook_timeout_secs"],
        exit_timeout_secs=values["exit_timeout_secs"],
        metrics_port=values["metrics_port"] if values["allow_metrics"] and not values["metrics_socket"] else -1,
        metrics_address=values["metrics_address"] or "127.0.0.1",
        metrics_socket=values["metrics_socket"] if values["allow_metrics"] else "",
    )


def _below_state(values: Values, name: str) -> str:
    """The path of a part of the state directory; "" without one."""
    return str(Path(values["state_dir"]).expanduser().absolute() / name) if values["state_dir"] else ""


def executor_settings(values: Values) -> ExecutorSettings:
    """`ExecutorSettings` from option values. Raises `StartupError` for invalid values."""
    mode = values["model_control_mode"].lower()
    if mode not in ("none", "poll", "explicit"):
        raise StartupError(f"--model-control-mode must be none, poll or explicit, got '{values['model_control_mode']}'")
    if mode == "poll" and values["repository_poll_secs"] <= 0:
        raise StartupError(f"--repository-poll-secs must be greater than 0, got {values['repository_poll_secs']:g}")
    load = values["load_model"]
    if "*" in load and len(load) > 1:
        raise StartupError("Wildcard model name '*' must be the ONLY startup model if specified at all.")
    if load and mode != "explicit":
        raise StartupError("Error: Use of '--load-model' requires setting '--model-control-mode=explicit' as well.")
    backend_config: dict[str, dict[str, str]] = {}
    for entry in values["backend_config"]:
        head, _, value = entry.partition("=")
        backend, _, key = head.rpartition(",")
        if not key or not value:
            text = "--backend-config must be <backend>,<key>=<value>, or <key>=<value> for all backends"
            raise StartupError(f"{text}, got '{entry}'")
        backend_config.setdefault(backend, {})[key] = value
    if values["backend_directory"]:
        backend_config.setdefault("", {})["backend-directory"] = values["backend_directory"]
    if where := _below_state(values, "environments"):
        backend_config.setdefault("", {}).setdefault("environment-cache-dir", where)
    if values["pinned_memory_pool_byte_size"] != PINNED_POOL_BYTES:
        size = str(values["pinned_memory_pool_byte_size"])
        backend_config.setdefault("", {}).setdefault("pinned-memory-pool-byte-size", size)
    for option in ("cuda-memory-pool-byte-size", "cuda-virtual-address-size"):
        check_device_pools(option, values[option.replace("-", "_")])
    strict = values["strict_model_config"]
    if strict is not None:
        _log.warning("--strict-model-config is the old spelling of --disable-auto-complete-config")
    placed = placement_options(values)
    return ExecutorSettings(
        incarnation=incarnation("executor"),
        model_repository=values["model_repository"],
        repository_copies=_below_state(values, "repositories"),
        pool=values["pool"],
        labels=placed.labels,
        model_memory_budget_bytes=placed.budget_bytes,
        max_loaded_models=values["max_loaded_models"],
        model_control_mode=mode,
        repository_poll_secs=values["repository_poll_secs"],
        load_model=load,
        exit_on_error=values["exit_on_error"],
        exit_timeout_secs=values["exit_timeout_secs"],
        shm_dir=values["shm_dir"],
        disable_auto_complete_config=values["disable_auto_complete_config"] if strict is None else strict,
        model_load_thread_count=values["model_load_thread_count"],
        model_load_retry_count=values["model_load_retry_count"],
        require_sandbox=values["require_sandbox"],
        allow_native_models=native_models(values["allow_native_models"], values["model_repository"]),
        model_config_name=values["model_config_name"],
        model_namespacing=values["model_namespacing"],
        repoagent_directory=repository_agents(values["repoagent_directory"]),
        backend_config=backend_config,
        metrics_port=values["metrics_port"] if values["allow_metrics"] and not values["metrics_socket"] else -1,
        metrics_address=values["metrics_address"] or "127.0.0.1",
        metrics_socket=values["metrics_socket"] if values["allow_metrics"] else "",
        metrics=metrics_settings(values),
        response_cache_size_bytes=cache_options(values, os.environ).size_bytes,
        hosts_batcher=values["with_batcher"],
        rate_limit=rate_limited(values["rate_limit"].lower()),
        rate_limit_resources=rate_limits(values["rate_limit_resource"]),
        host_policies=host_policies(values["host_policy"]),
    )


def native_models(allowed: Sequence[str], repositories: Sequence[str]) -> tuple[str, ...]:
    """`--allow-native-models`, which must name repositories. Raises `StartupError`."""
    for one in allowed:
        if one not in repositories:
            raise StartupError(
                f"--allow-native-models '{one}' is no model repository of this server: give one of --model-repository, "
                f"{', '.join(repositories) or 'which is not set'}"
            )
    return tuple(allowed)


_SETTINGS = ("numa-node", "cpu-cores")


def rate_limited(mode: str) -> bool:
    """`--rate-limit`. Raises `StartupError`."""
    if mode not in ("off", "execution_count"):
        raise StartupError(f"--rate-limit must be execution_count or off, got '{mode}'")
    return mode == "execution_count"


def rate_limits(entries: Iterable[str]) -> dict[tuple[int, str], int]:
    """`--rate-limit-resource` as (device, name) -> count. Raises `StartupError`."""
    limits: dict[tuple[int, str], int] = {}
    for entry in entries:
        name, _, rest = entry.partition(":")
        numbers = rest.split(":")
        if not name or len(numbers) > 2 or not all(number.isascii() and number.isdecimal() for number in numbers):
            raise StartupError(
                "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or "
                f"'<resource_name>:<count>'. Got {entry}"
            )
        device = int(numbers[1]) if len(numbers) == 2 else EVERY_DEVICE
        limits[(device, name)] = int(numbers[0])
    return limits


def repository_agents(directory: str) -> str:
    """`--repoagent-directory`, which must be a directory if it is set. Raises `StartupError`."""
    if directory and not Path(directory).is_dir():
        raise StartupError(f"--repoagent-directory '{directory}' does not exist or is not a directory")
    return directory


def check_device_pools(option: str, entries: Iterable[str]) -> None:
    """Check `<gpu>:<bytes>` of options without effect. Raises `StartupError`."""
    for entry in entries:
        device, colon, count = entry.partition(":")
        if not colon or not all(word.isascii() and word.isdecimal() for word in (device, count)):
            raise StartupError(f"--{option} option format is '<GPU device id>:<byte size>'. Got {entry}")


def host_policies(entries: Iterable[str]) -> dict[str, dict[str, str]]:
    """`--host-policy` as policy -> setting -> value; the last value of a setting counts. Raises `StartupError`."""
    policies: dict[str, dict[str, str]] = {}
    for entry in entries:
        policy, comma, rest = entry.partition(",")
        setting, equals, value = rest.partition("=")
        if not comma or not equals or not policy or not setting or not value:
            raise StartupError("--host-policy option format is '<policy_name>,<setting>=<value>'. Got " + entry)
        if setting not in _SETTINGS:
            raise StartupError(
                f"--host-policy setting '{setting}' of policy '{policy}' is not known: it is one of "
                f"{', '.join(_SETTINGS)}"
            )
        policies.setdefault(policy, {})[setting] = value
    return policies


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB)?")
_UNITS = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """`budget_bytes` is 0 for no bound."""

    labels: dict[str, str]
    budget_bytes: int


def placement_options(values: Values) -> PlacementOptions:
    """From option values. Raises `StartupError` for invalid ones."""
    try:
        check_pool(values["pool"])
        labels = dict(label_of(text) for text in values["label"])
    except InvalidArgument as error:
        raise StartupError(error.message) from None
    if len(labels) != len(values["label"]):
        raise StartupError("--label has the same key twice")
    budget_bytes = size_bytes("--model-memory-budget", values["model_memory_budget"])
    if (budget_bytes or values["max_loaded_models"]) and values["model_control_mode"] != "none":
        raise StartupError(
            "--model-memory-budget and --max-loaded-models need --model-control-mode none: in the mode "
            f"'{values['model_control_mode']}' others say what is loaded"
        )
    return PlacementOptions(labels, budget_bytes)


def size_bytes(option: str, text: str) -> int:
    """`1073741824`, `512MiB`, `1.5 GiB` in bytes, 0 for "". Raises `StartupError`."""
    if not text:
        return 0
    found = _SIZE.fullmatch(text.strip())
    size = int(float(found[1]) * _UNITS[found[2] or "B"]) if found else 0
    if size < 1:
        raise StartupError(f"{option} must be a size like 4GiB or 536870912, got '{text}'")
    return size


_OF_ROLES: dict[str, Callable[[Values], object]] = {
    GATEWAY: gateway_settings,
    BATCHER: batcher_settings,
    EXECUTOR: executor_settings,
    WEBHOOKS: webhook_settings,
}


def check_role(role: str, values: Values) -> None:
    """Make the settings of a part, as it does itself later, but without their warnings. Raises `StartupError`."""
    with without_warnings():
        _OF_ROLES[role](values)


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Within it options are read without a warning: for checks of what a part reads later itself."""
    warns = logging.getLogger(__package__)
    level = warns.level
    warns.setLevel(logging.ERROR)
    try:
        yield
    finally:
        warns.setLevel(level)


def check_settings(values: Values) -> None:
    """Check the values of `serve` as each part that it starts will. Raises `StartupError`."""
    for role in (GATEWAY, BATCHER, EXECUTOR):
        check_role(role, parse(role, render(role, values, os.environ), {}, {}))
