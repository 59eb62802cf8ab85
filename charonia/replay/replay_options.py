"""The options of `charonia replay`. Pure."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

from charonia.errors import InvalidArgument
from charonia.operations.arguments import positive, since
from charonia.releases.answer_differences import Tolerance

_MAX_VERSION = 1 << 62


@dataclass(frozen=True, slots=True)
class Target:
    """The candidate: a model, as clients call it, and its version."""

    model: str
    version: int


def parser() -> argparse.ArgumentParser:
    """The command and its options."""
    root = argparse.ArgumentParser(prog="charonia", allow_abbrev=False)
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    text = "ask a candidate version recorded requests again, and compare its answers with those that clients got"
    command = commands.add_parser(
        "replay",
        help=text,
        description=f"{text}. Exit code 0: they are the same, 1: they differ, 2: it could not be found out.",
        allow_abbrev=False,
    )
    command.add_argument("--json", action="store_true", help="print one JSON document")
    _add_requests(command.add_argument_group("requests"))
    _add_candidate(command.add_argument_group("candidate"))
    _add_comparison(command.add_argument_group("comparison"))
    return root


def _add_requests(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--from", dest="source", choices=("journal",), required=True, help="recordings in the log beside the journal, "
        "which has no tensors; of models with charonia.record_share")  # fmt: skip
    add("--model", default="", metavar="MODEL", help="whose recordings (the model of --to)")
    add("--answered-by", type=positive, default=0, metavar="V", help="only those that this version has answered (all "
        "but those of the candidate itself)")  # fmt: skip
    add("--tenant", action="append", default=[], help="only of this tenant, '' for none; repeatable")
    add("--since", type=since, metavar="WHEN", help="a duration ago (2h) or a time; else all there is")
    add("--until", type=since, metavar="WHEN", help="likewise (now)")
    add("--limit", type=positive, default=0, metavar="N", help="ask the N that were recorded first")
    add("--drop", action="store_true", help="delete these recordings instead of asking anything")
    add("--log-url", default="", metavar="URL", help="of the log with the recordings (CHARONIA_LOG_URL)")
    add("--log-password-file", default="", metavar="FILE", help="its password")
    add("--state-dir", default="", metavar="DIR", help="of the running 'charonia serve' whose log it is")


def _add_candidate(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--to", default="", metavar="MODEL:VERSION", help="the version to ask; it must be ready")
    add("--url", default="", metavar="URL", help="of its server: http://, https://, grpc:// or grpcs://, "
        "or http+unix:///PATH or grpc+unix:///PATH of a Unix socket (CHARONIA_URL)")  # fmt: skip
    add("--header", action="append", default=[], metavar="'NAME: VALUE'", help="send this header; repeatable")
    add("--ca-file", default="", metavar="FILE", help="trust these authorities (PEM)")
    add("--concurrency", type=positive, default=4, metavar="N", help="requests at a time (4)")
    add("--rate", type=_above_0, default=0.0, metavar="R", help="at most R requests a second")
    add("--timeout", type=_above_0, default=60.0, metavar="S", help="wait so long for an answer (60)")


def _add_comparison(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--absolute", action="append", default=[], metavar="[OUTPUT=]A", help="a recorded number a and another one b "
        "are alike when |a - b| <= A + R * |a|; repeatable")  # fmt: skip
    add("--relative", action="append", default=[], metavar="[OUTPUT=]R", help="likewise")
    add("--percent-different-allowed", type=_percent, default=0.0, metavar="P", help="so many of the compared requests "
        "may differ (0)")  # fmt: skip
    add("--min-requests", type=positive, default=1, metavar="N", help="compare at least so many, else exit code 2 (1)")
    add("--worst", type=positive, default=10, metavar="N", help="name so many of the requests that differ most (10)")


def _above_0(text: str) -> float:
    number = _finite(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"'{text}' is no number above 0")
    return number


def _percent(text: str) -> float:
    number = _finite(text.removesuffix("%"))
    if not 0 <= number <= 100:
        raise argparse.ArgumentTypeError(f"'{text}' is no number from 0 to 100")
    return number


def _finite(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    return number if math.isfinite(number) else -1.0


def target_of(text: str) -> Target:
    """The candidate of `--to`. Raises `InvalidArgument`."""
    model, colon, version = text.rpartition(":")
    if not colon or not model or not (version.isascii() and version.isdecimal()) or len(version) > 18:
        raise InvalidArgument(f"--to '{text}' is not MODEL:VERSION")
    if not 1 <= int(version) <= _MAX_VERSION:
        raise InvalidArgument(f"--to '{text}': versions begin at 1")
    return Target(model, int(version))


def tolerances_of(absolute: Sequence[str], relative: Sequence[str]) -> dict[str, Tolerance]:
    """Tolerances by output, that of "" for those that are not named; what is named has its own two parts, of which one
    that is not given is that of "". Raises `InvalidArgument`.
    """
    of_absolute = dict(_named(text, "--absolute") for text in absolute)
    of_relative = dict(_named(text, "--relative") for text in relative)
    default = Tolerance(of_absolute.get("", 0.0), of_relative.get("", 0.0))
    return {
        name: Tolerance(of_absolute.get(name, default.absolute), of_relative.get(name, default.relative))
        for name in ("", *of_absolute, *of_relative)
    }


def _named(text: str, option: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    number = _finite(value)
    if number < 0:
        raise InvalidArgument(f"'{text}' of {option} is neither a number of at least 0 nor OUTPUT=NUMBER")
    return name, number
