"""Requests that are recognised by their bytes are still those of their callers: tenants, keys, forwarded headers."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_calls import read_reply
from lane_clients import MODEL, GrpcClient, HttpClient
from lane_pair import LanePair, http_request, passed

from charonia import keys
from charonia.clock import wall_ns
from charonia.keys import lane_of
from charonia.operations.usage_reports import Question, usage

pytestmark = pytest.mark.integration

KEYS = """
[tenants.acme]
keys = ["acme-key"]
[tenants.bounded]
keys = ["bounded-key"]
max_pending_requests = 100
[tenants."north wind"]
keys = ["wind-key"]
"""


def write(path: Path, text: str, stamp: int) -> None:
    """A file that can be told from the one before it."""
    path.write_text(text)
    os.utime(path, (stamp, stamp))


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    write(path, KEYS, 1)
    return path


@pytest.fixture
def pair(keys_file: Path, tmp_path: Path) -> Iterator[LanePair]:
    with LanePair(tmp_path / "models", api_keys=str(keys_file)) as pair:
        yield pair


Client = HttpClient | GrpcClient
CLIENTS: dict[str, type[Client]] = {"http": HttpClient, "grpc": GrpcClient}


def client_of(pair: LanePair, protocol: str, key: str) -> Client:
    return CLIENTS[protocol](pair, ("x-api-key", key))


async def learn(pair: LanePair, client: Client) -> None:
    """Ask until it is recognised."""
    before = pair.ridden()
    async with asyncio.timeout(30):
        while pair.ridden() == before:
            assert await client.ask(1) == 2


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tenants_ride_each_in_its_own_queue(pair: LanePair, protocol: str) -> None:
    acme, wind = (client_of(pair, protocol, key) for key in ("acme-key", "wind-key"))
    streams: list[bytes] = []
    send = pair.waves.send

    def sending(wave: object, stream: bytes, pieces: object) -> bool:
        streams.append(stream)
        return send(wave, stream, pieces)  # type: ignore[arg-type]

    async def ask() -> None:
        await learn(pair, acme)
        await learn(pair, wind)
        pair.waves.send = sending  # type: ignore[method-assign]
        before = pair.ridden()
        assert [await acme.ask(value) for value in range(10)] == list(range(1, 11))
        assert [await wind.ask(value) for value in range(10)] == list(range(1, 11))
        assert pair.ridden() == before + 20

    pair.run(ask())
    model = streams[0].split(b"{")[1].split(b"}")[0].decode()
    own = [keys.queue(model, 0, lane_of(tenant)) for tenant in ("acme", "north wind")]
    assert own[0] != own[1]
    assert streams == [own[0]] * 10 + [own[1]] * 10
    acme.close()
    wind.close()
    pair.run(pair.settled())


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_tenant_with_bounds_and_a_model_that_calls_others_go_by_themselves(pair: LanePair, protocol: str) -> None:
    bounded, acme = client_of(pair, protocol, "bounded-key"), client_of(pair, protocol, "acme-key")

    async def ask() -> None:
        await learn(pair, acme)
        before = pair.ridden()
        for value in range(30):
            assert await bounded.ask(value) == value + 1
            assert await acme.ask(value, "one") == value + 1
        assert pair.ridden() == before

    pair.run(ask())
    bounded.close()
    acme.close()
    pair.run(pair.settled())


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_nobody_rides_on_anothers_key(pair: LanePair, protocol: str) -> None:
    acme, unknown = client_of(pair, protocol, "acme-key"), client_of(pair, protocol, "acme-kez")
    refusal = "401 the API key is not known" if protocol == "http" else "16 the API key is not known"

    async def ask() -> None:
        await learn(pair, acme)
        before = pair.ridden()
        assert await unknown.ask(1) == refusal
        assert pair.ridden() == before
        assert await acme.ask(1) == 2

    pair.run(ask())
    acme.close()
    unknown.close()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_key_that_is_taken_away_rides_no_more(pair: LanePair, keys_file: Path, protocol: str) -> None:
    """Also where another key of the same tenant rides on."""
    old, new = client_of(pair, protocol, "acme-key"), client_of(pair, protocol, "new-key")
    refusal = "401 the API key is not known" if protocol == "http" else "16 the API key is not known"

    async def ask() -> None:
        await learn(pair, old)
        write(keys_file, KEYS.replace("acme-key", "new-key"), 2)
        async with asyncio.timeout(30):
            while (said := await old.ask(1)) == 2:  # at most a second
                await asyncio.sleep(0.01)
        assert said == refusal
        await learn(pair, new)
        assert [await old.ask(value) for value in range(5)] == [refusal] * 5

    pair.run(ask())
    old.close()
    new.close()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_key_that_is_taken_away_while_its_request_runs_rides_no_more(
    pair: LanePair, keys_file: Path, protocol: str
) -> None:
    """What such a request teaches is learned after everything was forgotten."""
    client = client_of(pair, protocol, "acme-key")
    refusal = "401 the API key is not known" if protocol == "http" else "16 the API key is not known"
    service, tenants = pair.service, pair.service._tenants
    assert tenants is not None

    async def ask() -> None:
        await learn(pair, client)  # the way into waves is open
        service.lane.callers_changed()
        infer = service.infer

        async def revoked_meanwhile(*arguments: Any, **named: Any) -> Any:
            response = await infer(*arguments, **named)
            write(keys_file, KEYS.replace("acme-key", "new-key"), 2)
            tenants._look_after_ns = 0
            tenants.look()
            return response

        service.infer = revoked_meanwhile  # type: ignore[method-assign]
        assert await client.ask(1) == 2
        service.infer = infer  # type: ignore[method-assign]
        assert [await client.ask(value) for value in range(5)] == [refusal] * 5

    pair.run(ask())
    client.close()
    pair.run(pair.settled())


def test_a_call_that_was_begun_with_a_key_that_is_taken_away_is_refused(pair: LanePair, keys_file: Path) -> None:
    """Also where calls with another key of the same tenant ride when its message comes."""
    old, new = GrpcClient(pair, ("x-api-key", "acme-key")), GrpcClient(pair, ("x-api-key", "new-key"))
    tenants = pair.service._tenants
    assert tenants is not None

    async def ask() -> None:
        await learn(pair, old)
        number = await old.begin()
        await passed()
        write(keys_file, KEYS.replace("acme-key", "new-key"), 2)
        tenants._look_after_ns = 0
        tenants.look()
        await learn(pair, new)
        assert await old.finish(number, 1) == "16 the API key is not known"

    pair.run(ask())
    old.close()
    new.close()
    pair.run(pair.settled())


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tenants_that_a_proxy_names_ride_in_their_queues_and_anonymous_callers_in_theirs(
    tmp_path: Path, protocol: str
) -> None:
    with LanePair(tmp_path / "models", tenant_header="X-Tenant") as pair:
        anonymous, acme, both = (
            CLIENTS[protocol](pair, *(("x-tenant", tenant) for tenant in tenants))
            for tenants in ((), ("acme",), ("acme", "north wind"))
        )
        refusal = "header 'x-tenant' does not name one tenant"
        streams: list[bytes] = []
        send = pair.waves.send

        def sending(wave: object, stream: bytes, pieces: object) -> bool:
            streams.append(stream)
            return send(wave, stream, pieces)  # type: ignore[arg-type]

        async def ask() -> None:
            await learn(pair, anonymous)
            await learn(pair, acme)
            pair.waves.send = sending  # type: ignore[method-assign]
            assert [await client.ask(5) for client in (anonymous, acme, anonymous, acme)] == [6] * 4
            before = pair.ridden()
            for _ in range(5):
                said = await both.ask(5)
                assert isinstance(said, str)
                assert said.endswith(refusal)
            assert pair.ridden() == before

        pair.run(ask())
        model = streams[0].split(b"{")[1].split(b"}")[0].decode()
        assert streams == [keys.queue(model, 0, lane_of(tenant)) for tenant in ("", "acme")] * 2
        for client in (anonymous, acme, both):
            client.close()
        pair.run(pair.settled())


@pytest.mark.parametrize("first", ["x-add", "x-more"])
def test_repeated_and_reordered_metadata_means_the_same_as_without_the_lane(tmp_path: Path, first: str) -> None:
    """The last of a repeated header counts, whatever stands between; binary metadata is forwarded as its bytes."""
    with LanePair(tmp_path / "models", grpc_header_forward_pattern="x-.*") as pair:
        client = GrpcClient(pair)
        more = [("x-add", "10"), ("x-more", "1"), ("x-add", "20"), ("x-some-bin", "AAH/")]
        more.sort(key=lambda one: one[0] != first)

        async def ask() -> None:
            before = pair.ridden()
            async with asyncio.timeout(30):
                while pair.ridden() == before:
                    assert await client.ask(1, "told", *more) == 21
            assert await client.ask(2, "told", *reversed(more)) == 12
            assert await client.ask(2, "told", *more) == 22

        pair.run(ask())
        client.close()
        pair.run(pair.settled())


def test_forwarded_metadata_rides_and_each_model_call_sees_its_own(tmp_path: Path) -> None:
    with LanePair(tmp_path / "models", grpc_header_forward_pattern="x-.*") as pair:
        client = GrpcClient(pair)

        async def ask() -> None:
            async def learnt(number: int) -> None:
                before = pair.ridden()
                async with asyncio.timeout(30):
                    while pair.ridden() == before:
                        assert await client.ask(1, "told", ("x-add", str(number))) == 1 + number

            await learnt(10)
            await learnt(20)
            before = pair.ridden()
            for value in range(10):
                assert await client.ask(value, "told", ("x-add", "10")) == value + 10
                assert await client.ask(value, "told", ("x-add", "20")) == value + 20
            assert pair.ridden() == before + 20
            assert await client.ask(5, "told") == 5
            assert await client.ask(5, "told", ("x-add", "30")) == 35

        pair.run(ask())
        client.close()
        pair.run(pair.settled())


def test_each_tenant_has_what_it_used_with_waves_and_without(pair: LanePair) -> None:
    acme, wind, bounded = (client_of(pair, "http", key) for key in ("acme-key", "wind-key", "bounded-key"))
    sent = {"acme": 0, "north wind": 0, "bounded": 0}

    async def ask() -> None:
        for name, client in (("acme", acme), ("north wind", wind)):
            before = pair.ridden()
            async with asyncio.timeout(30):
                while pair.ridden() < before + 10:
                    assert await client.ask(1) == 2
                    sent[name] += 1
        for _ in range(5):
            assert await bounded.ask(1) == 2
            sent["bounded"] += 1

    async def used() -> dict[str, Any]:
        found: dict[str, Any] = {}
        async with asyncio.timeout(60):
            while {name: row["requests"] for name, row in found.items()} != sent:
                await asyncio.sleep(0.05)
                now_ns = wall_ns()
                document = await usage(pair.log, Question(0, now_ns / 1e9 + 60), now_ns)
                found = {row["tenant"]: row for row in document["usage"]}
        return found

    pair.run(ask())
    for name, row in pair.run(used(), 90).items():
        assert (row["failures"], row["rows"]) == (0, sent[name])
        assert (row["input_bytes"], row["output_bytes"]) == (8 * sent[name], 8 * sent[name])
        assert row["instance_s"] > 0
        assert 0 < row["batch_share"] <= 1
    for client in (acme, wind, bounded):
        client.close()
    pair.run(pair.settled())


def test_a_request_that_asks_for_its_receipt_goes_by_itself(pair: LanePair) -> None:
    acme = client_of(pair, "http", "acme-key")

    async def ask() -> list[dict[str, Any]]:
        await learn(pair, acme)
        before = pair.ridden()
        reader, writer = await asyncio.open_connection("127.0.0.1", pair.http_port(pair.with_lane))
        more = {"parameters": {"binary_data_output": True, "charonia_receipt": True}}
        found = []
        for _ in range(3):
            writer.write(http_request(MODEL, 1, head="x-api-key: acme-key\r\n", more=more))
            status, headers, body = await read_reply(reader)
            assert status == 200
            found.append(json.loads(body[: int(headers["inference-header-content-length"])])["parameters"])
        writer.close()
        assert pair.ridden() == before
        return found

    for parameters in pair.run(ask()):
        receipt = json.loads(parameters["charonia_receipt"])
        assert (receipt["tenant"], receipt["rows"], receipt["batch_rows"], receipt["batch_share"]) == ("acme", 1, 1, 1)
        assert (receipt["input_bytes"], receipt["output_bytes"], receipt["attempt"]) == (8, 8, 1)
        assert receipt["instance_s"] > 0
    acme.close()
    pair.run(pair.settled())
