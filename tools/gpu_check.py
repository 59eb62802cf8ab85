"""Checks Charonia on a machine with an NVIDIA GPU: nine checks, one line each, in less than ten minutes.

    python tools/gpu_check.py [--json FILE] [--only NAME ...] [--list]

Each check runs in a process of its own, which is ended with all its children at its time limit. Exit code 0: no check
failed, 1: some did, 2: wrong usage, 3: no GPU. With `--device cpu` the checks run on the processor with small models:
that tests the checks, so figures of speed are shown and not judged.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from gpu_checks.outcome import FAILED, NOT_RUN, Outcome  # noqa: E402
from gpu_checks.table import CHECKS, Check  # noqa: E402

from charonia.cuda.cuda_library import CudaError, CudaLibrary  # noqa: E402

NO_GPU = 3
_WIDTHS = (22, 72, 44)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks and return the exit code."""
    parser = argparse.ArgumentParser(prog="gpu_check", description="Checks Charonia on a machine with an NVIDIA GPU.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, figures and verdicts into this file")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=sorted(CHECKS), help="run these checks alone")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: test the checks themselves")
    parser.add_argument("--limit-s", type=float, default=0.0, help="time limit of each check, in place of its own")
    parser.add_argument("--list", action="store_true", help="name the checks, their goals and their time limits")
    parser.add_argument("--run", choices=sorted(CHECKS), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    said = parser.parse_args(arguments)
    if said.list:
        for check in CHECKS.values():
            print(f"{check.name:<{_WIDTHS[0]}}{check.limit_s:>4} s  {check.goal}")
        return 0
    if said.run:
        return _run_here(CHECKS[said.run], said.device, said.out)
    machine = _machine()
    if said.device == "cuda" and not machine["gpus"]:
        print("no GPU")
        if said.json:
            _write(said.json, {**machine, "checks": []})
        return NO_GPU
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(_line("check", "figure", "goal", "verdict"))
    outcomes = []
    for check in CHECKS.values():
        if said.only and check.name not in said.only:
            continue
        outcome = run_apart(check, said.device, said.limit_s or check.limit_s)
        print(_line(check.name, outcome.figure, check.goal, outcome.verdict), flush=True)
        if outcome.reason:
            print(f"  {outcome.reason}", flush=True)
        outcomes.append({"name": check.name, "goal": check.goal, **asdict(outcome)})
    if said.json:
        _write(said.json, {**machine, "device": said.device, "checks": outcomes})
    return 1 if any(one["verdict"] == FAILED for one in outcomes) else 0


def run_apart(check: Check, device: str, limit_s: float) -> Outcome:
    """Run a check in a process of its own; at its limit that process and its children are ended."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
        out, log = Path(folder) / "outcome.json", Path(folder) / "log"
        command = [sys.executable, str(Path(__file__).resolve()), "--run", check.name, "--out", str(out)]
        with log.open("wb") as written:
            process = subprocess.Popen(
                [*command, "--device", device],
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=ROOT,
                env={**os.environ, "TMPDIR": folder},
            )
            try:
                process.wait(limit_s)
                late = False
            except subprocess.TimeoutExpired:
                late = True
            finally:  # also when this program is interrupted
                _end_session(process)
        last = " / ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
        if late:
            outcome = Outcome(FAILED, reason=f"not done within {limit_s:g} s: {last}")
        elif out.exists():
            outcome = Outcome(**json.loads(out.read_text()))
        else:
            outcome = Outcome(FAILED, reason=f"its process ended with {process.returncode}: {last}")
    outcome.took_s = round(time.monotonic() - began, 1)
    return outcome


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the check's processes: those of its session; parts of a server end with that."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _run_here(check: Check, device: str, out: Path) -> int:
    try:
        outcome = check.load()(device)
    except ModuleNotFoundError as error:
        outcome = Outcome(NOT_RUN, reason=f"the module {error.name} is not installed")
    except Exception as error:  # whatever a check meets is its outcome
        import traceback

        traceback.print_exc()
        outcome = Outcome(FAILED, reason=f"{type(error).__name__}: {error}")
    partial = out.with_suffix(".part")
    partial.write_text(json.dumps(asdict(outcome)))
    partial.rename(out)
    return 0


def _machine() -> dict[str, object]:
    try:
        gpus = CudaLibrary({}).devices
    except CudaError:
        gpus = 0
    names: list[str] = []
    if gpus:
        asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        try:
            answer = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True)
            names = answer.stdout.strip().splitlines()
        except (OSError, subprocess.SubprocessError):
            names = []
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "gpus": gpus, "cards": names}


def _line(*words: str) -> str:
    cells = [word.ljust(width) for word, width in zip(words[:-1], _WIDTHS, strict=True)]
    return "  ".join([*cells, words[-1]])


def _write(path: Path, document: dict[str, object]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
