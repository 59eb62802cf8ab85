"""How a batch stands: the fold of the facts that its stream in the log holds. Pure.

Any gateway may append a fact; the first one that ends the batch counts, and none after it. So a gateway that was held
up, and drives a batch that another one has taken over, cannot change how it ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CREATED, STARTED, ASKED = "created", "started", "asked"
CANCELLING, FINALIZING, ENDED = "cancelling", "finalizing", "ended"

COMPLETED, FAILED, EXPIRED, CANCELLED = "completed", "failed", "expired", "cancelled"


@dataclass(slots=True)
class Counts:
    """Lines of a batch, and the tokens that they took."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    result_bytes: int = 0
    """What the results take in the log while the batch runs."""

    @property
    def done(self) -> int:
        return self.completed + self.failed

    def note(self) -> dict[str, int]:
        """As it is kept in the log."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @staticmethod
    def of_note(note: Mapping[str, Any]) -> Counts:
        return Counts(**{name: int(note.get(name, 0)) for name in Counts.__dataclass_fields__})


@dataclass(slots=True)
class BatchState:
    """A batch. Times are seconds since the epoch, 0 for what has not happened."""

    id: str
    tenant: str = ""
    input_file: str = ""
    endpoint: str = ""
    metadata: dict[str, str] | None = None
    created_s: int = 0
    expires_s: int = 0
    """When its window ends."""
    output_ttl_s: int = 0
    started_s: int = 0
    cancelling_s: int = 0
    finalizing_s: int = 0
    ended_s: int = 0
    model: str = ""
    asked: set[str] | None = None
    """The models that have had jobs of its lines, written before the first of each: `model` may be an adapter's name,
    which leads to another model later. None for a batch that a gateway of an older release started.
    """
    outcome: str = ""
    """How it ended: completed, failed, expired or cancelled; "" while it has not."""
    errors: list[dict[str, Any]] = field(default_factory=list)
    output_file: str | None = None
    error_file: str | None = None
    counts: Counts = field(default_factory=Counts)

    @property
    def exists(self) -> bool:
        return self.created_s > 0

    @property
    def status(self) -> str:
        """The word of the API."""
        if self.outcome:
            return self.outcome
        if self.finalizing_s:
            return "finalizing"
        if self.cancelling_s:
            return "cancelling"
        return "in_progress" if self.started_s else "validating"

    def apply(self, fact: Mapping[str, Any]) -> None:
        """Take in the next fact. An unknown one, and all after the end, change nothing."""
        if self.outcome:
            return
        kind, time_s = fact.get("kind"), int(fact.get("time_s", 0))
        if kind == CREATED and not self.created_s:
            self.tenant, self.input_file = fact["tenant"], fact["input_file"]
            self.endpoint, self.metadata = fact["endpoint"], fact["metadata"]
            self.created_s, self.expires_s = time_s, fact["expires_s"]
            self.output_ttl_s = fact["output_ttl_s"]
        elif kind == STARTED and not self.started_s:
            self.started_s, self.model = time_s, fact["model"]
            self.counts.total = fact["total"]
            self.asked = set() if fact.get("names_asked") else None
        elif kind == ASKED and self.asked is not None:
            self.asked.add(fact["model"])
        elif kind == CANCELLING and not self.cancelling_s:
            self.cancelling_s = time_s
        elif kind == FINALIZING and not self.finalizing_s:
            self.finalizing_s = time_s
        elif kind == ENDED:
            self.outcome, self.ended_s = fact["outcome"], time_s
            self.errors = list(fact.get("errors", ()))
            self.output_file, self.error_file = fact.get("output_file"), fact.get("error_file")
            self.counts = Counts.of_note(fact.get("counts", {}))

    def document(self, progress: Counts | None = None) -> dict[str, Any]:
        """The batch object; `progress` are the counts of one that runs."""
        counts = self.counts
        if progress is not None and not self.outcome and progress.total:
            counts = progress
        ended = {word: self.ended_s if self.outcome == word else None for word in (COMPLETED, FAILED, EXPIRED)}
        cancelled = self.ended_s if self.outcome == CANCELLED else None
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model or None,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_file,
            "error_file_id": self.error_file,
            "created_at": self.created_s,
            "in_progress_at": self.started_s or None,
            "expires_at": self.expires_s,
            "finalizing_at": self.finalizing_s or None,
            "completed_at": ended[COMPLETED],
            "failed_at": ended[FAILED],
            "expired_at": ended[EXPIRED],
            "cancelling_at": self.cancelling_s or None,
            "cancelled_at": cancelled,
            "request_counts": {"total": counts.total, "completed": counts.completed, "failed": counts.failed},
            "usage": _usage(counts),
            "metadata": self.metadata,
        }


def _usage(counts: Counts) -> dict[str, Any]:
    return {
        "input_tokens": counts.input_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": counts.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts.input_tokens + counts.output_tokens,
    }


def fold(batch_id: str, facts: list[dict[str, Any]]) -> BatchState:
    """The state after these facts, the oldest first."""
    state = BatchState(batch_id)
    for fact in facts:
        state.apply(fact)
    return state
