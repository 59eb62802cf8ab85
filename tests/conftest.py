"""A real log server for whoever needs one: a private one on a Unix socket, started once and emptied for each test.

`CHARONIA_TEST_LOG_URL` names a running server to use in its place (it is flushed!), so that the same tests cover other
versions of Redis and Valkey.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from cluster_servers import RedisCluster
from hypothesis import HealthCheck, settings

from charonia.eventlog.embedded import PrivateServer

# servers are forked from here; with its own handlers gRPC would end those that begin while one of its threads works
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# machines are shared: how long one example takes says nothing about the code
settings.register_profile("charonia", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("charonia")


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """The URL of a server that lives as long as the test session; its content is left to others."""
    configured = os.environ.get("CHARONIA_TEST_LOG_URL")
    if configured:
        yield configured
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
def fresh_log_url(redis_url: str) -> str:
    """The same server, emptied."""
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    return redis_url


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[Any]:
    """Three primaries that live as long as the test session."""
    cluster = RedisCluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def fresh_cluster_url(redis_cluster: Any) -> str:
    """The cluster, emptied."""
    redis_cluster.flush()
    return str(redis_cluster.url)
