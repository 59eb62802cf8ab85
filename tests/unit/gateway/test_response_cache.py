"""Requests through a gateway that caches responses: hits, shared executions, what is not cached, what is counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import job_bench as bench_module
import pytest
from job_bench import CONFIG, MODEL, JobBench, numbers, options, until, until_so
from job_bench import request as request_of

from charonia import keys
from charonia.clock import wall_ns
from charonia.datatypes import DataType
from charonia.errors import Cancelled, DeadlineExceeded, InternalError, LogUnavailable, Unavailable
from charonia.eventlog.memory import MemoryLog
from charonia.eventlog.port import Reply
from charonia.events import VersionLoaded
from charonia.models.config import normalise
from charonia.models.pbtxt import parse
from charonia.tensors import Tensor
from charonia.traces.contexts import TIMESTAMPS, Context, Traced
from charonia.traces.reports import Report
from charonia.wire import pack_response, record_fields, report_response
from gateway.handler import Duration

CACHED = CONFIG + "response_cache { enable: true }\n"
SIZE = 1_000_000


def parameter(name: str, value: str) -> str:
    return f'parameters {{ key: "charonia.{name}" value {{ string_value: "{value}" }} }}\n'


class CountingLog(MemoryLog):
    """Counts how often responses are looked up; `broken` makes looking and storing fail."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        self.broken = False

    async def notes(self, keys: Any) -> list[bytes | None]:
        self.looks += 1
        if self.broken:
            raise LogUnavailable("away")
        return await super().notes(keys)

    async def keep_recent(self, *arguments: Any, **more: Any) -> list[bytes]:
        if self.broken:
            raise LogUnavailable("away")
        return await super().keep_recent(*arguments, **more)


@pytest.fixture
async def bench() -> AsyncIterator[Any]:
    bench = JobBench(CountingLog())
    await bench.serve(CACHED)
    yield bench
    await bench.close()


async def cached_gateway(bench: Any, name: str = "g", **settings: Any) -> Any:
    return await bench.gateway(name, response_cache_size_bytes=SIZE, **settings)


async def ask(gateway: Any, value: int = 1, wishes: Any = None, **more: Any) -> dict[str, int]:
    response = await gateway.infer(request_of(value, **more), options=wishes)
    return numbers(response.outputs)


def asking(gateway: Any, value: int = 1, wishes: Any = None, **more: Any) -> asyncio.Task[dict[str, int]]:
    return asyncio.create_task(ask(gateway, value, wishes, **more))


async def executed(bench: Any, gateway: Any, value: int = 1, wishes: Any = None, **more: Any) -> dict[str, int]:
    """One request that is not in the cache, and its execution."""
    task = asking(gateway, value, wishes, **more)
    (record,) = await bench.comes()
    assert await bench.finish(record)
    return await task


async def stored(bench: Any, count: int = 1) -> None:
    async def there() -> bool:
        return bool(await bench.log.count_times(keys.CACHE_EXPIRIES) >= count)

    await until_so(there)


async def waiting(gateway: Any, count: int) -> None:
    """Until so many callers wait in the one flight there is."""
    await until(lambda: [len(f._passengers) for f in gateway._cache._flights.values()] == [count])


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
    await until(lambda: gateway.metrics.counts(MODEL, 1).cache_misses == 1)
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
    monkeypatch.setattr("charonia.calls.cache_store.wall_ns", lambda: now_ns + 6_000_000_000)
    await executed(bench, gateway)
    # the other one finds what the first has just made
    await until_so(lambda: _expires_later(bench, now_ns // 1000 + 6_000_000))
    assert await ask(other) == {"y": 1, "z": 1}
    monkeypatch.setattr("charonia.calls.cache_store.wall_ns", lambda: now_ns + 20_000_000_000)
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


# -- one execution for all who ask at once -----------------------------------------------------------------------------


async def test_equal_requests_in_flight_are_executed_once(bench: Any) -> None:
    gateway = await cached_gateway(bench)
    tasks = [asking(gateway, id=str(n)) for n in range(5)]
    await waiting(gateway, 5)
    (record,) = await bench.comes()
    await bench.finish(record)
    assert await asyncio.gather(*tasks) == [{"y": 1, "z": 1}] * 5
    await stored(bench)
    await until(lambda: gateway.metrics.counts(MODEL, 1).cache_misses == 1)
    (found,) = await gateway.statistics(MODEL, "")
    assert (found.cache_hit.count, found.cache_miss.count, found.success.count) == (4, 1, 4)
    assert gateway._cache._flights == {}


async def test_a_failure_of_the_model_is_everybodys(bench: Any) -> None:
    gateway = await cached_gateway(bench)
    tasks = [asking(gateway) for _ in range(3)]
    await waiting(gateway, 3)
    (record,) = await bench.comes()
    await bench.finish(record, error=InternalError("broken"))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(result) for result in results] == ["broken"] * 3
    assert len({id(result) for result in results}) == 3, "each has an error of its own"
    (found,) = await gateway.statistics(MODEL, "")
    # the executor counts the one it ran
    assert (found.fail.count, found.failures["BACKEND"]) == (2, 2)


async def test_who_asked_first_may_go(bench: Any) -> None:
    gateway = await cached_gateway(bench)
    first, second = asking(gateway), asking(gateway)
    await waiting(gateway, 2)
    (record,) = await bench.comes()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await bench.facts() == [fact for fact in await bench.facts() if type(fact).__name__ != "RequestCancelled"]
    await bench.finish(record)
    assert await second == {"y": 1, "z": 1}
    await until(lambda: gateway.metrics.counts(MODEL, 1).cache_misses == 1)
    assert gateway.metrics.counts(MODEL, 1).cache_hits == 0, "it was made for the second, then"


async def test_one_who_joined_may_go(bench: Any) -> None:
    gateway = await cached_gateway(bench)
    first, second = asking(gateway), asking(gateway)
    await waiting(gateway, 2)
    second.cancel()
    (record,) = await bench.comes()
    await bench.finish(record)
    assert await first == {"y": 1, "z": 1}


async def test_when_all_have_gone_the_request_is_cancelled(bench: Any) -> None:
    gateway = await cached_gateway(bench)
    tasks = [asking(gateway) for _ in range(2)]
    await waiting(gateway, 2)
    await bench.comes()
    for task in tasks:
        task.cancel()

    async def told() -> bool:
        return any(type(fact).__name__ == "RequestCancelled" for fact in await bench.facts())

    await until_so(told)
    assert gateway._cache._flights == {}
    for record in await bench.queued():
        await bench.finish(record)
    await executed(bench, gateway)


async def test_a_deadline_is_its_callers_own(bench: Any) -> None:
    gateway = await cached_gateway(bench)
    patient = asking(gateway)
    await bench.comes()
    hasty = asking(gateway, deadline_ns=wall_ns() + 20_000_000)
    with pytest.raises(DeadlineExceeded, match=r"^request deadline exceeded$"):
        await hasty
    (record,) = await bench.comes()
    await bench.finish(record)
    assert await patient == {"y": 1, "z": 1}
    (found,) = await gateway.statistics(MODEL, "")
    assert found.failures["REJECTED"] == 1


async def test_the_next_one_takes_over_from_one_whose_deadline_is_past(bench: Any) -> None:
    gateway = await cached_gateway(bench)
    hasty = asking(gateway, deadline_ns=wall_ns() + 50_000_000)
    await waiting(gateway, 1)
    patient = asking(gateway)
    await waiting(gateway, 2)
    (first,) = await bench.comes()
    with pytest.raises(DeadlineExceeded):
        await hasty
    (second,) = await bench.comes()
    assert second.id != first.id
    await bench.finish(second)
    assert await patient == {"y": 1, "z": 1}


@pytest.mark.parametrize(
    ("error", "timeout_us", "taken_over"),
    [
        (Cancelled("cancelled"), 0, True),
        (Unavailable("Request timeout expired"), 5_000_000, True),
        (Unavailable("Exceeds maximum queue size"), 0, False),
    ],
)
async def test_what_was_about_one_caller_alone(bench: Any, error: Any, timeout_us: int, taken_over: bool) -> None:
    gateway = await cached_gateway(bench)
    first = asking(gateway, timeout_us=timeout_us)
    await waiting(gateway, 1)
    second = asking(gateway)
    await waiting(gateway, 2)
    (record,) = await bench.comes()
    await bench.finish(record, error=error)
    with pytest.raises(type(error), match=error.message):
        await first
    if taken_over:
        (record,) = await bench.comes()
        await bench.finish(record)
        assert await second == {"y": 1, "z": 1}
    else:
        with pytest.raises(type(error), match=error.message):
            await second


async def test_nobody_is_left_behind_when_the_gateway_ends(bench: Any) -> None:
    gateway = await cached_gateway(bench)
    tasks = [asking(gateway) for _ in range(2)]
    await waiting(gateway, 2)
    await gateway.close()
    for task in tasks:
        with pytest.raises(Unavailable, match=r"^Server exiting$"):
            await task


async def test_large_inputs_are_hashed_aside() -> None:
    bench = JobBench()
    await bench.serve(
        CACHED.replace('name: "x" data_type: TYPE_INT32 dims: 1', 'name: "x" data_type: TYPE_INT32 dims: -1')
    )
    gateway = await bench.gateway(response_cache_size_bytes=10_000_000)
    request = request_of()
    request.inputs[0].shape, request.inputs[0].data = (1, 100_000), bytes(400_000)
    task = asyncio.create_task(gateway.infer(request))
    (record,) = await bench.comes()
    packed = bench_module.pack_response(record.id, MODEL, 1, request_of(9).inputs, {})
    await bench.log.append(keys.replies(record.endpoint), bench_module.record_fields([packed]))
    await task
    assert await gateway.infer(request) == await gateway.infer(request)
    await bench.close()


async def test_the_trace_of_who_asked_first_has_what_the_executor_says_of_it(bench: Any) -> None:
    gateway = await cached_gateway(bench)
    traces = [Traced(Context(TIMESTAMPS, bytes(16), bytes([number]) * 8)) for number in (1, 2)]
    first = asking(gateway, trace=traces[0])
    (record,) = await bench.comes()
    second = asking(gateway, trace=traces[1])
    await waiting(gateway, 2)
    assert record.trace is not None
    report = Report(record.trace.context.span_id, MODEL, 1, "", (("COMPUTE_START", 5),))
    outputs = [Tensor(name, DataType.INT32, (1, 1), bytes(4)) for name in ("y", "z")]
    answer = report_response(pack_response(record.id, MODEL, 1, outputs, {}), report)
    reply = Reply(keys.replies(record.endpoint), record_fields([answer]))
    assert await bench.log.settle(MODEL, [(record.id, 1)], None, [reply]) == [True]
    await asyncio.gather(first, second)
    assert [trace.report for trace in traces] == [report, None], "nothing was executed for the second"
