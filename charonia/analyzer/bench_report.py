"""The figures of a run as text, as perf_analyzer's CSV, and as one document for JSON and the page. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from charonia.operations.text.rendering import table

from .bench_options import BenchOptions
from .input_data import ModelView
from .latency_histogram import LatencyHistogram, bounds_of
from .window_figures import ServerFigures, WindowFigures

PERCENTILES = (50, 90, 95, 99)
_MORE_PERCENTILES = (*PERCENTILES, 99.9)
_BUSY = 0.85
"""Above this share of a core a worker may be what limits the rate."""
_PLOTTED = 400
_AT_THE_EDGES = 3
"""Requests by which a server that keeps up may be behind at the end of a window more than at its beginning."""
_GPU_COLUMNS = (
    ("Avg GPU Utilization", "nv_gpu_utilization", "mean"),
    ("Avg GPU Power Usage", "nv_gpu_power_usage", "mean"),
    ("Max GPU Memory Usage", "nv_gpu_memory_used_bytes", "max"),
    ("Total GPU Memory", "nv_gpu_memory_total_bytes", "last"),
)


@dataclass(frozen=True, slots=True)
class LevelResult:
    """One level: `windows` are all that were measured, `figures` those that count, as one."""

    level: float
    is_stable: bool
    within_threshold: bool
    windows: tuple[WindowFigures, ...]
    figures: WindowFigures

    @property
    def is_good(self) -> bool:
        return self.is_stable and not self.figures.errors and self.figures.completed > 0


@dataclass(frozen=True, slots=True)
class Run:
    """What was measured where; `processes` sent the load, `load_average` is the machine's before and after."""

    options: BenchOptions
    view: ModelView
    processes: int
    began: str
    load_average: list[float] = field(default_factory=list)

    @property
    def level_word(self) -> str:
        return "Request Rate" if self.options.is_open else "Concurrency"

    def shown(self, level: float) -> str:
        if self.options.words.request_intervals:
            return f"{level:g} (intervals of a file)"
        return f"{level:g}"


# -- text --------------------------------------------------------------------------------------------------------------


def level_text(run: Run, result: LevelResult) -> str:
    """A level's figures in perf_analyzer's words."""
    figures, options = result.figures, run.options
    lines = [f"{'Request Rate' if options.is_open else 'Request concurrency'}: {run.shown(result.level)}", "  Client:"]
    lines.append(f"    Request count: {figures.completed}")
    lines.append(f"    Throughput: {figures.rate:.2f} infer/sec")
    if figures.first.count:
        lines.append(f"    Response throughput: {figures.response_rate:.2f} responses/sec")
    lines += [f"    {line}" for line in _latencies("latency", figures.latency, options.percentile)]
    if options.is_open:
        lines += [f"    {line}" for line in _latencies("service time", figures.service, options.percentile)]
        lines.append(f"    Left more than 1 ms late: {figures.late}")
    for name, histogram in (("time to first response", figures.first), ("inter-response", figures.gaps)):
        if histogram.count and options.words.streaming:
            lines += [f"    {line}" for line in _latencies(name, histogram, None)]
    send_receive, wait = _client_parts(figures)
    protocol = "gRPC" if options.is_grpc else "HTTP"
    lines.append(
        f"    Avg {protocol} time: {send_receive + wait:.0f} usec "
        f"(send/recv {send_receive:.0f} usec + response wait {wait:.0f} usec)"
    )
    lines.append(
        f"    Generator: {figures.generator_share * 100:.0f} % of a core in {run.processes} process(es), the busiest "
        f"{figures.busiest * 100:.0f} %"
    )
    lines += [f"    Failed: {count} times: {text}" for text, count in figures.errors.most_common(5)]
    for model, server in figures.server.items():
        lines.append("  Server:" if model == run.view.name else f"  Server, model {model}:")
        lines += [f"    {line}" for line in _server(server, run.view.caches and model == run.view.name)]
    lines += [f"  Note: {note}" for note in notes(result)]
    return "\n".join(lines)


def _latencies(name: str, histogram: LatencyHistogram, percentile: int | None) -> list[str]:
    lines = [
        f"Avg {name}: {histogram.mean_ns / 1000:.0f} usec (standard deviation {histogram.deviation_ns / 1000:.0f} usec)"
    ]
    return lines + [
        f"p{percent} {name}: {histogram.percentile_ns(percent) / 1000:.0f} usec" for percent in _percents(percentile)
    ]


def _percents(percentile: int | None) -> list[int]:
    return sorted({*PERCENTILES, *([percentile] if percentile is not None else [])})


def _client_parts(figures: WindowFigures) -> tuple[float, float]:
    """Microseconds of a request: sending and receiving, and waiting between them."""
    if not figures.completed:
        return 0.0, 0.0
    busy = (figures.send_ns + figures.receive_ns) / figures.completed / 1000
    return busy, max(0.0, figures.service.mean_ns / 1000 - busy)


def _server(server: ServerFigures, caches: bool) -> list[str]:
    parts = [("overhead", server.overhead_us), ("queue", server.mean_us("queue"))]
    parts += [
        (name.replace("_", " "), server.mean_us(name)) for name in ("compute_input", "compute_infer", "compute_output")
    ]
    if caches:
        parts += [(name.replace("_", " "), server.mean_us(name)) for name in ("cache_hit", "cache_miss")]
    lines = [
        f"Inference count: {server.inferences}",
        f"Execution count: {server.executions}",
        f"Successful request count: {server.counts.get('success', 0)}",
    ]
    if caches:
        lines.append(f"Cache hit count: {server.counts.get('cache_hit', 0)}")
    shown = " + ".join(f"{name} {value:.0f} usec" for name, value in parts)
    return [*lines, f"Avg request latency: {server.mean_us('success'):.0f} usec ({shown})"]


def notes(result: LevelResult) -> list[str]:
    """What to bear in mind of a level."""
    found = []
    if not result.is_stable:
        found.append(f"not stable within {len(result.windows)} windows; the figures are those of the last ones")
    if result.figures.busiest > _BUSY:
        found.append("the generator was busy all the time and may be what limits the rate: raise --max-threads")
    # what came due, not the rate times the time: that is by chance more or less in a window of Poisson arrivals
    ended = result.figures.completed + result.figures.errors.total()
    if result.figures.due - ended > 0.05 * result.figures.due + _AT_THE_EDGES:
        found.append("the server did not keep up with the request rate: latency grows as long as it is asked")
    return found


def threshold_text(run: Run, results: Sequence[LevelResult]) -> str:
    """Which level is the last one within `--latency-threshold`, or that none is and what to do; empty without one."""
    options = run.options
    limit_ms, word = options.words.latency_threshold, run.level_word.lower()
    if not limit_ms or not results:
        return ""
    asked = f"{'mean' if options.percentile is None else f'p{options.percentile}'} latency of at most {limit_ms:g} ms"
    within = [result for result in results if result.within_threshold]
    if within:
        found = max(within, key=lambda result: result.level)
        said = (
            f"The highest measured level with a {asked}: {word} {run.shown(found.level)}, with "
            f"{_judged_ms(run, found)} and {found.figures.rate:.1f} infer/s."
        )
        if not found.is_good:
            said += " It was not stable, or had failed requests."
        if not options.words.request_intervals and found.level >= options.levels.end > 0:
            said += " It is the end of the range: higher ones were not tried."
        return said
    said = f"No measured level met the latency threshold: asked was a {asked}, "
    answered = [result for result in results if result.figures.completed]
    if not answered:
        return said + "and no request was answered."
    best = min(answered, key=lambda result: result.figures.judged_ns(options.percentile))
    said += f"the best measured is {_judged_ms(run, best)}, of {word} {run.shown(best.level)}. "
    ways = ["raise --latency-threshold"]
    if not options.words.request_intervals and (options.is_open or best.level > 1):
        ways.append(f"begin the range below {best.level:g}")
    ways += ["lower -b"] if options.words.batch > 1 else []
    ways.append("make the model faster (charonia tune)")
    ways[0] = ways[0].capitalize()
    return said + f"{', '.join(ways[:-1])}, or {ways[-1]}."


def _judged_ms(run: Run, result: LevelResult) -> str:
    return f"{result.figures.judged_ns(run.options.percentile) / 1e6:.3f} ms"


def _has_threshold(run: Run) -> bool:
    return bool(run.options.words.latency_threshold)


def summary_table(run: Run, results: Sequence[LevelResult]) -> str:
    """One line for each level, and below them what `threshold_text` says."""
    rows = []
    for result in results:
        figures = result.figures
        row: dict[str, Any] = {"level": run.shown(result.level), "rate": f"{figures.rate:.1f}"}
        row["avg"] = f"{figures.latency.mean_ns / 1000:.0f}"
        row |= {f"p{p}": f"{figures.latency.percentile_ns(p) / 1000:.0f}" for p in _percents(run.options.percentile)}
        server = figures.server.get(run.view.name)
        row["queue"] = f"{server.mean_us('queue'):.0f}" if server else "-"
        row["infer"] = f"{server.mean_us('compute_infer'):.0f}" if server else "-"
        row["generator"] = f"{figures.generator_share * 100:.0f} %"
        row["failed"] = str(figures.errors.total())
        row["stable"] = "yes" if result.is_stable else "no"
        row["within"] = "yes" if result.within_threshold else "no"
        rows.append(row)
    percents = [(f"p{p} us", f"p{p}") for p in _percents(run.options.percentile)]
    columns = [
        (run.level_word, "level"), ("infer/s", "rate"), ("avg us", "avg"), *percents, ("queue us", "queue"),
        ("infer us", "infer"), ("generator", "generator"), ("failed", "failed"), ("stable", "stable"),
    ]  # fmt: skip
    if not _has_threshold(run):
        return "\n".join(table(rows, columns))
    columns.append((f"within {run.options.words.latency_threshold:g} ms", "within"))
    return "\n".join([*table(rows, columns), "", threshold_text(run, results)])


# -- CSV ---------------------------------------------------------------------------------------------------------------


def csv_text(run: Run, results: Sequence[LevelResult]) -> str:
    """perf_analyzer's report: times are microseconds of one request. A server without statistics leaves out its
    columns. With `--latency-threshold` the last column, which perf_analyzer has not, is 1 for a level within it."""
    has_server = any(run.view.name in result.figures.server for result in results)
    has_responses = any(result.figures.responses > result.figures.completed for result in results)
    percents = _percents(run.options.percentile)
    heading = [run.level_word, "Inferences/Second"]
    heading += ["Response Throughput"] if has_responses else []
    heading += ["Client Send"]
    if has_server:
        heading += ["Network+Server Send/Recv", "Server Queue", "Server Compute Input", "Server Compute Infer"]
        heading += ["Server Compute Output"]
        heading += ["Server Cache Hit", "Server Cache Miss"] if run.view.caches else []
    heading += ["Client Recv", *(f"p{percent} latency" for percent in percents)]
    if run.options.words.verbose_csv:
        heading += ["Avg latency", "request/response", "response wait"]
        heading += [name for name, _, _ in _GPU_COLUMNS] if run.options.words.collect_metrics else []
    heading += ["Within Latency Threshold"] if _has_threshold(run) else []
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(heading)
    for result in results:
        writer.writerow(_csv_row(run, result, has_server, has_responses, percents))
    return out.getvalue()


def _csv_row(run: Run, result: LevelResult, has_server: bool, has_responses: bool, percents: list[int]) -> list[str]:
    figures = result.figures
    row = [f"{result.level:g}", f"{figures.rate:g}"]
    row += [f"{figures.response_rate:g}"] if has_responses else []
    count = max(1, figures.completed)
    send, receive = figures.send_ns / count / 1000, figures.receive_ns / count / 1000
    row.append(f"{send:.0f}")
    if has_server:
        server = figures.server.get(run.view.name, ServerFigures())
        names = ["queue", "compute_input", "compute_infer", "compute_output"]
        names += ["cache_hit", "cache_miss"] if run.view.caches else []
        parts = [server.mean_us(name) for name in names]
        rest = figures.service.mean_ns / 1000 - send - receive - sum(parts)
        row += [f"{max(0.0, rest):.0f}", *(f"{part:.0f}" for part in parts)]
    row.append(f"{receive:.0f}")
    row += [f"{figures.latency.percentile_ns(percent) / 1000:.0f}" for percent in percents]
    if run.options.words.verbose_csv:
        both, wait = _client_parts(figures)
        row += [f"{figures.latency.mean_ns / 1000:.0f}", f"{both:.0f}", f"{wait:.0f}"]
        if run.options.words.collect_metrics:
            row += [_gpu_cell(figures.metrics.get(metric, {}), how) for _, metric, how in _GPU_COLUMNS]
    row += [str(int(result.within_threshold))] if _has_threshold(run) else []
    return row


def _gpu_cell(values: Mapping[str, Sequence[float]], how: str) -> str:
    """`GPU:value;` for each GPU."""
    return "".join(f"{label}:{reduced(found, how):g};" for label, found in sorted(values.items()) if found)


def reduced(values: Sequence[float], how: str) -> float:
    """The `mean`, `max` or `last` of some values."""
    if how == "mean":
        return sum(values) / len(values)
    return max(values) if how == "max" else values[-1]


# -- the document ------------------------------------------------------------------------------------------------------


def document(run: Run, results: Sequence[LevelResult]) -> dict[str, Any]:
    """The whole run for `--json` and the page. Times are microseconds, rates per second."""
    options = run.options
    return {
        "model": run.view.name,
        "version": run.view.version,
        "url": options.url,
        "protocol": "grpc" if options.is_grpc else "http",
        "streaming": options.words.streaming,
        "batch": options.words.batch,
        "load": "open" if options.is_open else "closed",
        "level": run.level_word,
        "distribution": _distribution(options),
        "began": run.began,
        "load_average": run.load_average,
        "processes": run.processes,
        "judged_by": "mean" if options.percentile is None else f"p{options.percentile}",
        "stability_percent": options.words.stability_percentage,
        "latency_threshold_ms": options.words.latency_threshold,
        "latency_threshold_result": threshold_text(run, results),
        "levels": [_level(run, result) for result in results],
    }


def _distribution(options: BenchOptions) -> str:
    if options.words.request_intervals:
        return "intervals of a file"
    return options.words.request_distribution if options.is_open else ""


def _level(run: Run, result: LevelResult) -> dict[str, Any]:
    figures = result.figures
    both, wait = _client_parts(figures)
    found: dict[str, Any] = {
        "level": result.level,
        "stable": result.is_stable,
        "within_threshold": result.within_threshold,
        "requests": figures.completed,
        "rate": figures.rate,
        "latency_us": latency_document(figures.latency),
        "client_us": {"send_receive": both, "wait": wait},
        "errors": dict(figures.errors),
        "generator": {"cores": figures.generator_share, "busiest": figures.busiest},
        "windows": [{"rate": w.rate, "latency_us": w.judged_ns(run.options.percentile) / 1000} for w in result.windows],
        "notes": notes(result),
        "server": {model: server_document(server) for model, server in figures.server.items()},
    }
    if run.options.is_open:
        found |= {"service_us": latency_document(figures.service), "late": figures.late}
    if figures.first.count:
        found |= {"responses": figures.responses, "response_rate": figures.response_rate}
        found |= {"first_response_us": latency_document(figures.first)}
        found |= {"inter_response_us": latency_document(figures.gaps)}
    if figures.metrics:
        found["metrics"] = {
            name: {label: reduced(values, "mean") for label, values in by_label.items() if values}
            for name, by_label in figures.metrics.items()
        }
    return found


def server_document(server: ServerFigures) -> dict[str, Any]:
    """A model's part at the server; means are of a successful request."""
    names = ("queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
    return {
        "inferences": server.inferences,
        "executions": server.executions,
        "requests": server.counts.get("success", 0),
        "failed": server.counts.get("fail", 0),
        "cache_hits": server.counts.get("cache_hit", 0),
        "request_us": server.mean_us("success"),
        **{f"{name}_us": server.mean_us(name) for name in names},
    }


def latency_document(histogram: LatencyHistogram) -> dict[str, Any]:
    """A histogram: its figures, and points (value, share of values up to it) for plots."""
    points = [(bounds_of(cell)[1] / 1000, seen / histogram.count) for cell, seen in histogram.cumulative()]
    every = max(1, len(points) // _PLOTTED)
    kept = [*points[:-1][::every], *points[-1:]]
    # the tail is what such a plot is for, so its points are never thinned out
    kept = sorted({*kept, *(point for point in points if point[1] > 0.999)})
    return {
        "count": histogram.count,
        "mean": histogram.mean_ns / 1000,
        "deviation": histogram.deviation_ns / 1000,
        "min": histogram.min_ns / 1000,
        "max": histogram.max_ns / 1000,
        **{f"p{percent:g}": histogram.percentile_ns(percent) / 1000 for percent in _MORE_PERCENTILES},
        "shares": [[round(value, 3), round(share, 7)] for value, share in kept],
    }
