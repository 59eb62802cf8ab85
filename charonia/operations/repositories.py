"""`charonia check` and `charonia migrate`. The executors' code finds the faults of a repository."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from charonia.clock import monotonic_ns
from charonia.errors import Unsupported

Check = Callable[[Path, int | None, bool, Callable[[int, int], None], str], dict[str, Any]]
"""(repository, GPUs of the machine or None for this one's, whether to fix, progress, the directory of python-based
backends or "") -> the document."""

_PROGRESS_NS = 1_000_000_000


def cannot_check(
    repository: Path, gpus: int | None, fix: bool, on_progress: Callable[[int, int], None], backend_directory: str
) -> dict[str, Any]:
    """Raises where the executors' code is not installed."""
    raise Unsupported("a repository can only be checked by the command 'charonia'")


def check(options: argparse.Namespace, check_repository: Check) -> tuple[dict[str, Any], bool]:
    """The document, and whether there is no fault. Reports progress on stderr once a second."""
    last_ns = monotonic_ns()

    def on_progress(done: int, total: int) -> None:
        nonlocal last_ns
        if monotonic_ns() - last_ns >= _PROGRESS_NS:
            last_ns = monotonic_ns()
            sys.stderr.write(f"{done} of {total} models\n")
            sys.stderr.flush()

    document = check_repository(options.repository, options.gpus, options.fix, on_progress, options.backend_directory)
    return document, not document["faults"]


def migrated(options: argparse.Namespace, check_repository: Check) -> tuple[dict[str, Any], bool]:
    """The document of a migration, and whether all models could be read and the written ones have no fault."""
    from .migration.migrating import migrate  # the other commands do not need it

    document = migrate(options.source, options.kind, options.to)
    faults: list[dict[str, Any]] = []
    if options.to is not None and document["models"]:
        names = {model["model"] for model in document["models"]}
        checked = check_repository(options.to, None, False, lambda _done, _total: None, "")
        faults = [fault for fault in checked["faults"] if fault["model"] in names]
    return {**document, "faults": faults}, not faults and not document["refused"]
