"""Tracing as Triton's clients know it: settings by both protocols, the trace file, spans at a collector (N1-N7, H44).

One server sends spans to a collector of ours; a second gateway on its log writes Triton's file.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from e2e_asking import client, infer, inputs, post, until
from e2e_models import WIDTH, put, python, scaling
from e2e_parts import GATEWAY_FLAGS, Part
from e2e_server import serving
from otlp_receiver import Receiver, Span
from trace_files import entries, names_of, traced
from traced_models import CALLER, CALLER_IO, CHAIN, COUNTS, COUNTS_IO, ONE, OUTER, WAITS, WAITS_IO
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.e2e
ROW = np.arange(WIDTH, dtype=np.float32).reshape(1, WIDTH)
ROOT_EVENTS = ["HTTP_RECV_START", "HTTP_RECV_END", "INFER_RESPONSE_COMPLETE", "HTTP_SEND_START", "HTTP_SEND_END"]

GRPC_EVENTS = [
    "GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "INFER_RESPONSE_COMPLETE", "GRPC_SEND_START", "GRPC_SEND_END",
]  # fmt: skip
MODEL_EVENTS = ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
COMPUTE_EVENTS = ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`server` sends spans to `receiver`, of every request; `other` writes `file`, of none until it is told to."""
    directory = tmp_path_factory.mktemp("tracing")
    models = directory / "models"
    scaling(models, "double", 2, config=ONE)
    scaling(models, "triple", 3, config=ONE)
    scaling(models, "ordered", 4, config=f"{ONE} dynamic_batching {{ preserve_ordering: true }}")
    python(models, "caller", CALLER, CALLER_IO + ONE)
    python(models, "counts", COUNTS, COUNTS_IO + ONE)
    python(models, "waits", WAITS, WAITS_IO + ONE)
    for name, config in (("chain", CHAIN), ("outer", OUTER)):
        (models / name / "1").mkdir(parents=True)
        put(models / name / "config.pbtxt", config)
    with ExitStack() as ends:
        receiver = ends.enter_context(Receiver())
        flags = [
            f"opentelemetry,url={receiver.url}", "opentelemetry,resource=service.name=tested", "level=TIMESTAMPS",
            "opentelemetry,resource=test.key=test.value", "rate=1", "opentelemetry,bsp_schedule_delay=20",
        ]  # fmt: skip
        server = ends.enter_context(
            serving(
                models,
                directory / "state",
                "--allow-webhooks=true",
                "--webhook-allow=127.0.0.1/32",
                *(f"--trace-config={flag}" for flag in flags),
            )
        )
        file = directory / "trace.json"
        other = Part(
            "gateway", "other", directory, server.log_url, *GATEWAY_FLAGS, f"--trace-config=triton,file={file}"
        )
        ends.callback(other.stop)
        other.learn_addresses()
        other.wait_ready()
        yield SimpleNamespace(server=server, other=other, receiver=receiver, file=file, directory=directory)


def whole(stack: Any, trace_id: str, count: int) -> list[Span]:
    """The spans of one trace, once so many are there."""
    until(f"{count} spans of {trace_id}", lambda: len(stack.receiver.of(trace_id)) >= count)
    return list(stack.receiver.of(trace_id))


def parent(number: int, flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{number:032x}-{number:016x}-{flags}", "tracestate": "vendor=1"}


def ask(server: Any, model: str, kind: str = "http", headers: dict[str, str] | None = None, **more: Any) -> Any:
    name = {"chain": "IN", "outer": "IN", "caller": "X"}.get(model, "INPUT0")
    return infer(server, model, kind, options={"headers": headers, **more}, **{name: ROW})


# -- spans -------------------------------------------------------------------------------------------------------------


def test_the_spans_of_one_inference(stack: Any) -> None:
    assert (ask(stack.server, "double", headers=parent(1), request_id="one").as_numpy("OUTPUT0") == ROW * 2).all()
    spans = {span.name: span for span in whole(stack, f"{1:032x}", 3)}
    assert stack.receiver.tree(f"{1:032x}") == {"InferRequest": ["double"], "double": ["compute"]}
    root, model, compute = spans["InferRequest"], spans["double"], spans["compute"]
    assert (root.parent, root.state) == (f"{1:016x}", "vendor=1")
    assert sorted(root.events) == sorted(ROOT_EVENTS)
    assert sorted(model.events) == sorted(MODEL_EVENTS)
    assert sorted(compute.events) == sorted(COMPUTE_EVENTS)
    told = {name: value for name, value in model.attributes.items() if name.startswith("triton.")}
    assert told.pop("triton.trace_id") > 0
    assert told == {
        "triton.model_name": "double", "triton.model_version": 1, "triton.trace_parent_id": 0,
        "triton.request_id": "one",
    }  # fmt: skip
    assert model.attributes["charonia.batch_size"] == 1
    assert str(model.attributes["charonia.executor"]).startswith("executor-")
    assert root.resource.items() >= {"service.name": "tested", "test.key": "test.value"}.items()
    # one machine has one clock
    order = [*ROOT_EVENTS[:2], *MODEL_EVENTS[:2], *COMPUTE_EVENTS, "REQUEST_END", *ROOT_EVENTS[2:]]
    events = root.events | model.events | compute.events
    assert sorted(order, key=lambda name: (events[name], order.index(name))) == order
    assert root.begin_ns <= model.begin_ns <= compute.begin_ns < compute.end_ns <= model.end_ns <= root.end_ns


def test_calls_and_steps_are_children(stack: Any) -> None:
    answer = ask(stack.server, "caller", kind="grpc", headers=parent(2))
    assert (answer.as_numpy("Y") == ROW * 6).all()
    spans = whole(stack, f"{2:032x}", 8)
    assert stack.receiver.tree(f"{2:032x}") == {
        "InferRequest": ["caller"],
        "caller": ["chain", "compute"],
        "chain": ["double", "triple"],
        "double": ["compute"],
        "triple": ["compute"],
    }
    assert len(spans) == 8
    by_name = {span.name: span for span in spans}
    assert sorted(by_name["InferRequest"].events) == sorted(GRPC_EVENTS)
    numbers = {span.attributes["triton.trace_id"]: span.name for span in spans if "triton.trace_id" in span.attributes}
    above = {
        name: numbers.get(span.attributes["triton.trace_parent_id"]) for name, span in by_name.items()
        if "triton.trace_id" in span.attributes
    }  # fmt: skip
    assert above == {"caller": None, "chain": "caller", "double": "chain", "triple": "chain"}
    # what model code was told is the span of its own model, to which its own spans may be added
    told = json.loads(json.loads(answer.as_numpy("TEXT")[0, 0]))
    assert told == {"traceparent": f"00-{2:032x}-{by_name['caller'].id}-01", "tracestate": "vendor=1"}
    # the clock is one, so a step lies within its ensemble, and that within the caller's compute
    compute = next(s for s in spans if s.name == "compute" and s.parent == by_name["caller"].id)
    assert compute.begin_ns <= by_name["chain"].begin_ns <= by_name["double"].begin_ns
    assert by_name["triple"].end_ns <= by_name["chain"].end_ns <= compute.end_ns


def test_nested_ensembles(stack: Any) -> None:
    assert (ask(stack.server, "outer", headers=parent(3)).as_numpy("OUT") == ROW * 18).all()
    whole(stack, f"{3:032x}", 9)
    assert stack.receiver.tree(f"{3:032x}") == {
        "InferRequest": ["outer"],
        "outer": ["chain", "triple"],
        "chain": ["double", "triple"],
        "double": ["compute"],
        "triple": ["compute", "compute"],
    }


def test_a_jobs_spans_join_the_trace_of_the_request_that_made_it(stack: Any) -> None:
    body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, WIDTH], "data": ROW.ravel().tolist()}]}
    hook = stack.receiver.url.replace("/v1/traces", "/hook")
    headers = {**parent(4), "prefer": "respond-async", "charonia-webhook": hook}
    status, _ = stack.server.request("POST", "/v2/models/chain/infer", json.dumps(body).encode(), headers)
    assert status == 202
    whole(stack, f"{4:032x}", 6)
    assert stack.receiver.tree(f"{4:032x}") == {
        "InferRequest": ["chain"], "chain": ["double", "triple"], "double": ["compute"], "triple": ["compute"],
    }  # fmt: skip
    (chain,) = [span for span in stack.receiver.of(f"{4:032x}") if span.name == "chain"]
    until("its webhook is called", lambda: stack.receiver.others)
    ((path, hooked),) = stack.receiver.others
    assert (path, hooked["traceparent"]) == ("/hook", f"00-{4:032x}-{chain.id}-01")
    assert hooked["tracestate"] == "vendor=1"
    # one with a key is waited for, and its answer brings the spans
    headers = {**parent(5), "idempotency-key": "k-1"}
    for expected in (6, 8):  # the second call gets the answer of the first one's job
        status, _ = stack.server.request("POST", "/v2/models/chain/infer", json.dumps(body).encode(), headers)
        assert status == 200
        spans = whole(stack, f"{5:032x}", expected)
    assert sorted(span.name for span in spans) == sorted(
        ["InferRequest", "chain"] * 2 + ["double", "triple", "compute", "compute"]
    )


@pytest.mark.parametrize(("model", "number"), [("double", 12), ("ordered", 13)])
def test_the_spans_of_a_job_of_one_model(stack: Any, model: str, number: int) -> None:
    body = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, WIDTH], "data": ROW.ravel().tolist()}]}
    headers = {**parent(number), "prefer": "respond-async"}
    status, _ = stack.server.request("POST", f"/v2/models/{model}/infer", json.dumps(body).encode(), headers)
    assert status == 202
    spans = {span.name: span for span in whole(stack, f"{number:032x}", 3)}
    assert stack.receiver.tree(f"{number:032x}") == {"InferRequest": [model], model: ["compute"]}
    assert spans["compute"].end_ns <= spans[model].end_ns <= spans["InferRequest"].end_ns


def test_streams_and_generate(stack: Any) -> None:
    answers: list[Any] = []
    with client("grpc", stack.server) as asking:
        asking.start_stream(lambda result, error: answers.append((result, error)), headers=parent(6))
        asking.async_stream_infer("double", inputs("grpc", INPUT0=ROW))
        asking.async_stream_infer("counts", inputs("grpc", COUNT=np.array([2], np.int32)))
        until("three answers", lambda: len(answers) >= 3)
        asking.stop_stream()
    assert not [error for _, error in answers if error is not None]
    whole(stack, f"{6:032x}", 6)
    assert stack.receiver.tree(f"{6:032x}") == {
        "InferRequest": ["counts", "double"], "double": ["compute"], "counts": ["compute"],
    }  # fmt: skip
    status, text = stack.server.request(
        "POST", "/v2/models/counts/generate_stream", json.dumps({"COUNT": 2}).encode(), parent(7)
    )
    assert (status, text.count(b"data:")) == (200, 2)
    whole(stack, f"{7:032x}", 3)
    assert stack.receiver.tree(f"{7:032x}") == {"InferRequest": ["counts"], "counts": ["compute"]}


def test_what_fails_is_told(stack: Any) -> None:
    with pytest.raises(InferenceServerException):
        infer(stack.server, "double", options={"headers": parent(8)}, INPUT0=np.zeros((1, WIDTH + 1), np.float32))
    spans = whole(stack, f"{8:032x}", 2)
    assert {span.name for span in spans} == {"InferRequest", "double"}
    assert all("unexpected shape for input 'INPUT0'" in span.error for span in spans)


def test_one_who_leaves_is_told(stack: Any) -> None:
    with pytest.raises(InferenceServerException):  # refused before it is a request: the model cannot answer once
        infer(stack.server, "counts", "grpc", options={"headers": parent(14)}, COUNT=np.array([1], np.int32))
    connection = http.client.HTTPConnection(stack.server.http, timeout=60)
    body = json.dumps({"GATE": str(stack.directory / "gate")})
    connection.request("POST", "/v2/models/waits/generate_stream", body, parent(15))
    until("the model waits", (stack.directory / "gate.entered").exists)
    connection.close()
    spans = whole(stack, f"{15:032x}", 2)
    (stack.directory / "gate").touch()
    assert {span.error for span in spans if span.name != "compute"} == {"the caller has gone"}
    assert not stack.receiver.of(f"{14:032x}")


def test_a_caller_who_is_not_sampled_counts_as_any_other(stack: Any) -> None:
    ask(stack.server, "double", headers=parent(9, flags="00"))
    spans = whole(stack, f"{9:032x}", 3)  # every one is traced
    assert {span.parent for span in spans if span.name == "InferRequest"} == {f"{9:016x}"}


def test_a_collector_that_is_away_costs_nothing_but_the_spans(stack: Any) -> None:
    receiver = stack.receiver

    def dropped() -> float:
        lines = stack.server.scrape().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("charonia_traces_dropped"))

    before = dropped()
    receiver.status = 400
    try:
        ask(stack.server, "double", headers=parent(10))
        until("spans are dropped", lambda: dropped() >= before + 3)
    finally:
        receiver.status = 200
    ask(stack.server, "double", headers=parent(11))
    whole(stack, f"{11:032x}", 3)
    assert not receiver.of(f"{10:032x}")
    assert stack.server.log().count("the collector does not take spans") == 1


# -- settings ----------------------------------------------------------------------------------------------------------


def test_settings_are_the_same_by_both_protocols(stack: Any) -> None:
    expected = {
        "trace_level": ["TIMESTAMPS"],
        "trace_rate": "1",
        "trace_count": "-1",
        "trace_mode": "opentelemetry",
        "bsp_max_export_batch_size": "512",
        "bsp_max_queue_size": "2048",
        "bsp_schedule_delay": "20",
        "url": stack.receiver.url,
        "resource": "service.name=tested,test.key=test.value",
    }
    with client("http", stack.server) as asking:
        assert asking.get_trace_settings() == asking.get_trace_settings("double") == expected
        for wrong in ("get", "update"):
            with pytest.raises(InferenceServerException, match="Request for unknown model : nope"):
                asking.get_trace_settings("nope") if wrong == "get" else asking.update_trace_settings("nope", {})
    with client("grpc", stack.server) as asking:
        told = asking.get_trace_settings("double", as_json=True)["settings"]
        as_lists = {name: value if isinstance(value, list) else [value] for name, value in expected.items()}
        assert {name: setting["value"] for name, setting in told.items()} == as_lists
        with pytest.raises(InferenceServerException, match="Request for unknown model : nope"):
            asking.get_trace_settings("nope")
        with pytest.raises(InferenceServerException, match="expect only 1 value for 'trace_rate'"):
            asking.update_trace_settings(settings={"trace_rate": ["1", "2"]})


@pytest.mark.parametrize(
    ("change", "status", "text"),
    [
        ({"trace_file": "x"}, 501, "trace file location can not be updated through network protocol"),
        ({"trace_level": ["OFF", "TENSORS"]}, 400, "Expect only one trace level 'OFF' is specified"),
        ({"trace_rate": "x"}, 400, "Unable to parse 'trace_rate', got: x"),
        ({"trace_count": -2}, 400, "Unable to parse 'trace_count'. Expecting value >= -1, got:-2"),
        (
            {"trace_count": "9999999999"},
            400,
            "Unable to parse 'trace_count', value is out of range [ -1, 2147483647 ], got: 9999999999",
        ),
    ],
)
def test_wrong_settings(stack: Any, change: dict[str, Any], status: int, text: str) -> None:
    for path in ("/v2/trace/setting", "/v2/models/double/trace/setting"):
        assert post(stack.server, path, change) == (status, {"error": text})


def written(stack: Any, request_id: str) -> bool:
    """Whether the file tells of a request; who reads it while it is written to may see the beginning of a write."""
    with suppress(ValueError):
        return bool(traced(stack, request_id))
    return False


# -- the trace file ----------------------------------------------------------------------------------------------------


def test_a_change_at_one_gateway_holds_at_the_other(stack: Any) -> None:
    """Tells the one that sends spans; the one that writes the file begins, and ends, to trace."""
    ask(stack.other, "chain", request_id="before")
    with client("http", stack.server) as asking, client("grpc", stack.other) as looking:
        try:
            told = asking.update_trace_settings("chain", {"trace_level": ["TIMESTAMPS"], "trace_rate": 1})
            assert (told["trace_level"], told["trace_mode"]) == (["TIMESTAMPS"], "opentelemetry")

            def heard(level: str) -> Any:
                settings = looking.get_trace_settings("chain").settings
                return settings["trace_level"].value == [level] and settings

            settings = until("the other gateway has heard it", lambda: heard("TIMESTAMPS"))
            assert settings["trace_file"].value == [str(stack.file)]
            for kind in ("http", "grpc"):
                ask(stack.other, "chain", kind=kind, request_id=f"chain-{kind}")
                until("it is written", lambda kind=kind: written(stack, f"chain-{kind}"))
        finally:
            asking.update_trace_settings("chain", {"trace_level": None, "trace_rate": None})
        until("the other gateway has heard it", lambda: heard("OFF"))
    ask(stack.other, "chain", request_id="after")
    found = traced(stack, "chain-http")
    assert names_of(found) == [("chain", -1), ("double", 0), ("triple", 0)]
    stamps = {entry["id"]: [s["name"] for s in entry["timestamps"]] for entry in found if "timestamps" in entry}
    chain, double, _ = stamps.values()
    assert sorted(chain) == sorted(ROOT_EVENTS + MODEL_EVENTS)
    assert sorted(double) == sorted(MODEL_EVENTS + COMPUTE_EVENTS)
    for entry in found:
        times = [stamp["ns"] for stamp in entry.get("timestamps", ())]
        assert times == sorted(times)
    assert not traced(stack, "before")
    assert not traced(stack, "after")


def test_tensors_and_a_bound_of_both_gateways_together(stack: Any) -> None:
    change = {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "2", "trace_count": "3"}
    with client("grpc", stack.other) as asking:
        try:
            told = asking.update_trace_settings("double", change)
            assert told.settings["trace_level"].value == ["TIMESTAMPS", "TENSORS"]
            for number in range(4):
                ask(stack.other, "double", request_id=f"bounded-{number}")

            def left(expected: str) -> bool:
                return bool(asking.get_trace_settings("double").settings["trace_count"].value == [expected])

            until("two are counted", lambda: left("1"))
            spans = len(stack.receiver.spans)
            for number in range(10):  # of these one more
                ask(stack.server, "double", request_id=f"elsewhere-{number}")
            until("three are counted", lambda: left("0"))
            ask(stack.other, "double", request_id="too-late")
            ask(stack.other, "double", request_id="too-late")
            until("its spans are there", lambda: len(stack.receiver.spans) >= spans + 3)
            until("both are written", lambda: written(stack, "bounded-1") and written(stack, "bounded-3"))
        finally:
            asking.update_trace_settings("double", dict.fromkeys(change))
    mine = [entry["request_id"] for entry in entries(stack) if entry.get("model_name") == "double"]
    assert [name for name in mine if name.startswith("bounded")] == ["bounded-1", "bounded-3"]
    assert "too-late" not in mine
    tensors = [entry for entry in traced(stack, "bounded-1") if "tensor" in entry]
    data, doubled = (",".join(str(float(x)) for x in row.ravel()) for row in (ROW, ROW * 2))
    shape = f"1,{WIDTH}"
    assert [(t["activity"], t["tensor"]) for t in tensors] == [
        ("TENSOR_QUEUE_INPUT", {"name": "INPUT0", "data": data, "shape": shape, "dtype": "FP32"}),
        ("TENSOR_BACKEND_INPUT", {"name": "INPUT0", "data": data, "shape": shape, "dtype": "FP32"}),
        ("TENSOR_BACKEND_OUTPUT", {"name": "OUTPUT0", "data": doubled, "shape": shape, "dtype": "FP32"}),
    ]
