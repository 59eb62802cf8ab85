"""The commands of `charonia.operations` as an argument parser. Wrong usage exits with 2."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TypeAlias

from charonia.facts.jobs import JobState

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

SOURCES = ("mlserver", "bentoml", "torchserve", "kserve")
"""Servers that `migrate` reads from."""

_OF_ALL = ("--json", "--log-url", "--log-password-file", "--state-dir")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def duration_s(text: str) -> float:
    """`90`, `90s`, `5m`, `2h`, `1d`, `250ms` in seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"'{text}' is no duration: write 90, 90s, 5m, 2h or 1d")
    return float(found[1]) * _UNITS[found[2] or "s"]


def since(text: str) -> tuple[str, float]:
    """("ago", seconds) or ("at", seconds since the epoch)."""
    try:
        return "ago", duration_s(text)
    except argparse.ArgumentTypeError:
        pass
    try:
        return "at", datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is neither a duration (2h) nor a time (2026-05-01T12:00)") from None


def request_id(text: str) -> bytes:
    """A request id: 32 hex digits, with or without the model of a job's id."""
    digits = text.partition(".")[0]
    if not re.fullmatch(r"[0-9a-f]{32}", digits):
        raise argparse.ArgumentTypeError(f"'{text}' is no request id (32 hex digits)")
    return bytes.fromhex(digits)


def file_path(text: str) -> Path:
    return Path(text).expanduser().absolute()


def positive(text: str) -> int:
    number = int(text) if re.fullmatch(r"\d+", text) else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no number above 0")
    return number


def count(text: str) -> int:
    if not re.fullmatch(r"\d{1,4}", text):
        raise argparse.ArgumentTypeError(f"'{text}' is no number of at least 0")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """The whole tree. `command` and `action` say what was chosen."""
    root = argparse.ArgumentParser(prog="charonia", allow_abbrev=False)
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _audit(commands)
    _usage(commands)
    _queue(_actions(commands, "queue", "see, hold back and cancel queued requests; talks to the log alone"))
    _jobs(_actions(commands, "jobs", "jobs as the log has them, without a gateway"))
    _dead_letters(_actions(commands, "dlq", "dead letters: requests that were given up"))
    _executors(_actions(commands, "executors", "who executes, with what, and how much of it is in use"))
    _route(commands)
    _state(_actions(commands, "state", "the state of a log: what wrote it, and as a file to take elsewhere"))
    _check(commands)
    _migrate(commands)
    _trace(
        _actions(commands, "trace", "trace files, which gateways write (--trace-config triton,file=PATH)", ["--json"])
    )
    return root


def _actions(commands: Commands, name: str, text: str, options: Sequence[str] = _OF_ALL) -> Commands:
    """A command with actions, which all have these options."""
    command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    for option in options:
        command.add_argument(option, action=_Misplaced, nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return command.add_subparsers(dest="action", required=True, metavar="ACTION")


class _Misplaced(argparse.Action):
    """Refuses an option of the actions that stands before the action: its value would be taken for the action."""

    def __call__(
        self, parser: argparse.ArgumentParser, _namespace: object, _values: object, option_string: str | None = None
    ) -> None:
        parser.error(f"{option_string} belongs behind the action: {parser.prog} ACTION {option_string}")


def _add(actions: Commands, name: str, text: str) -> argparse.ArgumentParser:
    """A command with the options that all have."""
    command = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
    command.add_argument("--json", action="store_true", help="print one JSON document")
    command.add_argument(
        "--log-url",
        default="",
        metavar="URL",
        help="the log: redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://",
    )
    command.add_argument("--log-password-file", default="", metavar="FILE", help="file that holds the log's password")
    command.add_argument(
        "--state-dir", default="", metavar="DIR", help="state directory of a running 'charonia serve', to find its log"
    )
    return command


def _audit(commands: Commands) -> None:
    text = "read the journal and check what must hold: one end for each request, growing attempts, nothing run after it"
    command = _add(commands, "audit", text)
    command.add_argument("--model", action="append", default=[], help="only this model; repeatable")
    command.add_argument("--since", type=since, metavar="WHEN", help="a duration ago (2h) or a time; else all there is")
    command.add_argument("--verify", action="store_true", help="prove instead that nothing sealed was changed since")
    text = "with --verify: compare with the seals in this file, then add the last ones to it"
    command.add_argument("--heads", type=file_path, metavar="FILE", help=text)
    text = "with --verify: fail if an entry older than this is not sealed"
    command.add_argument("--max-unsealed", type=duration_s, metavar="S", help=text)
    text = "write the facts to this file instead, a row for each request of a fact: .jsonl or .parquet"
    command.add_argument("--export", type=file_path, metavar="FILE", help=text)
    command.add_argument("--until", type=since, metavar="WHEN", help="with --export: only what was before (now)")
    command.add_argument("--overwrite", action="store_true", help="with --export: replace the file if it exists")
    command.add_argument(
        "--exact",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="remember finished requests, about 40 MB a million, to find a second end however late (default)",
    )
    command.add_argument(
        "--journal-only", action="store_true", help="do not compare the journal with queues and jobs of the log"
    )
    command.add_argument("--max-findings", type=positive, default=1000, metavar="N", help="print so many (1000)")
    command.add_argument("--max-unfinished", type=positive, default=20, metavar="N", help="list so many a model (20)")


def _usage(commands: Commands) -> None:
    text = "what tenants have used of models: requests, seconds of instances, time in queues, bytes, tokens"
    command = _add(commands, "usage", text)
    command.add_argument("--model", action="append", default=[], help="only this model; repeatable")
    command.add_argument("--tenant", action="append", default=[], help="only this tenant; repeatable")
    command.add_argument(
        "--since", type=since, default=("ago", 86_400.0), metavar="WHEN", help="a duration ago or a time (24h)"
    )
    command.add_argument("--until", type=since, default=("ago", 0.0), metavar="WHEN", help="likewise (now)")
    command.add_argument("--by", choices=("all", "day", "hour"), default="all", help="a row for each (all)")
    command.add_argument("--csv", action="store_true", help="print comma-separated values")


def _queue(actions: Commands) -> None:
    command = _add(actions, "ls", "what waits, by model, level and lane")
    command.add_argument("--model", action="append", default=[], help="only this model; repeatable")
    command = _add(actions, "inspect", "the requests of a queue in order; running ones stay until they are settled")
    command.add_argument("model")
    command.add_argument("--limit", type=positive, default=50, metavar="N", help="how many (50)")
    command = _add(actions, "pause", "dispatch nothing more of a model; requests are still accepted")
    command.add_argument("model")
    command = _add(actions, "resume", "dispatch again")
    command.add_argument("model")
    command = _add(actions, "cancel", "cancel requests that are not settled, running ones included")
    command.add_argument("model")
    command.add_argument("--id", type=request_id, action="append", default=[], help="this request; repeatable")
    command.add_argument("--all", action="store_true", help="every request that the other options let through")
    command.add_argument("--older-than", type=duration_s, default=0.0, metavar="S", help="only those older (90, 5m)")
    command.add_argument("--level", type=int, default=None, metavar="N", help="only those of this priority level")
    text = "move queued jobs to another priority level, behind what waits there; the model must be paused"
    command = _add(actions, "move", text)
    command.add_argument("model")
    command.add_argument("--id", type=request_id, action="append", required=True, help="this job; repeatable")
    command.add_argument("--level", type=positive, required=True, metavar="N", help="where to")


def _jobs(actions: Commands) -> None:
    def filters(command: argparse.ArgumentParser) -> None:
        states = [state.value for state in JobState]
        command.add_argument("--model", action="append", default=[], help="only of this model; repeatable")
        command.add_argument("--state", action="append", default=[], choices=states, help="repeatable")
        command.add_argument("--tenant", default=None, help="only of this tenant")
        command.add_argument("--older-than", type=duration_s, default=0.0, metavar="S", help="only those older")

    command = _add(actions, "ls", "active jobs oldest first, then ended ones newest first")
    filters(command)
    command.add_argument("--limit", type=positive, default=100, metavar="N", help="how many (100)")
    command.add_argument("--after", default="", metavar="ID", help="go on after this job")
    for name, text in (("show", "one job with its place in the queue"), ("timeline", "everything that happened to it")):
        _add(actions, name, text).add_argument("id")
    command = _add(actions, "result", "the answer of an ended job; exit code 1 when there is none")
    command.add_argument("id")
    command.add_argument("--out", default="", metavar="DIR", help="write outputs there (.npy, BYTES as .json)")
    command = _add(actions, "cancel", "cancel jobs by id, or with --all those that match")
    command.add_argument("id", nargs="*")
    command.add_argument("--all", action="store_true", help="every active job that the other options let through")
    filters(command)
    command = _add(actions, "wait", "wait until a job has ended; exit code 0 when it succeeded")
    command.add_argument("id")
    command.add_argument("--timeout", type=duration_s, default=float("inf"), metavar="S", help="no longer than this")


def _dead_letters(actions: Commands) -> None:
    command = _add(actions, "ls", "dead letters, oldest first")
    command.add_argument("model", nargs="*")
    command.add_argument("--limit", type=positive, default=100, metavar="N", help="how many (100)")
    command = _add(actions, "show", "one dead letter: inputs, error, last stderr lines")
    command.add_argument("what", nargs="+", metavar="[MODEL] ID", help="a job's id needs no model")
    command.add_argument("--out", default="", metavar="DIR", help="write its inputs there (.npy, BYTES as .json)")
    command = _add(actions, "replay", "submit again as new jobs; the letters stay")
    command.add_argument("what", nargs="*", metavar="[MODEL] ID")
    command.add_argument("--all", action="store_true", help="every letter (of MODEL)")
    command.add_argument("--retention", type=duration_s, default=86_400.0, metavar="S", help="keep results (1d)")
    command = _add(actions, "drop", "delete dead letters")
    command.add_argument("what", nargs="*", metavar="[MODEL] ID")
    command.add_argument("--all", action="store_true", help="every letter (of MODEL)")


def _executors(actions: Commands) -> None:
    _add(actions, "ls", "who executes: pool, devices, models in memory, dispatched batches, heartbeat")


def _route(commands: Commands) -> None:
    text = "which version gets the requests that name none: canaries that roll back by themselves, matches, shadows"
    command = _add(commands, "route", text)
    command.add_argument("model", nargs="?", default="", help="the model; without one, all that have a rule are shown")
    command.add_argument("show", nargs="?", choices=("show",), help="only show the rule (so does naming no change)")
    command.add_argument("--clear", action="store_true", help="take the rule away: the highest version gets requests")
    command.add_argument("--present", type=positive, metavar="N", help="the version that gets what nothing else takes")
    command.add_argument("--canary", default="", metavar="N:SHARE", help="a candidate and its share, as 3:10%%")
    command.add_argument(
        "--match", action="append", default=[], metavar="NAME=VALUE", help="this header too goes to it; repeatable"
    )
    command.add_argument("--tenant", action="append", default=[], help="so does this tenant; repeatable")
    command.add_argument(
        "--sticky", metavar="KEY", help="keep requests together by a header, or correlation-id (none to end it)"
    )
    command.add_argument("--shadow", type=count, metavar="N", help="a version that gets copies of requests, 0 for none")
    command.add_argument(
        "--tolerance", action="append", default=[], metavar="[OUTPUT=]X", help="how far a shadow's numbers may differ"
    )
    command.add_argument("--advance", metavar="SHARES", help="next shares, as 25%%,50%%,100%% (none to end it)")
    command.add_argument("--rollback", action=argparse.BooleanOptionalAction, default=None, help="roll back (default)")
    command.add_argument("--window", dest="window_s", type=duration_s, metavar="S", help="length of a window (60)")
    command.add_argument(
        "--min-requests", type=positive, metavar="N", help="decide nothing on fewer requests in a window (50)"
    )
    command.add_argument(
        "--max-errors", dest="max_error_percent", type=float, metavar="POINTS", help="percent more that may fail (1)"
    )
    command.add_argument(
        "--max-latency", dest="max_latency_ratio", type=float, metavar="X", help="times the present latency (1.5)"
    )
    command.add_argument(
        "--latency-slack", dest="latency_slack_ms", type=float, metavar="MS", help="and so many milliseconds (5)"
    )


def _state(actions: Commands) -> None:
    def place(command: argparse.ArgumentParser) -> None:
        command.add_argument("--json", action="store_true", help="print one JSON document")
        command.add_argument(
            "--state-dir", default="", metavar="DIR", help="state directory of a stopped 'charonia serve'"
        )
        command.add_argument("--log-url", default="", metavar="URL", help="a log that no process of charonia uses")
        command.add_argument(
            "--log-password-file", default="", metavar="FILE", help="file that holds the log's password"
        )

    def action(name: str, text: str) -> argparse.ArgumentParser:
        command = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        place(command)
        return command

    action("show", "which server program wrote a state, which process uses it, what was lost at its end")
    program = "valkey-server or redis-server to read a state directory with (the one that wrote it)"
    command = action(
        "export", "write a whole state to a file that every supported server program and release can import"
    )
    command.add_argument("file", type=file_path, help="where to; its directory must exist")
    command.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    command.add_argument("--log-server", default="", metavar="PROGRAM", help=program)
    command = action("import", "fill a state directory, or an empty log, from an exported file")
    command.add_argument("file", type=file_path, help="an exported file; it is checked before anything is written")
    command.add_argument(
        "--replace",
        action="store_true",
        help="if there is a state: a directory's is kept beside it, a log's is deleted",
    )
    program = "valkey-server or redis-server to write a state directory with (the first that serve would find)"
    command.add_argument("--log-server", default="", metavar="PROGRAM", help=program)


def _trace(actions: Commands) -> None:
    text = "where the time of traced requests went: means in microseconds, by model and by caller"
    command = actions.add_parser("summary", help=text, description=text, allow_abbrev=False)
    command.add_argument("--json", action="store_true", help="print one JSON document")
    command.add_argument("--model", action="append", default=[], help="only requests to this model; repeatable")
    command.add_argument("file", nargs="+", help="a trace file; of a log frequency, all its parts")


def _check(commands: Commands) -> None:
    text = "find every fault of a model repository, with its line and what to write instead; runs no model"
    command = commands.add_parser("check", help=text, description=text, allow_abbrev=False)
    command.add_argument("--json", action="store_true", help="print one JSON document")
    command.add_argument("--fix", action="store_true", help="mend what is safe and unambiguous, show how")
    command.add_argument(
        "--gpus", type=count, default=None, metavar="N", help="check for a machine with N GPUs (those of this machine)"
    )
    text = "the directory of python-based backends, as of the server's option"
    command.add_argument("--backend-directory", default="", metavar="DIR", help=text)
    command.add_argument("repository", type=file_path, help="the directory for --model-repository")


def _migrate(commands: Commands) -> None:
    text = "make a model repository of what another server's users have, and say what does not map"
    command = commands.add_parser("migrate", help=text, description=text, allow_abbrev=False)
    command.add_argument("--json", action="store_true", help="print one JSON document")
    command.add_argument("--to", type=file_path, default=None, metavar="REPO", help="write here; else only say what")
    command.add_argument("--from", dest="kind", choices=SOURCES, default="", help="what SOURCE is (found by its files)")
    command.add_argument("source", type=file_path, help="a file, a directory or a .mar archive")


def words(root: argparse.ArgumentParser) -> dict[str, dict[str, list[str]]]:
    """For shell completion: command to action to flags; the action of a command without any is ""."""

    def flags(command: argparse.ArgumentParser) -> list[str]:
        return [word for action in command._actions for word in action.option_strings if word.startswith("--")]

    found: dict[str, dict[str, list[str]]] = {}
    for name, command in _children(root).items():
        actions = _children(command)
        found[name] = {action: flags(child) for action, child in actions.items()} or {"": flags(command)}
    return found


def _children(command: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}
