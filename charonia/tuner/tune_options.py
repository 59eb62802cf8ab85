"""The options of `charonia tune`, checked. Pure. Those of the load have the names of `charonia bench`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from charonia.errors import InvalidArgument
from charonia.options.table import ALIASES

from .knobs import KNOBS, parsed_values
from .verdict import OBJECTIVES, RATE, Aim

QUICK, BRUTE = "quick", "brute"
MOST_POINTS = 5000
"""A brute search of more asks for `--max-configurations`."""
_OWN = ("config", "log-url", "state-dir", "shm-dir", "model-repository")
_OWN_ENDINGS = ("-port", "-socket")
"""Options that the servers of a run have of their own, and their ports and sockets: others would let them meet another
server. A file of options (`config`) may name any of them."""


def parser() -> argparse.ArgumentParser:
    """The command's options, in a parser that has it as its only command (as the other commands' parsers)."""
    root = argparse.ArgumentParser(prog="charonia", allow_abbrev=False)
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    text = "find the configuration of models that serves most within limits of latency and memory"
    command = commands.add_parser("tune", help=text, description=text, allow_abbrev=False)
    command.add_argument("models", nargs="+", metavar="MODEL", help="a model; of an ensemble its steps are tuned")
    _add_search(command.add_argument_group("search"))
    _add_knobs(command.add_argument_group("values to try (comma-separated; 'keep' leaves a knob as it is written)"))
    _add_load(command.add_argument_group("load"))
    _add_output(command.add_argument_group("server and output"))
    return root


def _add_search(group: Any) -> None:
    add = group.add_argument
    add("--search", default=QUICK, choices=(QUICK, BRUTE), help="quick: climb from the configuration as written, knob "
        "by knob; brute: every combination (quick)")  # fmt: skip
    add("--together", action="store_true", help="tune the models on one server, each under load at the same time")
    add("--max-configurations", type=int, default=0, metavar="N", help="measure at most so many (no limit)")
    add("--objective", default=RATE, choices=OBJECTIVES, help="most inferences a second, or least latency or memory "
        "(rate)")  # fmt: skip
    add("--percentile", type=int, default=99, metavar="P", help="of latency, for limit and objective (99)")
    add("--latency-limit", type=float, default=0.0, metavar="MS", help="of that percentile (none)")
    add("--memory-limit", type=float, default=0.0, metavar="MIB", help="of all processes of the server (none)")
    add("--min-gain", type=float, default=3.0, metavar="PERCENT", help="by which a configuration has to be better "
        "to be preferred (3)")  # fmt: skip
    add("--rounds", type=int, default=3, metavar="N", help="at the end measure the best ones and the one as written in "
        "turns, so often; 0: do not (3)")  # fmt: skip
    add("--finalists", type=int, default=2, metavar="N", help="how many of the best (2)")


def _add_knobs(group: Any) -> None:
    add = group.add_argument
    add("--instances", default="", metavar="N,...", help="count of the instance group (powers of 2 up to the cores)")
    add("--threads", default="", metavar="auto|N,...", help="of onnxruntime and openvino (auto, powers of 2 up to the "
        "cores)")  # fmt: skip
    add("--max-batch", default="", metavar="N,...", help="max_batch_size (powers of 2 up to the written one or the "
        "load)")  # fmt: skip
    add("--delay-us", default="", metavar="off|US,...", help="max_queue_delay_microseconds; off: no dynamic batching "
        "(0,500,1000,2000,5000,10000)")  # fmt: skip
    add("--preferred", default="", metavar="max|half|N+M,...", help="preferred_batch_size; max: the largest "
        "batch, half: half of it and it (max,half)")  # fmt: skip
    add("--cache", default="", metavar="off|on,...", help="response_cache; give --input-data whose requests repeat as "
        "yours do (keep)")  # fmt: skip


def _add_load(group: Any) -> None:
    add = group.add_argument
    add("--concurrency", default="", metavar="N,...", help="requests in flight; of several levels the best one counts "
        "(8)")  # fmt: skip
    add("--request-rate", default="", metavar="N,...", help="requests a second, whatever the server does")
    add(
        "--request-distribution",
        default="constant",
        choices=("constant", "poisson"),
        help="of request rates (constant)",
    )
    add("-i", dest="protocol", default="http", type=str.lower, choices=("http", "grpc"), help="protocol (http)")
    add("--streaming", action="store_true", help="over gRPC streams, as models with several responses need it")
    add("-b", dest="batch", type=int, default=1, metavar="N", help="batch size of each request (1)")
    add("--input-data", action="append", default=[], metavar="[MODEL=]DATA", help="zero, random, a JSON file or a "
        "directory, as of charonia bench; repeatable (random)")  # fmt: skip
    add("--shape", action="append", default=[], metavar="[MODEL=]NAME:D,D", help="shape of an input, without its batch "
        "dimension; repeatable")  # fmt: skip
    add("--max-threads", type=int, default=0, metavar="N", help="most worker processes of the load of a model")
    add("-p", "--measurement-interval", type=int, default=2000, metavar="MS", help="length of a window (2000)")
    add("-s", "--stability-percentage", type=float, default=10.0, metavar="PERCENT", help="by which rate and latency "
        "of three windows in a row may differ (10)")  # fmt: skip
    add("-r", "--max-trials", type=int, default=6, metavar="N", help="windows of a level before it is given up (6)")


def _add_output(group: Any) -> None:
    add = group.add_argument
    add("--model-repository", action="append", default=[], metavar="DIR", help="where the models are; required, "
        "repeatable; never changed without --write")  # fmt: skip
    add("--with", dest="others", action="append", default=[], metavar="MODEL", help="load this model too, without "
        "tuning it; repeatable")  # fmt: skip
    add("--serve", action="append", default=[], metavar="NAME=VALUE", help="option of charonia serve; repeatable")
    add("--start-timeout", type=float, default=120.0, metavar="S", help="a configuration whose server is not ready by "
        "then counts as failed (120)")  # fmt: skip
    add("--output", default="tune-results", metavar="DIR", help="checkpoint, report.html, report.csv, report.json and "
        "MODEL/config.pbtxt go there (tune-results)")  # fmt: skip
    add("--fresh", action="store_true", help="measure again what the checkpoint there has")
    add("--write", action="store_true", help="put winners into the repository; the file before stays "
        "there as config.pbtxt~")  # fmt: skip
    add("--json", action="store_true", help="print the report as JSON")


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """Checked options. `values` are the wanted ones by knob; `levels` are of concurrency, of rates if `is_open`."""

    words: argparse.Namespace
    values: dict[str, list[str]]
    levels: tuple[float, ...]
    is_open: bool
    aim: Aim
    gain: float

    def of_model(self, name: str, model: str) -> list[str]:
        """The values of `input_data` or `shape` for a model: its own, else those for all."""
        given = [_owned(text, self.words.models) for text in getattr(self.words, name)]
        own = [text for owner, text in given if owner == model]
        return own or [text for owner, text in given if not owner]

    def bench_words(self, model: str, url: str) -> list[str]:
        """The command line of `charonia bench` that puts load on a model at a server."""
        words = self.words
        level = "--request-rate-range" if self.is_open else "--concurrency-range"
        line = ["bench", "-m", model, "-u", url, "-i", words.protocol, "-b", str(words.batch)]
        line += [level, ":".join(f"{value:g}" for value in (min(self.levels), max(self.levels)))]
        line += ["--percentile", str(self.aim.percentile), "-p", str(words.measurement_interval)]
        line += ["-s", str(words.stability_percentage), "-r", str(words.max_trials)]
        line += ["--max-threads", str(words.max_threads), "--request-distribution", words.request_distribution]
        line += ["--streaming"] if words.streaming else []
        for name in ("input_data", "shape"):
            for text in self.of_model(name, model):
                line += [f"--{name.replace('_', '-')}", text]
        return line

    def measured(self, targets: Sequence[str]) -> list[str]:
        """The words on which a measurement of these models depends: those of the load and the server, not those of the
        search."""
        words = [word for target in targets for word in self.bench_words(target, "")]
        return [*words, *map(str, self.levels), *self.words.others, *self.words.serve]


def _owned(text: str, models: Sequence[str]) -> tuple[str, str]:
    owner, mark, rest = text.partition("=")
    return (owner, rest) if mark and owner in models else ("", text)


def parsed(line: Sequence[str]) -> TuneOptions:
    """The options of a command line, the command first. Raises `SystemExit` for wrong usage and help,
    `InvalidArgument` for what does not fit together."""
    words = parser().parse_args(list(line))
    if not words.model_repository:
        _refuse("--model-repository is required: name the directory with the models")
    if len(set(words.models)) < len(words.models):
        _refuse("a model is named twice")
    if words.concurrency and words.request_rate:
        _refuse("--concurrency and --request-rate exclude each other")
    if words.streaming and words.protocol != "grpc":
        _refuse("--streaming is of gRPC: add -i grpc")
    if not 1 <= words.percentile <= 99:
        _refuse("--percentile is from 1 to 99")
    for name in ("latency_limit", "memory_limit", "min_gain", "max_configurations", "rounds", "max_threads"):
        if not 0 <= getattr(words, name) < 2**31:
            _refuse(f"--{name.replace('_', '-')} is at least 0")
    for name, shown in (
        ("batch", "-b"), ("measurement_interval", "-p"), ("max_trials", "-r"), ("finalists", "--finalists"),
        ("start_timeout", "--start-timeout"), ("stability_percentage", "-s"),
    ):  # fmt: skip
        if not 0 < getattr(words, name) < 2**31:
            _refuse(f"{shown} is above 0")
    for text in words.serve:
        if "=" not in text or text.startswith("-"):
            _refuse(f"--serve '{text}' is not NAME=VALUE")
        name = text.partition("=")[0]
        if name == "config":
            _refuse("--serve config: the servers of a run read no file of options; name each as --serve NAME=VALUE")
        if ALIASES.get(name, name) in _OWN or name.endswith(_OWN_ENDINGS):
            _refuse(f"--serve {name}: the servers of a run have their own")
    values = {knob: parsed_values(knob, text) for knob in KNOBS if (text := getattr(words, knob.replace("-", "_")))}
    aim = Aim(words.objective, words.percentile, words.latency_limit * 1000, round(words.memory_limit * (1 << 20)))
    is_open = bool(words.request_rate)
    return TuneOptions(words, values, _levels(words, is_open), is_open, aim, words.min_gain / 100)


def _levels(words: argparse.Namespace, is_open: bool) -> tuple[float, ...]:
    text = words.request_rate if is_open else words.concurrency or "8"
    try:
        levels = tuple(dict.fromkeys(float(part) if is_open else int(part) for part in text.split(",")))
    except ValueError:
        levels = ()
    if not levels or not all(0 < level <= 65_536 for level in levels):
        _refuse(f"'{text}' is no list of levels above 0, such as 4,8")
    return levels


def _refuse(text: str) -> NoReturn:
    raise InvalidArgument(text)
