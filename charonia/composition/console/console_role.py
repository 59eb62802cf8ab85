"""Runs the console in this process (`charonia console`): finds the log and the metrics, and serves its pages.

It joins nothing, and without `--console-actions` it writes nothing to the log: so it may come and go, and run on any
machine that reaches the log.
`serve` starts one behind its metrics port (`console_part`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from charonia.composition.logs import configure_logging
from charonia.composition.roles import check_servers, check_urls, close_log, open_blobs
from charonia.composition.state_directory import ENDPOINTS, default_state_dir
from charonia.errors import PermissionDenied, StartupError
from charonia.eventlog.port import EventLog, Limits
from charonia.facts.jobs import JobRecord
from charonia.options.role_settings import restricted_groups
from charonia.options.values import Values

from .console_part import INSTALL, is_installed
from .metric_pages import metrics_reader, metrics_urls

if TYPE_CHECKING:
    from charonia.console.stories.answer_delivery import WebhookCall
    from charonia.console.web_app import Identify
    from gateway.access.restrictions import Restrictions


def run_console(values: Values) -> int:
    """Serve the console until a signal; the exit code. Raises `StartupError`."""
    configure_logging(values)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it has a line for each reading
    if not is_installed():
        raise StartupError(f"the console {INSTALL}")
    return asyncio.run(_run(values))


async def _run(values: Values) -> int:
    from charonia.console.page_server import Place, serve_pages
    from charonia.console.readings import Sampler
    from charonia.console.web_app import ConsoleApp
    from charonia.eventlog.redis import open_log
    from charonia.eventlog.redis.server.address import with_password

    told = _told(values)
    url = with_password(values["log_url"] or told.get("log", ""), values["log_password_file"])
    if not url:
        raise StartupError(
            "charonia console needs --log-url, the URL of the log, or --state-dir, the state directory of a running "
            "'charonia serve'"
        )
    metrics = metrics_urls(values, told)
    identify = identification(values)
    check_urls(values)
    await check_servers(values, url)
    log = open_log(url)
    await open_blobs(log, values)
    await log.open()
    sampler = Sampler(log, metrics_reader(metrics))
    try:
        names = {name.lower() for name in (socket.gethostname(), *values["console_name"])}
        # who needs a key cannot be made to send it by a site that lets its name point here
        known = None if values["api_keys"] else names
        actions = values["console_actions"]
        app = ConsoleApp(log, sampler, read_statistics, identify, known, read_webhook=read_webhook, actions=actions)
        place = Place(values["console_socket"], values["console_address"], values["console_port"])
        try:
            await serve_pages(app.asgi, place, lambda where: _announce(values["report_fd"], where))
        finally:
            await app.close()
    finally:
        await sampler.close()
        await close_log(log)
    return 0


def _told(values: Values) -> Mapping[str, str]:
    """What a running `serve` wrote into its state directory; nothing where the log is given."""
    if values["log_url"]:
        return {}
    path = Path(values["state_dir"] or default_state_dir()).expanduser() / ENDPOINTS
    try:
        found: Mapping[str, str] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def identification(values: Values) -> Identify | None:
    """Who asks, and what they may change, as the gateways decide it (`--api-keys`, `--tenant-header`, restricted APIs);
    None where neither tenants nor restrictions are.
    """
    from charonia.console.viewers import Viewer
    from charonia.options.settings import GatewaySettings
    from gateway.access.tenants import Tenants
    from gateway.access.terms import TermsBook
    from gateway.requests.delivery import ANYONE, DeliveryOptions

    settings = GatewaySettings("console", tenant_header=values["tenant_header"], api_keys=values["api_keys"])
    tenants = Tenants.of(settings)
    terms = TermsBook(settings, tenants.bounds if tenants is not None else None)
    restricted = _restrictions(values)
    if tenants is None and not any(one.any for one in restricted):
        return None

    def identify(headers: Sequence[tuple[bytes, bytes]]) -> Viewer:
        caller = tenants.identify(headers) if tenants is not None else ANYONE
        return Viewer(
            caller.tenant,
            caller.scoped,
            acts=_has_key(restricted, "inference", headers),
            operates=not caller.scoped and _has_key(restricted, "model-repository", headers),
            limits=terms.of(DeliveryOptions(caller=caller)).limits if caller.scoped else Limits(),
        )

    return identify


def _restrictions(values: Values) -> tuple[Restrictions, ...]:
    """The headers that the gateways' APIs require. Raises `StartupError`."""
    from gateway.access.restrictions import GRPC_KEY_PREFIX, Restrictions

    http = restricted_groups("http-restricted-api", values["http_restricted_api"])
    grpc = restricted_groups("grpc-restricted-protocol", values["grpc_restricted_protocol"])
    return (
        Restrictions(http, PermissionDenied),
        Restrictions(grpc, PermissionDenied, word="protocol", header_prefix=GRPC_KEY_PREFIX),
    )


def _has_key(restricted: Sequence[Restrictions], group: str, headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether the headers hold the keys of a group, those of HTTP and those of gRPC."""
    try:
        for one in restricted:
            one.check(group, headers)
    except PermissionDenied:
        return False
    return True


def read_statistics(name: str, version: int, counters: Mapping[str, int], memory: Mapping[str, int]) -> dict[str, Any]:
    """Triton's statistics of a version, as the gateways report them."""
    from gateway.reports.model_statistics import model_statistics

    return asdict(model_statistics(name, version, counters, memory))


async def read_webhook(log: EventLog, job: JobRecord) -> WebhookCall | None:
    """How far the webhook of an ended job has come, as its senders keep it; None where none is called."""
    from charonia.console.stories.answer_delivery import WebhookCall
    from gateway.webhooks.deliveries import Delivery, called, delivery_of

    if not called(job):
        return None
    found = await delivery_of(log, job.model, job.id) or Delivery()
    return WebhookCall(str(found.state), found.attempts, found.last_status, found.last_error, found.last_us)


def _announce(report_fd: int, where: str) -> None:
    """Say that it listens, to the supervisor or to the user."""
    if report_fd < 0:
        print(f"console  {where}", flush=True)  # noqa: T201
        return
    with contextlib.suppress(OSError):
        os.write(report_fd, json.dumps({"endpoints": {}, "ready": True}).encode() + b"\n")
