"""Has a process read a model's file, or reads it in a sandbox, and returns what it found. See `reader_process`."""

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
from typing import Any

from charonia.errors import InternalError, InvalidArgument, Unsupported

from . import reader_process

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
    name: str, path: Path, file_format: str, *, allow_unknown: bool, as_checkpoint: bool, here: bool = False
) -> tuple[ForestSummary, bytes]:
    """Return the model of a file, checked. Blocks for about a second.

    `here`: this process, which is the model's own, reads it itself; some broken files end it. Raises `Unsupported`
    where no process may be started, `InvalidArgument` for a file that is broken or not supported.
    """
    if here:
        return _read_here(name, path, file_format, allow_unknown=allow_unknown, as_checkpoint=as_checkpoint)
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
        raise Unsupported(f"model '{name}': the process that reads '{path.name}' cannot be started ({error})") from None
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
    return _summary(said), content


def _read_here(
    name: str, path: Path, file_format: str, *, allow_unknown: bool, as_checkpoint: bool
) -> tuple[ForestSummary, bytes]:
    try:
        with reader_process.limited(str(path)):
            said, content = reader_process.read(
                str(path), file_format, allow_unknown=allow_unknown, as_checkpoint=as_checkpoint
            )
    except MemoryError:
        raise _broken(name, path, "it needs more memory than a file of its size may") from None
    except Exception as error:
        text = str(error).strip() or type(error).__name__
        raise _broken(name, path, _PREFIX.sub("", text.splitlines()[0])[:_SHOWN]) from None
    return _summary(said), content


def _summary(said: Mapping[str, Any]) -> ForestSummary:
    return ForestSummary(**{**said, "base_scores": tuple(said["base_scores"])})


_PREFIX = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: (Error: )?")
"""Of treelite's messages; it prints what is wrong with a field, and raises a text without it."""


_NO_MEMORY = b"cannot allocate memory"
"""Of the C library, which ends the process."""


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    """One thread: libraries begin threads by the number of cores, whose stacks count as memory."""
    return {**ours, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _broken(name: str, path: Path, why: str) -> InvalidArgument:
    return InvalidArgument(f"model '{name}': '{path.name}' cannot be loaded: {why}")
