"""The command line of `charonia bench`: perf_analyzer's defaults, and one sentence for what is refused."""

from __future__ import annotations

import pytest

from charonia import cli
from charonia.analyzer.bench_options import BenchOptions, Range, parsed
from charonia.errors import InvalidArgument


def options(line: str) -> BenchOptions:
    return parsed(["bench", "-m", "model", *line.split()])


def test_the_defaults_are_perf_analyzers() -> None:
    found = options("")
    words = found.words
    assert (found.url, found.is_grpc, found.is_open) == ("http://localhost:8000", False, False)
    assert found.levels == Range(1, 1, 1, False)
    assert (words.batch, words.measurement_interval, words.measurement_mode) == (1, 5000, "time_windows")
    assert (words.measurement_request_count, words.stability_percentage, words.max_trials) == (50, 10, 10)
    assert (words.num_of_sequences, words.sequence_length_variation, found.sequence_ids) == (4, 20, (1, 0))
    assert (words.string_length, words.output_shared_memory_size, words.shared_memory) == (128, 102_400, "none")
    assert (words.metrics_url, words.metrics_interval, found.percentile) == ("localhost:8002/metrics", 1000, None)


@pytest.mark.parametrize(
    ("line", "url", "grpc"),
    [
        ("-i grpc", "grpc://localhost:8001", True),
        ("-i gRPC -u host:9", "grpc://host:9", True),
        ("-u host:9", "http://host:9", False),
        ("-u grpcs://host:9", "grpcs://host:9", True),
        ("-u https://host", "https://host", False),
        ("-i grpc -u host:9 --ssl-grpc-use-ssl true", "grpcs://host:9", True),
    ],
)
def test_urls(line: str, url: str, grpc: bool) -> None:
    found = options(line)
    assert (found.url, found.is_grpc) == (url, grpc)


def test_the_user_of_a_url_is_sent_with_each_request() -> None:
    found = options("-u http://me:s%40cret@[::1]:9")
    assert (found.url, found.headers) == ("http://[::1]:9", (("Authorization", "Basic bWU6c0BjcmV0"),))
    found = options("-u https://me@host -H authorization:mine")
    assert (found.url, found.headers) == ("https://host", (("authorization", "mine"),))
    found = options("-u http+unix:///run/a@b")
    assert (found.url, found.headers) == ("http+unix:///run/a@b", ())


def test_values() -> None:
    found = options(
        "--request-rate-range 10:50.5:0.5 --request-distribution poisson --percentile 95 -H Authorization:Bearer:x "
        "--shape X:3,4 --shape Y:1 --request-parameter a:3:int --request-parameter b:x:y:string "
        "--request-parameter c:true:bool --sequence-id-range 5:9"
    )
    assert found.is_open
    assert found.levels == Range(10, 50.5, 0.5, True)
    assert found.percentile == 95
    assert found.headers == (("Authorization", "Bearer:x"),)
    assert found.shapes == {"X": (3, 4), "Y": (1,)}
    assert found.parameters == {"a": 3, "b": "x:y", "c": True}
    assert found.sequence_ids == (5, 9)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--service-kind openai", "--service-kind is not supported"),
        ("--periodic-concurrency-range 1:2", "--periodic-concurrency-range is not supported"),
        ("-t 4", "-t is not supported: it is perf_analyzer's old form"),
        ("-z", "-z is not supported"),
        ("--version", "--version is not supported: charonia --version says it"),
        ("--shared-memory cuda", "--shared-memory cuda is not supported"),
        ("--streaming", "--streaming is of gRPC"),
        ("--grpc-compression-algorithm gzip", "is of gRPC"),
        ("-i grpc --input-tensor-format json", "are of HTTP"),
        ("-i tcp", "-i is http or grpc"),
        ("-i http -u grpc://host", "does not fit the URL"),
        ("-u ftp://host", "is no server"),
        ("-u ftp://me:secret@host", "'ftp://[*]{3}@host' is no server"),
        ("-i grpc -u http://me:secret@host", "does not fit the URL 'http://[*]{3}@host'"),
        ("-u unix:///run/http.sock", "is no server"),
        ("-u http+unix:/run/http.sock", "names no Unix socket: write http"),
        ("-u grpc+unix:/run/grpc.sock", "names no Unix socket: write grpc"),
        ("-u http+unix://run/http.sock", "names no Unix socket: write "),
        ("-i http -u grpc+unix:///run/grpc.sock", "does not fit the URL"),
        ("--concurrency-range 0", "has no level"),
        ("--concurrency-range 4:2", "has no level"),
        ("--concurrency-range 1.5", "is no range"),
        ("--concurrency-range 1:2:3:4", "is no range"),
        ("--concurrency-range 1:0", "needs a --latency-threshold"),
        ("--concurrency-range 1:99999", "at most 65536"),
        ("--concurrency-range 2 --request-rate-range 3", "exclude one another"),
        ("--binary-search -l 5", "needs the start and the end"),
        ("--binary-search --concurrency-range 1:8", "needs a --latency-threshold"),
        ("--percentile 100", "--percentile is from 1 to 99"),
        ("-b 0", "-b must be above 0"),
        ("--max-trials -1", "--max-trials must be above 0"),
        ("--sequence-length -1", "must be 0 or more"),
        ("--sequence-id-range 5:5", "--sequence-id-range"),
        ("--shape X:0", "--shape 'X:0'"),
        ("--shape X", "--shape 'X'"),
        ("-H nothing", "-H 'nothing' is not NAME:VALUE"),
        ("--request-parameter a:b:int", "--request-parameter"),
        ("--ssl-https-verify-peer 0", "certificates are always checked"),
        ("--collect-metrics -f x.csv", "needs --verbose-csv"),
        (
            "--metrics-url grpc://host:8001",
            "--metrics-url 'grpc://host:8001' is of gRPC: write http://HOST:PORT/metrics",
        ),
        ("--metrics-url unix:/run/metrics", "--metrics-url: 'unix:/run/metrics' names no protocol: write http[+]unix"),
        ("--metrics-url http://me:s/cret@host", "--metrics-url: 'http://[*]{3}@host' is no server"),
        ("--metrics-url http://me:secret@host", "--metrics-url 'http://[*]{3}@host' names a user, which is not sent"),
    ],
)
def test_what_does_not_fit_is_one_sentence(line: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidArgument, match=sentence):
        options(line)
    assert cli.main(["bench", "-m", "model", *line.split()]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_usage_help_and_completion(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--unknown"]) == 2
    assert cli.main(["bench"]) == 2
    assert "-m is required" in capsys.readouterr().err
    assert cli.main(["bench", "--help"]) == 0
    assert "--periodic-concurrency-range" not in capsys.readouterr().out
    cli.main(["completion"])
    assert "--concurrency-range" in capsys.readouterr().out
    cli.main(["--help"])
    assert "  bench " in capsys.readouterr().out
    assert options("--service-kind triton").words.model == "model"
