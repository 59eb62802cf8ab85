"""The process that reads a model's file with treelite, checks it and answers with what runs it.

Started as `python -m executors.backends.fil.reader_process PARENT FORMAT UNKNOWN CHECKPOINT PATH` by `model_reader`.
Treelite crashes or never ends on some broken files of every format. The answer on stdout is a line of JSON (a
`ForestSummary`, or `{"fault": text}`), then the bytes it is about. A sandboxed model's own process reads the file
itself, with `limited` and `read`: it may start none, and is the only one that a broken file can end.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from executors.host.parent_death import die_with

if TYPE_CHECKING:
    from .forest import Forest

_CPU_LIMIT_S = 10
_CPU_S_PER_MB = 2
"""Measured: 1 s for the libraries, 0.1 s for each MB."""
_MEMORY_LIMIT_BYTES = 2 << 30
_MISSING, _ZERO_IS_MISSING = 0b1100, 0b0100
"""In LightGBM's decision types: what counts as a missing value."""
_MEMORY_PER_BYTE = 64
"""How much larger than its file a model may become, beyond the limit above: text becomes arrays in several forms."""


def main() -> None:
    _, parent, file_format, unknown, checkpoint, path = sys.argv
    die_with(int(parent))
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # treelite writes to stdout
    memory, cpu_s = _limits(path)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        summary, content = read(path, file_format, allow_unknown=unknown == "1", as_checkpoint=checkpoint == "1")
    except MemoryError:
        summary, content = {"fault": "it needs more memory than a file of its size may"}, b""
    except Exception as error:
        summary, content = {"fault": str(error).strip() or type(error).__name__}, b""
    answer.write(json.dumps(summary).encode() + b"\n" + content)
    answer.close()
    sys.stdout.flush()  # it prints by Python's means, too
    os._exit(0)  # nothing of a broken model is taken down


def _limits(path: str) -> tuple[int, int]:
    """Bytes of memory, and seconds of the processor."""
    size = os.path.getsize(path)
    return _MEMORY_LIMIT_BYTES + _MEMORY_PER_BYTE * size, _CPU_LIMIT_S + _CPU_S_PER_MB * (size >> 20)


@contextlib.contextmanager
def limited(path: str) -> Iterator[None]:
    """Let this process take so much more memory and time than it has, for the length of a block: more ends it."""
    memory, cpu_s = _limits(path)
    with open("/proc/self/statm") as sizes:
        mapped = int(sizes.read().split()[0]) * resource.getpagesize()
    wanted = {resource.RLIMIT_AS: mapped + memory, resource.RLIMIT_CPU: math.ceil(time.process_time()) + cpu_s}
    before = {kind: resource.getrlimit(kind) for kind in wanted}
    try:
        for kind, limit in wanted.items():
            soft, hard = before[kind]
            bounds = [bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY]
            resource.setrlimit(kind, (min([limit, *bounds]), hard))
        yield
    finally:
        for kind, bounds_before in before.items():
            resource.setrlimit(kind, bounds_before)


def read(path: str, file_format: str, *, allow_unknown: bool, as_checkpoint: bool) -> tuple[dict[str, Any], bytes]:
    """A `ForestSummary` as words, and the bytes it is about. Raises what treelite and the checks raise."""
    import treelite

    if file_format == "lightgbm":
        with open(path, "rb") as lines:
            check_text(lines)
        model = treelite.frontend.load_lightgbm_model(path)
    elif file_format == "treelite_checkpoint":
        model = treelite.Model.deserialize(path)
    else:
        word = "ubjson" if file_format == "xgboost_ubj" else "json"
        model = treelite.frontend.load_xgboost_model(path, format_choice=word, allow_unknown_field=allow_unknown)
    from .forest import read_forest
    from .tree_ensemble import ensemble_bytes, is_expressible

    forest = read_forest(model)
    if as_checkpoint or not is_expressible(forest):
        return _summary(forest, "checkpoint"), model.serialize_bytes()
    return _summary(forest, "onnx"), ensemble_bytes(forest, double=forest.double)


def check_text(lines: Iterable[bytes]) -> None:
    """Raise `ValueError` for what a file of LightGBM may say and treelite passes over."""
    for line in lines:
        key, _, value = line.partition(b"=")
        if key == b"is_linear" and value.strip() != b"0":
            raise ValueError("its leaves are linear functions (linear_tree), which are not supported")
        if key == b"decision_type" and any(int(word) & _MISSING == _ZERO_IS_MISSING for word in value.split()):
            raise ValueError("it takes zeros for missing values (zero_as_missing), which is not supported")


def _summary(forest: Forest, content: str) -> dict[str, Any]:
    return {
        "trees": len(forest.roots),
        "features": forest.features,
        "classes": forest.classes,
        "task": forest.task,
        "postprocessor": forest.postprocessor,
        "sigmoid_alpha": forest.sigmoid_alpha,
        "ratio_c": forest.ratio_c,
        "base_scores": forest.base_scores,
        "divisor": forest.divisor,
        "double": forest.double,
        "content": content,
    }


if __name__ == "__main__":
    main()
