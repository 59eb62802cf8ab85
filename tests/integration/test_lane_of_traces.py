"""Requests of a caller's trace are recognised by their bytes like others, and those that are traced go the full way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lane_clients import GrpcClient, HttpClient
from lane_pair import LanePair

from charonia.traces.contexts import TIMESTAMPS
from charonia.traces.trace_settings import TraceOptions, TraceSettings
from charonia.wire import WaveReply
from gateway.grpc.native.grpc_lane import GrpcSignature
from gateway.http.http_lane import HttpSignature
from gateway.lane.door import Call

pytestmark = [
    pytest.mark.integration,
    pytest.mark.parametrize("client", [HttpClient, GrpcClient], ids=["http", "grpc"]),
]

Client = type[HttpClient] | type[GrpcClient]
RATE = 10


def context(sampled: bool = False) -> tuple[str, str]:
    """A trace context of its own."""
    return "traceparent", f"00-{os.urandom(16).hex()}-{os.urandom(8).hex()}-0{int(sampled)}"


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    return tmp_path / "traces.json"


@pytest.fixture
def pair(tmp_path: Path, trace_file: Path, request: pytest.FixtureRequest) -> Iterator[LanePair]:
    options: dict[str, Any] = getattr(request, "param", {})
    if options.get("rate"):
        settings = TraceSettings(TIMESTAMPS, rate=options["rate"])
        options = {"tracing": TraceOptions(file=str(trace_file), initial=settings)}
    with LanePair(tmp_path / "models", **options) as pair:
        yield pair


@pytest.fixture
def recognised(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """`count` of the requests that were not read in full; all share waves."""
    found: Counter[str] = Counter()

    def note(kind: type[HttpSignature] | type[GrpcSignature]) -> None:
        answer = kind.answer

        def noting(signature: Any, calls: list[Call], start: int, reply: WaveReply) -> None:
            found["count"] += len(calls)
            answer(signature, calls, start, reply)

        monkeypatch.setattr(kind, "answer", noting)

    note(HttpSignature)
    note(GrpcSignature)
    return found


async def learn(recognised: Counter[str], asker: HttpClient | GrpcClient, *, traced: bool) -> int:
    """Ask until it is recognised; how many requests that took."""
    before, asked = recognised["count"], 0
    async with asyncio.timeout(30):
        while recognised["count"] == before:
            asked += 1
            assert await asker.ask(1, "one", *([context()] if traced else [])) == 2
    return asked


def test_a_context_of_its_own_keeps_no_request_from_the_lane(
    pair: LanePair, recognised: Counter[str], client: Client
) -> None:
    async def ask() -> None:
        with contextlib.closing(client(pair)) as asker:
            await learn(recognised, asker, traced=True)
            before = recognised["count"]
            for value in range(20):
                assert await asker.ask(value, "one", context(sampled=value % 2 == 0)) == value + 1
            assert recognised["count"] == before + 20
            await learn(recognised, asker, traced=False)
            before = recognised["count"]
            for value in range(10):
                assert await asker.ask(value, "one") == value + 1
                assert await asker.ask(value, "one", context()) == value + 1
            assert recognised["count"] == before + 20
            with contextlib.closing(client(pair)) as other:  # another connection knows them as well
                assert await other.ask(5, "one", context()) == 6
            assert recognised["count"] == before + 21

    pair.run(ask())
    pair.run(pair.settled())


@pytest.mark.parametrize("value", ["00", "x" * 55, "00-" + "a" * 51 + "\t", "00-" + "A" * 52])
def test_what_is_no_context_is_read(pair: LanePair, recognised: Counter[str], client: Client, value: str) -> None:
    async def ask() -> None:
        with contextlib.closing(client(pair)) as asker:
            await learn(recognised, asker, traced=True)
            before = recognised["count"]
            for number in range(5):
                assert await asker.ask(number, "one", ("traceparent", value)) == number + 1
            assert recognised["count"] == before
            assert await asker.ask(1, "one", context(), context()) == 2
            assert recognised["count"] == before

    pair.run(ask())


def test_text_that_looks_like_a_context_is_not_taken_for_one(
    pair: LanePair, recognised: Counter[str], client: Client
) -> None:
    """In the value of another header: it means something there, and is compared."""

    async def ask() -> None:
        with contextlib.closing(client(pair)) as asker:
            await learn(recognised, asker, traced=True)
            _, first = context()
            _, second = context()
            for value in (first, second):
                decoy = "x-note", f"traceparent7{value}" if client is GrpcClient else f"traceparent: {value}"
                for number in range(5):
                    assert await asker.ask(number, "one", decoy, context()) == number + 1
            assert await asker.ask(3, "one", ("traceparent", "?" * 55)) == 4

    pair.run(ask())


@pytest.mark.parametrize(
    "pair",
    [
        {"http_header_forward_pattern": "trace.*", "grpc_header_forward_pattern": "trace.*"},
        {"tenant_header": "traceparent"},
    ],
    indirect=True,
    ids=["forwarded", "tenant"],
)
def test_a_context_that_means_more_is_read_each_time(pair: LanePair, recognised: Counter[str], client: Client) -> None:
    async def ask() -> None:
        with contextlib.closing(client(pair)) as asker:
            for value in range(30):
                assert await asker.ask(value, "told", context()) == value
            assert recognised["count"] == 0

    pair.run(ask())


@pytest.mark.parametrize("pair", [{"rate": RATE}], indirect=True)
def test_one_in_ten_is_traced_and_the_others_ride(
    pair: LanePair, recognised: Counter[str], trace_file: Path, client: Client
) -> None:
    async def ask() -> int:
        with contextlib.closing(client(pair)) as asker:
            asked = await learn(recognised, asker, traced=True)
            before = recognised["count"]
            for value in range(10 * RATE):
                assert await asker.ask(value, "one", context()) == value + 1
            assert recognised["count"] == before + 10 * RATE - 10
            await pair.with_lane.service.tracer.close()
            return asked + 10 * RATE

    asked = pair.run(ask())
    found = [entry for entry in json.loads(trace_file.read_text()) if "model_name" in entry]
    assert len(found) == asked // RATE


def test_tracing_that_is_switched_on_while_requests_ride_is_heard(
    pair: LanePair, recognised: Counter[str], client: Client
) -> None:
    async def ask() -> None:
        with contextlib.closing(client(pair)) as asker:
            await learn(recognised, asker, traced=False)
            before = recognised["count"]
            pair.service.tracer.on = True
            sampler = pair.service.tracer._of_all
            sampler.settings = TraceSettings(TIMESTAMPS, rate=2)
            for value in range(10):
                assert await asker.ask(value, "one") == value + 1
            assert recognised["count"] == before + 5

    pair.run(ask())
