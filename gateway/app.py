"""Composes one gateway: fronts over the service over the log. The only place where its parts meet."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Protocol

from charonia.eventlog.control import ControlPlane
from charonia.eventlog.membership import Membership
from charonia.eventlog.payloads import PayloadDirectory
from charonia.eventlog.port import EventLog
from charonia.metrics.endpoint import MetricsEndpoint
from charonia.metrics.host_metrics import beside_host
from charonia.options.settings import GatewaySettings, LogSettings

from .listening import bound
from .service import GatewayService
from .tracing.writer import trace_writer

_log = logging.getLogger(__name__)


class Front(Protocol):
    """What every front can do."""

    port: int

    async def start(self) -> None: ...

    async def stop_accepting(self) -> None: ...

    async def close(self, grace_s: float) -> None: ...


def _fronts(settings: GatewaySettings, handler: GatewayService) -> dict[str, tuple[str, Front]]:
    """The fronts that are on, by name, with their address; the libraries of the others are never loaded."""
    fronts: dict[str, tuple[str, Front]] = {}
    if settings.http_port >= 0:
        from .http.server import HttpFront

        fronts["http"] = (settings.http_address, HttpFront(settings, handler))
    if settings.grpc_port >= 0:
        fronts["grpc"] = (settings.grpc_address, _grpc_front(settings, handler))
    return fronts


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
        self.membership.say_again.append(self.service.say_weights)
        if self.service.payloads is not None:
            self.membership.say_again.append(self.service.payloads.renew)
            self.service.payloads.leased = self.membership.is_leased
        self.service.metrics.log_epoch_changes = lambda: self.membership.epoch_changes
        self._fronts = _fronts(settings, self.service)
        self._metrics = MetricsEndpoint(
            self.service.metrics.render
            if settings.metrics_socket
            else beside_host(self.service.metrics.render, settings.metrics),
            address=settings.metrics_address,
            port=settings.metrics_port,
            socket_path=settings.metrics_socket,
        )
        self.endpoints: dict[str, str] = {}

    async def start(self) -> None:
        """Bind the fronts and join. Raises `StartupError` when a port is taken."""
        self._payloads.open()
        await self._control.start()
        if self._log_is_private:
            for departure in self._control.departures():  # the batcher tells the others
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

    async def _first_loads(self) -> None:
        """Wait for the first loads of the executors that `serve` starts, as clients wait for the ports (R30).

        A port that is taken is said before: loads may take minutes.
        """
        wanted = self._settings.await_executors
        if not wanted:
            return
        settings = self._settings
        for address, port, service, reuse in (
            (settings.http_address, settings.http_port, "HTTP", settings.reuse_http_port),
            (settings.grpc_address, settings.grpc_port, "GRPC", settings.reuse_grpc_port),
        ):
            if port > 0:
                bound(address.strip("[]"), port, service=service, reuse_port=reuse).close()
        _log.info("the ports open when %d executors have loaded their models", wanted)
        while len(self._control.catalog.loaded_executors()) < wanted:
            await self._control.changed()

    async def became_ready(self) -> None:
        """Wait until readiness is true for the first time."""
        while not self.service.ready():
            await self._control.changed()

    async def stop(self) -> bool:
        """Drain and leave: False when requests were still open after `exit_timeout_secs` (R41)."""
        timeout_s = self._settings.exit_timeout_secs
        self.service.leave_rotation()
        await asyncio.sleep(self._settings.drain_delay_secs)
        self.service.begin_drain()
        fronts = [front for _, front in self._fronts.values()]
        for front in fronts:
            await front.stop_accepting()
        finished = True
        try:
            await asyncio.wait_for(self.service.drained(), timeout_s)
        except TimeoutError:
            finished = False
        for front in fronts:
            await front.close(1.0 if finished else 0.0)
        with contextlib.suppress(Exception):
            await self.membership.leave("drained")
        await self.service.close()
        await self._metrics.close()
        await self._control.close()
        self._payloads.close()
        return finished
