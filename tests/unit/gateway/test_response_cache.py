"""Requests through a gateway that caches responses: hits, shared executions, what is not cached, what is counted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from cache_bench import CACHED, CountingLog, ask, asking, cached_gateway, executed, stored
from job_bench import MODEL, JobBench, numbers, options, until, until_so
from job_bench import request as request_of

from charonia import keys
from charonia.clock import wall_ns
from charonia.errors import InternalError
from charonia.facts.events import VersionLoaded
from charonia.models.config_forms import parse
from executors.configuration.config import normalise
from gateway.handler import Duration


def parameter(name: str, value: str) -> str:
    return f'parameters {{ key: "charonia.{name}" value {{ string_value: "{value}" }} }}\n'


@pytest.fixture
async def bench() -> AsyncIterator[Any]:
    bench = JobBench(CountingLog())
    await bench.serve(CACHED)
    yield bench
    await bench.close()


# -- hits and misses ---------------------------------------------------------------------------------------------------


async def test_the_second_of_two_equal_requests_is_a_hit(bench: Any) -> None:
    gateway = await cached_gateway(bench)
    assert await executed(bench, gateway, 7) == {"y": 7, "z": 7}
    looks = bench.log.looks
    response = await gateway.infer(request_of(7, id="mine", priority=3))
    assert (numbers(response.outputs), response.id, response.version) == ({"y": 7, "z": 7}, "mine", 1)
    assert response.parameters == {"note": "kept"}
    assert bench.log.looks == looks, "what is hot costs no word to the log"
    assert await bench.queued() == []
    assert await executed(bench, gateway, 8) == {"y": 8, "z": 8}


async def test_a_caller_may_change_its_answer(bench: Any) -> None:
    gateway = await cached_gateway(bench)
    await executed(bench, gateway)
    first = await gateway.infer(request_of())
    first.outputs.clear()
    first.parameters.clear()
    second = await gateway.infer(request_of())
    assert (numbers(second.outputs), second.parameters) == ({"y": 1, "z": 1}, {"note": "kept"})


async def test_what_is_counted(bench: Any) -> None:
    gateway = await cached_gateway(bench)
    (before,) = await gateway.statistics(MODEL, "")
    assert (before.cache_hit, before.cache_miss) == (Duration(), Duration())
    await executed(bench, gateway)
    assert gateway.metrics.counts(MODEL, 1).cache_misses == 1, "when its answer is there"
    assert (await gateway.statistics(MODEL, ""))[0].cache_miss.count == 1
    assert await ask(gateway) == await ask(gateway)
    (found,) = await gateway.statistics(MODEL, "")
    assert (found.cache_hit.count, found.cache_miss.count) == (2, 1)
    assert min(found.cache_hit.ns, found.cache_miss.ns) > 0
    # the executor of this test counts nothing: these are the hits
    assert (found.success.count, found.success.ns) == (2, found.cache_hit.ns)
    assert (found.queue, found.inference_count, found.execution_count) == (Duration(2, 0), 0, 0)
    assert abs(found.last_inference_ms - wall_ns() // 1_000_000) < 60_000
    page = gateway.metrics.render().decode().splitlines()
    for line in (
        'nv_cache_num_hits_per_model{model="m",version="1"} 2.0',
        'nv_cache_num_misses_per_model{model="m",version="1"} 1.0',
        'nv_inference_request_success{model="m",version="1"} 3.0',
        "charonia_cache_here_entries 1.0",
    ):
        assert line in page
    assert any(line.startswith('nv_cache_hit_duration_per_model{model="m"') for line in page)
    assert any(line.startswith('nv_cache_miss_duration_per_model{model="m"') for line in page)


async def test_without_a_cache_nothing_is_cached_and_it_is_said(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    gateway = await bench.gateway()
    await executed(bench, gateway)
    await executed(bench, gateway)
    assert [r.message for r in caplog.records if "cache" in r.message] == [
        "model 'm' wants its responses cached, but this server has no cache (--cache-config): they are not"
    ]
    assert "nv_cache" not in gateway.metrics.render().decode()


async def test_a_model_that_does_not_want_it_is_not_cached() -> None:
    bench = JobBench(CountingLog())
    await bench.serve()
    gateway = await cached_gateway(bench)
    await executed(bench, gateway)
    await executed(bench, gateway)
    assert bench.log.looks == 0
    assert "nv_cache_num_hits_per_model{" not in gateway.metrics.render().decode()
    await bench.close()


async def test_jobs_are_not_answered_from_the_cache(bench: Any) -> None:
    gateway = await cached_gateway(bench)
    await executed(bench, gateway)
    await executed(bench, gateway, wishes=options(key="k"))


async def test_failures_are_not_kept(bench: Any) -> None:
    gateway = await cached_gateway(bench)
    for _ in range(2):
        task = asking(gateway)
        (record,) = await bench.comes()
        await bench.finish(record, error=InternalError("broken"))
        with pytest.raises(InternalError, match=r"^broken$"):
            await task
    page = gateway.metrics.render().decode()
    assert 'nv_inference_request_failure{model="m",reason="BACKEND",version="1"} 2.0' in page
    await executed(bench, gateway)


async def test_a_log_that_is_away_makes_a_miss(bench: Any) -> None:
    gateway = await cached_gateway(bench)
    other = await cached_gateway(bench, "h")
    bench.log.broken = True
    await executed(bench, gateway)
    await executed(bench, other)
    assert await ask(gateway) == {"y": 1, "z": 1}, "what this process has it still has"


# -- tenants, time, reload ---------------------------------------------------------------------------------------------


async def test_tenants_do_not_see_one_another(bench: Any) -> None:
    gateway = await cached_gateway(bench, tenant_header="x-tenant")
    await executed(bench, gateway, wishes=options(tenant="acme"))
    await executed(bench, gateway, wishes=options(tenant="other"))
    await executed(bench, gateway)
    assert await ask(gateway, wishes=options(tenant="acme")) == {"y": 1, "z": 1}


async def test_tenants_share_what_the_model_says_they_share() -> None:
    bench = JobBench()
    await bench.serve(CACHED + parameter("cache_share_tenants", "true"))
    gateway = await cached_gateway(bench, tenant_header="x-tenant")
    await executed(bench, gateway, wishes=options(tenant="acme"))
    assert await ask(gateway, wishes=options(tenant="other")) == {"y": 1, "z": 1}
    await bench.close()


async def test_an_answer_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = JobBench()
    await bench.serve(CACHED + parameter("cache_ttl_s", "5"))
    gateway, other = await cached_gateway(bench), await cached_gateway(bench, "h")
    await executed(bench, gateway)
    await stored(bench)
    assert await ask(other) == {"y": 1, "z": 1}
    now_ns = wall_ns()
    monkeypatch.setattr("charonia.calls.cache.cache_store.wall_ns", lambda: now_ns + 6_000_000_000)
    await executed(bench, gateway)
    # the other one finds what the first has just made
    await until_so(lambda: _expires_later(bench, now_ns // 1000 + 6_000_000))
    assert await ask(other) == {"y": 1, "z": 1}
    monkeypatch.setattr("charonia.calls.cache.cache_store.wall_ns", lambda: now_ns + 20_000_000_000)
    await gateway._cache.store.sweep()
    assert await bench.log.count_times(keys.CACHE_EXPIRIES) == 0
    assert await bench.log.keep_recent(keys.CACHE_USES, {}, 0) == []
    await bench.close()


async def _expires_later(bench: Any, us: int) -> bool:
    return not await bench.log.due(keys.CACHE_EXPIRIES, us, 1)


async def test_a_reload_starts_anew(bench: Any) -> None:
    gateway = await cached_gateway(bench)
    await executed(bench, gateway)
    packed = normalise(parse(CACHED)).SerializeToString()
    await bench.tell(VersionLoaded("e", MODEL, 1, "h2", 1, packed))
    await until(lambda: gateway._catalog.served(MODEL)[1].content_hash == "h2")
    await executed(bench, gateway)
    assert await ask(gateway) == {"y": 1, "z": 1}


async def test_what_waited_over_a_reload_is_not_kept(bench: Any) -> None:
    gateway = await cached_gateway(bench)
    packed = normalise(parse(CACHED)).SerializeToString()
    task = asking(gateway)
    (record,) = await bench.comes()
    await bench.tell(VersionLoaded("e", MODEL, 1, "h2", 1, packed))
    await until(lambda: gateway._catalog.served(MODEL)[1].content_hash == "h2")
    await bench.finish(record)
    await task
    await bench.tell(VersionLoaded("e", MODEL, 1, "h", 1, packed))
    await until(lambda: gateway._catalog.served(MODEL)[1].content_hash == "h")
    await executed(bench, gateway)


# -- several gateways --------------------------------------------------------------------------------------------------


async def test_gateways_share(bench: Any) -> None:
    one, other = await cached_gateway(bench), await cached_gateway(bench, "h")
    await executed(bench, one, 5)
    await stored(bench)
    assert await ask(other, 5) == {"y": 5, "z": 5}
    (found,) = await other.statistics(MODEL, "")
    assert found.cache_hit.count == 1
    looks = bench.log.looks
    assert await ask(other, 5) == {"y": 5, "z": 5}
    assert bench.log.looks == looks


async def test_what_cannot_be_read_is_a_miss(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    one, other = await cached_gateway(bench), await cached_gateway(bench, "h")
    await executed(bench, one)
    await stored(bench)
    (member,) = await bench.log.due(keys.CACHE_EXPIRIES, 2**62, 10)
    for garbage in (b"", b"\xff" * 8, b"\xff" * 40):
        await bench.log.put_note(keys.cached(member), garbage, 60)
        other._cache.store.forget()
        await executed(bench, other)
        await until(lambda: not other._cache.store._on_the_way_bytes)
    assert sum("cannot be read" in r.message for r in caplog.records) == 3
