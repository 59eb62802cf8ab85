"""The command: `examples CHECKOUT`, `perf PROGRAM`, `analyzer PROGRAM`, `genai PROGRAM`, `guidellm PROGRAM`, `aiperf
PROGRAM` or `suite NAME SOURCE`.

It prints a table, or JSON. Exit 1 when a run failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from loadtest.model import LoadTestError

from . import analyzer, chats, examples, genai, perf
from .outcome import Outcome, document, table
from .suites import running


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.clients", description=__doc__.split(";")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    stock = verbs.add_parser("examples", help="the Python examples of Triton's client repository")
    stock.add_argument("checkout", type=Path, help="a checkout of triton-inference-server/client")
    stock.add_argument("--python", default=sys.executable, help="interpreter with tritonclient (default: this one)")
    asking = verbs.add_parser("perf", help="perf_analyzer in each of its ways")
    asking.add_argument("program", type=Path, help="perf_analyzer, of the wheel tritonclient 2.50.0")
    tuning = verbs.add_parser("analyzer", help="model_analyzer against a server that is there")
    tuning.add_argument("program", type=Path, help="model-analyzer, of the distribution triton-model-analyzer")
    texts = verbs.add_parser("genai", help="genai-perf against the language model of `make serve-llm`")
    texts.add_argument("program", type=Path, help="genai-perf, of the distribution of this name")
    chats_of = [
        verbs.add_parser(name, help=f"{name}: streamed chats with the language model of `make serve-llm`")
        for name in chats.PROGRAMS
    ]
    for verb, name in zip(chats_of, chats.PROGRAMS, strict=True):
        verb.add_argument("program", type=Path, help=f"{name}, of the distribution of this name")
    suite = verbs.add_parser("suite", help="tests of others' OpenAI APIs")
    suite.add_argument("name", choices=("vllm", "triton"))
    suite.add_argument(
        "source", type=Path, help="vLLM's source distribution, or `python/openai` of Triton's server, unpacked"
    )
    for verb in (texts, *chats_of, suite):
        verb.add_argument(
            "--repository", type=Path, default=Path("examples/models_llm"), help="default examples/models_llm"
        )
    for verb in (tuning, texts):
        verb.add_argument("--perf", type=Path, required=True, help="perf_analyzer, of the wheel tritonclient 2.50.0")
    for verb in (asking, tuning, texts):
        verb.add_argument(
            "--library", type=Path, action="append", default=[], metavar="DIRECTORY", help="with libb64 or libcudart"
        )
    for verb in (stock, asking, tuning, texts, suite):
        verb.add_argument("--only", default="", metavar="TEXT", help="runs whose name has this text in it")
    for verb in (stock, asking, tuning, texts, *chats_of, suite):
        verb.add_argument(
            "--serve", action="append", default=[], metavar="OPTION", help="one more option of the servers; repeatable"
        )
        verb.add_argument("--json", action="store_true", help="one JSON document in place of the table")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; the exit code."""
    options = parser().parse_args(arguments)
    try:
        if options.verb == "examples":
            against = f"triton-inference-server/client, {examples.version(options.checkout)}"
            outcomes = _shown(examples.play(options.checkout, options.python, options.serve, options.only))
        elif options.verb == "analyzer":
            against, program, asking = str(options.program), options.program.absolute(), options.perf.absolute()
            outcomes = _shown(analyzer.play(program, asking, options.library, options.serve, options.only))
        elif options.verb == "genai":
            against, program, asking = str(options.program), options.program.absolute(), options.perf.absolute()
            repository = options.repository.absolute()
            outcomes = _shown(genai.play(program, asking, options.library, repository, options.serve, options.only))
        elif options.verb in chats.PROGRAMS:
            against, program, repository = (
                str(options.program),
                options.program.absolute(),
                options.repository.absolute(),
            )
            outcomes = _shown(chats.play(options.verb, program, repository, options.serve))
        elif options.verb == "suite":
            against, play = f"{options.name}, {options.source}", {"vllm": running.vllm, "triton": running.triton}
            repository = options.repository.absolute()
            outcomes = _shown(play[options.name](options.source, repository, options.serve, options.only))
        else:
            against = str(options.program)
            outcomes = _shown(perf.play(options.program.absolute(), options.library, options.serve, options.only))
    except LoadTestError as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({"program": against, "runs": document(outcomes)}))
    else:
        print(f"{against}\n\n{table(outcomes)}")
    return int(not outcomes or any(one.state == "failed" for one in outcomes))


def _shown(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """All of them; each is on standard error as soon as it is known."""
    seen = []
    for one in outcomes:
        print(f"{one.state:8}{one.name}  {one.reason}", file=sys.stderr)
        seen.append(one)
    return seen


if __name__ == "__main__":
    sys.exit(main())
