"""The options of `charonia tune`."""

from __future__ import annotations

import pytest

from charonia.analyzer import bench_options
from charonia.errors import InvalidArgument
from charonia.tuner.tune_options import TuneOptions, parsed

MIB = 1 << 20


def options(line: str) -> TuneOptions:
    return parsed(["tune", *line.split(), "--model-repository", "models"])


def test_limits_levels_and_values() -> None:
    found = options("m --latency-limit 2.5 --memory-limit 100 --percentile 95 --concurrency 4,8 --instances 1,2")
    assert (found.aim.latency_us, found.aim.memory_bytes, found.aim.percentile) == (2500, 100 * MIB, 95)
    assert (found.levels, found.is_open, found.values) == ((4, 8), False, {"instances": ["1", "2"]})
    assert options("m").levels == (8,)
    assert options("m --request-rate 10.5").levels == (10.5,)


def test_the_load_is_one_of_bench() -> None:
    found = options("m n --shape n=x:3,4 --shape y:2 --input-data zero -b 2 -i grpc --streaming --concurrency 16,4")
    line = found.bench_words("n", "localhost:1")
    bench = bench_options.parsed(line)
    assert bench.shapes == {"x": (3, 4)}
    assert (bench.levels.start, bench.levels.end, bench.percentile, bench.is_grpc) == (4, 16, 99, True)
    assert bench_options.parsed(found.bench_words("m", "localhost:1")).shapes == {"y": (2,)}
    assert bench_options.parsed(options("m --request-rate 5").bench_words("m", "localhost:1")).is_open


def test_the_search_is_no_part_of_a_measurement() -> None:
    def measured(line: str) -> list[str]:
        return options(line).measured(["m"])

    assert measured("m") == measured("m --search brute --instances 1,2 --latency-limit 3 --rounds 0")
    assert measured("m") == measured("m n --shape n=x:3")  # what belongs to another model
    for other in ("-b 2", "--concurrency 4", "--serve a=b", "--with n", "-p 100", "--input-data zero"):
        assert measured("m") != measured(f"m {other}")


@pytest.mark.parametrize(("line", "said"), [
    ("m m", "named twice"), ("m --concurrency 1 --request-rate 1", "exclude"), ("m --streaming", "-i grpc"),
    ("m --percentile 100", "1 to 99"), ("m --latency-limit -1", "--latency-limit"), ("m -p 0", "-p"),
    ("m --concurrency 0", "levels"), ("m --concurrency 1.5", "levels"), ("m --request-rate nan", "levels"),
    ("m --serve x", "NAME=VALUE"), ("m --serve log-url=redis://x", "log-url"), ("m --serve state-dir=x", "their own"),
    ("m --serve model-repository=x", "their own"), ("m --serve http-port=1", "http-port"),
    ("m --serve model-store=x", "their own"), ("m --serve shm-dir=x", "their own"),
    ("m --serve http-socket=x", "their own"), ("m --serve config=/etc/charonia.toml", "no file of options"),
    ("m --finalists 0", "--finalists"), ("m --max-batch many", "--max-batch"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(line: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        options(line)


def test_the_repository_is_required() -> None:
    with pytest.raises(InvalidArgument, match="--model-repository"):
        parsed(["tune", "m"])
