"""`--trace-config` and its old spellings (N1)."""

from __future__ import annotations

import pytest

from charonia.errors import StartupError
from charonia.options import values as options
from charonia.options.trace_options import trace_options
from charonia.traces.contexts import TENSORS, TIMESTAMPS
from charonia.traces.trace_settings import OPENTELEMETRY, TRITON, TraceOptions, TraceSettings


def read(*argv: str) -> TraceOptions:
    return trace_options(options.parse("gateway", argv, {}, {}))


def test_nothing_is_traced_by_default() -> None:
    assert read() == TraceOptions()
    assert read("--trace-config=opentelemetry").mode == OPENTELEMETRY
    assert not read("--trace-config=level=OFF").initial.level


def test_mode_triton() -> None:
    assert read(
        "--trace-config", "triton,file=/tmp/t.json", "--trace-config", "triton,log-frequency=50", "--trace-config",
        "rate=100", "--trace-config", "level=TIMESTAMPS", "--trace-config", "level=TENSORS", "--trace-config=count=7",
    ) == TraceOptions(TRITON, "/tmp/t.json", TraceSettings(TIMESTAMPS | TENSORS, 100, 7, 50))  # fmt: skip


def test_mode_opentelemetry() -> None:
    given = [
        "mode=opentelemetry", "opentelemetry,url=http://c:4318/v1/traces", "opentelemetry,resource=service.name=a=b",
        "opentelemetry,resource=x=1", "opentelemetry,bsp_max_queue_size=100", "opentelemetry,bsp_schedule_delay=7",
        "opentelemetry,bsp_max_export_batch_size=9", "level=OFF", "level=TIMESTAMPS",
    ]  # fmt: skip
    assert read(*(f"--trace-config={word}" for word in given)) == TraceOptions(
        OPENTELEMETRY,
        initial=TraceSettings(TIMESTAMPS),
        url="http://c:4318/v1/traces",
        resource=(("service.name", "a=b"), ("x", "1")),
        bsp_max_queue_size=100,
        bsp_schedule_delay=7,
        bsp_max_export_batch_size=9,
    )


def test_from_the_environment_one_a_line() -> None:
    words = "opentelemetry,url=http://c:4318\n\nlevel=OFF\nrate=5\ncount=-1"
    found = trace_options(options.parse("gateway", [], {"CHARONIA_TRACE_CONFIG": words}, {}))
    assert found == TraceOptions(OPENTELEMETRY, initial=TraceSettings(rate=5), url="http://c:4318")
    assert trace_options(options.parse("gateway", [], {"CHARONIA_TRACE_CONFIG": ""}, {})) == TraceOptions()


def test_old_spellings(caplog: pytest.LogCaptureFixture) -> None:
    found = read("--trace-file=/t", "--trace-level=MAX", "--trace-rate=5", "--trace-count=6", "--trace-log-frequency=7")
    assert found == TraceOptions(TRITON, "/t", TraceSettings(TIMESTAMPS, 5, 6, 7))
    assert "--trace-file is the old spelling of --trace-config triton,file=<value>" in caplog.text


def test_a_level_that_leads_nowhere_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert not read("--trace-config=level=TIMESTAMPS").leads_somewhere
    assert "nothing is traced" in caplog.text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["x"], "--trace-config must be <mode>,<key>=<value> or <key>=<value>, got 'x'"),
        (["jaeger,url=x"], "--trace-config must be <mode>,<key>=<value> or <key>=<value>, got 'jaeger,url=x'"),
        (["mode=jaeger"], "--trace-config mode must be triton or opentelemetry, got 'jaeger'"),
        (["triton,url=x"], "--trace-config has no setting 'url' of 'triton': file, log-frequency"),
        (["colour=red"], "--trace-config has no setting 'colour' of all modes: mode, level, rate, count"),
        (["level=MANY"], "--trace-config: Unable to parse 'trace_level', got: MANY"),
        (["rate=x"], "--trace-config: Unable to parse 'trace_rate', got: x"),
        (["count=-2"], "--trace-config: Unable to parse 'trace_count'. Expecting value >= -1, got:-2"),
        (["opentelemetry,resource=x"], "--trace-config opentelemetry,resource must be <key>=<value>, got 'x'"),
        (["opentelemetry,bsp_schedule_delay=0"], "--trace-config opentelemetry,bsp_schedule_delay must be a number"),
        (["opentelemetry,bsp_max_queue_size=5"], "bsp_max_export_batch_size must not be more than bsp_max_queue_size"),
    ],
)
def test_one_sentence(words: list[str], sentence: str) -> None:
    with pytest.raises(StartupError) as caught:
        read(*(f"--trace-config={word}" for word in words))
    assert sentence in str(caught.value)
