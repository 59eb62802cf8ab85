"""What one run of a program came to: done, failed with a reason, or not run with one; and the table of many."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LAST_LINES = 4


@dataclass(frozen=True)
class Outcome:
    """`state` is "ok", "failed", "not run", or "excepted" for what need not be ok; `reason` is empty for what is ok."""

    name: str
    state: str
    seconds: float = 0.0
    reason: str = ""
    figures: str = ""


def run(name: str, command: Sequence[str], within_s: float, **options: Any) -> tuple[Outcome, str]:
    """Runs a program to its end; ok when it exits with 0. Its output comes along."""
    started = time.monotonic()
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=within_s,
            text=True,
            errors="replace",
            **options,
        )
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"").decode(errors="replace") if isinstance(late.stdout, bytes) else str(late.stdout)
        return Outcome(name, "failed", within_s, f"not over after {within_s:.0f} s; {_end(said)}"), said
    except OSError as error:
        return Outcome(name, "failed", 0.0, str(error)), ""
    seconds = time.monotonic() - started
    if done.returncode:
        return Outcome(name, "failed", seconds, f"exit {done.returncode}: {_end(done.stdout)}"), done.stdout
    return Outcome(name, "ok", seconds), done.stdout


def environment(added: Mapping[str, str], libraries: Sequence[Path] = ()) -> dict[str, str]:
    """This process's environment without its PYTHONPATH, so that a program imports its own packages."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if libraries:
        own["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, libraries))
    return {**own, **added}


def _end(said: str) -> str:
    return " / ".join(line.strip() for line in said.strip().splitlines()[-LAST_LINES:])


def table(outcomes: Sequence[Outcome]) -> str:
    """A Markdown table, and a line with the counts below it."""
    rows = ["| run | result | s | figures or reason |", "|---|---|---|---|"]
    for one in outcomes:
        note = (one.figures or one.reason).replace("|", "/")
        rows.append(f"| `{one.name}` | {one.state} | {one.seconds:.1f} | {note} |")
    counts = {state: sum(one.state == state for one in outcomes) for state in ("ok", "failed", "not run", "excepted")}
    rows += ["", ", ".join(f"{count} {state}" for state, count in counts.items() if count or state != "excepted")]
    return "\n".join(rows)


def document(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    return [asdict(one) for one in outcomes]
