"""A real log server for whoever needs one: a private one on a Unix socket, started once and emptied for each test.

Which program it is, `chosen_server` says. `CHARONIA_TEST_LOG_URL` names a running server to use in its place (it is
flushed!), `CHARONIA_TEST_TOPOLOGY` another kind of log (`topologies`).
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import chosen_server
import pytest
import redis
import topologies
from cluster_servers import RedisCluster
from example_counts import examples
from hypothesis import HealthCheck, settings

from charonia.eventlog.embedded import PrivateServer

# compiled modules are kept even where the environment says otherwise: each process of a server would compile them all
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# servers are forked from here; with its own handlers gRPC would end those that begin while one of its threads works
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# shells without job control have background commands ignore Ctrl-C, nohup a hang-up, and processes inherit that
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


def _memory() -> str | None:
    """A folder in memory with room for what tests write, where programs may be run; None if there is none."""
    folder = Path("/dev/shm") / f"t{os.getuid()}"  # short, as the paths of sockets are bounded
    try:
        found = os.statvfs(folder.parent)
        is_roomy = found.f_bavail * found.f_frsize >= 4 << 30
        if not is_roomy or found.f_flag & (os.ST_NOEXEC | os.ST_RDONLY):
            return None
        folder.mkdir(mode=0o700, exist_ok=True)
        made = folder.lstat()  # any user may have made it, or a link
    except OSError:
        return None
    is_ours = stat.S_ISDIR(made.st_mode) and made.st_uid == os.getuid() and not made.st_mode & 0o077
    return str(folder) if is_ours else None


# the logs of hundreds of servers are synced to a disk that others use too: a sync takes 3 ms there, or a second
if "TMPDIR" not in os.environ and (memory := _memory()):
    os.environ["TMPDIR"] = memory
    tempfile.tempdir = None  # pytest has asked for it already


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Reports of workers travel as UTF-8, which has no form for halves of surrogates in what a test has logged."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


# machines are shared: how long one example takes says nothing about the code
settings.register_profile(
    "charonia", max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("charonia")


_SERVER = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    directory = Path(tempfile.mkdtemp(prefix="charonia-test-"))
    config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))
    config.stash[_SERVER] = chosen_server.put_first(directory)


_FIRST = [
    "integration/test_cluster.py",
    "integration/test_portable_state.py",
    "integration/test_acl.py",
    "contract/test_backends.py",
    "integration/test_resumed_streams.py",
    "integration/test_sentinel.py",
    "integration/test_bench.py",
    "integration/test_lane_of_traces.py",
    "integration/test_python_stream_ends.py",
    "house/test_prose.py",
    "unit/gateway/jobs/test_job_waiting.py",
    "property/test_job_races.py",
    "property/test_scheduler.py",
    "e2e/test_drill.py",
    "e2e/test_processes.py",
    "e2e/test_hostile_connections.py",
    "e2e/test_client_shm.py",
    "e2e/test_upgrades.py",
    "e2e/test_restart_storm.py",
    "e2e/test_log_failures.py",
    "e2e/test_state_moves.py",
    "e2e/test_stalls.py",
    "e2e/test_tuner.py",
    "e2e/test_tutorials.py",
    "e2e/test_ensembles.py",
    "e2e/test_analyzer.py",
    "e2e/test_cloud_fronts.py",
    "e2e/test_python_client.py",
    "e2e/test_waves.py",
]
"""Files of tests that take longest: first, so that no worker is left alone with one at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {Path(__file__).parent / name: at for at, name in enumerate(_FIRST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_collection_finish() -> None:
    """Thousands of tests stay to the end: the collector would look at all of them now and then, for a second."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.write_line(f"log server: {config.stash[_SERVER]}")


@pytest.fixture(scope="session")
def log_topology() -> Iterator[topologies.Topology | None]:
    """The servers of `CHARONIA_TEST_TOPOLOGY`, None without it. What the log's user was refused fails the run."""
    if not topologies.wanted():
        yield None
        return
    topology = topologies.Topology(topologies.wanted())
    try:
        yield topology
        assert topology.refusals() == []
    finally:
        topology.stop()


@pytest.fixture(scope="session")
def redis_url(log_topology: topologies.Topology | None) -> Iterator[str]:
    """The URL of a log that lives as long as the test session; its content is left to others."""
    configured = os.environ.get("CHARONIA_TEST_LOG_URL")
    if log_topology is not None or configured:
        yield log_topology.url if log_topology is not None else str(configured)
        return
    # not below pytest's own directory: its path may be too long for a socket
    state_dir = Path(tempfile.mkdtemp(prefix="charonia-test-"))
    server = PrivateServer(state_dir)
    server.start()
    try:
        server.wait_ready()
        yield server.url
    finally:
        server.stop()
        shutil.rmtree(state_dir, ignore_errors=True)


@pytest.fixture
def fresh_log_url(redis_url: str, log_topology: topologies.Topology | None) -> str:
    """The same log, emptied."""
    if log_topology is not None:
        log_topology.flush()
        return redis_url
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    return redis_url


@pytest.fixture
def log_client(fresh_log_url: str, log_topology: topologies.Topology | None) -> Callable[[], Any]:
    """Makes clients of redis-py that may do everything to the log of `fresh_log_url`."""
    return log_topology.client if log_topology is not None else lambda: redis.Redis.from_url(fresh_log_url)


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[Any]:
    """Three primaries that live as long as the test session."""
    cluster = RedisCluster()
    try:
        cluster.start()
        cluster.be_patient()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def fresh_cluster_url(redis_cluster: Any) -> str:
    """The cluster, emptied."""
    redis_cluster.flush()
    return str(redis_cluster.url)
