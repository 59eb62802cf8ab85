"""Composes one webhook sender, which shares the models with the other senders. Only here its parts meet."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from charonia.eventlog.control import ControlPlane
from charonia.eventlog.membership import Membership, preferred_owner
from charonia.eventlog.port import EventLog
from charonia.metrics.endpoint import MetricsEndpoint, render
from charonia.metrics.part_health import Health, leased
from charonia.options.settings import LogSettings, WebhookSettings

from .addresses import Allowed
from .keyring import Keyring
from .posting import Poster
from .sender import Sender


class _Sent(Collector):
    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def collect(self) -> Iterable[Metric]:
        deliveries = CounterMetricFamily(
            "charonia_webhook_deliveries", "Calls of webhooks, by how they ended", labels=["outcome"]
        )
        for outcome, count in self._sender.outcomes.items():
            deliveries.add_metric([outcome], count)
        yield deliveries
        yield GaugeMetricFamily(
            "charonia_webhook_pending", "Webhooks of ended jobs still to be delivered", value=self._sender.pending
        )


def render_metrics(sender: Sender) -> bytes:
    """The metrics of one sender in text exposition format 0.0.4."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Sent(sender))
    return render(registry)


ROLE = "webhooks"

_GRACE_S = 2.0
"""How long running calls may take when the sender stops."""


class WebhooksApp:
    """One sender process."""

    def __init__(self, log: EventLog, settings: WebhookSettings, log_settings: LogSettings) -> None:
        """Raises `StartupError` for secrets or allowances that cannot be used."""
        self._settings = settings
        self._log_is_private = log_settings.private
        allowed = Allowed.parse(settings.allow)
        keyring = Keyring(settings.secrets)
        self._control = ControlPlane(
            log,
            check_interval_ms=log_settings.heartbeat_interval_ms,
            incarnation=settings.incarnation,
            stall_limit_s=log_settings.stall_limit_s,
        )
        self.membership = Membership(
            log,
            ROLE,
            settings.incarnation,
            interval_ms=log_settings.heartbeat_interval_ms,
            ttl_ms=log_settings.heartbeat_ttl_ms,
        )
        self.membership.on_new_epoch.append(self._control.begin_anew)
        self._control.catalog.process_listeners.append(self.membership.hear)
        self.membership.on_beat.append(self._control.on_beat)
        self._poster = Poster(allowed, timeout_s=settings.timeout_s, agent=settings.agent)
        self.sender = Sender(
            log,
            self._mine,
            self._poster,
            keyring,
            allowed,
            first_retry_s=settings.first_retry_s,
            concurrency=settings.concurrency,
            concurrency_per_host=settings.concurrency_per_host,
        )
        self.health = Health("it starts", leased(self.membership.is_leased))
        self._endpoint = MetricsEndpoint(
            self._render,
            address=settings.metrics_address,
            port=settings.metrics_port,
            socket_path=settings.metrics_socket,
            unready=self.health.unready,
        )

    async def start(self) -> None:
        await self._control.start()
        if self._log_is_private:
            for departure in self._control.departures():
                await self._control.announce(departure)
                self._control.catalog.apply(departure)
        await self.membership.start()
        self.sender.start()
        await self._endpoint.start()
        self.health.serves()

    async def stop(self) -> bool:
        """Leave; other senders deliver the rest. Returns True."""
        self.health.drains()
        await self.sender.close(min(self._settings.exit_timeout_secs, _GRACE_S))
        with contextlib.suppress(Exception):
            await self.membership.leave("drained")
        await self._endpoint.close()
        await self._control.close()
        self._poster.close()
        return True

    def _mine(self, models: list[str]) -> list[str]:
        me = self._settings.incarnation
        senders = {p.incarnation for p in self._control.catalog.processes.values() if p.role == ROLE} | {me}
        return [model for model in models if preferred_owner(model, senders) == me]

    def _render(self) -> bytes:
        return render_metrics(self.sender)
