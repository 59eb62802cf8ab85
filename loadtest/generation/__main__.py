"""`python -m loadtest.generation`: tokens a second of our engine, of OpenVINO GenAI's loop, and through the server.

    python -m loadtest.generation --repository examples/models_llm --streams 1,16,32 --rounds 5 \\
        --json figures.json --chart times.svg

Each round asks all of them one after the other with the same prompts, in another order each time; ratios are of one
round, and their medians are printed with the least and the most. Needs `charonia[llm,llm-gguf]`.

    library    OpenVINO GenAI's own continuous batching, in this process
    engine     our engine, in this process, without a server
    generate   `POST /v2/models/smollm2/generate_stream` of `charonia serve`
    openai     `POST /v1/completions` there
    grpc       `ModelStreamInfer` there

After that: prompts with a shared beginning, cold and warm; and requests of 8 to 160 tokens in continuous and in static
batches.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from executors.backends.llm.conversion import converted, default_directory
from loadtest.bench.servers import Charonia
from loadtest.measurement import median

from . import served
from .chart import svg
from .figures import Row, document, rows_of, table
from .loops import Library, Ours, Prompts, Run, random_prompts

ROOT = Path(__file__).resolve().parents[2]
MODEL = "smollm2"
PROMPT_TOKENS = 24
PREFIX_TOKENS, TAIL_TOKENS, PREFIX_ANSWER = 352, 8, 4
MIX_REQUESTS, MIX_SLOTS = 32, 8

Way = Callable[[Prompts, int], Run]
"""Has all prompts continued by so many tokens each."""


def main() -> int:
    arguments = parser().parse_args()
    directory = converted(arguments.repository / MODEL / "1" / "model.gguf", default_directory())
    ours = Ours(directory, arguments.threads)
    loads = [_load()]
    print(f"load {loads[0]}; {arguments.tokens} tokens for each of the streams, medians of {arguments.rounds} rounds")
    rows: list[Row] = []
    with ExitStack() as stack:
        ways = _ways(arguments, stack, directory, ours)
        for streams in arguments.streams:
            found = rows_of(streams, _rounds(ways, streams, arguments.tokens, arguments.rounds))
            print(table(found), flush=True)
            rows += found
            loads.append(_load())
        prefixes = _prefixes(ways, directory, arguments.threads, arguments.rounds) if arguments.prefixes else {}
        batching = _mix(ours, max(1, arguments.rounds // 2)) if arguments.mix else {}
    loads.append(_load())
    print(f"load {', '.join(loads)}")
    said = f"load {loads[0]} to {loads[-1]}; {os.cpu_count()} cores, {arguments.tokens} tokens a stream"
    if arguments.chart:
        arguments.chart.write_text(svg(rows, said))
    if arguments.json:
        made = document(
            rows, load=loads, cores=os.cpu_count(), tokens=arguments.tokens, prefix=prefixes, batching=batching
        )
        arguments.json.write_text(json.dumps(made, indent=1) + "\n")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.generation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repository", type=Path, default=ROOT / "examples" / "models_llm", metavar="DIR")
    parser.add_argument("--streams", type=_numbers, default=[1, 16, 32], metavar="N,N,…")
    parser.add_argument("--tokens", type=int, default=48, metavar="N", help="for each stream (default 48)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    for name, what in (
        ("serve", "ask a server as well"),
        ("library", "run OpenVINO GenAI's loop as well"),
        ("prefixes", "measure shared beginnings"),
        ("mix", "compare continuous with static batches"),
    ):
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=True, help=what)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw times against load there, as SVG")
    return parser


def _ways(arguments: argparse.Namespace, stack: ExitStack, directory: Path, ours: Ours) -> dict[str, Way]:
    ways: dict[str, Way] = {}
    if arguments.library:
        library = Library(directory, arguments.threads)
        ways["library"] = lambda prompts, tokens: library.run(prompts, [tokens] * len(prompts))
    ways["engine"] = lambda prompts, tokens: ours.run(prompts, [tokens] * len(prompts))
    if arguments.serve:
        server = Charonia(arguments.repository, ["--openai-on-http-port=true"], checkout=ROOT)
        endpoints = stack.enter_context(server).endpoints
        ways["generate"] = _served(served.generate(str(endpoints.http), MODEL))
        ways["openai"] = _served(served.openai(str(endpoints.http), MODEL))
        ways["grpc"] = _served(served.grpc(str(endpoints.grpc), MODEL))
    return ways


def _served(stream: served.Stream) -> Way:
    return lambda prompts, tokens: served.run(stream, prompts, tokens)


def _rounds(ways: dict[str, Way], streams: int, tokens: int, rounds: int) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(rounds + 1):
        for at in range(len(names)):
            name = names[(at + number) % len(names)]
            # prompts of its own: a server keeps what they begin with
            run = ways[name](random_prompts(streams, PROMPT_TOKENS, 1000 * number + at), tokens)
            if number:  # the first round warms up
                found[name].append(run)
    return found


def _prefixes(ways: dict[str, Way], directory: Path, threads: int, rounds: int) -> dict[str, dict[str, float]]:
    """Times to the first token of a prompt whose beginning is new, and of another one with the same beginning."""
    keeping = Ours(directory, threads, prefixes=True)
    asked: dict[str, Way] = {"engine": lambda prompts, tokens: keeping.run(prompts, [tokens] * len(prompts))}
    asked |= {name: way for name, way in ways.items() if name not in ("library", "engine")}
    found: dict[str, dict[str, float]] = {}
    for at, (name, way) in enumerate(asked.items()):
        cold: list[float] = []
        warm: list[float] = []
        for number in range(rounds):
            (prefix,) = random_prompts(1, PREFIX_TOKENS, 5_000_000 + 1000 * number + at)
            tails = random_prompts(2, TAIL_TOKENS, 6_000_000 + 1000 * number + at)
            for tail, times in zip(tails, (cold, warm), strict=True):
                times.append(way([prefix + tail], PREFIX_ANSWER).first_ms)
        ratio = median(one / other for one, other in zip(warm, cold, strict=True))
        found[name] = {"cold_ms": median(cold), "warm_ms": median(warm), "ratio": ratio}
        print(
            f"prefix of {PREFIX_TOKENS} tokens, {name}: cold {median(cold):.1f} ms, warm {median(warm):.1f} ms, "
            f"ratio {ratio:.2f}"
        )
    return found


def _mix(ours: Ours, rounds: int) -> dict[str, object]:
    """Requests of 8 to 160 tokens: continuous batching beside batches that are padded to their longest."""
    ratios = []
    for number in range(rounds):
        prompts = random_prompts(MIX_REQUESTS, PROMPT_TOKENS, 100 + number)
        tokens = [int(count) for count in np.random.default_rng(number).integers(8, 161, MIX_REQUESTS)]
        rates = {}
        for kind in ("continuous", "static") if number % 2 else ("static", "continuous"):
            run = ours.run_in_slots if kind == "continuous" else ours.run_statically
            rates[kind] = run(prompts, tokens, MIX_SLOTS).rate
        ratios.append(rates["continuous"] / rates["static"])
        print(f"mix: continuous {rates['continuous']:.1f}, static {rates['static']:.1f} tokens/s")
    print(f"mix: continuous is {median(ratios):.2f} of static")
    return {"continuous_of_static": median(ratios), "rounds": rounds}


def _numbers(text: str) -> Sequence[int]:
    return [int(part) for part in text.split(",")]


def _load() -> str:
    return "/".join(f"{one:.1f}" for one in os.getloadavg())


if __name__ == "__main__":
    raise SystemExit(main())
