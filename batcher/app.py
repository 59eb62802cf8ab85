"""Composes one batcher, alone or inside an executor's process. The only place where its parts meet."""

from __future__ import annotations

import contextlib
import os

from charonia.eventlog.control import ControlPlane
from charonia.eventlog.local_link import LocalLink
from charonia.eventlog.membership import Membership
from charonia.eventlog.port import EventLog
from charonia.metrics.endpoint import MetricsEndpoint
from charonia.metrics.host_metrics import beside_host
from charonia.metrics.log_memory import LogMemory
from charonia.metrics.part_health import Health, leased
from charonia.options.settings import BatcherSettings, LogSettings

from .metrics import BatcherMetrics
from .scheduling.sequences.sequence_dispatch import Delays
from .service import BatcherService


class BatcherApp:
    """One batcher. `link` leads to the executor in this process, if there is one. `control` is its view of all
    processes, for other parts of this process; `cache_log` holds cached responses when the log does not.
    """

    def __init__(
        self,
        log: EventLog,
        settings: BatcherSettings,
        log_settings: LogSettings,
        *,
        link: LocalLink | None = None,
        cache_log: EventLog | None = None,
    ) -> None:
        self._log_is_private = log_settings.private
        self.control = ControlPlane(
            log,
            check_interval_ms=log_settings.heartbeat_interval_ms,
            incarnation=settings.incarnation,
            stall_limit_s=log_settings.stall_limit_s,
        )
        self.membership = Membership(
            log,
            "batcher",
            settings.incarnation,
            interval_ms=log_settings.heartbeat_interval_ms,
            ttl_ms=log_settings.heartbeat_ttl_ms,
        )
        delays = Delays(_hook("TRITONSERVER_DELAY_SCHEDULER"), _hook("TRITONSERVER_BACKLOG_DELAY_SCHEDULER"))
        self.service = BatcherService(log, self.control, settings, link=link, delays=delays, cache_log=cache_log)
        self.membership.on_new_epoch.append(self._begin_anew)
        self.control.catalog.process_listeners.append(self.membership.hear)
        self.membership.on_beat.append(self.control.on_beat)
        self.metrics = BatcherMetrics(
            self.service, self.control.catalog, settings.metrics, joint=settings.joint_metrics
        )
        if link is None:
            self.metrics.log_epoch_changes = lambda: self.membership.epoch_changes
        self._log_memory = self.metrics.log_memory = LogMemory(log)
        self.health = Health("it starts", leased(self.membership.is_leased), self._takeover)
        """Ready: it has joined, its lease is fresh, it is not taking over a model, and it does not drain."""
        self._endpoint = MetricsEndpoint(
            self.metrics.render if settings.metrics_socket else beside_host(self.metrics.render, settings.metrics),
            address=settings.metrics_address,
            port=settings.metrics_port,
            socket_path=settings.metrics_socket,
            unready=self.health.unready,
        )

    def _takeover(self) -> str:
        """A roll goes on once the models of the batcher that left have an owner: one that cannot read them stops it."""
        taking = self.service.taking
        return f"it is taking over model '{min(taking)}'" if taking else ""

    def _begin_anew(self) -> None:
        """The log has a new epoch: this batcher owns no queue until it acquires one there."""
        self.service.begin_anew()
        self.control.begin_anew()

    async def start(self) -> None:
        await self.control.start()
        await self.membership.start()
        await self.service.start()
        if self._log_is_private:
            for departure in self.control.departures():
                await self.control.announce(departure)
        await self._endpoint.start()
        self.health.serves()

    async def stop(self) -> None:
        """Release the models and leave."""
        self.health.drains()
        await self.service.drain()
        with contextlib.suppress(Exception):
            await self.membership.leave("drained")
        await self.service.close()
        await self._endpoint.close()
        await self._log_memory.close()
        await self.control.close()


def _hook(name: str) -> int:
    """Reads an integer hook of Triton's own tests (S43); 0 when it is not set."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0
