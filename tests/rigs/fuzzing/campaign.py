"""Feeds a target for a while, guided by coverage where atheris is installed; makes a finding small and keeps it.

A campaign under atheris runs in a process of its own, which libFuzzer ends at the first finding. The other kind goes
on through `mutation` in this process; it serves where there is no atheris, and in the short form that is a test.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import mutation
from .targets import Check, Overdue, checked

ROOT = Path(__file__).resolve().parents[3]
CORPUS = ROOT / "tests" / "fuzz" / "corpus"
WORDS = ROOT / "tests" / "fuzz" / "words"

_MOST_MINIMISING_S = 20.0
_MEMORY_MB = 4096
_STATISTICS = re.compile(rb"stat::(\w+): +(\d+)")
_COVERAGE = re.compile(rb"cov: (\d+)")


@dataclass(slots=True)
class Outcome:
    """What a campaign came to. `kept` are the findings' files, `coverage` libFuzzer's count of edges, 0 without it."""

    target: str
    engine: str
    seed: int
    seconds: float
    inputs: int
    coverage: int
    corpus: int
    added: int
    kept: list[str]

    def json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Finding:
    """An input that breaks a promise, and how."""

    data: bytes
    kind: str
    report: str


def corpus_of(target: str) -> list[bytes]:
    """The kept inputs of a target, findings included, in the order of their names."""
    return [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]


def words_of(target: str) -> list[bytes]:
    """Words worth trying: lines of libFuzzer's form of a dictionary."""
    lines = (WORDS / f"{target}.dict").read_text().splitlines()
    return [ast.literal_eval("b" + line) for line in lines if line.startswith('"')]


def finding_in(check: Check, data: bytes) -> Finding | None:
    """What is wrong with this input."""
    try:
        check(data)
    except (Exception, Overdue) as error:
        *_, place = traceback.extract_tb(error.__traceback__)
        return Finding(data, f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}", _report(error))
    return None


def _report(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-4000:]


def minimised(check: Check, finding: Finding) -> Finding:
    """The smallest input found within a while that fails at the same place."""
    until = time.monotonic() + _MOST_MINIMISING_S
    size = max(1, len(finding.data) // 2)
    while size:
        at, smaller = 0, False
        while at < len(finding.data) and time.monotonic() < until:
            data = finding.data[:at] + finding.data[at + size :]
            again = finding_in(check, data)
            if again is not None and again.kind == finding.kind:
                finding, smaller = again, True
            else:
                at += size
        if not smaller or size > 1:
            size //= 2
    return finding


def keep(target: str, data: bytes, prefix: str = "") -> Path:
    """Write an input into the corpus, under the digest of its bytes."""
    path = CORPUS / target / (prefix + hashlib.sha1(data, usedforsecurity=False).hexdigest()[:16])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def replay(target: str, inputs: Iterable[bytes]) -> Finding | None:
    """The first finding among these inputs."""
    check = checked(target)
    return next((found for data in inputs if (found := finding_in(check, data)) is not None), None)


def mutate(target: str, seed: int, seconds: float, say: Callable[[str], None]) -> tuple[int, Finding | None]:
    """Feed mutations of the corpus for so long; how many, and the first finding."""
    check, count, said = checked(target), 0, time.monotonic()
    until = said + seconds
    for count, data in enumerate(mutation.mutations(corpus_of(target), words_of(target), seed), 1):
        found = finding_in(check, data)
        now = time.monotonic()
        if found is not None or now >= until:
            return count, found
        if now - said >= 10:
            said = now
            say(f"{target}: {count} inputs")
    raise AssertionError("mutations do not end")


def can_guide() -> bool:
    """Whether atheris is there."""
    return importlib.util.find_spec("atheris") is not None


def guide(
    target: str, seed: int, seconds: float, say: Callable[[str], None], grown: Path
) -> tuple[int, int, tuple[bytes, str] | None]:
    """Run atheris for so long, what it adds goes to `grown`; inputs, coverage, what ended it and its words."""
    with tempfile.TemporaryDirectory() as directory:
        command = [
            *(sys.executable, "-m", "fuzzing", "--worker", target, str(grown), str(CORPUS / target)),
            *(f"-max_total_time={max(1, round(seconds))}", f"-seed={seed}", f"-max_len={mutation.MAX_BYTES}"),
            *(f"-dict={WORDS / target}.dict", f"-artifact_prefix={directory}/", f"-rss_limit_mb={_MEMORY_MB}"),
            *("-timeout=60", "-print_final_stats=1", "-len_control=20"),
            "-report_slow_units=100000",  # by the wall's clock; `checked` judges time on a processor
        ]
        # PYTHONPATH: -m finds this package as the caller did
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)
        assert worker.stdout is not None
        inputs = coverage = 0
        last: list[str] = []
        said = time.monotonic()
        try:
            for line in worker.stdout:
                last = [*last[-30:], line.decode(errors="replace")]
                if (found := _STATISTICS.search(line)) and found[1] == b"number_of_executed_units":
                    inputs = int(found[2])
                if found := _COVERAGE.search(line):
                    coverage = int(found[1])
                    if time.monotonic() - said >= 10:
                        said = time.monotonic()
                        say(f"{target}: {line.decode(errors='replace').strip()}")
            worker.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                worker.kill()
        artifacts = sorted(Path(directory).iterdir())
        if not artifacts and worker.returncode:
            raise RuntimeError(f"atheris ended with {worker.returncode}:\n{''.join(last)}")
        return inputs, coverage, (artifacts[0].read_bytes(), "".join(last)) if artifacts else None


def run(
    target: str, *, seed: int, seconds: float, engine: str, keeps_more: int, say: Callable[[str], None]
) -> tuple[Outcome, Finding | None]:
    """A campaign. A finding is made small and kept; of new inputs that reach more, up to `keeps_more` small ones."""
    began, corpus = time.monotonic(), corpus_of(target)
    added, coverage = 0, 0
    found = replay(target, corpus)
    inputs = len(corpus)
    if found is None and engine == "atheris":
        with tempfile.TemporaryDirectory() as grown:
            inputs, coverage, ended = guide(target, seed, seconds, say, Path(grown))
            if ended is not None:
                data, report = ended
                found = finding_in(checked(target), data) or Finding(data, "only under atheris", report)
            fresh = sorted((path.read_bytes() for path in Path(grown).iterdir()), key=len)
            for one in _spread(fresh, keeps_more):
                keep(target, one)
                added += 1
    elif found is None:
        inputs, found = mutate(target, seed, seconds, say)
    kept = []
    if found is not None:
        found = minimised(checked(target), found)
        kept.append(str(keep(target, found.data, "found-").relative_to(ROOT)))
    seconds = round(time.monotonic() - began, 1)
    return Outcome(target, engine, seed, seconds, inputs, coverage, len(corpus), added, kept), found


def _spread(inputs: list[bytes], count: int) -> list[bytes]:
    """So many of them, of all sizes up to 1 KiB."""
    small = [data for data in inputs if 0 < len(data) <= 1024]
    return small[:: max(1, -(-len(small) // count))] if count else []
