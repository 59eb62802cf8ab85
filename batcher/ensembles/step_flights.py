"""Steps of an ensemble that are awaited, and their ids, which are the same at every owner."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from batcher.scheduling.ensembles.ensemble_planner import SubmitStep
from batcher.scheduling.ensembles.ensemble_run import Path
from batcher.scheduling.observations import QueuedRequest
from charonia.calls.splicing import Visible
from charonia.wire import Reference


def step_id(request_id: bytes, step: int, path: Path) -> bytes:
    """The request id of a step: the same at every owner."""
    place = ",".join(map(str, (step, *path))).encode()
    return hashlib.blake2b(request_id + place, digest_size=16).digest()


@dataclass(slots=True, eq=False)
class Flight:
    """One step that is awaited. `asked` once the log has it; `record` until then, `beside_bytes` lie elsewhere."""

    id: bytes
    decision: SubmitStep
    level: int = 0
    record: bytes = b""
    beside_bytes: int = 0
    asked: bool = False
    since_ns: int = 0
    reference: Reference | None = None
    """Where the answer of a step lies that waits for the cache to take it."""
    visible: Visible = field(default_factory=lambda: Visible(repeatable=False))
    """What of a decoupled step's responses was followed up."""
    wanted: int = 0
    """Of a step with a window: how many responses are wanted; `told` is what its model's owner knows (S55)."""
    told: int = 0
    telling: bool = False

    @property
    def model(self) -> str:
        return self.decision.step.model

    @property
    def request(self) -> QueuedRequest:
        return self.decision.request
