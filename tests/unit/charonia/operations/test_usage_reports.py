"""`charonia usage` over a log in memory: sums by tenant and model, spans, and what it prints."""

from __future__ import annotations

from typing import Any

import pytest
from memory_log.log import MemoryLog

from charonia import keys
from charonia.errors import InvalidArgument
from charonia.facts.usage import DAY_S, HOUR_S, KEPT_DAYS, increments, nothing
from charonia.operations.arguments import parser
from charonia.operations.text.command_reports import text
from charonia.operations.usage_reports import Period, Question, usage

DAY = 20_000
NOW_NS = (DAY * DAY_S + 12 * HOUR_S) * 10**9
NOW_S = NOW_NS // 10**9


async def used(log: MemoryLog, model: str, tenant: str, day: int, hour: int, requests: int = 1) -> None:
    amounts = nothing()
    amounts[:] = [requests, 0, 2 * requests, 500_000 * requests, 10**9, 2 * 10**9, 2048, 512, 7, 250_000_000]
    await log.add_statistics(keys.usage(model, day), increments(hour, {tenant: amounts}))
    await log.set_times(keys.USED_MODELS, {model.encode(): 1})


@pytest.fixture
async def log() -> MemoryLog:
    log = MemoryLog()
    await used(log, "m", "acme", DAY, 11, 4)
    await used(log, "m", "acme", DAY, 10)
    await used(log, "m", "", DAY, 11)
    await used(log, "ünï", "acme", DAY - 1, 23)
    await used(log, "m", "acme", DAY - KEPT_DAYS - 40, 0)  # long forgotten by executors, had they run
    return log


async def asked(log: MemoryLog, since_s: float, until_s: float = NOW_S, **more: Any) -> dict[str, Any]:
    return await usage(log, Question(since_s, until_s, **more), NOW_NS)  # type: ignore[arg-type]


def short(document: dict[str, Any]) -> list[tuple[str, str, int]]:
    return [(row["tenant"], row["model"], row["requests"]) for row in document["usage"]]


async def test_sums_by_tenant_and_model(log: MemoryLog) -> None:
    document = await asked(log, 0)
    assert short(document) == [("", "m", 1), ("acme", "m", 5), ("acme", "ünï", 1)]
    assert document["usage"][1] == {
        "tenant": "acme",
        "model": "m",
        "requests": 5,
        "failures": 0,
        "rows": 10,
        "instance_s": 2.0,
        "failed_instance_s": 0.5,
        "queue_s": 4.0,
        "input_bytes": 4096,
        "output_bytes": 1024,
        "tokens": 14,
        "batch_share": 0.5,
    }
    assert document["total"]["requests"] == 7


async def test_only_some_models_tenants_and_hours(log: MemoryLog) -> None:
    assert short(await asked(log, 0, models=("ünï", "unknown"))) == [("acme", "ünï", 1)]
    assert short(await asked(log, 0, tenants=("",))) == [("", "m", 1)]
    last_hour = NOW_S - HOUR_S
    assert short(await asked(log, last_hour)) == [("", "m", 1), ("acme", "m", 4)]
    assert short(await asked(log, last_hour - 1)) == [("", "m", 1), ("acme", "m", 5)]  # an hour counts whole
    assert short(await asked(log, 0, last_hour)) == [("acme", "m", 1), ("acme", "ünï", 1)]
    assert short(await asked(log, NOW_S, NOW_S + DAY_S)) == []


@pytest.mark.parametrize(("period", "starts"), [("day", ["00", "00"]), ("hour", ["10", "11"])])
async def test_a_row_for_each_period(log: MemoryLog, period: Period, starts: list[str]) -> None:
    rows = (await asked(log, 0, models=("m",), period=period))["usage"]
    assert rows[0]["from"] == f"2024-10-04T{starts[1]}:00:00Z"
    assert [row["from"][11:13] for row in rows if row["tenant"] == "acme"] == sorted(set(starts))


async def test_an_empty_span_is_refused(log: MemoryLog) -> None:
    with pytest.raises(InvalidArgument, match="--since must be earlier"):
        await asked(log, NOW_S)


async def test_what_is_printed(log: MemoryLog) -> None:
    document = await asked(log, 0)
    printed = text(parser().parse_args(["usage"]), document).splitlines()
    assert printed[0].endswith("to 2024-10-04T12:00:00Z")
    headings = (
        ["TENANT", "MODEL", "REQUESTS", "FAILURES", "ROWS", "INSTANCE", "FAILED", "QUEUE"],
        ["IN", "OUT", "TOKENS", "SHARE"],
    )
    assert printed[1].split() == [*headings[0], *headings[1]]
    assert printed[2].split()[:3] == ["-", "m", "1"]
    assert printed[-1].split()[:2] == ["total", "7"]
    empty = await asked(log, 0, tenants=("nobody",))
    assert text(parser().parse_args(["usage"]), empty).startswith("no requests ran from ")


async def test_comma_separated_values(log: MemoryLog) -> None:
    await used(log, "m", 'a "quoted", one', DAY, 3)
    document = await asked(log, 0, models=("m",), period="hour")
    printed = text(parser().parse_args(["usage", "--csv"]), document).splitlines()
    assert printed[0] == (
        "tenant,model,from,requests,failures,rows,instance_s,queue_s,input_bytes,output_bytes,tokens,batch_share,"
        "failed_instance_s"
    )
    assert printed[1] == ",m,2024-10-04T11:00:00Z,1,0,2,1,2,2048,512,7,0.5,0.25"
    assert printed[2] == '"a ""quoted"", one",m,2024-10-04T03:00:00Z,1,0,2,1,2,2048,512,7,0.5,0.25'
    assert len(printed) == 1 + len(document["usage"])
