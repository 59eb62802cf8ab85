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
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from charonia import failpoints
from charonia.clock import monotonic_ns
from charonia.errors import StartupError
from charonia.eventlog.membership import LeaseKeeper
from charonia.eventlog.port import EventLog
from charonia.metrics.stalls import watch_stalls
from charonia.offload.time_slices import LOOP_SLICE_NS, set_time_slice
from charonia.options.cache_options import cache_options
from charonia.options.role_settings import (
    batcher_settings,
    check_role,
    executor_settings,
    gateway_settings,
    log_settings,
    webhook_settings,
    without_warnings,
)
from charonia.options.values import GATEWAY, WEBHOOKS, Values
from charonia.tasks import Tasks
from executors.host import owned_folders

from .gateways import check_gateway, unless_pipe
from .heartbeat_process import HeartbeatProcess, KeeperTerms
from .logs import configure_logging

if TYPE_CHECKING:
    from batcher.app import BatcherApp
    from charonia.eventlog.redis import ClusterLog, RedisLog
    from executors.backends.registry import BackendRegistry
    from gateway.app import GatewayApp

_log = logging.getLogger(__name__)

Stop = Callable[[], Awaitable[bool]]

_UNDO_S = 2.0
"""How long a start that is broken off may take to undo itself."""


def run_role(role: str, values: Values) -> int:
    """Run `role` until a signal stops it; the process's exit code. Raises `StartupError`."""
    configure_logging(values)
    failpoints.activate(values["fail_points"])
    if not values["log_url"]:
        raise StartupError(f"charonia {role} needs --log-url, the URL of the log all parts share")
    if role == WEBHOOKS:  # it reads no payloads: the server beside the log may not know it
        values = {**values, "blob_url": "", "blob_password_file": ""}
    if values["report_fd"] < 0:  # serve has checked those of its parts
        check_role(role, values)
        check_urls(values)
        if role == GATEWAY:
            check_gateway(values)
    keeper = HeartbeatProcess.fork(keeper_terms(values))  # before there are threads
    set_time_slice(LOOP_SLICE_NS, inherited=False)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_run(role, values, keeper))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(role, values, keeper))


def keeper_terms(values: Values) -> KeeperTerms:
    """How a process, whatever its role, keeps its leases. Raises `StartupError` for a password that cannot be read."""
    from charonia.eventlog.redis.server.address import with_password

    settings = log_settings(values)
    url = with_password(values["log_url"], values["log_password_file"])
    return KeeperTerms(url, settings.heartbeat_interval_ms / 1000, settings.stall_limit_s)


async def _run(role: str, values: Values, keeper: HeartbeatProcess) -> int:
    from charonia.eventlog.redis import open_log

    await check_servers(values, keeper.url)
    keeper.start()
    log = open_log(keeper.url, durability=values.get("durability", "memory"))
    await open_blobs(log, values)
    # of several parts that cannot reach a log which is not serve's own, one says so and the others are stopped
    await _open(log, patient=values["private_log"] or (values["report_fd"] >= 0 and role != "gateway"))
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    start = {"gateway": _gateway, "batcher": _batcher, "executor": _executor, "webhooks": _webhooks}[role]
    starting = asyncio.create_task(start(log, values, keeper), name=f"start {role}")
    stop_asked = asyncio.create_task(stopping.wait())
    await asyncio.wait([starting, stop_asked], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        await _break_off(starting)
    endpoints, stop = await starting
    _settle_garbage_collector()
    if values["debug_stalls"]:
        watch_stalls(values["debug_stalls"])
    _report(values["report_fd"], {"endpoints": endpoints, "ready": True})
    _log.info("%s is up%s", role, "".join(f", {name} on {where}" for name, where in endpoints.items()))
    await stop_asked
    clean = await stop()
    await keeper.close()
    await close_log(log)
    if not clean:
        _log.error("exit timeout: some work was still running after %d s", values["exit_timeout_secs"])
    return 0 if clean else 1


def check_urls(values: Values) -> None:
    """Check the URLs of the log and of the servers beside it, with the files that they need; connects to none. Raises
    `StartupError`.
    """
    from charonia.eventlog.redis.server.address import parse_address, with_password

    own = "unix:///server.sock"  # as that of serve's own log is
    parse_address(with_password(values["log_url"] or own, unless_pipe(values["log_password_file"])))
    if values["blob_password_file"] and not values["blob_url"]:
        raise StartupError("--blob-password-file needs --blob-url, the server it is the password of")
    with without_warnings():
        cache = _cache_url(values)
    blobs = _blob_url({**values, "blob_password_file": unless_pipe(values["blob_password_file"])})
    others = {"--blob-url": blobs if values["blob_url"] else "", "--cache-config": cache}
    for option, url in others.items():
        try:
            if url:
                parse_address(url)
        except StartupError as error:
            raise StartupError(str(error).replace("the event log URL", f"the URL of {option}")) from None


async def check_servers(values: Values, url: str) -> None:
    """Raises `StartupError` for servers that are not safe, where `--require-secure-log` asks for that.

    `url` is the log's with its password. serve's own log is a socket in its state directory.
    """
    if not values["require_secure_log"]:
        return
    from charonia.eventlog.redis.server.security import check_secure

    await check_secure(url)
    if values["blob_url"]:
        await check_secure(_blob_url(values), "the server of --blob-url")
    if cache := _cache_url(values):
        await check_secure(cache, "the response cache")


def _blob_url(values: Values) -> str:
    from charonia.eventlog.redis.server.address import with_password

    return with_password(values["blob_url"], values["blob_password_file"], "--blob-password-file")


def _cache_url(values: Values) -> str:
    """The URL of the cache's own server; "" where it has none, and for parts that do not use it."""
    return cache_options(values, os.environ).url if "cache_config" in values else ""


async def open_blobs(log: RedisLog | ClusterLog, values: Values) -> None:
    """Open the server beside the log, where there is one. Raises `StartupError`."""
    from charonia.eventlog.redis import open_log
    from charonia.eventlog.redis.blob_server import BlobServer

    if values["blob_url"]:
        log.blobs = BlobServer(open_log(_blob_url(values)))
        await log.blobs.open()


async def close_log(log: RedisLog | ClusterLog) -> None:
    """Close it and the server beside it, whatever state they are in."""
    with contextlib.suppress(Exception):
        await log.close()
        if log.blobs is not None:
            await log.blobs.close()


async def _break_off(starting: asyncio.Task[tuple[dict[str, str], Stop]]) -> None:
    """Stopped before it was up: nothing was promised yet. Ends the process unless the start failed by itself meanwhile.

    At once, because the thread in which a native library loads a model cannot be interrupted and would be waited for.
    """
    starting.cancel()
    await asyncio.wait([starting], timeout=_UNDO_S)
    if starting.done() and not starting.cancelled():
        return
    _exit(0)


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


# -- gateway -----------------------------------------------------------------------------------------------------------


async def _gateway(log: EventLog, values: Values, keeper: LeaseKeeper) -> tuple[dict[str, str], Stop]:
    app, end = await start_gateway(log, values, keeper)

    async def report_serving() -> None:
        await app.became_ready()
        _report(values["report_fd"], {"serving": True})

    tasks = Tasks()
    tasks.spawn(report_serving(), "report serving")

    async def stop() -> bool:
        tasks.cancel()
        return await end()

    return app.endpoints, stop


async def start_gateway(log: EventLog, values: Values, keeper: LeaseKeeper) -> tuple[GatewayApp, Stop]:
    """A gateway in this event loop, and how it drains and leaves. Raises `StartupError`."""
    from gateway.app import GatewayApp

    settings = gateway_settings(values)
    cache_log = await _cache_log(values)
    app = GatewayApp(log, settings, log_settings(values), cache_log)
    app.membership.keeper = keeper
    await app.start()

    async def stop() -> bool:
        clean = await app.stop()
        await _close(cache_log)
        return clean

    return app, stop


async def _cache_log(values: Values) -> EventLog | None:
    """Where responses are cached when that is not the log. Raises `StartupError` when it cannot be used."""
    from charonia.eventlog.redis import open_log

    url = _cache_url(values)
    if not url:
        return None
    log = open_log(url)
    try:
        await log.open()
    except StartupError as error:
        raise StartupError(str(error).replace("the event log", "the response cache")) from None
    return log


async def _close(cache_log: EventLog | None) -> None:
    if cache_log is not None:
        await cache_log.close()


# -- batcher -----------------------------------------------------------------------------------------------------------


async def _batcher(log: EventLog, values: Values, keeper: LeaseKeeper) -> tuple[dict[str, str], Stop]:
    from batcher.app import BatcherApp

    cache_log = await _cache_log(values)
    app = BatcherApp(log, batcher_settings(values), log_settings(values), cache_log=cache_log)
    app.membership.keeper = keeper
    await app.start()

    async def stop() -> bool:
        await app.stop()
        await _close(cache_log)
        return True

    return {}, stop


# -- webhooks ----------------------------------------------------------------------------------------------------------


async def _webhooks(log: EventLog, values: Values, keeper: LeaseKeeper) -> tuple[dict[str, str], Stop]:
    from gateway.webhooks.app import WebhooksApp

    app = WebhooksApp(log, webhook_settings(values), log_settings(values))
    app.membership.keeper = keeper
    await app.start()
    return {}, app.stop


# -- executor ----------------------------------------------------------------------------------------------------------


class ExecutorParts:
    """An executor, and the batcher in its process unless it is to have none.

    `backends` may hold some that exist already. `on_failure` is called when the executor has to end.
    """

    def __init__(
        self,
        log: EventLog,
        values: Values,
        on_failure: Callable[[], None],
        *,
        backends: BackendRegistry | None = None,
        cache_log: EventLog | None = None,
        keeper: LeaseKeeper | None = None,
    ) -> None:
        from charonia.eventlog.local_link import LocalLink
        from executors.app import ExecutorApp

        settings, shared = executor_settings(values), log_settings(values)
        self._batcher: BatcherApp | None = None
        link = control = None
        if settings.hosts_batcher:
            from batcher.app import BatcherApp

            link = LocalLink(settings.incarnation)
            own = batcher_settings(values, colocated=True)
            self._batcher = BatcherApp(log, own, shared, link=link, cache_log=cache_log)
            self._batcher.membership.keeper = keeper
            control = self._batcher.control
        self._executor = ExecutorApp(log, settings, shared, backends, control, cache_log, link)
        self._executor.service.on_failure = on_failure
        self._executor.service.membership.keeper = keeper
        if self._batcher is not None:
            self._executor.add_metrics(self._batcher.metrics.render)
            self._executor.health.add(self._batcher.health.unready)

    async def start(self) -> None:
        """Serve. Raises `StartupError`, then nothing is left running."""
        if self._batcher is None:
            await self._executor.start()
            return
        # the batcher first: an executor that is ready with models must find an owner for them
        await self._batcher.start()
        try:
            await self._executor.start()
        except BaseException:
            await self._batcher.stop()
            raise

    async def stop(self) -> bool:
        """Drain and leave; True: in time."""
        clean = await self._executor.stop()
        if self._batcher is not None:
            await self._batcher.stop()
            await self._executor.service.report_hung_batches()
        return clean

    @property
    def must_end(self) -> bool:
        """Whether something of a model still runs, or has failed so that the process is not to be trusted."""
        return self._executor.service.failed or self._executor.service.hangs


async def _executor(log: EventLog, values: Values, keeper: LeaseKeeper) -> tuple[dict[str, str], Stop]:
    from executors.host.watchdog import watch_loop

    tasks = Tasks()
    tasks.spawn(watch_loop(), "watchdog")
    cache_log = await _cache_log(values)
    parts = ExecutorParts(log, values, _stop_myself, cache_log=cache_log, keeper=keeper)
    await parts.start()

    async def stop() -> bool:
        clean = await parts.stop()
        await _close(cache_log)
        tasks.cancel()
        if parts.must_end:
            await _end_now(log, clean=clean)
        return clean

    return {}, stop


def _stop_myself() -> None:
    """As if told to from outside; the exit status says that something failed, so that a supervisor starts it again."""
    signal.raise_signal(signal.SIGTERM)


async def _end_now(log: EventLog, *, clean: bool) -> None:
    """End the process without the interpreter's orderly end, which would wait for a thread that hangs, or abort."""
    with contextlib.suppress(Exception):
        await log.close()
    _exit(0 if clean else 1)


def _exit(status: int) -> None:
    owned_folders.remove_rest()  # threads may be removing some of them, and are not waited for
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)
