"""A cluster over a log in memory or on a server, and what its callers get from it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from batching_cluster import HASH, MODEL, PATIENCE_S, Cluster, value_of

from charonia import keys
from charonia.errors import CharoniaError

DYNAMIC = "dynamic_batching { }"
ORDERED = "dynamic_batching { preserve_ordering: true }"


@asynccontextmanager
async def clustered(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    url = request.getfixturevalue("fresh_log_url") if request.param == "redis" else ""
    cluster = Cluster(url)
    cluster.configure(DYNAMIC)
    yield cluster
    await cluster.close()


async def answers(calls: list[asyncio.Task]) -> list[int]:
    async with asyncio.timeout(PATIENCE_S):
        return [value_of(response) for response in await asyncio.gather(*calls)]


async def failure(call: asyncio.Task) -> CharoniaError:
    with pytest.raises(CharoniaError) as caught:
        await asyncio.wait_for(call, PATIENCE_S)
    return caught.value


async def statistics(cluster: Cluster) -> dict[str, int]:
    return await (await cluster.log()).statistics(keys.statistics(MODEL, 1, HASH))


async def pending_are(cluster: Cluster, requests: int) -> bool:
    return (await (await shared_log(cluster)).pending(MODEL))[0] == requests


async def shared_log(cluster: Cluster) -> object:
    return cluster._executors[0].log if cluster._executors else await cluster.log()
