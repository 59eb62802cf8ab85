"""Copies the tests of a suite, runs them in a process of pytest against `charonia serve`, and reads what came of each.

A test that fails and stands in `exceptions.toml` is "excepted", with the reason written there; one that stands there
and passes is "failed", so that the list stays true, unless its reason begins with "at times". Where a failure is
written there, a test that fails otherwise is "failed" too.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

from executors.backends.llm.conversion import converted, default_directory
from loadtest.bench.servers import Charonia
from loadtest.clients.genai import MODEL, weights_of
from loadtest.clients.outcome import Outcome, environment, run
from loadtest.model import LoadTestError

from . import minilm

ROOT = Path(__file__).parents[3]
EXCEPTIONS = Path(__file__).parent / "exceptions.toml"
WITHIN_S = 3600.0
AT_TIMES = "at times: "
"""The reasons of tests that fail in some runs begin so: by what the model says, or by how fast it says it."""
SHOWN = 300
"""Characters of a failure's message."""
ADAPTERS = ("zephyr-lora", "qwen3-lora")
"""Names that vLLM's tests ask for; each is an adapter with random weights."""
VLLM_FILES = (
    "openai/completion/test_completion.py",
    *("openai/chat_completion/test_chat.py", "openai/chat_completion/test_chat_completion.py"),
    *("openai/chat_completion/test_chat_echo.py", "openai/chat_completion/test_chat_logit_bias_validation.py"),
    *("openai/chat_completion/test_logprob_token_ids.py", "openai/test_return_token_ids.py"),
    *("openai/test_return_tokens_as_ids.py", "openai/models/test_models.py", "serve/tokenize/test_tokenization.py"),
)
"""Those of vLLM's tests of entrypoints that need a server with one model that writes text, and no reasoning."""
_LEFT_OUT = ("--tokenizer", "--backend", "--tool-call-parser")
"""Options of the frontend for what stands in a model's own files here; each has a value."""
_GROUPS = {"model-repository": "model-repository,metadata", "metrics": "statistics"}
"""The frontend's groups of restricted endpoints that have other names here: lists of models are `metadata`."""
SHORT_CONTEXT = 'parameters { key: "charonia.context" value { string_value: "1024" } }\n'
"""In tokens. The frontend writes 16 tokens unless a chat asks for more, and we as many as the context has room for."""
_OPTIONS = (
    *("-q", "--no-header", "-p", "no:schemathesis", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"),
    *("-o", "asyncio_mode=strict", "-o", "asyncio_default_fixture_loop_scope=function"),
)
_LOOP_OF_CLASS = ("-o", "asyncio_default_test_loop_scope=class")
"""The tests of a class share a client, whose connections belong to an event loop."""


def vllm(source: Path, repository: Path, serve: Sequence[str] = (), only: str = "") -> Iterator[Outcome]:
    """Runs vLLM's tests of a source distribution, unpacked at `source`. `repository` is that of `make serve-llm`.

    In the copies of the tests the names of their models are ours. Raises LoadTestError for a folder that has no such
    tests, or a repository without the model.
    """
    tests = source / "tests" / "entrypoints"
    files = [tests / name for name in VLLM_FILES]
    if not all(file.is_file() for file in files):
        raise LoadTestError(f"there are no tests of vLLM's entrypoints in {tests}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="charonia-suite-")))
        models = write_models(folder / "models", repository, adapters=ADAPTERS)
        for file, name in zip(files, VLLM_FILES, strict=True):
            target = folder / "tests" / "entrypoints" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(renamed(file.read_text()))
        shutil.copy(tests / "conftest.py", folder / "tests" / "entrypoints")
        for inner in (folder / "tests").rglob("*/"):
            (inner / "__init__.py").touch()
        (folder / "tests" / "__init__.py").touch()
        tokenizer = converted(models / MODEL / "1" / "model.gguf", default_directory())  # once, maybe for minutes
        server = stack.enter_context(Charonia(models, ["--openai-on-http-port=true", *serve])).endpoints
        own = {"SUITE_URL": f"http://{server.http}", "SUITE_TOKENIZER": str(tokenizer)}
        yield from judged("vllm", tested(folder, "vllm_tests", list(VLLM_FILES), own, only, "tests/entrypoints", ()))


def triton(source: Path, repository: Path, serve: Sequence[str] = (), only: str = "") -> Iterator[Outcome]:
    """Runs the tests of Triton's OpenAI frontend; `source` is the folder `python/openai` of its server. As `vllm`."""
    if not (source / "tests" / "conftest.py").is_file():
        raise LoadTestError(f"there are no tests of Triton's OpenAI frontend in {source / 'tests'}")
    with tempfile.TemporaryDirectory(prefix="charonia-suite-") as place:
        folder = Path(place)
        models = write_models(folder / "repository", repository, SHORT_CONTEXT)  # the tests remove `models`
        shutil.copytree(source / "tests", folder / "tests")
        minilm.write_model(folder / "tests" / "vllm_embedding_models")
        files = sorted(file.name for file in (folder / "tests").glob("test_*.py"))
        converted(models / MODEL / "1" / "model.gguf", default_directory())
        own = {
            "TEST_MODEL": MODEL,
            "TEST_BACKEND": "vllm",
            "TEST_TOKENIZER": "none",
            "TEST_MODEL_REPOSITORY": str(models),
            "SUITE_FRONTEND": str(source.resolve() / "openai_frontend"),
            "SUITE_SERVE": shlex.join(serve),
        }
        yield from judged("triton", tested(folder, "triton_tests", files, own, only, "tests", _LOOP_OF_CLASS))


def renamed(text: str) -> str:
    """A file of tests with our model's name in the place of its own."""
    for name in re.findall(r'^MODEL_NAME = "([^"]+)"', text, re.MULTILINE):
        text = text.replace(f'"{name}"', f'"{MODEL}"')
    return text


def write_models(folder: Path, repository: Path, parameters: str = "", adapters: Sequence[str] = ()) -> Path:
    """A repository with the example's model; as `write_model`. Raises LoadTestError where the example is not there."""
    write_model(folder / MODEL, weights_of(repository), parameters, adapters)
    return folder


def write_model(directory: Path, weights: Path, parameters: str = "", adapters: Sequence[str] = ()) -> None:
    """A model with these weights, and adapters of random weights. Needs `tests/rigs` on the path.

    `parameters` are lines of the model's configuration, `adapters` names.
    """
    from lora_files import write_adapter

    version = directory / "1"
    version.mkdir(parents=True, exist_ok=True)
    (directory / "config.pbtxt").write_text(f'name: "{directory.name}"\nbackend: "llm"\n{parameters}')
    (version / "model.gguf").symlink_to(weights.resolve())
    for seed, name in enumerate(adapters):
        write_adapter(version / "adapters" / name, seed, modules=("self_attn.q_proj", "self_attn.v_proj"))


def tested(
    folder: Path,
    plugin: str,
    files: Sequence[str],
    own: Mapping[str, str],
    only: str,
    below: str,
    options: Sequence[str],
) -> list[Outcome]:
    """Runs files of tests in a process of their own; the outcome of each test. Raises LoadTestError without any.

    `options` are further ones of pytest.
    """
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-p", f"loadtest.clients.suites.{plugin}", *_OPTIONS, *options]
    command += [f"--rootdir={folder}", f"--junitxml={report}", "-o", "junit_family=xunit1", "-c", "/dev/null"]
    command += [*(("-k", only) if only else ()), *(f"{below}/{name}" for name in files)]
    given = {
        **own,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "rigs"))),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    _, said = run("pytest", command, WITHIN_S, env=environment(given), cwd=folder)
    if not report.exists():
        raise LoadTestError(f"pytest wrote no report: {said[-2000:]}")
    return read_report(report)


def read_report(report: Path) -> list[Outcome]:
    """The outcome of each test in a report in JUnit's form."""
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{Path(case.get('file') or case.get('classname', '')).name}::{case.get('name')}"
        outcome = Outcome(name, "ok", float(case.get("time") or 0))
        for tag, state in (("skipped", "not run"), ("failure", "failed"), ("error", "failed")):
            if (inner := case.find(tag)) is not None:
                outcome = replace(outcome, state=state, reason=" ".join((inner.get("message") or "").split()))
        found.append(outcome)
    return found


@dataclass(frozen=True)
class Exempt:
    """An exception: patterns of tests' names, why they need not pass, and the pattern of their failure ("": any)."""

    tests: Sequence[str]
    reason: str
    failure: str = ""

    def covers(self, outcome: Outcome) -> bool:
        """Whether the outcome is of such a test and, where it failed, has such a failure."""
        return any(_is_like(outcome.name, pattern) for pattern in self.tests) and (
            outcome.state != "failed" or _is_like(outcome.reason, f"*{self.failure}*")
        )


def _is_like(text: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(text, pattern.replace("[", "[[]"))


def exceptions(suite: str) -> list[Exempt]:
    """The exceptions of a suite."""
    return [Exempt(**written) for written in tomllib.loads(EXCEPTIONS.read_text())[suite]]


def judged(suite: str, outcomes: Sequence[Outcome]) -> Iterator[Outcome]:
    """The outcomes with the exceptions of a suite. Of other failures the first words are shown."""
    known = exceptions(suite)
    for one in outcomes:
        reasons = [exempt.reason for exempt in known if exempt.covers(one)]
        if one.state == "failed" and reasons:
            yield replace(one, state="excepted", reason=reasons[0])
        elif one.state == "ok" and reasons and not reasons[0].startswith(AT_TIMES):
            yield replace(one, state="failed", reason=f"passes, but is an exception: {reasons[0]}")
        else:
            yield replace(one, reason=one.reason[:SHOWN])


def options_of(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The model repository in the arguments of the frontend, and our options for the others."""
    left = list(arguments)
    repository, options = "", []
    while left:
        word = left.pop(0)
        if word == "--model-repository":
            repository = left.pop(0)
        elif word in _LEFT_OUT:
            left.pop(0)
        elif word == "--openai-restricted-api":
            groups, header, value = (left.pop(0) for _ in range(3))
            ours = ",".join(_GROUPS.get(group, group) for group in groups.split(","))
            options.append(f"--http-restricted-api={ours}:{header}={value}")
        elif word != "--enable-kserve-frontends":
            options.append(f"{word}={left.pop(0)}")
    return repository, options
