"""Has a process read a model's file, and returns what it found. See `reader_process`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from charonia.errors import InternalError, InvalidArgument, Unsupported

_LIMIT_S = 900.0
"""Of the wall clock; the process itself is limited to a time of CPU."""
_SHOWN = 300
"""Characters of treelite's message that are shown."""


@dataclass(frozen=True, slots=True)
class ForestSummary:
    """What a model's file says besides its trees."""

    trees: int
    features: int
    classes: int
    task: str
    """binary, regression, multiclass, ranking or isolation."""
    postprocessor: str
    sigmoid_alpha: float
    ratio_c: float
    base_scores: tuple[float, ...]
    divisor: float
    """What sums of leaves are divided by."""
    double: bool
    """Whether the trees have 64 bits."""
    content: str
    """What the bytes beside it are: `onnx`, a graph of one node that sums the leaves, or a treelite `checkpoint`."""


def read_model(
    name: str, path: Path, file_format: str, *, allow_unknown: bool, as_checkpoint: bool
) -> tuple[ForestSummary, bytes]:
    """Return the model of a file, checked. Blocks for about a second.

    Raises `Unsupported` where no process may be started, `InvalidArgument` for a file that is broken or not supported.
    """
    words = [str(os.getpid()), file_format, str(int(allow_unknown)), str(int(as_checkpoint)), os.fspath(path)]
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "executors.backends.fil.reader_process", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=_environment(os.environ),
            timeout=_LIMIT_S,
            check=False,
        )
    except OSError as error:
        raise Unsupported(
            f"model '{name}': the process that reads '{path.name}' cannot be started ({error}); isolation 'sandbox' "
            "allows none: use 'process'"
        ) from None
    except subprocess.TimeoutExpired:
        raise _broken(name, path, f"reading it took longer than {_LIMIT_S:.0f} s") from None
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise _broken(name, path, "reading it took too long or too much memory")
    if done.returncode < 0:
        raise _broken(name, path, f"treelite crashed while it read it ({signal.Signals(-done.returncode).name})")
    line, _, content = done.stdout.partition(b"\n")
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    if done.returncode and _NO_MEMORY in done.stderr:
        raise _broken(name, path, "reading it took too much memory")
    if done.returncode or not line:
        raise InternalError(f"model '{name}': the process that reads '{path.name}' failed: {' '.join(lines[-1:])}")
    said = json.loads(line)
    if "fault" in said:
        details = [text for text in lines if _PREFIX.match(text)]
        raise _broken(name, path, _PREFIX.sub("", (details[-1:] or said["fault"].splitlines())[0])[:_SHOWN])
    return ForestSummary(**{**said, "base_scores": tuple(said["base_scores"])}), content


_PREFIX = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: (Error: )?")
"""Of treelite's messages; it prints what is wrong with a field, and raises a text without it."""


_NO_MEMORY = b"cannot allocate memory"
"""Of the C library, which ends the process."""


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    """One thread: libraries begin threads by the number of cores, whose stacks count as memory."""
    return {**ours, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _broken(name: str, path: Path, why: str) -> InvalidArgument:
    return InvalidArgument(f"model '{name}': '{path.name}' cannot be loaded: {why}")
