"""`charonia bench`: asks about the model, starts the workers, measures each level, and shows what was found."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from charonia.client import Client, RetryPolicy, SharedRegion, Tls
from charonia.client.clients import Address
from charonia.client.results import region_parameters
from charonia.datatypes import DataType
from charonia.errors import CharoniaError, InvalidArgument, Unavailable
from charonia.tensors import Tensor

from . import bench_report, report_page, stability
from .bench_options import BenchOptions, parsed
from .bench_report import LevelResult, Run
from .encoded_requests import RequestPlan, SentTensor
from .input_data import ModelView, batch_of, intervals_of, model_view, streams_of
from .load_worker import Workers
from .send_schedule import TRACE, SendSchedule
from .window_figures import ServerFigures, WindowFigures, gauges, joined

_ATTEMPTS = 4
_MAX_PROCESSES = 8
_LANES_AT_FIRST = 4
_POLL_S = 0.01
_WARM_UP_S = 1.0
_WARM_UP_PART = 0.2
_COUNTED_INTERVALS = 10
"""A window by count that has too few requests ends after so many measurement intervals."""
_STALLED_S = 300.0
"""A level of `--request-count` is given up when for so long no request has ended, longer with long intervals."""
_SCRAPE_WITHIN_S = 2.0
_LARGEST_SCRAPE_BYTES = 16 << 20


def run(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """The command line `words`, the command first; the exit code, 1 when requests failed or a level was not stable, 2
    for options that cannot be.

    Raises `SystemExit` for usage and help, `InvalidArgument` for options that do not fit the model, and the
    `CharoniaError` that a server, or its absence, is.
    """
    try:
        options = parsed(words, environment.get("CHARONIA_URL", ""))
    except InvalidArgument as error:
        _complain(str(error))
        return 2
    arguments = options.words
    with interrupted_by_signals(), opened(options) as bench:
        described = bench.described
        results: list[LevelResult] = []

        def take(result: LevelResult) -> None:
            results.append(result)
            if arguments.json != "-":
                _print(bench_report.level_text(described, result))

        try:
            for result in bench.results():
                take(result)
        except KeyboardInterrupt:
            if results:
                _complain("interrupted: the figures are those of the levels before")
            elif (begun := bench.begun()) is not None:
                take(begun)
                count = len(begun.windows)
                windows = f"the first {count} windows" if count > 1 else "the first window"
                _complain(f"interrupted: the figures are those of {windows} of the first level")
            else:
                _complain("interrupted in the first window of the first level: there are no figures")
                raise
        described.load_average.append(load_average())
    return _show(described, results)


@contextmanager
def opened(options: BenchOptions) -> Iterator[Bench]:
    """Within it the model is known, its requests are built and the workers run: levels can be measured.

    Raises `InvalidArgument` for options that do not fit the model, and what a server, or its absence, is.
    """
    arguments = options.words
    tls = Tls(arguments.ca_file, arguments.certificate_file, arguments.key_file)
    with ExitStack() as stack:
        client = stack.enter_context(
            Client(options.url, headers=dict(options.headers), retry=RetryPolicy(_ATTEMPTS), tls=tls)
        )
        view, has_binary = _view(client, options)
        if not has_binary and not options.is_grpc:
            arguments.input_tensor_format = arguments.output_tensor_format = "json"
        plan = _plan(options, view, client, stack)
        processes = processes_of(options, view)
        setups = [_setup(options, view, plan, number, processes) for number in range(processes)]
        began = datetime.now(UTC).isoformat(timespec="seconds")
        described = Run(options, view, processes, began, [load_average()])
        workers = stack.enter_context(Workers(setups))
        yield Bench(described, workers, client)


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Within it SIGTERM and a terminal that is gone end the main thread's work as Ctrl-C does, so that what is in
    shared memory is deleted. Elsewhere, and where they are ignored, signals are not ours."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    before = {number: signal.getsignal(number) for number in numbers}
    ours = [number for number in numbers if before[number] is not signal.SIG_IGN]  # nohup's are ignored
    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number] or signal.SIG_DFL)


def _show(described: Run, results: Sequence[LevelResult]) -> int:
    arguments = described.options.words
    found = bench_report.document(described, results)
    if arguments.json == "-":
        _print(json.dumps(found))
        if not any(result.within_threshold for result in results):
            _complain(bench_report.threshold_text(described, results))
    else:
        _print("\n" + bench_report.summary_table(described, results))
    for path, make in (
        (arguments.csv, lambda: bench_report.csv_text(described, results)),
        (arguments.json if arguments.json != "-" else "", lambda: json.dumps(found, indent=1) + "\n"),
        (arguments.html, lambda: report_page.page(found)),
    ):
        if path:
            _write(path, make)
    bad = [described.shown(result.level) for result in results if not result.is_good]
    if bad:
        _complain(f"not stable, or with failed requests: {described.level_word.lower()} {', '.join(bad)}")
    return 1 if bad else 0


def _write(path: str, make: Callable[[], str]) -> None:
    try:
        Path(path).write_text(make(), encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"'{path}' cannot be written: {error.strerror}") from None


# -- the model and its requests ----------------------------------------------------------------------------------------


def _view(client: Client, options: BenchOptions) -> tuple[ModelView, bool]:
    """The model, and whether the server takes binary tensors over HTTP."""
    model, version = options.words.model, options.words.model_version
    metadata = client.metadata(model, version)
    try:
        config: Mapping[str, Any] | None = client.config(model, version)
    except CharoniaError:  # a server of the protocol without Triton's extensions
        config = None
    view = model_view(model, version, metadata, config, options.shapes)
    if view.decoupled and not options.words.streaming:
        raise InvalidArgument(f"model '{model}' may answer more than once: add -i grpc --streaming")
    ids = options.sequence_ids
    most = options.words.num_of_sequences if options.is_open else max(options.levels.start, options.levels.end)
    if view.sequences and ids[1] and most > ids[1] - ids[0]:
        raise InvalidArgument(
            f"--sequence-id-range has {ids[1] - ids[0]} ids, and {most:g} sequences are active at once"
        )
    extensions = client.metadata().get("extensions") if not options.is_grpc else None
    return view, extensions is None or "binary_tensor_data" in extensions


def _plan(options: BenchOptions, view: ModelView, client: Client, stack: ExitStack) -> RequestPlan:
    streams = streams_of(options, view)
    batch = options.words.batch
    requests = [[batch_of(steps, at, batch, view) for at in range(len(steps))] for steps in streams]
    outputs: dict[str, Mapping[str, Any]] = {}
    place: Callable[[Tensor], Mapping[str, Any] | None] = lambda _: None  # noqa: E731
    if options.words.shared_memory == "system":
        place, outputs = _shared(options, view, requests, client, stack)
    steps = tuple(
        tuple(tuple(_sent(tensor, place(tensor)) for tensor in tensors) for tensors in stream) for stream in requests
    )
    parts = urlsplit(options.url)
    authority = parts.netloc if parts.port else f"{parts.netloc}:{_port(options)}"
    words = options.words
    return RequestPlan(
        view.name, view.version, "localhost" if Address(options.url).socket else authority,
        parts.scheme in ("https", "grpcs"), options.headers, steps, options.parameters, outputs,
        words.input_tensor_format == "json", words.output_tensor_format == "json", words.grpc_compression_algorithm,
        words.streaming, view.decoupled,
    )  # fmt: skip


def _sent(tensor: Tensor, place: Mapping[str, Any] | None) -> SentTensor:
    data = b"" if place is not None else bytes(tensor.data)
    return SentTensor(tensor.name, tensor.datatype.value, tensor.shape, data, place)


def _shared(
    options: BenchOptions,
    view: ModelView,
    requests: Sequence[Sequence[Sequence[Tensor]]],
    client: Client,
    stack: ExitStack,
) -> tuple[Callable[[Tensor], Mapping[str, Any] | None], dict[str, Mapping[str, Any]]]:
    """Puts all inputs into one region; each output has one place there, which all requests share: answers are not
    read."""
    tensors = [tensor for stream in requests for step in stream for tensor in step]
    sizes = {output.name: _output_size(output.datatype, output.dims, options, view) for output in view.outputs}
    total = sum(len(tensor.data) + 64 for tensor in tensors) + sum(size + 64 for size in sizes.values())
    region: SharedRegion = stack.enter_context(client.shared_memory(max(1, total)))

    def placed(tensor: Tensor) -> Mapping[str, Any] | None:
        array = region.array((len(tensor.data),), np.uint8)
        array.array[:] = np.frombuffer(tensor.data, np.uint8)
        return region_parameters(array)

    outputs: dict[str, Mapping[str, Any]] = {}
    for name, size in sizes.items():
        outputs[name] = region_parameters(region.array((size,), np.uint8))
    return placed, outputs


def _output_size(datatype: DataType, dims: Sequence[int], options: BenchOptions, view: ModelView) -> int:
    batch = options.words.batch if view.batches else 1
    if datatype is DataType.BYTES or min(dims, default=1) < 0:
        return int(options.words.output_shared_memory_size) * batch
    return prod(dims) * datatype.size_bytes * batch


# -- the workers -------------------------------------------------------------------------------------------------------


def _port(options: BenchOptions) -> int:
    return urlsplit(options.url).port or (8001 if options.is_grpc else 443 if options.url.startswith("https") else 8000)


def processes_of(options: BenchOptions, view: ModelView) -> int:
    """How many processes send: no more than have something to send."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = options.words.max_threads or min(_MAX_PROCESSES, max(1, cores // 2))
    if options.is_open:
        most: float = options.words.num_of_sequences if view.sequences else wanted
    else:
        most = max(options.levels.start, options.levels.end) if options.levels.end else wanted
    return int(max(1, min(wanted, most)))


def _setup(options: BenchOptions, view: ModelView, plan: RequestPlan, number: int, processes: int) -> dict[str, Any]:
    words = options.words
    sequences = None
    if view.sequences:
        length = words.sequence_length or (
            0 if words.input_data and words.input_data[0] not in ("zero", "random") else 20
        )
        start, end = options.sequence_ids
        sequences = {
            "length": length, "variation_percent": words.sequence_length_variation, "first": start + number,
            "stride": processes, "end": end,
        }  # fmt: skip
    tls = None
    if plan.secure:
        tls = {
            "ca_file": words.ca_file, "certificate_file": words.certificate_file, "key_file": words.key_file,
        }  # fmt: skip
    return {
        "plan": plan.packed(), "number": number, "workers": processes, "seed": words.seed, "is_grpc": options.is_grpc,
        "lanes": _shares(words.num_of_sequences, processes)[number] if view.sequences else _LANES_AT_FIRST,
        "host": urlsplit(options.url).hostname, "port": _port(options), "socket": Address(options.url).socket,
        "tls": tls, "sequences": sequences,
    }  # fmt: skip


def _shares(whole: int, parts: int) -> list[int]:
    base, extra = divmod(whole, parts)
    return [base + (number < extra) for number in range(parts)]


# -- measuring ---------------------------------------------------------------------------------------------------------


class Bench:
    """Measures the levels of a run."""

    def __init__(self, described: Run, workers: Workers, client: Client) -> None:
        self._run, self._workers, self._client = described, workers, client
        self._options, self._words = described.options, described.options.words
        self._intervals = intervals_of(self._words.request_intervals) if self._words.request_intervals else ()
        self._models = [described.view.name, *described.view.steps]
        self._has_statistics = True
        self._has_metrics = self._words.collect_metrics
        self._patience_s = 0.0
        self._level = 0.0
        self._windows: list[WindowFigures] = []
        self._before: Mapping[str, Any] = {}
        self._is_stable = False

    @property
    def described(self) -> Run:
        """What is measured."""
        return self._run

    def results(self) -> Iterator[LevelResult]:
        """Each level that the search asks for, measured."""
        if self._intervals:
            yield self.measure(SendSchedule(TRACE, intervals_us=self._intervals).mean_rate)
            return
        levels = self._options.levels
        whole = not self._options.is_open
        search = (
            stability.bisected(levels.start, levels.end, levels.step, whole=whole)
            if self._words.binary_search
            else stability.linear(levels.start, levels.end, levels.step)
        )
        level = next(search)
        while True:
            result = self.measure(level)
            yield result
            try:
                level = search.send(result.within_threshold and result.figures.completed > 0)
            except StopIteration:
                return

    def measure(self, level: float) -> LevelResult:
        """One level: warm-up, then windows until three agree, at most `--max-trials`."""
        self.begin(level)
        while not self.take_window():
            pass
        return self.end()

    def begin(self, level: float) -> None:
        """Starts the load of a level and lets it warm up."""
        self._level, self._windows, self._is_stable = level, [], False
        if self._words.request_count:  # its window begins with the first request
            self._before = self._statistics()
            self._start(level)
            return
        self._start(level)
        self._warm_up()
        self._before = self._statistics()
        self._workers.ask({"do": "cut"})

    def take_window(self) -> bool:
        """Measures the next window; whether the level is done: stable, or given up."""
        words = self._words
        window, self._before = self._window(self._before)
        self._windows.append(window)
        self._say(self._level, window)
        if words.request_count:  # one window, which is whole unless the server stopped answering
            self._is_stable = window.completed + window.errors.total() >= words.request_count
            return True
        self._is_stable = stability.is_stable(self._windows, words.stability_percentage, self._options.percentile)
        is_hopeless = not window.completed and bool(window.errors)
        return self._is_stable or is_hopeless or len(self._windows) >= words.max_trials

    def end(self) -> LevelResult:
        """Stops the load; the level's figures."""
        self._workers.ask({"do": "stop"})
        return self._result()

    def begun(self) -> LevelResult | None:
        """The figures of a level that was interrupted, None where it has no whole window. Asks the workers nothing:
        they may be in the middle of an answer.
        """
        self._is_stable = False
        return self._result() if self._windows else None

    def _result(self) -> LevelResult:
        words, percentile = self._words, self._options.percentile
        figures = joined(self._windows[-stability.AGREEING :])
        limit_ns = words.latency_threshold * 1e6
        # without an answer there is no latency that could be within
        within = not limit_ns or (figures.completed > 0 and figures.judged_ns(percentile) <= limit_ns)
        return LevelResult(self._level, self._is_stable, within, tuple(self._windows), figures)

    def _start(self, level: float) -> None:
        count = len(self._workers)
        limits: Sequence[int | None] = [None] * count
        self._patience_s = max(_STALLED_S, _COUNTED_INTERVALS * self._words.measurement_interval / 1000)
        if self._words.request_count:
            senders = count if self._options.is_open else min(count, round(level))  # the others have no lane
            limits = [*_shares(self._words.request_count, senders), *[0] * (count - senders)]
        if self._options.is_open:
            self._patience_s += max(_COUNTED_INTERVALS / level, max(self._intervals, default=0) / 1e6)
            schedule = [self._words.request_distribution, level, []]
            if self._intervals:
                schedule = [TRACE, 0.0, list(self._intervals)]
            commands: list[dict[str, Any]] = [{"do": "open", "schedule": schedule, "limit": limit} for limit in limits]
        else:
            lanes = _shares(round(level), count)
            commands = [
                {"do": "closed", "lanes": share, "limit": limit} for share, limit in zip(lanes, limits, strict=True)
            ]
        self._workers.ask_each(commands)

    def _warm_up(self) -> None:
        if self._words.warmup_request_count:
            self._wait_for(self._words.warmup_request_count)
        else:
            time.sleep(min(_WARM_UP_S, self._words.measurement_interval / 1000 * _WARM_UP_PART))

    def _window(self, before: Mapping[str, Any]) -> tuple[WindowFigures, Mapping[str, Any]]:
        words = self._words
        window = WindowFigures(batch=words.batch)
        if words.request_count:
            self._wait_for(words.request_count, window)
        elif words.measurement_mode == "count_windows":
            self._wait_for(words.measurement_request_count, window)
        else:
            self._wait_until(time.monotonic() + words.measurement_interval / 1000, window)
        for tally in self._workers.ask({"do": "cut"}):
            window.add_worker(tally)
        after = self._statistics()
        for model in self._models:
            if model in before and model in after:
                window.server[model] = ServerFigures.between(before[model], after[model])
        return window, after

    def _wait_for(self, requests: int, window: WindowFigures | None = None) -> None:
        until_s = time.monotonic() + _COUNTED_INTERVALS * self._words.measurement_interval / 1000
        scraped_s, before = 0.0, -1
        while (ended := sum(answer["ended"] for answer in self._workers.ask({"do": "count"}))) < requests:
            if self._words.request_count and ended > before:
                before, until_s = ended, time.monotonic() + self._patience_s
            if time.monotonic() > until_s:
                if self._words.request_count:
                    _complain(f"{ended} of {requests} requests ended, and none for {self._patience_s:.0f} s: given up")
                return
            if (
                window is not None
                and self._has_metrics
                and time.monotonic() - scraped_s > self._words.metrics_interval / 1000
            ):
                scraped_s = time.monotonic()
                self._scrape(window)
            time.sleep(_POLL_S)

    def _wait_until(self, end_s: float, window: WindowFigures) -> None:
        while (left_s := end_s - time.monotonic()) > 0:
            if self._has_metrics:
                self._scrape(window)
                left_s = max(0.0, min(end_s - time.monotonic(), self._words.metrics_interval / 1000))
            time.sleep(left_s)

    def _statistics(self) -> Mapping[str, Any]:
        """The statistics of the model and of what it is made of; none of a server that has none."""
        if not self._has_statistics:
            return {}
        try:
            found = {model: self._client.statistics(model, "") for model in self._models[1:]}
            return found | {self._models[0]: self._client.statistics(self._models[0], self._run.view.version)}
        except Unavailable:
            raise
        except CharoniaError:
            self._has_statistics = False
            return {}

    def _scrape(self, window: WindowFigures) -> None:
        url = self._words.metrics_url
        try:
            text = _page_of_metrics(Address(url)).decode(errors="replace")
        except (OSError, ValueError, http.client.HTTPException) as error:  # those of urllib are `OSError`
            self._has_metrics = False
            _complain(f"the metrics at '{url}' cannot be read, and are left out: {error}")
            return
        for name, label, value in gauges(text, self._run.view.name):
            window.metrics.setdefault(name, {}).setdefault(label, []).append(value)

    def _say(self, level: float, window: WindowFigures) -> None:
        if self._words.verbose:
            judged_us = window.judged_ns(self._options.percentile) / 1000
            failed = window.errors.total()
            _complain(f"{self._run.shown(level)}: {window.rate:.1f} infer/s, {judged_us:.0f} us, {failed} failed")


def _page_of_metrics(address: Address) -> bytes:
    """The page at a URL; over a Unix socket that of /metrics. Raises `OSError`, `ValueError` and `HTTPException`."""
    if not address.socket:
        with urllib.request.urlopen(address.url, timeout=_SCRAPE_WITHIN_S) as answer:
            return bytes(answer.read(_LARGEST_SCRAPE_BYTES))
    connection = http.client.HTTPConnection("localhost", timeout=_SCRAPE_WITHIN_S)
    with closing(connection):
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(_SCRAPE_WITHIN_S)
        connection.sock.connect(address.socket)
        connection.request("GET", "/metrics")
        page = connection.getresponse()
        if page.status != 200:
            raise OSError(f"HTTP Error {page.status}: {page.reason}")
        return page.read(_LARGEST_SCRAPE_BYTES)


def load_average() -> float:
    """The machine's load of the last minute, 0 where it is not known."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _complain(text: str) -> None:
    sys.stderr.write(f"charonia bench: {text}\n")
    sys.stderr.flush()
