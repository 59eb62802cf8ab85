"""Measures one configuration: a server of its own, load on each model at the same time, figures as a document.

The load, its warm-up and when it is stable are `charonia.analyzer.benching`'s. Of several models the windows lie beside
each other, and count when all are stable: a model that has the machine to itself would look faster than it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, TypeVar

from charonia.analyzer import bench_options
from charonia.analyzer.bench_report import LevelResult, server_document
from charonia.analyzer.benching import Bench, load_average, opened
from charonia.errors import CharoniaError, InvalidArgument, Unavailable

from .trial_server import ModelCopies, RunningServer, started
from .tune_options import TuneOptions
from .verdict import Aim, has_failed, score_of

_T = TypeVar("_T")

Turn = Callable[[], dict[str, Any]]
"""Measures a running configuration once: an observation."""


def measure(
    options: TuneOptions, copies: ModelCopies, targets: Sequence[str], loaded: Sequence[str], configs: Mapping[str, str]
) -> dict[str, Any]:
    """The observation of a configuration, on a server for it alone; arguments and errors are those of `running`."""
    began_s = time.monotonic()
    with running(options, copies, targets, loaded, configs) as turn:
        found = turn()
    return found | {"seconds": time.monotonic() - began_s}


@contextmanager
def running(
    options: TuneOptions, copies: ModelCopies, targets: Sequence[str], loaded: Sequence[str], configs: Mapping[str, str]
) -> Iterator[Turn]:
    """Within it a server runs with a configuration, and each call of what it gives measures it once: an observation.

    `configs` are the texts of `config.pbtxt`, `loaded` the models to load, `targets` those that get load. What a
    configuration does to a server (it does not start, a request fails) is in the observation. Raises `InvalidArgument`
    for a load that does not fit the models.
    """
    copies.write(configs)
    server, benches, failed = None, list[Bench](), ""
    with ExitStack() as stack:
        try:
            server = stack.enter_context(_server(options, copies, loaded))
            benches = [stack.enter_context(opened(_bench_options(options, target, server))) for target in targets]
        except InvalidArgument:
            raise
        except CharoniaError as error:  # Unavailable mostly
            failed = str(error)
        threads = stack.enter_context(ThreadPoolExecutor(len(benches))) if len(benches) > 1 else None

        def turn() -> dict[str, Any]:
            began_s, load = time.monotonic(), load_average()
            found: dict[str, Any] = {"targets": {}, "failed": failed}
            found["began"] = datetime.now(UTC).isoformat(timespec="seconds")
            if server is not None and not failed:
                try:
                    found["targets"] = _levels(options, benches, threads)
                    found["memory"] = server.memory()
                except CharoniaError as error:  # it went away
                    found["failed"] = str(error)
            return found | {"seconds": time.monotonic() - began_s, "load_average": [load, load_average()]}

        yield turn


class SideBySide:
    """Servers of configurations that are measured in turns: each starts with its first turn, and again with the next
    one after it failed, as it may be gone. They end with `stack`."""

    def __init__(
        self,
        stack: ExitStack,
        beside: Callable[[str], Callable[[Mapping[str, str]], AbstractContextManager[Turn]]],
        aim: Aim,
    ) -> None:
        """`beside` gives what starts the servers of a configuration, by its name; called once for each."""
        self._stack, self._beside, self._aim = stack, beside, aim
        self._starts: dict[str, Callable[[Mapping[str, str]], AbstractContextManager[Turn]]] = {}
        self._servers: dict[str, tuple[ExitStack, Turn]] = {}

    def measured(self, name: str, configs: Mapping[str, str]) -> dict[str, Any]:
        """One turn of a configuration: its observation."""
        if name not in self._starts:
            self._starts[name] = self._beside(name)
        if name not in self._servers:
            own = self._stack.enter_context(ExitStack())
            self._servers[name] = own, own.enter_context(self._starts[name](configs))
        own, turn = self._servers[name]
        found = turn()
        if has_failed(score_of(found, self._aim)):
            del self._servers[name]
            own.close()
        return found


def loaded_configs(options: TuneOptions, copies: ModelCopies, models: Sequence[str]) -> dict[str, Any]:
    """The configurations of models as written, as a server completes them. Raises `Unavailable` when it does not load
    them: then there is nothing to begin from."""
    try:
        with _server(options, copies, models) as server:
            return {model: server.config(model) for model in models}
    except Unavailable as error:
        raise Unavailable(f"as they are written the models do not load: {error}") from None


def _server(options: TuneOptions, copies: ModelCopies, models: Sequence[str]) -> AbstractContextManager[RunningServer]:
    flags = [f"--{text}" for text in options.words.serve]
    return started(copies, models, flags, caches=_caches(options), within_s=options.words.start_timeout)


def _caches(options: TuneOptions) -> bool:
    named = any(text.startswith("cache-config=") for text in options.words.serve)
    return bool(options.values.get("cache")) and options.values["cache"] != ["keep"] and not named


def _levels(
    options: TuneOptions, benches: Sequence[Bench], threads: ThreadPoolExecutor | None
) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {bench.described.view.name: [] for bench in benches}
    for level in options.levels:
        for bench, result in zip(benches, _side_by_side(benches, level, threads), strict=True):
            found[bench.described.view.name].append(_document(bench, result))
    return found


def _side_by_side(benches: Sequence[Bench], level: float, threads: ThreadPoolExecutor | None) -> list[LevelResult]:
    try:
        if threads is None:
            return [benches[0].measure(level)]
        _each(threads, lambda bench: bench.begin(level), benches)
        while not all(_each(threads, lambda bench: bench.take_window(), benches)):  # each one's, before the next round
            pass
        return [bench.end() for bench in benches]
    except CharoniaError:
        for bench in benches:  # none goes on sending beside what is measured next
            with suppress(CharoniaError):
                bench.end()
        raise


def _each(threads: ThreadPoolExecutor, action: Callable[[Bench], _T], benches: Sequence[Bench]) -> list[_T]:
    """What each one gives; an error is raised when all have ended, so that none is under way afterwards."""
    futures = [threads.submit(action, bench) for bench in benches]
    wait(futures)
    return [future.result() for future in futures]


def _bench_options(options: TuneOptions, target: str, server: RunningServer) -> bench_options.BenchOptions:
    url = server.grpc if options.words.protocol == "grpc" else server.http
    return bench_options.parsed(options.bench_words(target, url))


def _document(bench: Bench, result: LevelResult) -> dict[str, Any]:
    """A model's figures of a level; times are microseconds."""
    figures, percentile = result.figures, bench.described.options.percentile
    latency = figures.latency
    return {
        "level": result.level,
        "rate": figures.rate,
        "requests": figures.completed,
        "stable": result.is_stable,
        "errors": dict(figures.errors),
        "latency_us": {
            "mean": latency.mean_ns / 1000,
            "judged": figures.judged_ns(percentile) / 1000,
            **{f"p{percent}": latency.percentile_ns(percent) / 1000 for percent in (50, 90, 95, 99)},
        },
        "server": {model: server_document(server) for model, server in figures.server.items()},
        "generator": {"cores": figures.generator_share, "busiest": figures.busiest},
    }
