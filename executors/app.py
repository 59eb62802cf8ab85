"""Composes one executor: the only module that connects its parts and reads the environment."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from charonia.backend import MeteredBackend
from charonia.eventlog.control import ControlPlane
from charonia.eventlog.local_link import LocalLink
from charonia.eventlog.port import EventLog
from charonia.metrics.endpoint import MetricsEndpoint
from charonia.metrics.exposition import merge
from charonia.metrics.host_metrics import beside_host
from charonia.metrics.part_health import Health, leased
from charonia.options.settings import ExecutorSettings, LogSettings

from .backends.registry import BackendRegistry
from .host import owned_folders
from .host.devices import count_gpus, missing_gpu_warning
from .host.host_policy import HostPolicies
from .loading.loader import Loader
from .loading.placement_rules import Capabilities
from .metrics import ExecutorMetrics
from .repository.model_repository import ModelRepository
from .repository.remote.opening import RemoteRepositories
from .repository.repository_agents import RepositoryAgents
from .running.rate_limiter import RateLimiter
from .running.resource_grants import ResourceGrants
from .service import ExecutorService

_log = logging.getLogger(__name__)


def create(
    settings: ExecutorSettings,
    log: EventLog,
    log_settings: LogSettings | None = None,
    backends: BackendRegistry | None = None,
    control: ControlPlane | None = None,
    cache_log: EventLog | None = None,
    link: LocalLink | None = None,
) -> ExecutorService:
    """Return the executor's service. Raises `StartupError` for a repository that cannot be used.

    `control` is the control plane of another part of this process, for models that call models. `cache_log` stores
    cached responses, if not `log`. `link` leads to a batcher in this process.
    """
    registry = backends or BackendRegistry()
    gpus = count_gpus(os.environ)
    if warning := missing_gpu_warning(gpus):
        _log.warning("%s", warning)
    repository = ModelRepository(
        settings.model_repository,
        config_name=settings.model_config_name or None,
        namespacing=settings.model_namespacing,
        open_remote=RemoteRepositories(os.environ, settings.repository_copies).open,
    )
    loader = Loader(
        registry,
        gpus=gpus,
        auto_complete=not settings.disable_auto_complete_config,
        backend_config=settings.backend_config,
        retries=settings.model_load_retry_count,
        resource_grants=ResourceGrants(RateLimiter(settings.rate_limit_resources)) if settings.rate_limit else None,
        host_policies=HostPolicies(settings.host_policies),
        agents=RepositoryAgents(settings.repoagent_directory),
        require_sandbox=settings.require_sandbox,
        native_models=settings.allow_native_models,
    )
    return ExecutorService(
        log,
        settings,
        log_settings or LogSettings(),
        repository=repository,
        loader=loader,
        capabilities=Capabilities(registry, gpus=gpus, configured=settings.labels),
        metrics=ExecutorMetrics(
            settings.metrics, caches=bool(settings.response_cache_size_bytes), joint=bool(settings.metrics_socket)
        ),
        control=control,
        cache_log=cache_log,
        link=link,
    )


_FAILED_DRAIN_S = 5.0
"""Time for the other batches of an executor that must end because one hangs: its queued requests wait for it."""


class ExecutorApp:
    """One executor with its metrics endpoint. `backends` may contain existing ones; the rest is as in `create`."""

    def __init__(
        self,
        log: EventLog,
        settings: ExecutorSettings,
        log_settings: LogSettings,
        backends: BackendRegistry | None = None,
        control: ControlPlane | None = None,
        cache_log: EventLog | None = None,
        link: LocalLink | None = None,
    ) -> None:
        self._settings = settings
        self._renderers: list[Callable[[], bytes]] = []
        self._backends = backends or BackendRegistry()
        self.service = create(settings, log, log_settings, self._backends, control, cache_log, link)
        self.health = Health("its first loads are not over", leased(self.service.membership.is_leased), self._failure)
        """Ready: it has joined, its first loads have ended (well or not), its lease is fresh, and it does not drain."""
        self._endpoint = MetricsEndpoint(
            self.render if settings.metrics_socket else beside_host(self.render, settings.metrics),
            address=settings.metrics_address,
            port=settings.metrics_port,
            socket_path=settings.metrics_socket,
            unready=self.health.unready,
        )

    def _failure(self) -> str:
        return "it has to end: a batch hangs, or its GPU is lost" if self.service.failed else ""

    def add_metrics(self, render: Callable[[], bytes]) -> None:
        """Add the metrics of a part hosted in this process (the batcher) to the page."""
        self._renderers.append(render)

    def render(self) -> bytes:
        """Return the metrics page."""
        metered = [
            backend.render_metrics for backend in self._backends.created() if isinstance(backend, MeteredBackend)
        ]
        pages = [self.service.metrics.render(), self.service.render_cache()]
        pages += [render() for render in (*self._renderers, *metered)]
        # several pages may have samples of one metric
        found = [page.decode() for page in pages if page]
        return merge(found, last=not self._settings.metrics_socket) if len(found) > 1 else pages[0]

    async def start(self) -> None:
        """Start to serve. Raises `StartupError` and leaves nothing running."""
        await self._start_endpoint()
        threading.Thread(target=_remove_abandoned_folders, name="abandoned folders", daemon=True).start()
        try:
            await self.service.start()
        except BaseException:
            await self._endpoint.close()
            raise
        self.health.serves()

    async def stop(self) -> bool:
        """Drain and close. Returns False after a failure, or when batches still ran after `--exit-timeout-secs`."""
        self.health.drains()
        timeout_s = self._settings.exit_timeout_secs
        clean = await self.service.drain(min(timeout_s, _FAILED_DRAIN_S) if self.service.failed else timeout_s)
        clean = clean and not self.service.failed
        # what outlasted the drain gets no second time-out
        await self.service.close(self._settings.exit_timeout_secs if clean else 1.0)
        await self._endpoint.close()
        return clean

    async def _start_endpoint(self) -> None:
        if self._settings.metrics_port >= 0 or self._settings.metrics_socket:
            await self._endpoint.start()


def _remove_abandoned_folders() -> None:
    found = owned_folders.remove_abandoned()
    if found:
        _log.info("removed %d temporary folders of executors that were killed", len(found))
