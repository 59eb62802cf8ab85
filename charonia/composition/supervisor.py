"""`charonia serve`: private log, gateways, executors, their batcher, webhooks: started and stopped together.

The supervisor imports no library beyond the standard one, and of the services only what reads the names of repositories
(`executors.repository.remote.store`) and keys of webhooks, so that it starts at once and stays small. A part that dies
is started again, with back-off; one that cannot start at all ends the server with its own sentence.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from charonia.errors import StartupError, path_without_credentials
from charonia.eventlog.embedded import SharedProcessor, short_directory
from charonia.metrics.endpoint import MetricsEndpoint
from charonia.metrics.host_metrics import HostMetrics
from charonia.options.metrics_options import metrics_settings
from charonia.options.role_settings import check_settings
from charonia.options.values import BATCHER, CONSOLE, EXECUTOR, GATEWAY, WEBHOOKS, Values, render
from charonia.tasks import Tasks
from executors.repository.remote.store import is_remote, parse

from .children import STABLE_S, Child, backoff_s, descendants
from .console.console_part import ConsolePart, as_host, kept_off_by
from .gateways import check_gateway, share_ports, values_of_each
from .metrics_page import MetricsUnion, first_unready
from .private_log import PrivateLog
from .state_directory import ENDPOINTS, PROCESSES, StateDirectory

_log = logging.getLogger(__name__)
_SECOND_THOUGHT_S = 1.0
_STARTS = 3
_GRACE_S = 5.0
_CENSUS_S = 1.0


def serve(values: Values) -> int:
    """Run everything until a signal; the exit code. Raises `StartupError`."""
    return asyncio.run(Supervisor(values).run())


class Supervisor:
    """The parent of all parts."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._state = StateDirectory(values["state_dir"])
        self._runtime_dir = self._state.path
        self._shm_dir = ""
        self._children: list[Child] = []
        self._private_log: PrivateLog | None = None
        self._log_url = values["log_url"]
        self._stopping = False
        self._signalled_at_s = 0.0
        self._stop_wanted = asyncio.Event()
        self._hurry = asyncio.Event()
        self._started = asyncio.Event()
        self._held_ports: list[socket.socket] = []
        self._failed = ""
        self._endpoints: dict[str, str] = {}
        self._metrics: MetricsEndpoint | None = None
        self._joint_metrics: MetricsEndpoint | None = None
        self._metrics_union: MetricsUnion | None = None
        self._console: ConsolePart | None = None
        self._census: list[dict[str, Any]] = []
        self._processor = SharedProcessor()
        self._tasks = Tasks()

    async def run(self) -> int:
        _check_repositories(self._values["model_repository"])
        _check_values(self._values)
        lock = self._state.lock()
        self._state.clear()  # of one that was killed: others may listen where it did
        self._listen_to_signals()
        self._shm_dir = self._values["shm_dir"] or self._state.memory_directory()
        self._runtime_dir = short_directory(self._state.path)  # one that was killed is cleared away by its successor
        try:
            await self._start_log()
            self._start_children()
            await self._start_metrics()
            await self._start_here()
            self._tasks.spawn(self._take_census(), "census")
            await self._wait(self._started)
            if self._started.is_set() and not self._failed:
                self._announce()
                self._start_webhooks()
                await self._wait(None)
            clean = await self._stop()
            return 0 if clean and not self._failed else 1
        finally:
            await self._kill_all()
            shutil.rmtree(self._runtime_dir, ignore_errors=True)
            self._state.remove_memory()
            os.close(lock)

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        """The first signal drains, one that comes a second later or more no longer waits.

        Some parents send the same signal to a process and to its group: two at once are one wish.
        """
        now_s = asyncio.get_running_loop().time()
        if not self._stop_wanted.is_set():
            self._signalled_at_s = now_s
        elif now_s - self._signalled_at_s >= _SECOND_THOUGHT_S:
            self._hurry.set()
        self._stop_wanted.set()

    # -- starting -----------------------------------------------------------------------------------------------------

    async def _start_log(self) -> None:
        if self._log_url:
            return
        self._private_log = PrivateLog(
            self._state.path,
            self._values["log_server"],
            self._values["durability"],
            has_served=lambda: any(child.was_ready for child in self._children),
            failed=self._fail,
            changed=self._take_census_once,
        )
        await self._private_log.start()
        self._log_url = self._private_log.url

    @property
    def _joint_metrics_socket(self) -> str:
        """Where a gateway gets the page of all parts, for the clients of Vertex AI and of the OpenAI API's port."""
        asked = self._values["allow_vertex_ai"] or self._values["allow_openai"]
        wanted = asked and self._values["allow_metrics"]
        return str(self._runtime_dir / "metrics.joint") if wanted else ""

    def _part_values(self) -> Values:
        """What the parts are told."""
        values = {**self._values, "log_url": self._log_url, "private_log": self._private_log is not None, "config": ""}
        values["shm_dir"], values["state_dir"] = self._shm_dir, str(self._state.path)
        values["joint_metrics_socket"] = self._joint_metrics_socket
        values["await_executors"] = 0 if values["listen_while_loading"] else values["executors"]
        return values

    def _start_children(self) -> None:
        values = self._part_values()
        colocated = _is_colocated(values)
        self._add_gateways(values)
        if not colocated:
            self._add(BATCHER, BATCHER, values)
        for _ in range(values["executors"]):
            self._add(EXECUTOR, "executor+batcher" if colocated else EXECUTOR, {**values, "with_batcher": colocated})
        self._start_all(values)

    def _add_gateways(self, values: Values) -> None:
        """Add `--gateways` gateways; several share the ports that this process holds."""
        shared, self._held_ports = share_ports(values)
        for each in values_of_each(shared):
            self._add(GATEWAY, GATEWAY, each)

    async def _start_here(self) -> None:
        """For a supervisor that hosts a part in this process."""

    async def _stop_here(self, _roles: Sequence[str]) -> bool:
        """Drain and end what `_start_here` began of these roles; True: in time."""
        return True

    def _start_all(self, values: Values) -> None:
        for child in self._children:
            child.start()
        if values["allow_webhooks"]:
            self._add(WEBHOOKS, WEBHOOKS, {**values, "webhook_secrets": self._webhook_secrets()})
        self._take_census_once()

    def _webhook_secrets(self) -> str:
        """The file of secrets to sign with; made once when none is configured."""
        configured: str = self._values["webhook_secrets"]
        if configured:
            return str(Path(configured).absolute())
        return self._state.make_webhook_secret()

    def _start_webhooks(self) -> None:
        """Last: a gateway that is not ready must not hold up the parts that execute."""
        for child in self._children:
            if child.role == WEBHOOKS:
                child.start()
        self._take_census_once()

    def _add(self, role: str, name: str, values: Values) -> None:
        socket_path = str(self._runtime_dir / f"{role}-{len(self._children)}.metrics")
        own = {**values, "metrics_socket": socket_path if values["allow_metrics"] else ""}
        argv = [role, *render(role, own, os.environ)]
        child = Child(name, argv, self._on_report, self._on_exit)
        child.metrics_socket = Path(socket_path)
        self._children.append(child)

    async def _start_metrics(self) -> None:
        if not self._values["allow_metrics"]:
            return
        union = self._metrics_union = MetricsUnion(self._runtime_dir, HostMetrics(metrics_settings(self._values)))
        address = self._values["metrics_address"] or self._values["http_address"]
        self._console = self._make_console()
        forwarded = {} if self._console is None else {b"/console": self._console.forward}
        port = self._values["metrics_port"]
        self._metrics = MetricsEndpoint(
            union.render, address=address, port=port, forwarded=forwarded, unready=self._unready
        )
        await self._metrics.start()
        if path := self._joint_metrics_socket:
            self._joint_metrics = MetricsEndpoint(union.render, socket_path=path)
            await self._joint_metrics.start()
        self._endpoints["metrics"] = f"{address}:{self._metrics.port}"

    async def _unready(self) -> str:
        """Why the server is not ready: it starts, it stops, or one of its parts is not."""
        if self._stopping:
            return "it drains"
        if not self._started.is_set():
            return "it starts"
        parts = {child.metrics_socket for child in self._children if child.role != CONSOLE}
        return await first_unready(parts | {*self._runtime_dir.glob("*.metrics")})  # also of a part in this process

    def _make_console(self) -> ConsolePart | None:
        """The console, whose process starts with the first request for one of its pages."""
        if option := kept_off_by(self._values):
            _log.info("the console is off because of %s; --allow-console=true turns it on", option)
            return None
        if self._values["allow_console"] is False:
            return None
        socket_path = self._runtime_dir / "console.socket"
        return ConsolePart(socket_path, lambda: self._start_console(socket_path))

    def _start_console(self, socket_path: Path) -> None:
        if self._stopping:
            raise ConnectionError("the server stops")
        where = f"http://{as_host(reachable(self._endpoints['metrics']))}/metrics"
        own = {**self._part_values(), "console_socket": str(socket_path), "metrics_url": (where,)}
        child = Child(CONSOLE, [CONSOLE, *render(CONSOLE, own, os.environ)], self._on_report, self._on_exit)
        child.start()
        self._children.append(child)
        self._take_census_once()

    def _on_report(self, child: Child, report: dict[str, Any]) -> None:
        child.reason = report.get("failed", "")
        if report.get("ready"):
            child.ready = child.was_ready = True
            if child.role == CONSOLE and self._console is not None:
                self._console.is_up()
            if child.role == GATEWAY:
                self._endpoints.update(report["endpoints"])
                if all(gateway.was_ready for gateway in self._gateways()):
                    self._write_endpoints()
                # a free port was asked for once: a gateway that is started again must be found where it was, at once
                ports = {name: where.rpartition(":")[2] for name, where in report["endpoints"].items()}
                child.pin(*(f"--{name}-port={port}" for name, port in ports.items()), "--await-executors=0")
        if report.get("serving"):
            child.serving = True
        # what an executor of before left in the log may look ready: the start is over when these parts say so
        parts = [c for c in self._children if c.role not in (WEBHOOKS, CONSOLE)]
        if all(c.ready for c in parts) and (self._ready() or not self._values["exit_on_error"]):
            self._started.set()

    def _gateways(self) -> list[Child]:
        return [child for child in self._children if child.role == GATEWAY]

    def _ready(self) -> bool:
        """Whether every gateway has said that it serves: a client may reach any of them."""
        return all(gateway.serving for gateway in self._gateways())

    def _write_endpoints(self) -> None:
        where = {name: reachable(address) for name, address in self._endpoints.items()}
        self._state.write(ENDPOINTS, {**where, "log": self._log_url})

    def _announce(self) -> None:
        http = "https://" if self._values["http_use_ssl"] or self._values["http_use_ssl_mutual"] else "http://"
        for name, scheme, path in (
            *(("http", http, ""), ("grpc", "", ""), ("metrics", "http://", "/metrics")),
            *(("openai", http, "/v1"), ("sagemaker", "http://", ""), ("vertex-ai", "http://", "")),
        ):
            if name in self._endpoints:
                print(f"{name:8} {scheme}{as_host(reachable(self._endpoints[name]))}{path}", flush=True)  # noqa: T201
        if self._console is not None:
            print(f"console  {self._console.announced(as_host(reachable(self._endpoints['metrics'])))}", flush=True)  # noqa: T201
        if self._values["allow_webhooks"] and not self._values["webhook_secrets"]:
            print(f"webhooks are signed with {self._state.webhook_secret}", flush=True)  # noqa: T201
        state = "ready" if self._ready() else "up, not every model is ready"
        print(f"{state}: Ctrl-C stops the server", flush=True)  # noqa: T201

    # -- running ------------------------------------------------------------------------------------------------------

    async def _wait(self, event: asyncio.Event | None) -> None:
        """Until a stop is wanted, a part has failed for good, or `event` is set."""
        waits = [asyncio.create_task(self._stop_wanted.wait())]
        if event is not None:
            waits.append(asyncio.create_task(event.wait()))
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _on_exit(self, child: Child, status: int) -> None:
        self._take_census_once()
        if self._metrics_union is not None:
            self._metrics_union.ended(child.metrics_socket)
        if child.role == CONSOLE and self._console is not None:
            self._console.is_down(child.reason)
        if self._stopping or self._failed:  # several parts that cannot start for one reason are one failure
            return
        if child.role == CONSOLE:  # the next request for a page starts another: perhaps no one looks any more
            self._children.remove(child)
            what = "ended" if child.was_ready else "cannot start"
            _log.error("the console %s: %s", what, child.reason or f"it ended with status {status}")
            return
        loop = asyncio.get_running_loop()
        child.failures = 1 if loop.time() - child.started_at_s > STABLE_S else child.failures + 1
        if self._cannot_start(child, status):
            failure = f"{child.role} ended with status {status} while starting"
            # one whose command line was wrong has said so itself
            self._fail(failure, child.reason or (failure if status < 0 else ""))
            return
        wait_s = backoff_s(child.failures)
        why = f", {child.reason}" if child.reason else ""
        _log.error(
            "%s (pid %d) ended with status %d%s; starting it again in %.2f s",
            child.role,
            child.pid,
            status,
            why,
            wait_s,
        )
        loop.call_later(wait_s, self._restart, child)

    def _fail(self, failure: str, sentence: str | None = None) -> None:
        """End the server, which cannot serve, with a sentence; None: the failure is the sentence."""
        self._failed = failure
        if said := failure if sentence is None else sentence:
            print(f"charonia: {said}", file=sys.stderr, flush=True)  # noqa: T201
        self._stop_wanted.set()

    def _cannot_start(self, child: Child, status: int) -> bool:
        """One that says itself that it cannot start ends the start; one that was killed is worth another try.

        The server may be serving already: readiness does not wait for the last of several executors, and the loss of
        one that was never up must not stop the others.
        """
        if child.was_ready or self._started.is_set():
            return False
        if any(other.was_ready for other in self._children if other.role == child.role):
            return False
        return status >= 0 or child.failures >= _STARTS

    def _restart(self, child: Child) -> None:
        if self._stopping:
            return
        try:
            child.start()
        except OSError as error:  # no process or no descriptor is free: that may pass
            child.failures += 1
            wait_s = backoff_s(child.failures)
            _log.error("%s cannot be started: %s; trying it again in %.2f s", child.role, error, wait_s)
            asyncio.get_running_loop().call_later(wait_s, self._restart, child)
        self._take_census_once()

    async def _take_census(self) -> None:
        while True:
            await asyncio.sleep(_CENSUS_S)
            self._take_census_once()
            self._share_processor()

    def _take_census_once(self) -> None:
        """`processes.json`: role and pid of every process of the server, model instances included."""
        census: list[dict[str, Any]] = [{"role": "serve", "pid": os.getpid()}]
        if self._private_log is not None and self._private_log.pid:
            census.append({"role": "redis", "pid": self._private_log.pid})
        for child in self._children:
            if child.pid and not child.exited.is_set():
                census.append({"role": child.role, "pid": child.pid})
                census += [{"role": name, "pid": pid, "parent": child.pid} for pid, name in descendants(child.pid)]
        if census != self._census:
            self._census = census
            self._state.write(PROCESSES, census)

    def _share_processor(self) -> None:
        """The private log server and the loop of the gateway, if there is one, share a processor of two."""
        log, gateways = self._private_log, self._gateways()
        serves = len(gateways) == 1 and gateways[0].ready and not gateways[0].exited.is_set()
        pids = (log.pid, gateways[0].pid) if serves and log is not None and log.pid else None
        self._processor.look(
            pids, lambda: [pid for one in pids or () for pid, _ in descendants(one)], time.monotonic_ns()
        )

    # -- stopping -----------------------------------------------------------------------------------------------------

    async def _stop(self) -> bool:
        """Gateways first, which finish what is open, then executors, then the log. True: all drained in time."""
        self._stopping = True
        if self._private_log is not None:
            self._private_log.leave()
        for child in self._children:  # it has nothing to finish, and one that hangs must not hold up the others
            if child.role == CONSOLE:
                child.signal(signal.SIGKILL)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._values["exit_timeout_secs"]
        hurry = asyncio.create_task(self._hurry.wait())
        clean = True
        for roles in ((GATEWAY,), (EXECUTOR, "executor+batcher", BATCHER), (WEBHOOKS,)):
            group = [c for c in self._children if c.role in roles and c.pid and not c.exited.is_set()]
            # one that is not up yet has nothing to drain, and may not even listen to signals
            up = [child for child in group if child.ready]
            for child in group:
                child.signal(signal.SIGTERM)
            gone = asyncio.create_task(_all_exited(group))
            # the time is for all of them together; those who come last get a moment for their goodbyes
            timeout_s = max(0.0, deadline_s - loop.time()) + _GRACE_S
            await asyncio.wait([gone, hurry], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            # one that was killed just before we asked has not failed to drain: its work is in the log
            clean = clean and gone.done() and all((child.status or 0) <= 0 for child in up)
            gone.cancel()
            clean = await self._stop_here(roles) and clean
        hurry.cancel()
        for endpoint in (self._metrics, self._joint_metrics):
            if endpoint is not None:
                await endpoint.close()
        return clean

    async def _kill_all(self) -> None:
        self._stopping = True
        self._tasks.cancel()
        for child in self._children:
            if child.pid and not child.exited.is_set():
                child.signal(signal.SIGKILL)
                await child.exited.wait()
        if self._private_log is not None:
            await self._private_log.stop()
        for held in self._held_ports:
            held.close()
        self._state.clear()


async def _all_exited(children: list[Child]) -> None:
    for child in children:
        await child.exited.wait()


def _check_repositories(paths: tuple[str, ...]) -> None:
    if not paths:
        raise StartupError("charonia serve needs --model-repository, the directory that holds the models")
    for path in paths:
        if is_remote(path):
            parse(path)
        elif not path or not Path(path).is_dir():
            raise StartupError(f"model repository '{path_without_credentials(path)}' is not a directory")


def _is_colocated(values: Values) -> bool:
    """Whether the batcher runs in the executor's process. Raises `StartupError` for what cannot be."""
    executors, batcher = values["executors"], values["batcher"]
    if executors < 1:
        raise StartupError(f"--executors must be at least 1, got {executors}")
    if batcher not in ("auto", "separate", "colocated"):
        raise StartupError(f"--batcher must be auto, separate or colocated, got '{batcher}'")
    if batcher == "colocated" and executors > 1:
        raise StartupError("--batcher colocated needs --executors 1: several executors share one batcher process")
    return bool(batcher != "separate" and executors == 1)


_OF_SERVERS = ("log_url", "log_password_file", "blob_url", "blob_password_file", "cache_config")


def _check_values(values: Values) -> None:
    """Refuse, before anything is started, what one of the parts would refuse. Raises `StartupError`."""
    _is_colocated(values)
    check_settings(values)
    check_gateway(values)
    if any(values[name] for name in _OF_SERVERS):
        from .roles import check_urls

        check_urls(values)
    if values["allow_webhooks"] and values["webhook_secrets"]:
        from gateway.webhooks.keyring import Keyring

        Keyring(values["webhook_secrets"])


def reachable(where: str) -> str:
    """An address a client on this machine can dial."""
    host, _, port = where.rpartition(":")
    return f"{'127.0.0.1' if host in ('0.0.0.0', '') else host}:{port}"
