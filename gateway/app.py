"""Composes one gateway: fronts over the service over the log. Only here its parts meet."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from charonia.eventlog.control import ControlPlane
from charonia.eventlog.membership import Membership
from charonia.eventlog.payloads import PayloadDirectory
from charonia.eventlog.port import EventLog
from charonia.metrics.endpoint import MetricsEndpoint, scrape
from charonia.metrics.host_metrics import beside_host
from charonia.options.settings import GatewaySettings, LogSettings

from .listening import bound
from .reports.start_progress import StartProgress
from .service import GatewayService
from .tracing.writer import trace_writer

if TYPE_CHECKING:
    from .openai.openai_application import OpenAiInterface

_log = logging.getLogger(__name__)

_PROGRESS_S, _MOST_PROGRESS_S = 5.0, 60.0
"""Intervals of the log line about what the ports wait for: the first, doubled each time up to the second."""


class Front(Protocol):
    """The interface of every front."""

    port: int

    async def start(self) -> None: ...

    async def stop_accepting(self) -> None: ...

    async def close(self, grace_s: float) -> None: ...


Page = Callable[[], Awaitable[bytes | None]]
"""Returns a metrics page; None where there is none."""


def _openai(settings: GatewaySettings, handler: GatewayService, metrics: Page, log: EventLog) -> OpenAiInterface | None:
    """The OpenAI API, which is served on one or two of the fronts; None where it is off."""
    if settings.openai is None:
        return None
    from .openai.openai_application import OpenAiInterface

    return OpenAiInterface(settings, handler, metrics, log)


def _fronts(
    settings: GatewaySettings, handler: GatewayService, metrics: Page, beside: OpenAiInterface | None = None
) -> dict[str, tuple[str, Front]]:
    """The enabled fronts by name, with their address; libraries of the others are not loaded."""
    fronts: dict[str, tuple[str, Front]] = {}
    if (openai := settings.openai) is not None and beside is not None:
        from .openai.openai_application import OpenAiApplication

        handler.metrics.more.append(beside.serving.counts.collect)
    if settings.http_port >= 0:
        from .http.server import HttpFront
        from .http2.http_connection import http2

        front = HttpFront(settings, handler, http2)
        if openai is not None and openai.on_http_port:
            front.application.beside = beside
        fronts["http"] = (settings.http_address, front)
    if openai is not None and beside is not None and openai.port >= 0:
        from .http.server import HttpFront
        from .http2.http_connection import http2

        own = replace(settings, http_address=openai.address, http_port=openai.port, http_socket="")
        application = OpenAiApplication(own, handler, beside)
        front = HttpFront(own, handler, http2, application=application, service="OpenAI")
        fronts["openai"] = (openai.address, front)
    if settings.grpc_port >= 0:
        fronts["grpc"] = (settings.grpc_address, _grpc_front(settings, handler))
    if (sagemaker := settings.sagemaker) is not None:
        from .clouds.sagemaker import SageMakerApplication
        from .http.server import HttpFront

        own = _of_cloud(settings, sagemaker.address, sagemaker.port)
        of_sagemaker = SageMakerApplication(own, handler, sagemaker)
        front = HttpFront(own, handler, application=of_sagemaker, service="SageMaker")
        fronts["sagemaker"] = (sagemaker.address, front)
    if (vertex_ai := settings.vertex_ai) is not None:
        from .clouds.vertex_ai import VertexAiFront

        own = _of_cloud(settings, vertex_ai.address, vertex_ai.port)
        fronts["vertex-ai"] = (vertex_ai.address, VertexAiFront(own, handler, vertex_ai, metrics))
    return fronts


def _of_cloud(settings: GatewaySettings, address: str, port: int) -> GatewaySettings:
    """The HTTP settings that a cloud's front shares: limits and restrictions, but not TLS, sockets and forwarding."""
    return replace(
        settings,
        http_address=address,
        http_port=port,
        http_socket="",
        http_tls=None,
        http_header_forward_pattern="",
    )


def _grpc_front(settings: GatewaySettings, handler: GatewayService) -> Front:
    if settings.grpc_front == "grpcio":
        from .grpc.grpcio_server import GrpcFront

        return GrpcFront(settings, handler)
    from .grpc.native.native_server import NativeGrpcFront

    return NativeGrpcFront(settings, handler)


class GatewayApp:
    """One gateway process. `endpoints` maps front to host:port once started."""

    def __init__(
        self,
        log: EventLog,
        settings: GatewaySettings,
        log_settings: LogSettings,
        cache_log: EventLog | None = None,
    ) -> None:
        self._settings = settings
        self._log_is_private = log_settings.private
        self._control = ControlPlane(
            log,
            check_interval_ms=log_settings.heartbeat_interval_ms,
            incarnation=settings.incarnation,
            stall_limit_s=log_settings.stall_limit_s,
        )
        self.membership = Membership(
            log,
            "gateway",
            settings.incarnation,
            interval_ms=log_settings.heartbeat_interval_ms,
            ttl_ms=log_settings.gateway_ttl_ms,
        )
        self._payloads = PayloadDirectory(settings.shm_dir, settings.incarnation)
        self.service = GatewayService(log, self._control, settings, self._payloads, cache_log, trace_writer(settings))
        self.membership.on_new_epoch.append(self.service.begin_anew)
        self._control.catalog.process_listeners.append(self.membership.hear)
        self.membership.on_beat.append(self._control.on_beat)
        self.membership.say_again.append(self.service.publish_weights)
        self.membership.say_again.append(self.service.publish_routes)
        if self.service.payloads is not None:
            self.membership.say_again.append(self.service.payloads.renew)
            self.service.payloads.leased = self.membership.is_leased
        self.service.metrics.log_epoch_changes = lambda: self.membership.epoch_changes
        self._openai = _openai(settings, self.service, self._page, log)
        self._fronts = _fronts(settings, self.service, self._page, self._openai)
        self._render = (
            self.service.metrics.render
            if settings.metrics_socket
            else beside_host(self.service.metrics.render, settings.metrics)
        )
        self._metrics = MetricsEndpoint(
            self._render,
            address=settings.metrics_address,
            port=settings.metrics_port,
            socket_path=settings.metrics_socket,
            unready=self._unready,
        )
        self.endpoints: dict[str, str] = {}

    def _unready(self) -> str:
        """On the metrics port, the same as `/v2/health/ready`."""
        return "" if self.service.ready() else "the gateway is not ready, as at /v2/health/ready"

    async def _page(self) -> bytes | None:
        """The metrics of the whole server under `serve`, otherwise of this gateway."""
        settings = self._settings
        if settings.metrics_port < 0 and not settings.metrics_socket:
            return None
        for front in (settings.vertex_ai, settings.openai):
            if front is not None and front.metrics_socket:
                return (await scrape(Path(front.metrics_socket))).encode() or None
        page = self._render()
        return page if isinstance(page, bytes) else await page

    async def start(self) -> None:
        """Bind the fronts and join. If a port is taken, raises `StartupError` and undoes all."""
        try:
            await self._start()
        except BaseException:
            with contextlib.suppress(Exception):
                await self._close(0.0)
            raise

    async def _start(self) -> None:
        self._payloads.open()
        await self._control.start()
        if self._log_is_private:
            for departure in self._control.departures():  # the batcher announces the others
                self._control.catalog.apply(departure)
        await self.service.start()
        await self._first_loads()
        for name, (address, front) in self._fronts.items():
            await front.start()
            self.endpoints[name] = f"{address}:{front.port}"
        await self._metrics.start()
        if self._metrics.port:
            self.endpoints["metrics"] = f"{self._settings.metrics_address}:{self._metrics.port}"
        await self.membership.start()
        if self._openai is not None and self._openai.stored is not None:
            self._openai.stored.start()

    async def _first_loads(self) -> None:
        """Wait for the first loads of the executors that `serve` starts; clients wait for the ports meanwhile (R30).

        A port that is taken is reported before, as loads may take minutes.
        """
        wanted = self._settings.await_executors
        if not wanted:
            return
        settings = self._settings
        for address, port, service, reuse in (
            (settings.http_address, settings.http_port, "HTTP", settings.reuse_http_port),
            (settings.grpc_address, settings.grpc_port, "GRPC", settings.reuse_grpc_port),
            *(
                (other.address, other.port, name, settings.reuse_http_port)
                for name, other in (
                    ("SageMaker", settings.sagemaker),
                    ("Vertex AI", settings.vertex_ai),
                    ("OpenAI", settings.openai),
                )
                if other is not None
            ),
        ):
            if port > 0:
                bound(address.strip("[]"), port, service=service, reuse_port=reuse).close()
        _log.info("the ports open when %d executors have loaded their models", wanted)
        await self.loaded(wanted)

    async def loaded(self, executors: int) -> None:
        """Wait until this many executors have ended their first loads; logs the progress."""
        catalog, progress = self._control.catalog, StartProgress(executors)
        clock = asyncio.get_running_loop().time
        pause_s = _PROGRESS_S
        say_s = clock() + pause_s
        while len(catalog.loaded_executors()) < executors:
            progress.see(catalog.executors, clock())
            try:
                async with asyncio.timeout_at(say_s):
                    await self._control.changed()
            except TimeoutError:
                _log.info("%s", progress.text(catalog.executors, clock()))
                pause_s = min(2 * pause_s, _MOST_PROGRESS_S)
                say_s = clock() + pause_s

    async def became_ready(self) -> None:
        """Wait until the gateway is ready for the first time."""
        while not self.service.ready():
            await self._control.changed()

    async def stop(self) -> bool:
        """Drain and leave; returns False if requests were still open after `exit_timeout_secs` (R41)."""
        timeout_s = self._settings.exit_timeout_secs
        self.service.leave_rotation()
        await asyncio.sleep(self._settings.drain_delay_secs)
        self.service.begin_drain()
        fronts = [front for _, front in self._fronts.values()]
        for front in fronts:
            await front.stop_accepting()
        if self._openai is not None and self._openai.stored is not None:
            await self._openai.stored.close()
        finished = True
        try:
            await asyncio.wait_for(self.service.drained(), timeout_s)
        except TimeoutError:
            finished = False
        await self._close(1.0 if finished else 0.0)
        return finished

    async def _close(self, grace_s: float) -> None:
        for _, front in self._fronts.values():
            await front.close(grace_s)
        if self._openai is not None:
            await self._openai.close()
        with contextlib.suppress(Exception):
            await self.membership.leave("drained")
        await self.service.close()
        await self._metrics.close()
        await self._control.close()
        await asyncio.to_thread(self._payloads.close)
