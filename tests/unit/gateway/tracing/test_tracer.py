"""Which requests are traced (N1, N2), by gateways over one log; traces are written when they are over, jobs' too."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from memory_log.log import MemoryLog

from charonia import keys
from charonia.errors import InvalidArgument, LogUnavailable, Unsupported
from charonia.eventlog.control import ControlPlane
from charonia.traces.contexts import PROPAGATED, TIMESTAMPS
from charonia.traces.reports import Report
from charonia.traces.trace_settings import OPENTELEMETRY, TraceOptions, TraceSettings
from charonia.wire import ResponseRecord
from gateway.tracing.trace import Finished, Trace, answered
from gateway.tracing.tracer import Tracer
from gateway.tracing.writer import TraceWriter

PARENT = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"


class Kept:
    """A sink that keeps what it gets."""

    dropped = 0

    def __init__(self) -> None:
        self.traces: list[Finished] = []

    def write(self, traces: Sequence[Finished]) -> None:
        self.traces += traces

    def close(self) -> None: ...


class Gateway:
    """One tracer and what it wrote."""

    def __init__(self, log: MemoryLog, options: TraceOptions) -> None:
        self.control = ControlPlane(log, check_interval_ms=400, incarnation="g")
        self.kept = Kept()
        self.tracer = Tracer(options, self.control, log, TraceWriter(self.kept))

    def asked(self, times: int, model: str = "m", traceparent: str = "") -> int:
        """How many of so many requests are traced; they end at once."""
        traces = [trace for _ in range(times) if (trace := self.tracer.begin(model, traceparent)) is not None]
        for trace in traces:
            trace.begins(model, 1, "q")
            trace.ends()
            trace.finish()
        return len(traces)


@pytest.fixture
async def gateways(request: pytest.FixtureRequest) -> Any:
    """Two gateways with level TIMESTAMPS, or as the test's parameter has it, over one log where `m` and `n` are."""
    log = MemoryLog()
    options = getattr(request, "param", TraceOptions(file="f", initial=TraceSettings(TIMESTAMPS, rate=1)))
    both = [Gateway(log, options), Gateway(log, options)]
    for one in both:
        one.control.catalog.served = lambda model: {1: object()} if model in ("m", "n") else {}  # type: ignore
        await one.control.start()
    yield both
    for one in both:
        await one.tracer.close()
        await one.control.close()


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("gateways", [TraceOptions(file="f", initial=TraceSettings(TIMESTAMPS, rate=3))], indirect=True)
async def test_every_third_of_all_models_together(gateways: Any) -> None:
    one, other = gateways
    assert [one.asked(1, model) for model in "mnmnmn"] == [0, 0, 1, 0, 0, 1]
    assert other.asked(8) == 2
    await one.tracer.update("n", {"trace_rate": ["2"]})
    assert one.asked(4, "n") == 2
    assert one.asked(2, "m") == 0
    assert one.asked(1, "m") == 1


@pytest.mark.parametrize(
    "gateways",
    [
        TraceOptions(file="f", initial=TraceSettings(0, rate=1)),
        TraceOptions(file="", initial=TraceSettings(TIMESTAMPS, rate=0)),
        TraceOptions(mode=OPENTELEMETRY),
    ],
    indirect=True,
)
async def test_nothing_is_traced_unless_asked_for(gateways: Any) -> None:
    assert gateways[0].asked(3, traceparent=PARENT) == 0


@pytest.mark.parametrize("gateways", [TraceOptions(file="f", initial=TraceSettings(rate=1))], indirect=True)
async def test_a_change_holds_at_every_gateway_and_goes_again(gateways: Any) -> None:
    one, other = gateways
    assert not one.tracer.on
    told = await one.tracer.update("m", {"trace_level": ["TIMESTAMPS"]})
    assert (told["trace_level"], told["trace_rate"], told["trace_file"]) == (["TIMESTAMPS"], ["1"], ["f"])
    await until(lambda: other.tracer.on)
    assert (other.asked(2, "m"), other.asked(2, "n")) == (2, 0)
    assert await other.tracer.settings("m") == told
    assert (await other.tracer.settings(""))["trace_level"] == ["OFF"]
    assert (await other.tracer.update("m", {"trace_level": []}))["trace_level"] == ["OFF"]
    await until(lambda: not one.tracer.on)
    assert one.asked(2, "m") == 0


async def test_a_model_follows_what_is_said_of_all_but_where_it_has_its_own(gateways: Any) -> None:
    one, _ = gateways
    await one.tracer.update("m", {"trace_rate": ["12"]})
    await one.tracer.update("", {"trace_rate": ["56"], "trace_level": ["OFF"]})
    settings = await one.tracer.settings("m")
    assert (settings["trace_rate"], settings["trace_level"]) == (["12"], ["OFF"])
    assert (await one.tracer.update("m", {"trace_rate": None}))["trace_rate"] == ["56"]
    assert (await one.tracer.update("", {"trace_rate": None, "trace_level": None}))["trace_level"] == ["TIMESTAMPS"]
    assert (await one.tracer.settings("m"))["trace_rate"] == ["1"]


async def test_a_bound_is_of_all_gateways_together_and_exact(gateways: Any) -> None:
    one, other = gateways
    await one.tracer.update("", {"trace_count": ["5"]})
    await until(lambda: other.tracer.begin("m") is not None and other.tracer._of_all.counted)
    for _ in range(4):
        one.asked(2)
        other.asked(2)
    await until(lambda: one.tracer._of_all.left == 0 and other.tracer._of_all.left == 0)
    await until(lambda: len(one.kept.traces) + len(other.kept.traces) >= 5)
    assert (one.asked(5), other.asked(5)) == (0, 0)
    await one.tracer.close()
    await other.tracer.close()
    assert len(one.kept.traces) + len(other.kept.traces) == 5
    assert (await one.tracer.settings("m"))["trace_count"] == ["0"]
    # said again it begins again, and the old count goes
    (generation,) = {fact.counted for fact in one.control.catalog.trace_settings.values()}
    assert (await one.tracer.update("", {"trace_count": ["2"]}))["trace_count"] == ["2"]
    assert await one.control.log.add_to_count(keys.trace_count(generation), 0) == 0
    assert one.asked(1) == 1
    # another setting does not begin it again
    await until(lambda: one.tracer._of_all.left == 1)
    assert (await one.tracer.update("", {"trace_rate": ["7"]}))["trace_count"] == ["1"]


async def test_a_count_of_minus_one_is_no_bound(gateways: Any) -> None:
    """Said at run time, too, after a bound."""
    one, other = gateways
    for count in ("5", "-1"):
        assert (await one.tracer.update("", {"trace_count": [count]}))["trace_count"] == [count]
    await until(lambda: other.tracer.begin("m") is not None and other.tracer._of_all.left == -1)
    for gateway in gateways:
        assert gateway.asked(7) == 7
        await until(lambda kept=gateway.kept: len(kept.traces) == 7)


@pytest.mark.parametrize(
    ("gateways", "wanted", "reason"),
    [
        (
            TraceOptions(file="f", initial=TraceSettings(TIMESTAMPS)),
            {"trace_rate": ["0"]},
            "sample rate must be non-zero",
        ),
        (
            TraceOptions(file="f", initial=TraceSettings(0, rate=0)),
            {"trace_level": ["TENSORS"]},
            "sample rate must be non-zero",
        ),
        (TraceOptions(), {"trace_level": ["TENSORS"]}, "trace file name is not given"),
    ],
    indirect=["gateways"],
)
async def test_a_setting_that_traces_nothing_is_refused(gateways: Any, wanted: Any, reason: str) -> None:
    for model in ("", "m"):
        before = await gateways[0].tracer.settings(model)
        with pytest.raises(InvalidArgument) as refused:
            await gateways[0].tracer.update(model, wanted)
        assert refused.value.message == f"Attempting to set invalid trace setting :{reason}"
        assert await gateways[0].tracer.settings(model) == before
        off = await gateways[0].tracer.update(model, {**wanted, "trace_level": ["OFF"]})
        assert off["trace_level"] == ["OFF"]
        await gateways[0].tracer.update(model, dict.fromkeys(wanted) | {"trace_level": None})


@pytest.mark.parametrize(
    "gateways", [TraceOptions(file="f", initial=TraceSettings(TIMESTAMPS, rate=2, count=3))], indirect=True
)
async def test_a_bound_given_at_start_is_each_gateways_own(gateways: Any) -> None:
    one, other = gateways
    assert (one.asked(20), other.asked(4)) == (3, 2)
    assert (await one.tracer.settings("m"))["trace_count"] == ["0"]
    assert (await other.tracer.settings("m"))["trace_count"] == ["1"]


@pytest.mark.parametrize(
    "gateways",
    [TraceOptions(mode=OPENTELEMETRY, initial=TraceSettings(TIMESTAMPS, rate=100, count=0))],
    indirect=True,
)
async def test_a_sampled_parent_is_always_traced(gateways: Any) -> None:
    one, _ = gateways
    assert one.asked(3, traceparent=PARENT) == 3
    assert one.asked(3, traceparent=PARENT[:-1] + "0") == 0
    assert one.asked(3, traceparent="nonsense") == 0
    trace = one.tracer.begin("m", PARENT, "a=1")
    assert (trace.context.trace_id, trace.context.state) == (b"\xab" * 16, "a=1")
    assert trace.context.flags == TIMESTAMPS | PROPAGATED
    assert trace.parent.span_id == b"\xcd" * 8
    assert len({trace.root_id, trace.context.span_id, trace.parent.span_id}) == 3


async def test_in_mode_triton_a_parent_is_nothing(gateways: Any) -> None:
    trace = gateways[0].tracer.begin("m", PARENT)
    assert (trace.parent, trace.context.flags) == (None, TIMESTAMPS)


@pytest.mark.parametrize(
    ("model", "wanted", "kind"),
    [
        ("x", {}, InvalidArgument),
        ("m", {"trace_file": None}, Unsupported),
        ("m", {"trace_rate": ["x"]}, InvalidArgument),
    ],
)
async def test_a_change_that_cannot_be_changes_nothing(gateways: Any, model: str, wanted: Any, kind: type) -> None:
    one, _ = gateways
    with pytest.raises(kind) as caught:
        await one.tracer.update(model, {"trace_level": ["OFF"], **wanted})
    if model == "x":
        assert caught.value.message == "Request for unknown model : x"  # type: ignore[attr-defined]
        with pytest.raises(InvalidArgument):
            await one.tracer.settings("x")
    assert one.tracer.on
    assert not one.control.catalog.trace_settings


@pytest.mark.parametrize(
    ("gateways", "expected"),
    [
        (TraceOptions(file="f", initial=TraceSettings(TIMESTAMPS, rate=3)), "oo!oo!oo!"),
        (TraceOptions(file="f", initial=TraceSettings(TIMESTAMPS, rate=2, count=2)), "o!o!ooooo"),
        (TraceOptions(file="f", initial=TraceSettings(0, rate=1)), "ooooooooo"),
        (TraceOptions(file="f", initial=TraceSettings(TIMESTAMPS, rate=0)), "ooooooooo"),
    ],
    indirect=["gateways"],
)
async def test_who_passes_requests_over_counts_them_and_leaves_the_others(gateways: Any, expected: str) -> None:
    one, _ = gateways
    found = ""
    for _ in expected:
        if one.tracer.passes_over("m", is_sampled=False):
            found += "o"
        else:
            assert not one.tracer.passes_over("m", is_sampled=False), "it was not counted"
            assert one.asked(1) == 1
            found += "!"
    assert found == expected


@pytest.mark.parametrize(
    ("gateways", "passes"),
    [
        (TraceOptions(mode=OPENTELEMETRY, initial=TraceSettings(TIMESTAMPS, rate=1000)), False),
        (TraceOptions(file="f", initial=TraceSettings(TIMESTAMPS, rate=1000)), True),
    ],
    indirect=["gateways"],
)
async def test_a_callers_sampled_span_is_not_passed_over_where_contexts_are_heeded(gateways: Any, passes: bool) -> None:
    one, _ = gateways
    assert one.tracer.passes_over("m", is_sampled=True) is passes
    assert one.asked(1, traceparent=PARENT) == (not passes)


async def test_a_trace_is_written_when_its_call_is_over(gateways: Any) -> None:
    one, _ = gateways
    trace: Trace = one.tracer.begin("m")
    trace.mark("HTTP_RECV_START")
    trace.begins("m", 3, "q", "tenant")
    stamps = (("REQUEST_START", 1), ("QUEUE_START", 2), ("REQUEST_END", 3))
    report = Report(trace.context.span_id, "m", 3, "", stamps, about=(("rows", 2),))
    answered(trace, ResponseRecord(bytes(16), "m", 3, [], {}, None, report=report))
    trace.mark("HTTP_SEND_END")
    trace.finish()
    trace.finish()
    one.tracer.begin("m").finish()  # refused before it was a request: there is nothing to tell
    await one.tracer.close()
    (written,) = one.kept.traces
    assert [name for name, _ in written.front] == ["HTTP_RECV_START", "INFER_RESPONSE_COMPLETE", "HTTP_SEND_END"]
    # its ends are where the gateway saw them
    assert [name for name, _ in written.report.stamps] == ["REQUEST_START", "REQUEST_END", "QUEUE_START"]
    assert dict(written.report.stamps)["REQUEST_START"] > 3
    assert (written.report.request_id, written.report.about) == (
        "q", (("rows", 2), ("charonia.tenant", "tenant")),
    )  # fmt: skip


async def test_a_jobs_trace_waits_for_its_report(gateways: Any) -> None:
    one, _ = gateways
    traces = [one.tracer.begin("m") for _ in range(4)]
    ids = [bytes([number]) * 16 for number in range(4)]
    for trace, job_id in zip(traces, ids, strict=True):
        trace.begins("m", 1, "")
        one.tracer.await_report(job_id, trace)
        trace.finish()
    report = Report(traces[0].context.span_id, "m", 1, "", (("QUEUE_START", 2), ("REQUEST_END", 9)))
    answer = ResponseRecord(ids[0], "m", 1, [], {}, None, report=report)
    assert one.tracer.report_for(answer)
    assert not one.tracer.report_for(answer)
    assert not one.tracer.report_for(ResponseRecord(ids[1], "m", 1, [], {}, None))
    one.tracer.await_no_report(ids[1], "cancelled")
    one.tracer.await_no_report(ids[2])
    traces[2].finish()
    await one.tracer.close()
    assert [trace.report.span_id for trace in one.kept.traces] == [trace.context.span_id for trace in traces]
    assert dict(one.kept.traces[0].report.stamps)["REQUEST_END"] == 9
    assert [trace.error for trace in one.kept.traces] == ["", "cancelled", "", ""]


async def test_a_trace_whose_call_was_over_before_its_job_was_refused_is_written(gateways: Any) -> None:
    one, _ = gateways
    trace = one.tracer.begin("m")
    trace.begins("m", 1, "")
    refused: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    accepting = asyncio.create_task(one.tracer.accepted(bytes(16), trace, refused))
    await asyncio.sleep(0)
    trace.finish()  # its caller has gone
    refused.set_exception(LogUnavailable("away"))
    with pytest.raises(LogUnavailable):
        await accepting
    await until(lambda: one.tracer.written == 1)


async def test_without_the_log_a_counted_trace_is_lost_and_nothing_else(
    gateways: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = gateways
    await one.tracer.update("", {"trace_count": ["5"]})

    async def fails(_key: bytes, _amount: int) -> int:
        raise LogUnavailable("away")

    monkeypatch.setattr(one.control.log, "add_to_count", fails)
    assert one.asked(1) == 1
    await until(lambda: one.tracer.dropped == 1)
    assert one.tracer.written == 0


async def test_in_another_log_nothing_was_changed(gateways: Any) -> None:
    one, _ = gateways
    await one.tracer.update("", {"trace_level": ["OFF"]})
    assert not one.tracer.on
    one.control.catalog.clear()
    one.tracer.begin_anew()
    assert one.tracer.on
