"""Runs one role (gateway, batcher, executor, webhooks) in this process: its settings, the log, the service, signals.

A service draws its incarnation here, reports its endpoints and "ready" to the supervisor's descriptor when it has one,
drains on SIGTERM and SIGINT and exits 0, or 1 when work was still running after `--exit-timeout-secs`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from charonia import failpoints
from charonia.clock import monotonic_ns
from charonia.errors import StartupError
from charonia.eventlog.port import EventLog
from charonia.options import Values
from charonia.settings import BatcherSettings, ExecutorSettings, GatewaySettings, LogSettings, WebhookSettings

from .cache_options import cache_options
from .executor_options import check_device_pools, host_policies, rate_limited, rate_limits
from .logs import configure_logging
from .metrics_options import metrics_settings
from .placement_options import placement_options
from .trace_options import trace_options

if TYPE_CHECKING:
    from charonia.eventlog.redis.blobs import BlobServer

_log = logging.getLogger(__name__)

Stop = Callable[[], Awaitable[bool]]

_UNDO_S = 2.0
"""How long a start that is broken off may take to undo itself."""


def incarnation(role: str) -> str:
    """A name no other start of any process has: role, host, pid and 32 random bits."""
    host = "".join(c if c.isalnum() or c == "-" else "-" for c in socket.gethostname())[:40]
    return f"{role}-{host}-{os.getpid()}-{secrets.token_hex(4)}"


def run_role(role: str, values: Values) -> int:
    """Run `role` until a signal stops it; the process's exit code. Raises `StartupError`."""
    configure_logging(values)
    failpoints.activate(values["fail_points"])
    if not values["log_url"]:
        raise StartupError(f"charonia {role} needs --log-url, the URL of the log all parts share")
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_run(role, values))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(role, values))


async def _run(role: str, values: Values) -> int:
    from charonia.eventlog.redis import open_log
    from charonia.eventlog.redis.address import with_password

    if values["blob_password_file"] and not values["blob_url"]:
        raise StartupError("--blob-password-file needs --blob-url, the server it is the password of")
    url = with_password(values["log_url"], values["log_password_file"])
    log = open_log(url, durability=values.get("durability", "memory"))
    if values["blob_url"] and role != "webhooks":
        log.blobs = _blob_server(values)
        await log.blobs.open()
    # of several parts that cannot reach a log which is not serve's own, one says so and the others are stopped
    await _open(log, patient=values["private_log"] or (values["report_fd"] >= 0 and role != "gateway"))
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    start = {"gateway": _gateway, "batcher": _batcher, "executor": _executor, "webhooks": _webhooks}[role]
    starting = asyncio.create_task(start(log, values), name=f"start {role}")
    stop_asked = asyncio.create_task(stopping.wait())
    await asyncio.wait([starting, stop_asked], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        await _break_off(starting)
    endpoints, stop = await starting
    _settle_garbage_collector()
    _report(values["report_fd"], {"endpoints": endpoints, "ready": True})
    _log.info("%s is up%s", role, "".join(f", {name} on {where}" for name, where in endpoints.items()))
    await stop_asked
    clean = await stop()
    with contextlib.suppress(Exception):
        await log.close()
        if log.blobs is not None:
            await log.blobs.close()
    if not clean:
        _log.error("exit timeout: some work was still running after %d s", values["exit_timeout_secs"])
    return 0 if clean else 1


def _blob_server(values: Values) -> BlobServer:
    from charonia.eventlog.redis import open_log
    from charonia.eventlog.redis.address import with_password
    from charonia.eventlog.redis.blobs import BlobServer

    url = with_password(values["blob_url"], values["blob_password_file"], "--blob-password-file")
    try:
        return BlobServer(open_log(url))
    except StartupError as error:
        raise StartupError(str(error).replace("the event log URL", "the URL of --blob-url")) from None


async def _break_off(starting: asyncio.Task[tuple[dict[str, str], Stop]]) -> None:
    """Stopped before it was up: nothing was promised yet. Ends the process unless the start failed by itself meanwhile.

    At once, because the thread in which a native library loads a model cannot be interrupted and would be waited for.
    """
    starting.cancel()
    await asyncio.wait([starting], timeout=_UNDO_S)
    if starting.done() and not starting.cancelled():
        return
    logging.shutdown()
    sys.stderr.flush()
    os._exit(0)


def _settle_garbage_collector() -> None:
    """What is alive now stays alive: never look at it again, and look at the rest less often.

    Requests are freed by reference counts; with the defaults the collector took 7 % of a gateway's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


async def _open(log: EventLog, *, patient: bool) -> None:
    """Connect; a part of `serve` waits for the private server that starts beside it."""
    give_up_at = monotonic_ns() + 10_000_000_000
    while True:
        try:
            return await log.open()
        except StartupError:
            if not patient or monotonic_ns() > give_up_at:
                raise
            await asyncio.sleep(0.02)


def _report(descriptor: int, message: object) -> None:
    if descriptor >= 0:
        with contextlib.suppress(OSError):
            os.write(descriptor, json.dumps(message).encode() + b"\n")


def log_settings(values: Values) -> LogSettings:
    """How a part reaches the log and how it lives there; a gateway has a lease of its own length."""
    return LogSettings(
        url=values["log_url"],
        private=values["private_log"],
        heartbeat_ttl_ms=round(values.get("heartbeat_ttl_secs", 1.2) * 1000),
        gateway_ttl_ms=round(values.get("gateway_heartbeat_ttl_secs", 10.0) * 1000),
    )


# -- gateway -----------------------------------------------------------------------------------------------------------


async def _gateway(log: EventLog, values: Values) -> tuple[dict[str, str], Stop]:
    from gateway.app import GatewayApp

    settings = gateway_settings(values)
    cache_log = await _cache_log(values)
    app = GatewayApp(log, settings, log_settings(values), cache_log)
    await app.start()

    async def report_serving() -> None:
        await app.became_ready()
        _report(values["report_fd"], {"serving": True})

    reporting = asyncio.create_task(report_serving(), name="report serving")

    async def stop() -> bool:
        reporting.cancel()
        clean = await app.stop()
        if cache_log is not None:
            await cache_log.close()
        return clean

    return app.endpoints, stop


async def _cache_log(values: Values) -> EventLog | None:
    """Where responses are cached when that is not the log. Raises `StartupError` when it cannot be used."""
    from charonia.eventlog.redis import open_log

    url = cache_options(values, os.environ).url
    if not url:
        return None
    log = open_log(url)
    try:
        await log.open()
    except StartupError as error:
        raise StartupError(str(error).replace("the event log", "the response cache")) from None
    return log


def gateway_settings(values: Values) -> GatewaySettings:
    """`GatewaySettings` from option values. Raises `StartupError` for a malformed restriction."""
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
        reuse_http_port=values["reuse_http_port"],
        reuse_grpc_port=values["reuse_grpc_port"],
        http_max_input_size=values["http_max_input_size"],
        http_header_forward_pattern=values["http_header_forward_pattern"],
        grpc_header_forward_pattern=values["grpc_header_forward_pattern"],
        http_restricted_api=_restrictions("http-restricted-api", values["http_restricted_api"]),
        grpc_restricted_protocol=_restrictions("grpc-restricted-protocol", values["grpc_restricted_protocol"]),
        grpc_use_ssl=values["grpc_use_ssl"] or values["grpc_use_ssl_mutual"],
        grpc_use_ssl_mutual=values["grpc_use_ssl_mutual"],
        grpc_server_cert=values["grpc_server_cert"],
        grpc_server_key=values["grpc_server_key"],
        grpc_root_cert=values["grpc_root_cert"],
        grpc_infer_response_compression_level=values["grpc_infer_response_compression_level"],
        grpc_keepalive=keepalive,
        strict_readiness=values["strict_readiness"],
        executor_grace_s=values["executor_grace_secs"],
        exit_timeout_secs=values["exit_timeout_secs"],
        drain_delay_secs=values["drain_delay_secs"],
        shm_dir=values["shm_dir"],
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


def _restrictions(option: str, entries: tuple[str, ...]) -> tuple[tuple[tuple[str, ...], str, str], ...]:
    """`<group>[,<group>]:<header>=<value>` (H53): ((groups, header, value), ...); groups are checked by the gateway."""
    parsed = []
    for entry in entries:
        groups, colon, rest = entry.partition(":")
        header, equals, value = rest.partition("=")
        if not colon or not equals or not header:
            raise StartupError(f"--{option} must be <group>[,<group>]:<header>=<value>, got '{entry}'")
        parsed.append((tuple(groups.split(",")), header, value))
    return tuple(parsed)


# -- batcher -----------------------------------------------------------------------------------------------------------


async def _batcher(log: EventLog, values: Values) -> tuple[dict[str, str], Stop]:
    from batcher.app import BatcherApp

    app = BatcherApp(log, batcher_settings(values), log_settings(values))
    await app.start()

    async def stop() -> bool:
        await app.stop()
        return True

    return {}, stop


def batcher_settings(values: Values, *, colocated: bool = False) -> BatcherSettings:
    own_metrics = values["allow_metrics"] and not colocated
    return BatcherSettings(
        incarnation=incarnation("batcher"),
        exit_timeout_secs=values["exit_timeout_secs"],
        prefetch=0 if colocated else 1,
        shm_dir=values["shm_dir"],
        dead_letter_retention_size_bytes=values["dead_letter_retention_bytes"],
        metrics_port=values["metrics_port"] if own_metrics and not values["metrics_socket"] else -1,
        metrics_address=values["metrics_address"] or "127.0.0.1",
        metrics_socket=values["metrics_socket"] if own_metrics else "",
        metrics=metrics_settings(values),
        joint_metrics=bool(values["metrics_socket"]),
        response_cache_size_bytes=cache_options(values, os.environ).size_bytes,
    )


# -- webhooks ----------------------------------------------------------------------------------------------------------


async def _webhooks(log: EventLog, values: Values) -> tuple[dict[str, str], Stop]:
    from gateway.webhooks.app import WebhooksApp

    app = WebhooksApp(log, webhook_settings(values), log_settings(values))
    await app.start()
    return {}, app.stop


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


# -- executor ----------------------------------------------------------------------------------------------------------


async def _executor(log: EventLog, values: Values) -> tuple[dict[str, str], Stop]:
    from charonia.eventlog.colocated import ColocatedLog
    from charonia.eventlog.memory import MemoryLog
    from executors.app import ExecutorApp
    from executors.watchdog import watch_loop

    watching = asyncio.create_task(watch_loop(), name="watchdog")
    settings = executor_settings(values)
    shared = log_settings(values)
    if not settings.hosts_batcher:
        executor = ExecutorApp(log, settings, shared)
        executor.service.on_failure = _stop_myself
        await executor.start()

        async def stop_alone() -> bool:
            clean = await executor.stop()
            watching.cancel()
            if executor.service.failed:
                await _end_now(log)
            return clean

        return {}, stop_alone

    from batcher.app import BatcherApp

    joint = ColocatedLog(log, MemoryLog())
    batcher = BatcherApp(joint, batcher_settings(values, colocated=True), shared, local_executor=settings.incarnation)
    executor = ExecutorApp(joint, settings, shared, control=batcher.control)
    executor.service.on_failure = _stop_myself
    executor.add_metrics(batcher.metrics.render)
    # the batcher first: whoever is ready with models must find somebody who decides for them
    await batcher.start()
    await executor.start()

    async def stop() -> bool:
        clean = await executor.stop()
        await batcher.stop()
        await executor.service.say_last_words()
        watching.cancel()
        if executor.service.failed:
            await _end_now(log)
        return clean

    return {}, stop


def _stop_myself() -> None:
    """As if told to from outside; the exit status says that something failed, so that a supervisor starts it again."""
    signal.raise_signal(signal.SIGTERM)


async def _end_now(log: EventLog) -> None:
    """End the process without the interpreter's orderly end, which would run into a thread that hangs, and abort."""
    with contextlib.suppress(Exception):
        await log.close()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(1)


def executor_settings(values: Values) -> ExecutorSettings:
    """`ExecutorSettings` from option values. Raises `StartupError` for values that cannot work."""
    mode = values["model_control_mode"]
    if mode not in ("none", "poll", "explicit"):
        raise StartupError(f"--model-control-mode must be none, poll or explicit, got '{mode}'")
    if mode == "poll" and values["repository_poll_secs"] <= 0:
        raise StartupError(f"--repository-poll-secs must be greater than 0, got {values['repository_poll_secs']:g}")
    load = values["load_model"]
    if "*" in load and len(load) > 1:
        raise StartupError("Wildcard model name '*' must be the ONLY startup model if specified at all.")
    if load and mode != "explicit":
        raise StartupError("Use of '--load-model' requires setting '--model-control-mode=explicit' as well.")
    backend_config: dict[str, dict[str, str]] = {}
    for entry in values["backend_config"]:
        backend, comma, setting = entry.partition(",")
        key, equals, value = setting.partition("=")
        if not comma or not equals:
            raise StartupError(f"--backend-config must be <backend>,<key>=<value>, got '{entry}'")
        backend_config.setdefault(backend, {})[key] = value
    if values["backend_directory"]:
        backend_config.setdefault("", {})["backend-directory"] = values["backend_directory"]
    if values["state_dir"]:
        where = str(Path(values["state_dir"]).expanduser().absolute() / "environments")
        backend_config.setdefault("", {}).setdefault("environment-cache-dir", where)
    for option in ("cuda-memory-pool-byte-size", "cuda-virtual-address-size"):
        check_device_pools(option, values[option.replace("-", "_")])
    strict = values["strict_model_config"]
    if strict is not None:
        _log.warning("--strict-model-config is the old spelling of --disable-auto-complete-config")
    placed = placement_options(values)
    return ExecutorSettings(
        incarnation=incarnation("executor"),
        model_repository=values["model_repository"],
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
        model_config_name=values["model_config_name"],
        backend_config=backend_config,
        metrics_port=values["metrics_port"] if values["allow_metrics"] and not values["metrics_socket"] else -1,
        metrics_address=values["metrics_address"] or "127.0.0.1",
        metrics_socket=values["metrics_socket"] if values["allow_metrics"] else "",
        metrics=metrics_settings(values),
        response_cache_size_bytes=cache_options(values, os.environ).size_bytes,
        hosts_batcher=values["with_batcher"],
        rate_limit=rate_limited(values["rate_limit"]),
        rate_limit_resources=rate_limits(values["rate_limit_resource"]),
        host_policies=host_policies(values["host_policy"]),
    )
