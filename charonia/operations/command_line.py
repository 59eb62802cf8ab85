"""Runs the operators' commands: finds the log, runs the command, prints text or JSON.

Exit codes: 0 done (audit: clean or intact; wait: succeeded), 1 a problem was found or something failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from charonia.clock import wall_ns
from charonia.errors import CharoniaError, InvalidArgument, InvalidRecord, StartupError
from charonia.eventlog.port import EventLog
from charonia.facts.jobs import JobState

from . import arguments, dead_letters, executors, moving, queues
from . import job_commands as jobs
from . import route_commands as routes
from . import state_commands as states
from . import trace_files as traces
from .audit.model_audit import Scope, audit_models
from .history.history_commands import Span, export_journals, verify_journals
from .repositories import Check, cannot_check, check, migrated
from .text import command_reports as reports
from .usage_reports import Question, usage

Answer = tuple[dict[str, Any], bool]
"""The document to print, and whether it reports no problem."""


def run(
    words: Sequence[str],
    environment: Mapping[str, str],
    default_state_dir: Callable[[], str],
    check_repository: Check = cannot_check,
) -> int:
    """Run the command line `words` (the command first); returns the exit code. Raises `SystemExit` for usage and help.

    `check_repository` is the executors' check, which this package may not import.
    """
    options = arguments.parser().parse_args(list(words))
    try:
        _check(options)
        if options.command == "trace":
            document, well = traces.summarise(options.file, options.model), True
        elif options.command == "check":
            document, well = check(options, check_repository)
        elif options.command == "migrate":
            document, well = migrated(options, check_repository)
        elif options.command == "state":
            document, well = asyncio.run(_state(options, environment, default_state_dir)), True
        else:
            document, well = asyncio.run(_with_log(options, *log_place(options, environment, default_state_dir)))
    except (StartupError, CharoniaError, InvalidRecord) as error:
        sys.stderr.write(f"charonia: {error}\n")
        return 1
    try:
        sys.stdout.write(json.dumps(document) + "\n" if options.json else reports.text(options, document))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if well else 1


async def _state(
    options: argparse.Namespace, environment: Mapping[str, str], default_state_dir: Callable[[], str]
) -> dict[str, Any]:
    directory = ""
    url = options.log_url or ("" if options.state_dir else environment.get("CHARONIA_LOG_URL", ""))
    if not url:
        directory = options.state_dir or environment.get("CHARONIA_STATE_DIR") or default_state_dir()
    password_file = options.log_password_file or environment.get("CHARONIA_LOG_PASSWORD_FILE", "")
    place = states.Place(url, password_file if url else "", directory, getattr(options, "log_server", ""))
    if options.action == "show":
        return await states.show(place)
    if options.action == "export":
        return await states.export_state(place, options.file, overwrite=options.overwrite)
    return await states.import_state(place, options.file, replace=options.replace)


def _log_url(options: argparse.Namespace, environment: Mapping[str, str], default_state_dir: Callable[[], str]) -> str:
    """Flags override environment variables; among each, the URL overrides the state directory."""
    if options.log_url or (not options.state_dir and environment.get("CHARONIA_LOG_URL")):
        return str(options.log_url or environment["CHARONIA_LOG_URL"])
    directory = options.state_dir or environment.get("CHARONIA_STATE_DIR") or default_state_dir()
    path = Path(directory).expanduser() / "endpoints.json"
    try:
        return str(json.loads(path.read_text())["log"])
    except OSError:
        raise StartupError(
            f"no running 'charonia serve' has the state directory '{directory}': name its own with --state-dir, or "
            "the log with --log-url"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise StartupError(f"'{path}' does not say where the log is") from None


def log_place(
    options: argparse.Namespace, environment: Mapping[str, str], default_state_dir: Callable[[], str]
) -> tuple[str, str]:
    """The log's URL and the file of its password, "" for none, by the options. Raises `StartupError`."""
    file = options.log_password_file or environment.get("CHARONIA_LOG_PASSWORD_FILE", "")
    return _log_url(options, environment, default_state_dir), file


async def _with_log(options: argparse.Namespace, url: str, password_file: str) -> Answer:
    from charonia.eventlog.redis import open_log
    from charonia.eventlog.redis.server.address import with_password

    log = open_log(with_password(url, password_file))
    await log.open()
    try:
        return await perform(log, options)
    finally:
        await log.close()


async def perform(log: EventLog, options: argparse.Namespace) -> Answer:
    """Run the command against this log."""
    handler = _HANDLERS[(options.command, getattr(options, "action", ""))]
    return await handler(log, options)


# -- audit and queue ---------------------------------------------------------------------------------------------------


async def _audit(log: EventLog, options: argparse.Namespace) -> Answer:
    since_ms = int(_when_s(options.since) * 1000) if options.since is not None else 0
    if options.verify:
        oldest_ms = int(wall_ns() / 1e6 - options.max_unsealed * 1000) if options.max_unsealed is not None else 0
        document = await verify_journals(log, options.model, options.heads, oldest_ms)
        return document, document["intact"]
    if options.export is not None:
        until_ms = int(_when_s(options.until) * 1000) if options.until is not None else 0
        span = Span(max(0, since_ms), until_ms)
        document = await export_journals(log, options.model, span, options.export, overwrite=options.overwrite)
        return document, document["whole"]
    findings: list[dict[str, str]] = []

    def on_finding(finding: Any) -> None:
        if len(findings) < options.max_findings:
            findings.append(reports.finding_json(finding))

    scope = Scope(max(0, since_ms), options.exact, not options.journal_only)
    document = await audit_models(log, options.model, scope, on_finding, options.max_unfinished)
    return {**document, "findings": findings}, document["clean"]


def _when_s(when: tuple[str, float]) -> float:
    """Unix time of what `arguments.since` has read."""
    kind, seconds = when
    return wall_ns() / 1e9 - seconds if kind == "ago" else seconds


async def _usage(log: EventLog, options: argparse.Namespace) -> Answer:
    question = Question(_when_s(options.since), _when_s(options.until), options.model, options.tenant, options.by)
    return await usage(log, question, wall_ns()), True


async def _queue_ls(log: EventLog, options: argparse.Namespace) -> Answer:
    return await queues.list_queues(log, options.model, wall_ns()), True


async def _queue_inspect(log: EventLog, options: argparse.Namespace) -> Answer:
    return await queues.inspect_queue(log, options.model, wall_ns(), options.limit), True


async def _queue_pause(log: EventLog, options: argparse.Namespace) -> Answer:
    return await queues.pause(log, options.model, options.action == "pause"), True


async def _queue_cancel(log: EventLog, options: argparse.Namespace) -> Answer:
    selection = queues.Selection(frozenset(options.id), options.older_than, options.level)
    document = await queues.cancel_queued(log, options.model, selection, wall_ns())
    return document, not document["missing"]


async def _queue_move(log: EventLog, options: argparse.Namespace) -> Answer:
    document = await moving.move(log, options.model, options.id, options.level)
    return document, not document["left"]


# -- jobs --------------------------------------------------------------------------------------------------------------


def _filter(options: argparse.Namespace, after: str = "") -> jobs.Filter:
    states = frozenset(JobState(state) for state in options.state)
    return jobs.Filter(tuple(options.model), states, options.tenant, options.older_than, after)


async def _jobs_ls(log: EventLog, options: argparse.Namespace) -> Answer:
    return await jobs.list_jobs(log, _filter(options, options.after), _now_us(), options.limit), True


async def _jobs_show(log: EventLog, options: argparse.Namespace) -> Answer:
    return await jobs.show_job(log, options.id, _now_us()), True


async def _jobs_timeline(log: EventLog, options: argparse.Namespace) -> Answer:
    return await jobs.timeline(log, options.id, _now_us()), True


async def _jobs_result(log: EventLog, options: argparse.Namespace) -> Answer:
    document = await jobs.result(log, options.id, Path(options.out) if options.out else None)
    return document, document["error"] is None


async def _jobs_cancel(log: EventLog, options: argparse.Namespace) -> Answer:
    document = await jobs.cancel_jobs(log, options.id, _filter(options) if options.all else None, _now_us())
    return document, not document["missing"]


async def _jobs_wait(log: EventLog, options: argparse.Namespace) -> Answer:
    document = await jobs.wait_for_job(log, options.id, _now_us(), options.timeout)
    return document, document["state"] == JobState.SUCCEEDED.value


# -- dead letters ------------------------------------------------------------------------------------------------------


async def _chosen(log: EventLog, options: argparse.Namespace, *, every: bool) -> list[dead_letters.DeadLetter]:
    """`MODEL ID...`, or job ids, which contain their model; with `every` all of MODEL."""
    words = list(options.what)
    named = bool(words) and (every or len(words) > 1) and "." not in words[0][32:33]
    model = words.pop(0) if named else ""
    return await dead_letters.choose(log, model, words, every=every)


async def _dlq_ls(log: EventLog, options: argparse.Namespace) -> Answer:
    return await dead_letters.list_letters(log, options.model, _now_us(), options.limit), True


async def _dlq_show(log: EventLog, options: argparse.Namespace) -> Answer:
    (letter, *_) = await _chosen(log, options, every=False)
    directory = Path(options.out) if options.out else None
    return await dead_letters.show_letter(log, letter, _now_us(), directory), True


async def _dlq_replay(log: EventLog, options: argparse.Namespace) -> Answer:
    chosen = await _chosen(log, options, every=options.all)
    replayed = [await dead_letters.replay(log, letter, _now_us(), int(options.retention)) for letter in chosen]
    return {"replayed": replayed}, True


async def _dlq_drop(log: EventLog, options: argparse.Namespace) -> Answer:
    return {"dropped": await dead_letters.drop(log, await _chosen(log, options, every=options.all))}, True


# -- executors ---------------------------------------------------------------------------------------------------------


async def _executors_ls(log: EventLog, _options: argparse.Namespace) -> Answer:
    return await executors.list_executors(log), True


# -- releases ----------------------------------------------------------------------------------------------------------


async def _route(log: EventLog, options: argparse.Namespace) -> Answer:
    wanted = None if options.clear else routes.wanted_of(options)
    if options.clear or wanted:
        return await routes.change_route(log, options.model, wanted), True
    return await routes.show_routes(log, options.model), True


_HANDLERS = {
    ("audit", ""): _audit,
    ("usage", ""): _usage,
    ("queue", "ls"): _queue_ls,
    ("queue", "inspect"): _queue_inspect,
    ("queue", "pause"): _queue_pause,
    ("queue", "resume"): _queue_pause,
    ("queue", "cancel"): _queue_cancel,
    ("queue", "move"): _queue_move,
    ("jobs", "ls"): _jobs_ls,
    ("jobs", "show"): _jobs_show,
    ("jobs", "timeline"): _jobs_timeline,
    ("jobs", "result"): _jobs_result,
    ("jobs", "cancel"): _jobs_cancel,
    ("jobs", "wait"): _jobs_wait,
    ("dlq", "ls"): _dlq_ls,
    ("dlq", "show"): _dlq_show,
    ("dlq", "replay"): _dlq_replay,
    ("dlq", "drop"): _dlq_drop,
    ("executors", "ls"): _executors_ls,
    ("route", ""): _route,
}


def _wrong_audit(options: argparse.Namespace) -> str:
    """What does not go together, "" if all does."""
    if options.verify and options.export is not None:
        return "--verify or --export, not both"
    if options.verify and options.since is not None:
        return "--verify proves all that is kept: it goes with no --since"
    if not options.verify and (options.heads is not None or options.max_unsealed is not None):
        return "--heads and --max-unsealed go with --verify"
    if options.export is None and (options.until is not None or options.overwrite):
        return "--until and --overwrite go with --export"
    return ""


def _now_us() -> int:
    return wall_ns() // 1000


def _check(options: argparse.Namespace) -> None:
    """Dependencies between options. Exits with 2."""
    action = (options.command, getattr(options, "action", ""))
    problem = ""
    if options.command == "audit":
        problem = _wrong_audit(options)
    elif action == ("usage", "") and options.csv and options.json:
        problem = "--csv or --json, not both"
    elif action == ("queue", "cancel") and bool(options.id) == options.all:
        problem = "name requests with --id, or cancel with --all what the other options let through"
    elif action == ("jobs", "cancel") and bool(options.id) == options.all:
        problem = "name jobs, or cancel with --all what the other options let through"
    elif action in (("dlq", "replay"), ("dlq", "drop")):
        if options.all and len(options.what) > 1:
            problem = "--all takes no ids, only a model"
        elif not options.all and not options.what:
            problem = "name dead letters, or take all with --all"
    elif options.command == "route":
        wanted: Mapping[str, Any] = {}
        try:
            wanted = routes.wanted_of(options)
        except InvalidArgument as error:
            problem = error.message
        if options.clear and wanted:
            problem = "--clear takes the rule away and goes with no other option"
        elif options.show and (options.clear or wanted):
            problem = "show goes with no option that changes the rule"
        elif not options.model and (options.clear or wanted):
            problem = "name the model whose rule is to change"
    if problem:
        sys.stderr.write(f"charonia {' '.join(filter(None, action))}: {problem}\n")
        raise SystemExit(2)
