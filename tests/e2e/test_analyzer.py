"""`charonia bench` against a running server: both protocols, both kinds of load, every form of output."""

from __future__ import annotations

import csv
import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from e2e_models import python

from charonia import cli
from charonia.analyzer.bench_options import parsed
from charonia.analyzer.benching import Bench, opened
from charonia.analyzer.window_figures import WindowFigures
from charonia.client import Client
from charonia.eventlog.embedded import short_directory

pytestmark = pytest.mark.e2e

WINDOWS = ["--measurement-mode", "count_windows", "--measurement-request-count", "20", "--warmup-request-count", "4"]
ANY = ["-s", "1000000"]
"""Whether windows agree is no question here."""
COUNT = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([number], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
COUNT_CONFIG = """
input [ { name: "N" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
model_transaction_policy { decoupled: true }
"""


def bench(*words: str, capsys: pytest.CaptureFixture[str], model: str = "identity") -> dict[str, Any]:
    code = cli.main(["bench", "-m", model, "--json", *words])
    said = capsys.readouterr()
    assert code == 0, said.err
    found: dict[str, Any] = json.loads(said.out)
    return found


def test_levels_over_http_with_every_output(server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(tmp_path / name) for name in ("report.csv", "report.html", "report.json")]
    load = ["-u", server.http, "--concurrency-range", "1:3:2", "--max-threads", "2", "-b", "2", *WINDOWS, *ANY]
    metrics = ["--collect-metrics", "--metrics-url", f"{server.metrics}/metrics", "--verbose-csv"]
    assert (
        cli.main(["bench", "-m", "identity", *load, *metrics, "-f", files[0], "--html", files[1], "--json", files[2]])
        == 0
    )
    text = capsys.readouterr().out
    assert "Request concurrency: 3" in text
    assert "Avg HTTP time" in text
    with open(files[0], newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["Concurrency"] for row in rows] == ["1", "3"]
    assert all(float(row["Inferences/Second"]) > 0 and int(row["p99 latency"]) > 0 for row in rows)
    found = json.loads(Path(files[2]).read_text())
    assert [level["level"] for level in found["levels"]] == [1, 3]
    for level in found["levels"]:
        assert level["requests"] >= 60
        assert not level["errors"]
        assert {"queue_us", "compute_infer_us"} <= set(level["server"]["identity"])
        assert len(level["windows"]) == 3
        assert level["generator"]["cores"] > 0
    assert Path(files[1]).read_text().count("<svg") >= 4


def scraped(server: Any, metrics_url: str) -> dict[str, Any]:
    """What a bench takes from a page of metrics."""
    words = ["bench", "-m", "identity", "-u", server.http, "--collect-metrics", "--metrics-url", metrics_url]
    window = WindowFigures()
    with opened(parsed(words)) as running:
        running._scrape(window)
    return window.metrics


def test_metrics_over_a_unix_socket(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (socket,) = short_directory(server.state_dir).glob("executor*.metrics")
    assert "nv_inference_pending_request_count" in scraped(server, f"http+unix://{socket}")
    assert not scraped(server, f"http+unix://{socket}.none")
    error = f"the metrics at 'http+unix://{socket}.none' cannot be read, and are left out: [Errno 2] No such file"
    assert error in capsys.readouterr().err


def test_metrics_at_a_port_that_speaks_no_http_are_left_out(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert not scraped(server, f"{server.grpc}/metrics")
    assert f"the metrics at '{server.grpc}/metrics' cannot be read, and are left out" in capsys.readouterr().err


def test_an_open_loop_over_grpc(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rates = ["--request-rate-range", "200", "--request-distribution", "poisson", "--request-count", "60"]
    found = bench("-u", server.grpc, "-i", "grpc", *rates, capsys=capsys)
    (level,) = found["levels"]
    assert (found["load"], level["requests"]) == ("open", 60)
    # no request can have left before its time
    assert level["latency_us"]["mean"] >= level["service_us"]["mean"]


def test_streams(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--streaming", "--concurrency-range", "2", "--request-count", "40"]
    (level,) = bench("-u", f"grpc://{server.grpc}", *words, capsys=capsys)["levels"]
    assert level["requests"] == level["responses"] == 40
    assert level["latency_us"]["p50"] >= level["first_response_us"]["p50"] > 0


@pytest.mark.long
def test_streams_of_several_responses(
    serve: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python(tmp_path / "models", "count", COUNT, COUNT_CONFIG)
    (tmp_path / "data.json").write_text(json.dumps({"data": [{"N": [3]}]}))
    words = ["--streaming", "--input-data", str(tmp_path / "data.json"), "--request-count", "20"]
    url = f"grpc://{serve(tmp_path / 'models').grpc}"
    (level,) = bench("-u", url, *words, model="count", capsys=capsys)["levels"]
    assert (level["requests"], level["responses"], level["errors"]) == (20, 60, {})
    assert level["inter_response_us"]["count"] == 40
    assert level["latency_us"]["p50"] >= level["first_response_us"]["p50"] > 0


@pytest.mark.parametrize("load", [["--concurrency-range", "3"], ["--request-rate-range", "100"]])
@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_sequences(scheme: str, load: list[str], server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The server refuses a request of a sequence that has not begun or has ended, so without errors all is in order."""
    words = ["--shape", "input:1,576", "--sequence-length", "5", "--num-of-sequences", "3", "--request-count", "45"]
    url = f"{scheme}://{getattr(server, scheme)}"
    (level,) = bench("-u", url, *words, *load, model="silero_vad", capsys=capsys)["levels"]
    assert (level["requests"], level["errors"]) == (45, {})
    assert level["server"]["silero_vad"]["inferences"] >= 45


def test_shared_memory(few_models: Path, serve: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    own = serve(few_models, "--allow-client-shm=true")
    words = ["--shared-memory", "system", "-b", "2", "--concurrency-range", "2", "--request-count", "40"]
    for scheme in ("http", "grpc"):
        (level,) = bench("-u", f"{scheme}://{getattr(own, scheme)}", *words, capsys=capsys)["levels"]
        assert (level["requests"], level["errors"]) == (40, {})
        assert level["server"]["identity"]["inferences"] == 80
        assert own.get("/v2/systemsharedmemory/status")[1] == b"[]", "its region is registered no longer"


@pytest.mark.long
def test_intervals_of_a_file(server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "intervals").write_text("1000\n9000\n")
    words = ["--request-intervals", str(tmp_path / "intervals"), "--request-count", "40"]
    found = bench("-u", server.http, *words, capsys=capsys)
    (level,) = found["levels"]
    assert (found["load"], found["distribution"], level["level"]) == ("open", "intervals of a file", 200)
    assert (level["requests"], level["errors"]) == (40, {})


@pytest.mark.parametrize(("limit_ms", "levels"), [("0.001", [1]), ("600000", [1, 5])])
def test_a_search_within_a_threshold(
    limit_ms: str, levels: list[int], server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--binary-search", "--concurrency-range", "1:5:1", "--latency-threshold", limit_ms]
    found = bench("-u", server.http, *words, "--request-count", "20", capsys=capsys)
    assert [level["level"] for level in found["levels"]] == levels
    assert all(level["within_threshold"] == (levels != [1]) for level in found["levels"])
    assert cli.main(["bench", "-m", "identity", "-u", server.http, *words, "--request-count", "20"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    if levels == [1]:
        assert said.startswith("No measured level met the latency threshold: asked was a mean latency of at most 0.001")
        assert "of concurrency 1. Raise --latency-threshold, or" in said
    else:
        assert "at most 600000 ms: concurrency 5, with " in said


def test_what_fails_is_said(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "-m", "nothing", "-u", server.http]) == 1
    assert "nothing" in capsys.readouterr().err
    header = ["-H", "Authorization: Bearer wrong", "--request-parameter", "timeout:x:string"]
    assert cli.main(["bench", "-m", "identity", "-u", server.http, "--request-count", "3", *header, "--json"]) == 1
    said = capsys.readouterr()
    assert "with failed requests" in said.err
    assert sum(json.loads(said.out)["levels"][0]["errors"].values()) == 3


@pytest.mark.parametrize("windows", [0, 1, 2])
def test_an_interrupt_in_the_first_level_leaves_its_whole_windows(
    server: Any, windows: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, measured = Bench._window, list[Any]()

    def window(bench: Bench, before: Mapping[str, Any]) -> Any:
        if len(measured) == windows:
            signal.raise_signal(signal.SIGINT)
        measured.append(measure(bench, before))
        return measured[-1]

    monkeypatch.setattr(Bench, "_window", window)
    load = ["-u", server.http, "--concurrency-range", "2:4", *WINDOWS, *ANY]
    code = cli.main(["bench", "-m", "identity", *load])
    said = capsys.readouterr()
    assert "bench: interrupted" in said.err
    if not windows:
        assert (code, said.out) == (130, "")
        assert "there are no figures" in said.err
        return
    assert code == 1
    assert "Request concurrency: 2" in said.out
    assert f"the first {'window' if windows == 1 else '2 windows'} of the first level" in said.err
    assert "not stable, or with failed requests: concurrency 2" in said.err


def test_the_port_of_the_other_protocol_is_suspected(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "-m", "identity", "-u", server.grpc]) == 1
    assert capsys.readouterr().err.rstrip().endswith("is this the server's gRPC port?")
    assert cli.main(["bench", "-m", "identity", "-i", "grpc", "-u", server.http]) == 1
    assert capsys.readouterr().err.rstrip().endswith("is this the server's HTTP port?")


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_client_reads_configurations(server: Any, scheme: str) -> None:
    with Client(f"{scheme}://{getattr(server, scheme)}") as client:
        config = client.config("identity")
    assert config["name"] == "identity"
    assert {"max_batch_size", "input", "output"} <= set(config)
    assert config["input"][0]["data_type"].startswith("TYPE_")
    assert "sequence_batching" not in config
