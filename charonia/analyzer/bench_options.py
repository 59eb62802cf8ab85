"""The options of `charonia bench`: perf_analyzer's names, meanings and defaults, and what is refused. Pure."""

from __future__ import annotations

import argparse
import math
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import unquote, urlsplit

from charonia.client.clients import SCHEMES, Address, has_scheme
from charonia.errors import InvalidArgument, without_credentials

from .send_schedule import CONSTANT, POISSON

_REFUSED = {
    "--service-kind": "only servers of the KServe v2 protocol are measured (the kind 'triton')",
    "--model-signature-name": "it is of TensorFlow Serving, and only servers of the KServe v2 protocol are measured",
    "--endpoint": "it is of OpenAI's API, and only servers of the KServe v2 protocol are measured",
    "--periodic-concurrency-range": "levels are measured one after the other: give --concurrency-range",
    "--request-period": "it belongs to --periodic-concurrency-range, which is not supported",
    "--bls-composing-models": "the statistics of models that a model calls are not shown; those of an ensemble are",
    "--profile-export-file": "single requests are not kept: --json FILE has the histograms of each level",
    "--trace-level": "set it at the server: charonia serve --trace-config, or its trace settings",
    "--trace-rate": "set it at the server: charonia serve --trace-config, or its trace settings",
    "--trace-count": "set it at the server: charonia serve --trace-config, or its trace settings",
    "--log-frequency": "set it at the server: charonia serve --trace-config, or its trace settings",
    "--triton-server-directory": "no server is run in this process: start one and give -u",
    "--model-repository": "no server is run in this process: start one and give -u",
    "--ssl-https-client-certificate-type": "certificates are PEM",
    "--ssl-https-private-key-type": "keys are PEM",
    "--data-directory": "it is perf_analyzer's old name of --input-data",
    "--version": "charonia --version says it",
    "-z": "it is perf_analyzer's old form of --input-data zero",
    "-t": "it is perf_analyzer's old form of --concurrency-range",
    "-c": "it is perf_analyzer's old form of --concurrency-range",
    "-d": "it is perf_analyzer's old form of --concurrency-range START:0",
}  # fmt: skip
"""Options of perf_analyzer that this command has not, each with the reason or what to use."""

MAX_CONCURRENCY = 65_536
_MAX_INT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Range:
    """Levels from `start` to `end` by `step`; `end` 0 is none. `has_end`: it was written."""

    start: float
    end: float
    step: float
    has_end: bool


def parser() -> argparse.ArgumentParser:
    """The command's options, in a parser that has it as its only command (as the other commands' parsers)."""
    root = argparse.ArgumentParser(prog="charonia", allow_abbrev=False)
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    text = "measure how fast a model of a KServe v2 server is, with the options and figures of perf_analyzer"
    command = commands.add_parser("bench", help=text, description=text, allow_abbrev=False)
    _add_server(command.add_argument_group("server"))
    _add_load(command.add_argument_group("load"))
    _add_measurement(command.add_argument_group("measurement"))
    _add_inputs(command.add_argument_group("inputs"))
    _add_output(command.add_argument_group("output"))
    for name, reason in _REFUSED.items():
        command.add_argument(name, action=_Refuse, nargs="?", const="", help=argparse.SUPPRESS, reason=reason)
    return root


class _Refuse(argparse.Action):
    """Raises `InvalidArgument` with the reason for an option that is not supported."""

    def __init__(self, *words: Any, reason: str, **more: Any) -> None:
        super().__init__(*words, **more)
        self._reason = reason

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if option_string == "--service-kind" and values == "triton":
            return
        raise InvalidArgument(f"{option_string} is not supported: {self._reason}")


def _add_server(group: Any) -> None:
    add = group.add_argument
    add("-m", "--model", default="", metavar="MODEL", help="the model; required")
    add("-x", "--model-version", default="", metavar="V", help="its version (the newest that is ready)")
    add("-u", "--url", default="", metavar="URL", help="HOST:PORT, or http://, https://, grpc:// or grpcs://, "
        "or http+unix:///PATH or grpc+unix:///PATH of a Unix socket "
        "(CHARONIA_URL, else localhost:8000, localhost:8001 with -i grpc)")  # fmt: skip
    add("-i", dest="protocol", default="", type=str.lower, metavar="PROTOCOL", help="http or grpc (http)")
    add("-H", "--header", action="append", default=[], metavar="NAME:VALUE", help="send this header; repeatable")
    add("--ca-file", "--ssl-https-ca-certificates-file", "--ssl-grpc-root-certifications-file", dest="ca_file",
        default="", metavar="FILE", help="trust these authorities (PEM)")  # fmt: skip
    add("--ssl-https-client-certificate-file", "--ssl-grpc-certificate-chain-file", dest="certificate_file",
        default="", metavar="FILE", help="this client's certificate (PEM)")  # fmt: skip
    add("--ssl-https-private-key-file", "--ssl-grpc-private-key-file", dest="key_file", default="", metavar="FILE",
        help="the key of that certificate (PEM)")  # fmt: skip
    add("--ssl-grpc-use-ssl", nargs="?", const="true", default="false", metavar="BOOL", help="as grpcs:// (false)")
    add("--ssl-https-verify-peer", type=int, default=1, metavar="N", help="1: certificates are always checked")
    add("--ssl-https-verify-host", type=int, default=2, metavar="N", help="2: and whether they name the host")


def _add_load(group: Any) -> None:
    add = group.add_argument
    add("--concurrency-range", metavar="START:END:STEP", help="requests in flight (1:1:1; END 0: until the "
        "latency threshold)")  # fmt: skip
    add("--request-rate-range", metavar="START:END:STEP", help="requests a second, whatever the server does")
    add("--request-distribution", default=CONSTANT, choices=(CONSTANT, POISSON), help="of request rates (constant)")
    add("--request-intervals", default="", metavar="FILE", help="microseconds between requests, one a line, repeated")
    add("--binary-search", action="store_true", help="search a range for the last level within the latency threshold")
    add("-a", "--async", dest="asynchronous", action="store_true", help="accepted: requests are never sent by "
        "blocking threads")  # fmt: skip
    add("--sync", action="store_true", help="accepted, with no effect, like --async")
    add("--max-threads", type=int, default=0, metavar="N", help="most worker processes (half the cores, at most 8)")
    add("--streaming", action="store_true", help="over gRPC streams, as models with several responses need it")
    add("--grpc-compression-algorithm", default="none", choices=("none", "gzip", "deflate"), help="of requests (none)")
    add("--sequence-length", type=int, default=0, metavar="N", help="requests of a sequence (20)")
    add("--sequence-length-variation", type=float, default=20.0, metavar="PERCENT", help="by which it varies (20)")
    add("--sequence-id-range", default="1", metavar="START:END", help="correlation ids, without END (1)")
    add("--num-of-sequences", type=int, default=4, metavar="N", help="sequences at once of request rates (4)")
    add("--serial-sequences", action="store_true", help="accepted: a sequence never has two requests in flight")
    add("--request-parameter", action="append", default=[], metavar="NAME:VALUE:TYPE", help="parameter of each "
        "request; TYPE is bool, int, uint, double or string; repeatable")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="of random inputs, lengths and times (0)")


def _add_measurement(group: Any) -> None:
    add = group.add_argument
    add("-p", "--measurement-interval", type=int, default=5000, metavar="MS", help="length of a window (5000)")
    add("--measurement-mode", default="time_windows", choices=("time_windows", "count_windows"),
        help="windows of a length, or of a number of requests (time_windows)")  # fmt: skip
    add("--measurement-request-count", type=int, default=50, metavar="N", help="requests of a counted window (50)")
    add("--request-count", type=int, default=0, metavar="N", help="one window of this many requests for each level")
    add("-s", "--stability-percentage", type=float, default=10.0, metavar="PERCENT", help="by which rate and latency "
        "of three windows in a row may differ (10)")  # fmt: skip
    add("-r", "--max-trials", type=int, default=10, metavar="N", help="windows of a level before it is given up (10)")
    add("--percentile", type=int, default=-1, metavar="P", help="judge by this percentile of latency, not the mean")
    add("-l", "--latency-threshold", type=float, default=0.0, metavar="MS", help="measure no level beyond this latency")
    add("--warmup-request-count", type=int, default=0, metavar="N", help="requests of each level before its windows "
        "(those of a fifth of a window, at most 1 s)")  # fmt: skip
    add("--collect-metrics", action="store_true", help="ask the server for its metrics within windows")
    add("--metrics-url", default="localhost:8002/metrics", metavar="URL", help="where, or http+unix:///PATH of a "
        "Unix socket (localhost:8002/metrics)")  # fmt: skip
    add("--metrics-interval", type=int, default=1000, metavar="MS", help="how often (1000)")


def _add_inputs(group: Any) -> None:
    add = group.add_argument
    add("-b", dest="batch", type=int, default=1, metavar="N", help="batch size of each request (1)")
    add("--input-data", action="append", default=[], metavar="zero|random|FILE|DIR", help="JSON files, repeatable, or "
        "a directory with a file for each input (random)")  # fmt: skip
    add("--shape", action="append", default=[], metavar="NAME:D,D", help="shape of an input, without its batch "
        "dimension; repeatable")  # fmt: skip
    add("--string-length", type=int, default=128, metavar="N", help="of random strings (128)")
    add("--string-data", default=None, metavar="TEXT", help="for strings, in place of random ones")
    add("--shared-memory", default="none", choices=("none", "system", "cuda"), help="for inputs and outputs (none)")
    add("--output-shared-memory-size", type=int, default=102_400, metavar="BYTES", help="of outputs without a fixed "
        "size (102400)")  # fmt: skip
    add("--input-tensor-format", default="binary", choices=("binary", "json"), help="of HTTP requests (binary)")
    add("--output-tensor-format", default="binary", choices=("binary", "json"), help="of HTTP answers (binary)")


def _add_output(group: Any) -> None:
    add = group.add_argument
    add("-f", dest="csv", default="", metavar="FILE", help="write perf_analyzer's CSV there")
    add("--verbose-csv", action="store_true", help="with its additional columns")
    add("--json", nargs="?", const="-", default="", metavar="FILE", help="print the figures as JSON, or write them")
    add("--html", default="", metavar="FILE", help="write a report with plots: one page that needs nothing else")
    add("-v", "--verbose", action="count", default=0, help="show each window")


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Checked options. `words` are those of the command line by name; `levels` is of concurrency or, with `is_open`,
    of request rates. `percentile` is None for the mean; `sequence_ids` is (start, end), end 0 for none."""

    words: argparse.Namespace
    url: str
    is_grpc: bool
    is_open: bool
    levels: Range
    percentile: int | None
    sequence_ids: tuple[int, int]
    shapes: dict[str, tuple[int, ...]]
    parameters: dict[str, Any]
    headers: tuple[tuple[str, str], ...]


def checked(words: argparse.Namespace, default_url: str) -> BenchOptions:
    """The options of a command line. Raises `InvalidArgument` for what does not fit together."""
    if not words.model:
        _refuse("-m is required: name the model to measure")
    url, is_grpc = _address(words, default_url)
    url, headers = _signed(url, tuple(_header(text) for text in words.header))
    _check_metrics_url(words.metrics_url)
    if words.shared_memory == "cuda":
        _refuse("--shared-memory cuda is not supported: use system or none")
    if words.ssl_https_verify_peer != 1 or words.ssl_https_verify_host != 2:
        _refuse("certificates are always checked: trust the server's own with --ca-file")
    if words.streaming and not is_grpc:
        _refuse("--streaming is of gRPC: add -i grpc")
    if not is_grpc and words.grpc_compression_algorithm != "none":
        _refuse("--grpc-compression-algorithm is of gRPC: add -i grpc")
    if is_grpc and "json" in (words.input_tensor_format, words.output_tensor_format):
        _refuse("--input-tensor-format and --output-tensor-format are of HTTP")
    if words.collect_metrics and not words.verbose_csv and words.csv:
        _refuse("--collect-metrics needs --verbose-csv, whose columns it fills")
    if words.shared_memory == "system" and words.input_tensor_format == "json":
        _refuse("inputs in shared memory are not JSON: leave --input-tensor-format out")
    _check_numbers(words)
    given = [name for name in ("concurrency_range", "request_rate_range", "request_intervals") if getattr(words, name)]
    if len(given) > 1:
        _refuse(f"--{given[0].replace('_', '-')} and --{given[1].replace('_', '-')} exclude one another")
    is_open = bool(words.request_rate_range or words.request_intervals)
    levels = _range(words.request_rate_range or words.concurrency_range or "1", whole=not words.request_rate_range)
    if levels.end == 0 and not words.latency_threshold:
        _refuse("a range without end needs a --latency-threshold")
    if words.binary_search and (words.request_intervals or not levels.has_end or levels.end == 0):
        _refuse("--binary-search needs the start and the end of a range")
    if words.binary_search and not words.latency_threshold:
        _refuse("--binary-search needs a --latency-threshold")
    return BenchOptions(
        words,
        url,
        is_grpc,
        is_open,
        levels,
        None if words.percentile < 0 else words.percentile,
        _ids(words.sequence_id_range),
        dict(_shape(text) for text in words.shape),
        dict(_request_parameter(text) for text in words.request_parameter),
        headers,
    )


def _refuse(sentence: str) -> NoReturn:
    raise InvalidArgument(sentence)


def _check_numbers(words: argparse.Namespace) -> None:
    above_zero = {
        "-b": words.batch, "--measurement-interval": words.measurement_interval, "--max-trials": words.max_trials,
        "--measurement-request-count": words.measurement_request_count, "--metrics-interval": words.metrics_interval,
        "--num-of-sequences": words.num_of_sequences, "--stability-percentage": words.stability_percentage,
        "--output-shared-memory-size": words.output_shared_memory_size,
    }  # fmt: skip
    not_below = {
        "--latency-threshold": words.latency_threshold, "--sequence-length": words.sequence_length,
        "--sequence-length-variation": words.sequence_length_variation, "--string-length": words.string_length,
        "--max-threads": words.max_threads, "--request-count": words.request_count,
        "--warmup-request-count": words.warmup_request_count, "--seed": words.seed,
    }  # fmt: skip
    for name, value in above_zero.items():
        if not 0 < value <= _MAX_INT:
            _refuse(f"{name} must be above 0, and is {value}")
    for name, value in not_below.items():
        if not 0 <= value <= _MAX_INT:
            _refuse(f"{name} must be 0 or more, and is {value}")
    if words.sequence_length_variation > 100:
        _refuse("--sequence-length-variation is at most 100")
    if words.percentile != -1 and not 1 <= words.percentile <= 99:
        _refuse(f"--percentile is from 1 to 99, or -1 for the mean, not {words.percentile}")


def _address(words: argparse.Namespace, default_url: str) -> tuple[str, bool]:
    """The URL with its scheme, and whether it is gRPC's."""
    if words.protocol not in ("", "http", "grpc"):
        _refuse(f"-i is http or grpc, not '{words.protocol}'")
    url = words.url or default_url
    scheme, mark = url.partition(":")[0], has_scheme(url)
    if mark and scheme not in SCHEMES:
        _refuse(f"'{without_credentials(url)}' is no server: write HOST:PORT, http://HOST:PORT or grpc://HOST:PORT")
    is_grpc = words.protocol == "grpc" or (not words.protocol and mark and scheme.startswith("grpc"))
    if mark and words.protocol and (words.protocol == "grpc") != scheme.startswith("grpc"):
        _refuse(f"-i {words.protocol} does not fit the URL '{without_credentials(url)}'")
    if not url:
        url = "localhost:8001" if is_grpc else "localhost:8000"
    if not mark:
        secure = str(words.ssl_grpc_use_ssl).lower() in ("true", "1")
        url = f"{('grpcs' if secure else 'grpc') if is_grpc else 'http'}://{url}"
    Address(url)  # raises for one that names no server
    return url, is_grpc


def _signed(url: str, headers: tuple[tuple[str, str], ...]) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The URL without its user and password, and the headers with them, unless one says already who asks."""
    parts = urlsplit(url)
    user, mark, host = parts.netloc.rpartition("@")
    if not mark:
        return url, headers
    name, _, password = user.partition(":")
    if user and not any(header.lower() == "authorization" for header, _ in headers):
        basic = b64encode(f"{unquote(name)}:{unquote(password)}".encode()).decode()
        headers = (*headers, ("Authorization", f"Basic {basic}"))
    return parts._replace(netloc=host).geturl(), headers


def _check_metrics_url(url: str) -> None:
    try:
        address = Address(url)
    except InvalidArgument as error:
        _refuse(f"--metrics-url: {error.message}")
    shown = without_credentials(url)
    if address.is_grpc:
        _refuse(f"--metrics-url '{shown}' is of gRPC: write http://HOST:PORT/metrics or http+unix:///PATH")
    if "@" in address.target:
        _refuse(f"--metrics-url '{shown}' names a user, which is not sent")


def _range(text: str, *, whole: bool) -> Range:
    parts = text.split(":")
    try:
        numbers = [int(part) if whole else float(part) for part in parts]
    except ValueError:
        _refuse(f"'{text}' is no range: write START:END:STEP")
    if not 1 <= len(numbers) <= 3 or not all(math.isfinite(number) for number in numbers):
        _refuse(f"'{text}' is no range: write START:END:STEP")
    start = numbers[0]
    end = numbers[1] if len(numbers) > 1 else start
    step = numbers[2] if len(numbers) > 2 else 1
    if start <= 0 or step <= 0 or end < 0 or (end and end < start):
        _refuse(f"the range '{text}' has no level: START and STEP are above 0, END is 0 or at least START")
    if whole and max(start, end) > MAX_CONCURRENCY:
        _refuse(f"at most {MAX_CONCURRENCY} requests are in flight, not those of '{text}'")
    return Range(start, end, step, len(numbers) > 1)


def _ids(text: str) -> tuple[int, int]:
    start, _, end = text.partition(":")
    if (
        not start.isdecimal()
        or not (end == "" or end.isdecimal())
        or int(start) < 1
        or (end and int(end) <= int(start))
    ):
        _refuse(f"--sequence-id-range '{text}' is not START:END with 0 < START < END")
    return int(start), int(end or 0)


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, mark, dims = text.rpartition(":")
    try:
        shape = tuple(int(dim) for dim in dims.split(","))
    except ValueError:
        shape = ()
    if not mark or not name or not shape or min(shape) < 1:
        _refuse(f"--shape '{text}' is not NAME:D,D with dimensions above 0")
    return name, shape


def _header(text: str) -> tuple[str, str]:
    name, mark, value = text.partition(":")
    name, value = name.strip(), value.strip()
    if not mark or not name.isascii() or not name.isprintable() or not name or " " in name or not value.isprintable():
        _refuse(f"-H '{text}' is not NAME:VALUE")
    return name, value


def _request_parameter(text: str) -> tuple[str, Any]:
    """The value lies between the first and the last colon."""
    name, _, rest = text.partition(":")
    value, mark, kind = rest.rpartition(":")
    try:
        if not mark or not name:
            raise ValueError
        match kind:
            case "bool" if value.lower() in ("true", "false"):
                return name, value.lower() == "true"
            case "int" | "uint":
                return name, int(value)
            case "double":
                return name, float(value)
            case "string":
                return name, value
        raise ValueError
    except ValueError:
        _refuse(f"--request-parameter '{text}' is not NAME:VALUE:TYPE with TYPE bool, int, uint, double or string")


def parsed(line: Sequence[str], default_url: str = "") -> BenchOptions:
    """The options of a command line, the command first. Raises `SystemExit` for wrong usage and help."""
    return checked(parser().parse_args(list(line)), default_url)
