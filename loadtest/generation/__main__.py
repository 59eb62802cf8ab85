"""`python -m loadtest.generation`: tokens a second of our engine, of OpenVINO GenAI's loop, and through the server.

    python -m loadtest.generation --repository examples/models_llm --streams 1,16,32 --rounds 5

Each round asks all of them one after the other with the same prompts; ratios are of one round, and their medians are
printed. Needs `charonia[llm,llm-gguf]`. `--no-serve` leaves the server out.
"""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from executors.backends.llm.conversion import converted, default_directory
from loadtest.bench.servers import Charonia
from loadtest.measurement import median

from . import served
from .loops import Library, Ours, Run, random_prompts

ROOT = Path(__file__).resolve().parents[2]
PROMPT_TOKENS = 24
MIX_REQUESTS, MIX_SLOTS = 32, 8


def main() -> int:
    arguments = parser().parse_args()
    gguf = arguments.repository / "smollm2" / "1" / "model.gguf"
    directory = converted(gguf, default_directory())
    ours, library = Ours(directory, arguments.threads), Library(directory, arguments.threads)
    print(f"load {_load()}; {arguments.tokens} tokens for each of the streams, medians of {arguments.rounds} rounds")
    with ExitStack() as stack:
        server = None
        if arguments.serve:
            server = stack.enter_context(Charonia(arguments.repository, checkout=ROOT))
        for streams in arguments.streams:
            rows: dict[str, list[Run]] = {}
            for number in range(arguments.rounds + 1):
                prompts = random_prompts(streams, PROMPT_TOKENS, number)
                tokens = [arguments.tokens] * streams
                found = {"library": library.run(prompts, tokens), "ours": ours.run(prompts, tokens)}
                if server is not None:
                    texts = [ours.tokenizer.decode(prompt).decode(errors="replace") for prompt in prompts]
                    found["served"] = served.run(str(server.endpoints.http), "smollm2", texts, arguments.tokens)
                for name, run in found.items() if number else ():  # the first round warms up
                    rows.setdefault(name, []).append(run)
            _print(streams, rows)
    _mix(directory, arguments.threads, arguments.rounds)
    print(f"load {_load()}")
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
    parser.add_argument("--serve", action=argparse.BooleanOptionalAction, default=True, help="ask a server as well")
    return parser


def _print(streams: int, rows: dict[str, list[Run]]) -> None:
    for name, runs in rows.items():
        first = median(median(run.first_s) for run in runs) * 1e3
        gap = median(median(run.gaps_s) for run in runs) * 1e3
        against = {"ours": "library", "served": "ours"}.get(name)
        ratio = ""
        if against is not None:
            ratios = [run.rate / other.rate for run, other in zip(runs, rows[against], strict=True)]
            ratio = f", {median(ratios):.2f} of {against} ({min(ratios):.2f} to {max(ratios):.2f})"
        rate = median(run.rate for run in runs)
        print(f"{streams:3} {name:8} {rate:7.1f} tokens/s, first {first:6.1f} ms, between {gap:6.1f} ms{ratio}")


def _mix(directory: Path, threads: int, rounds: int) -> None:
    """Requests of 8 to 160 tokens: continuous batching beside batches that wait for their longest."""
    ours = Ours(directory, threads, slots=MIX_SLOTS)
    ratios = []
    for number in range(max(1, rounds // 2)):
        prompts = random_prompts(MIX_REQUESTS, PROMPT_TOKENS, 100 + number)
        drawn = np.random.default_rng(number).integers(8, 161, MIX_REQUESTS)
        tokens = [int(count) for count in drawn]
        continuous = ours.run(prompts, tokens).rate
        static = ours.run_statically(prompts, tokens, MIX_SLOTS).rate
        ratios.append(continuous / static)
        print(f"mix: continuous {continuous:.1f}, static {static:.1f} tokens/s")
    print(f"mix: continuous is {median(ratios):.2f} of static")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _load() -> str:
    return "/".join(f"{one:.1f}" for one in os.getloadavg())


if __name__ == "__main__":
    raise SystemExit(main())
