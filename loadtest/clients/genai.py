"""Runs genai-perf against a language model, over the OpenAI API and Triton's, and checks that it measured requests.

genai-perf starts perf_analyzer and counts tokens by the model's own tokenizer, which is written for it from the file of
the model (`make serve-llm` makes that): nothing is downloaded.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from executors.backends.llm.gguf_metadata import read_metadata
from executors.backends.llm.gguf_tokenizer import hugging_face_files
from loadtest.bench.servers import Charonia, Endpoints
from loadtest.model import LoadTestError

from .outcome import Outcome, environment, run

WITHIN_S = 600.0
MODEL = "smollm2"
REQUESTS = 6


@dataclass(frozen=True)
class Way:
    """One run: its name, the protocol it asks by, and its arguments."""

    name: str
    protocol: str
    arguments: tuple[str, ...]


WAYS = (
    Way("OpenAI chat, streamed", "http", ("--endpoint-type", "chat", "--streaming")),
    Way("OpenAI chat", "http", ("--endpoint-type", "chat")),
    Way("OpenAI completions, streamed", "http", ("--endpoint-type", "completions", "--streaming")),
    Way("generate", "http", ("--endpoint-type", "generate")),
    Way("gRPC stream", "grpc", ("--endpoint-type", "kserve", "--backend", "vllm", "--streaming")),
)
_LOAD = (
    *("--synthetic-input-tokens-mean", "30", "--synthetic-input-tokens-stddev", "0", "--output-tokens-mean", "16"),
    *("--concurrency", "2", "--request-count", str(REQUESTS), "--num-dataset-entries", "4"),
)


def play(
    program: Path, perf: Path, libraries: Sequence[Path], repository: Path, serve: Sequence[str] = (), only: str = ""
) -> Iterator[Outcome]:
    """Runs the program each way; `perf` is perf_analyzer, `libraries` have the shared libraries that it needs.

    Raises LoadTestError where `repository` has no model of `make serve-llm`.
    """
    weights = weights_of(repository)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="charonia-genai-")))
        write_tokenizer(weights, folder / "tokenizer")
        server = stack.enter_context(Charonia(repository, ["--openai-on-http-port=true", *serve])).endpoints
        for way in WAYS:
            if only in way.name:
                yield _run(way, program, perf, libraries, folder, server)


def weights_of(repository: Path) -> Path:
    """The model of `make serve-llm` in its repository. Raises LoadTestError where it is not there."""
    weights = repository / MODEL / "1" / "model.gguf"
    if not weights.is_file():
        raise LoadTestError(f"there is no {weights}: make serve-llm downloads it")
    return weights


def write_tokenizer(weights: Path, folder: Path) -> None:
    """Write the tokenizer of a GGUF file as the files that Hugging Face's library reads."""
    folder.mkdir()
    for name, content in hugging_face_files(read_metadata(weights)).items():
        (folder / name).write_bytes(content)
    settings = folder / "tokenizer_config.json"
    found = json.loads(settings.read_text()) if settings.exists() else {}
    settings.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **found}))


def _run(way: Way, program: Path, perf: Path, libraries: Sequence[Path], folder: Path, server: Endpoints) -> Outcome:
    results = folder / way.name.replace(" ", "-").replace(",", "")
    command = [
        *(str(program), "profile", "-m", MODEL, "-u", str(getattr(server, way.protocol))),
        *("--tokenizer", str(folder / "tokenizer"), "--artifact-dir", str(results), *_LOAD, *way.arguments),
    ]
    own = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PATH": f"{perf.parent}:/usr/bin:/bin"}
    outcome, _ = run(way.name, command, WITHIN_S, env=environment(own, libraries), cwd=folder)
    if outcome.state != "ok":
        return outcome
    try:
        return replace(outcome, figures=measured(results))
    except (OSError, KeyError, ValueError) as error:
        return replace(outcome, state="failed", reason=f"no measurement: {error!r}")


def measured(results: Path) -> str:
    """The rates of a report. Raises ValueError where it has fewer requests than were asked for, or no tokens."""
    (report,) = results.rglob("profile_export_genai_perf.json")
    found = json.loads(report.read_text())
    count, tokens = found["request_count"]["avg"], found["output_token_throughput"]["avg"]
    if count < REQUESTS or tokens <= 0:
        raise ValueError(f"{count} requests, {tokens} tokens a second")
    return f"{count:.0f} requests, {tokens:.1f} tokens/s"
