"""The `charonia` command: parses, then hands over to the composition of one role or of all (`charonia.composition`).

Operators' commands against a running log are `charonia.operations`', those that ask a server
`charonia.client_commands`', the one that measures a server is `charonia.analyzer`'s, the one that answers what-if
questions `charonia.simulation`'s, the one that compares a candidate's answers `charonia.replay`'s.

Exit codes: 0 done, 1 could not start or did not end cleanly, 2 wrong usage; `replay` has its own. A failure to start
is one sentence on stderr. Only this module, `charonia.composition` and `charonia.inprocess` import services, and
`charonia.simulation` the batcher's scheduler.
"""

from __future__ import annotations

import gc
import io
import json
import logging
import os
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .errors import CharoniaError, StartupError
from .options import values as options

_ROLES = (options.SERVE, options.GATEWAY, options.BATCHER, options.EXECUTOR, options.WEBHOOKS, options.CONSOLE)
_OPERATIONS = ("audit", "usage", "queue", "jobs", "dlq", "executors", "route", "state", "trace", "check", "migrate")

_QUESTIONS = ("infer", "submit", "result", "tail", "models", "stats", "health")
_BENCH, _SIMULATE, _TUNE, _REPLAY = "bench", "simulate", "tune", "replay"

_USAGE = """usage: charonia COMMAND [--option=value ...]

commands
  serve       run everything on this machine: private log, gateway, batcher, executors
  gateway     run one gateway against --log-url
  batcher     run one batcher against --log-url
  executor    run one executor against --log-url
  webhooks    run one sender of webhooks against --log-url
  console     pages that show what a server does, and why a request was slow, for a browser
  audit       check the journal: one end for each request, nothing run after it; prove it unchanged; export it
  usage       what tenants have used of models: instance time, queue time, bytes, tokens
  queue       ls, inspect, pause, resume, cancel, move: what waits for a model
  jobs        ls, show, timeline, result, cancel, wait
  dlq         ls, show, replay, drop: dead letters
  executors   ls: who executes, with what, and how much of it is in use
  route       which version gets the requests that name none: canaries, matches, shadows; shows or changes the rule
  state       show, export, import: what a log holds, as a file for another server program or machine
  trace       summary: where the time of traced requests went, from trace files
  check       REPOSITORY: find every fault of its models without a server, and mend what is safe to mend (--fix)
  migrate     SOURCE: make a repository of what another server's users have (MLServer, BentoML, TorchServe, KServe)
  infer       ask a model of a running server, ours or another, and print its answer
  submit      make an inference a job
  result      JOB: wait for the answer of a job
  tail        JOB: follow what happens to a job
  models      the models of a server
  stats       [MODEL]: the statistics of a server's models
  health      whether a server is ready
  bench       measure how fast a model of a server is, with perf_analyzer's options and figures
  simulate    answer what-if questions from recorded requests with the real scheduler
  tune        MODEL...: find the configuration that serves most within limits of latency and memory
  replay      ask a candidate version recorded requests again and compare its answers: a release gate by its exit code
  completion  print a shell completion script (bash)

'charonia COMMAND --help' lists a command's options. Option values come from the flag, else CHARONIA_<OPTION> in the
environment, else the TOML file of --config, else the default.
"""

_COMPLETION = """_charonia() {
    local word=${COMP_WORDS[COMP_CWORD]}
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "%s" -- "$word"))
    else
        case ${COMP_WORDS[1]} in
%s
        esac
    fi
}
complete -o default -F _charonia charonia
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Returns the exit code."""
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):  # names of files may be any bytes
            sys.stdout.reconfigure(errors="backslashreplace")
        code = _main(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output closed it: it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


def _main(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_USAGE, end="")
        return 0 if words else 2
    command, *rest = words
    if command == "--version":
        from importlib.metadata import version

        print(f"charonia {version('charonia')}")
        return 0
    if command == "completion":
        print(_completion(), end="")
        return 0
    if command not in (*_ROLES, *_OPERATIONS, *_QUESTIONS, _BENCH, _SIMULATE, _TUNE, _REPLAY):
        print(f"charonia: unknown command '{command}'\n\n{_USAGE}", end="", file=sys.stderr)
        return 2
    if command in _ROLES and ("--help" in rest or "-h" in rest):
        print(f"usage: charonia {command} [--option=value ...]\n\noptions\n{options.usage(command)}")
        return 0
    try:
        if command in _QUESTIONS:
            return _ask(words)
        if command == _BENCH:
            return _bench(words)
        if command == _SIMULATE:
            return _simulate(words)
        if command == _TUNE:
            return _tune(words)
        if command == _REPLAY:
            return _replay(words)
        return _run(command, rest) if command in _ROLES else _operate(words)
    except (StartupError, CharoniaError) as error:
        print(f"charonia: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        raise
    except Exception as error:
        logging.getLogger(__name__).debug("charonia %s failed", command, exc_info=True)
        sentence = f"internal error, {type(error).__name__}: {error}; --log-verbose=1 shows where"
        print(f"charonia: {sentence}", file=sys.stderr)
        return 2 if command == _REPLAY else 1  # there 1 says that answers differ


def _operate(words: list[str]) -> int:
    from .operations.command_line import run

    def default_state_dir() -> str:
        from .composition.state_directory import default_state_dir

        return default_state_dir()

    def check(
        repository: Path, gpus: int | None, fix: bool, on_progress: Callable[[int, int], None], backend_directory: str
    ) -> dict[str, Any]:
        from .composition.repository_tools import check

        return check(repository, gpus, fix, on_progress, backend_directory)

    try:
        return run(words, os.environ, default_state_dir, check)
    except SystemExit as end:  # argparse has said what is wrong, or printed its help
        return end.code if isinstance(end.code, int) else 2


def _ask(words: list[str]) -> int:
    from .client_commands import run

    try:
        return run(words, os.environ)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 2


def _bench(words: list[str]) -> int:
    from .analyzer.benching import run

    try:
        return run(words, os.environ)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 2


def _simulate(words: list[str]) -> int:
    from .composition.state_directory import default_state_dir
    from .simulation.simulate_command import run

    try:
        return run(words, os.environ, default_state_dir)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 2


def _tune(words: list[str]) -> int:
    from .tuner.tuning import run

    try:
        return run(words, os.environ)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 2


def _replay(words: list[str]) -> int:
    from .composition.state_directory import default_state_dir
    from .replay.replay_command import run

    try:
        return run(words, os.environ, default_state_dir)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 2


def _run(command: str, argv: list[str]) -> int:
    values = options.parse(command, argv, os.environ, {})
    if values["config"]:
        values = options.parse(command, argv, os.environ, _file(values["config"]))
    if command == options.SERVE:
        from .composition.logs import configure_logging
        from .composition.supervisor import serve

        configure_logging(values)
        return serve(values)
    if "CHARONIA_PARENT_PID" in os.environ and values["report_fd"] >= 0:
        from .composition.children import die_with_parent

        die_with_parent(int(os.environ["CHARONIA_PARENT_PID"]))
    gc.set_threshold(20_000, 20, 50)  # what is made while a part starts stays: not worth looking at again and again
    try:
        if command == options.CONSOLE:
            from .composition.console.console_role import run_console

            return run_console(values)
        from .composition.roles import run_role

        return run_role(command, values)
    except (StartupError, CharoniaError) as error:
        if values["report_fd"] < 0:
            raise
        os.write(values["report_fd"], json.dumps({"failed": str(error)}).encode() + b"\n")
        return 1


def _file(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise StartupError(f"configuration file '{path}' cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise StartupError(f"configuration file '{path}' is not TOML: {error}") from None


def command_flags() -> dict[str, dict[str, list[str]]]:
    """The options of each command, as `--name`, by its actions; the action of a command without any is ""."""
    from . import client_commands
    from .analyzer import bench_options
    from .operations import arguments
    from .replay import replay_options
    from .simulation import simulate_options
    from .tuner import tune_options

    flags = {role: {"": [f"--{option.name}" for option in options.options_of(role)]} for role in _ROLES}
    flags |= arguments.words(arguments.parser()) | arguments.words(client_commands.parser())
    flags |= arguments.words(bench_options.parser()) | arguments.words(simulate_options.parser())
    return flags | arguments.words(tune_options.parser()) | arguments.words(replay_options.parser())


def _completion() -> str:
    def offer(choices: Sequence[str]) -> str:
        return f'COMPREPLY=($(compgen -W "{" ".join(choices)}" -- "$word"))'

    cases = []
    for command, actions in command_flags().items():
        if "" in actions:
            cases.append(f"        {command}) {offer(actions[''])} ;;")
            continue
        cases.append(f'        {command}) if [ "$COMP_CWORD" -eq 2 ]; then {offer(list(actions))}; else')
        cases.append("            case ${COMP_WORDS[2]} in")
        cases += [f"            {action}) {offer(flags)} ;;" for action, flags in actions.items()]
        cases.append("            esac; fi ;;")
    return _COMPLETION % (
        " ".join([*_ROLES, *_OPERATIONS, *_QUESTIONS, _BENCH, _SIMULATE, _TUNE, _REPLAY, "completion"]),
        "\n".join(cases),
    )


if __name__ == "__main__":
    sys.exit(main())
