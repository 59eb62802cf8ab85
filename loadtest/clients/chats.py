"""Runs guidellm or aiperf: streamed chats with a language model over the OpenAI API, at a low load, and their figures.

Both count tokens by the model's own tokenizer, which `genai` writes for them: nothing is downloaded.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loadtest.bench.servers import Charonia

from .genai import MODEL, weights_of, write_tokenizer
from .outcome import Outcome, environment, run

WITHIN_S = 600.0
REQUESTS, IN_FLIGHT, PROMPT_TOKENS, TOKENS = 30, 2, 30, 32


@dataclass(frozen=True)
class Figures:
    """What a report says: requests that succeeded, tokens a second, and medians in milliseconds."""

    requests: float
    tokens_s: float
    first_token_ms: float
    between_tokens_ms: float


def guidellm(program: Path, url: str, tokenizer: Path, results: Path) -> list[str]:
    """The command of guidellm 0.8."""
    return [
        *(str(program), "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={url},model={MODEL},request_format=/v1/chat/completions"),
        *("--profile", f"kind=concurrent,streams={IN_FLIGHT}", "--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={TOKENS}"),
        *("--output", f"kind=json,path={results / 'report.json'}"),
    ]


def guidellm_figures(results: Path) -> Figures:
    """Of the report that `guidellm` asks for."""
    (benchmark,) = json.loads((results / "report.json").read_bytes())["benchmarks"]
    found: dict[str, Any] = benchmark["metrics"]
    tokens_s = found["output_token_count"]["successful"]["total_sum"] / benchmark["duration"]
    first, between = (
        found[name]["successful"]["median"] for name in ("time_to_first_token_ms", "inter_token_latency_ms")
    )
    return Figures(found["request_totals"]["successful"], tokens_s, first, between)


def aiperf(program: Path, url: str, tokenizer: Path, results: Path) -> list[str]:
    """The command of aiperf 0.13."""
    return [
        *(str(program), "profile", "--model", MODEL, "--url", url, "--endpoint-type", "chat", "--streaming"),
        *("--tokenizer", str(tokenizer), "--concurrency", str(IN_FLIGHT), "--request-count", str(REQUESTS)),
        *("--prompt-input-tokens-mean", str(PROMPT_TOKENS), "--prompt-output-tokens-mean", str(TOKENS)),
        *("--artifact-dir", str(results), "--ui-type", "none"),
    ]


def aiperf_figures(results: Path) -> Figures:
    """Of the report that `aiperf` writes."""
    (report,) = results.rglob("profile_export_aiperf.json")
    found: dict[str, Any] = json.loads(report.read_bytes())
    first, between = (found[name]["p50"] for name in ("time_to_first_token", "inter_token_latency"))
    return Figures(found["request_count"]["avg"], found["output_token_throughput"]["avg"], first, between)


PROGRAMS: dict[str, tuple[Callable[[Path, str, Path, Path], list[str]], Callable[[Path], Figures]]] = {
    "guidellm": (guidellm, guidellm_figures),
    "aiperf": (aiperf, aiperf_figures),
}


def play(name: str, program: Path, repository: Path, serve: Sequence[str] = ()) -> Iterator[Outcome]:
    """Runs the program of this name. Raises LoadTestError where `repository` has no model of `make serve-llm`."""
    weights = weights_of(repository)
    command, figures = PROGRAMS[name]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="charonia-chats-")))
        write_tokenizer(weights, folder / "tokenizer")
        server = stack.enter_context(Charonia(repository, ["--openai-on-http-port=true", *serve])).endpoints
        (results := folder / "results").mkdir()
        words = command(program, f"http://{server.http}", folder / "tokenizer", results)
        # aiperf takes no path for a tokenizer where HF_HUB_OFFLINE is set
        own = {} if name == "aiperf" else {"HF_HUB_OFFLINE": "1"}
        outcome, _ = run(name, words, WITHIN_S, env=environment(own), cwd=folder)
        yield measured(outcome, figures, results) if outcome.state == "ok" else outcome


def measured(outcome: Outcome, figures: Callable[[Path], Figures], results: Path) -> Outcome:
    """The outcome with its figures; failed where there are none, or a request failed."""
    try:
        found = figures(results)
    except (OSError, KeyError, ValueError, TypeError) as error:
        return replace(outcome, state="failed", reason=f"no measurement: {error!r}")
    text = (
        f"{found.requests:.0f} requests, {found.tokens_s:.1f} tokens/s, first token {found.first_token_ms:.0f} ms, "
        f"between tokens {found.between_tokens_ms:.1f} ms (medians)"
    )
    if found.requests < REQUESTS:
        return replace(outcome, state="failed", reason=f"of {REQUESTS} requests some failed: {text}")
    return replace(outcome, figures=text)
