"""The options of `charonia simulate`. Pure."""

from __future__ import annotations

import argparse

from charonia.operations.arguments import since

from .what_if import WhatIf, duration_us, what_if

_FLAGS = (
    ("executors", "+N|N", "so many more executors, or so many"),
    ("batcher", "WHERE", "separate: in a process of its own, also with one executor; colocated: in that one's process"),
    ("instances", "+N|N", "instances of the model at each executor"),
    ("delay", "TIME", "max_queue_delay: 5ms, 500us"),
    ("max-batch", "N", "max_batch_size"),
    ("preferred", "N,N", "preferred_batch_size; none for none"),
    ("cores", "N", "cores that the instances of the model share, each using one while it computes, in place of what "
     "the recording says of processors"),
    ("rate", "xF", "the recorded pattern, so many times as fast"),
    ("policy", "NAME:VALUE,...", "queue policy: max-queue:N, timeout:TIME, action:reject|delay, override:yes|no, "
     "order:yes|no (preserve_ordering); none: no dynamic batching"),
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The command and its options."""
    root = argparse.ArgumentParser(prog="charonia", allow_abbrev=False)
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    text = "answer what-if questions from recorded requests, with the real scheduler and a simulated clock"
    command = commands.add_parser(
        "simulate",
        help=text,
        description=f"{text}. The error of the simulation against the recording is always printed.",
        allow_abbrev=False,
    )
    _add_source(command.add_argument_group("recording"))
    group = command.add_argument_group("what if (given together they are one question)")
    for name, metavar, help_text in _FLAGS:
        group.add_argument(f"--{name}", default="", metavar=metavar, help=help_text)
    group.add_argument(
        "--what-if", action="append", default=[], metavar="'NAME=VALUE ...'", help="a further question, with the names "
        "above; MODEL:NAME=VALUE is about one model; repeatable",
    )  # fmt: skip
    group = command.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print JSON")
    group.add_argument("--html", default="", metavar="FILE", help="write a report with plots: one page")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the drawn times (0)")
    group.add_argument(
        "--measured", action="append", default=[], metavar="FILE", help="trace file of a real run under the last "
        "question: the prediction's error is printed; repeatable",
    )  # fmt: skip
    return root


def _add_source(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("trace", nargs="*", metavar="TRACE", help="trace files of the recorded run; without any, the journal in the "
        "log")  # fmt: skip
    add("-m", "--model", action="append", default=[], metavar="MODEL", help="only this one; repeatable")
    add("--url", default="", metavar="URL", help="take the models' configurations from this server")
    add("--model-repository", default="", metavar="DIR", help="take them from this repository")
    add("--recorded", default="", metavar="'NAME=VALUE ...'", help="what the recorded run had, where it is not as the "
        "configurations say; not cores or rate")  # fmt: skip
    add("--log-url", default="", metavar="URL", help="of the log with the journal (CHARONIA_LOG_URL)")
    add("--log-password-file", default="", metavar="FILE", help="its password")
    add("--state-dir", default="", metavar="DIR", help="of the running 'charonia serve' whose log it is")
    add("--since", type=since, metavar="WHEN", help="of the journal: a duration ago (2h) or a time; else all there is")
    add("--skip", default="0s", metavar="TIME", help="leave out this much of the beginning")
    add("--take", default="0s", metavar="TIME", help="simulate only this much behind it")


def questions_of(options: argparse.Namespace) -> list[WhatIf]:
    """The questions: that of the flags, then those of `--what-if`. Raises `InvalidArgument`."""
    words = [f"{name}={value}" for name, _, _ in _FLAGS if (value := getattr(options, name.replace("-", "_")))]
    return [what_if(text) for text in ([" ".join(words)] if words else []) + list(options.what_if)]


def window_ns(options: argparse.Namespace) -> tuple[int, int]:
    """How much to leave out and how much to take, in nanoseconds; 0 takes all. Raises `InvalidArgument`."""
    return duration_us("--skip", options.skip) * 1000, duration_us("--take", options.take) * 1000
