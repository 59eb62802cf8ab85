"""An ensemble whose second step waits at a gate, and jobs of it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from e2e_asking import infer, until
from e2e_server import Server
from ensemble_models import BIG, rows


def files_of(server: Server, model: str) -> list[Path]:
    """The tensors in the payload directory of an ensemble; its owner's token and the mark of its log are no tensors."""
    directory = server.state_dir / "shm" / f"ensemble.{model}"
    return [path for path in directory.iterdir() if path.name != "token" and not path.name.endswith("_")]


class Gate:
    """A request of `waiting`: its step `gated` waits for `open`, `entered` says that it has begun."""

    def __init__(self, server: Server, directory: Path, pool: ThreadPoolExecutor) -> None:
        self._entered, self._gate = directory / "entered", directory / "gate"
        asked = {"entered": str(self._entered), "gate": str(self._gate)}
        value = np.array([[7]], np.int32)
        self.task = pool.submit(
            infer, server, "waiting", "grpc", options={"parameters": asked}, INPUT0=rows(), VALUE=value, BIG=BIG
        )

    def until_entered(self) -> None:
        until("the gated step has begun", lambda: self._entered.exists() or self.task.done())

    def forget_entered(self) -> None:
        self._entered.unlink()

    def open(self) -> None:
        self._gate.touch()


def job_in(server: Server, location: str, state: str) -> dict[str, Any] | None:
    """The job once it is in a state; None before."""
    status, answer = server.get(location)
    assert status == 200, answer
    job = dict(json.loads(answer))
    assert job["state"] not in {"failed", "cancelled", "expired"} - {state}, job
    return job if job["state"] == state else None
