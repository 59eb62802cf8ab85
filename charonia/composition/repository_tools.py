"""Gives the operators' commands the executors' code: the check of a model repository."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from executors.checking.repository_check import check_repository
from executors.host.devices import count_gpus


def check(
    repository: Path, gpus: int | None, fix: bool, on_progress: Callable[[int, int], None], backend_directory: str
) -> dict[str, Any]:
    """The document of `charonia check`."""
    devices = count_gpus(os.environ) if gpus is None else gpus
    work = check_repository(
        repository,
        gpus=devices,
        assumed_gpus=gpus is not None,
        fix=fix,
        on_progress=on_progress,
        backend_directory=backend_directory,
    )
    loads = logging.getLogger("executors")
    level = loads.level
    loads.setLevel(logging.CRITICAL)  # what a load logs of a refused model is in the document
    try:
        report = asyncio.run(work)
    finally:
        loads.setLevel(level)
    return {
        "repository": report.repository,
        "models": report.models,
        "faults": [fault.document() for fault in report.faults],
        "notes": [{"model": note.model, "text": note.text} for note in report.notes],
        "fixed": report.fixed,
        "diffs": report.diffs,
    }
