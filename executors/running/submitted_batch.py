"""One batch on its way through an executor, and what an instance tells of it. What that means is `intake`'s."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct, field

from charonia.errors import InternalError, InvalidRecord
from charonia.eventlog.port import Entry
from charonia.facts.sequence_states import SequenceStep
from charonia.wire import FIELD_HEADER, BatchHeader, RequestRecord, Wave, work_in
from executors.batches.accounting import Executed
from executors.batches.answers import Put
from executors.batches.execution import Batch, Planned
from executors.batches.sequence_batch import BatchSteps
from executors.batches.sequences import Remembered

if TYPE_CHECKING:
    from executors.batches.wave_execution import ExecutedWaves, PutColumns, WaveBatch
    from executors.streams.streamed_batch import Outgoing, StreamedBatch


class WaveAnswers(Protocol):
    """Answers executed waves (`executors.waves.wave_settler.WaveSettler`)."""

    def answer(self, batch: SubmittedBatch, executed: ExecutedWaves) -> None:
        """Answer what can be answered at once, in the thread of the instance."""


class ResponseLog(Protocol):
    """Writes the responses of streamed batches to the log (`executors.settling.response_writer.ResponseWriter`)."""

    def open(self, streamed: StreamedBatch, batch: SubmittedBatch, settle: SettlePart) -> None: ...

    def close(self, streamed: StreamedBatch) -> None: ...

    def put(self, outgoing: Outgoing) -> None: ...

    def freed(self, streamed: StreamedBatch) -> None: ...

    async def written(self, streamed: StreamedBatch) -> None: ...


@dataclass(frozen=True, slots=True)
class Responses:
    """Where the responses of one batch go, and who settles what of it has ended."""

    writer: ResponseLog
    settle: SettlePart


class SubmittedBatch(Struct, eq=False):
    """The batch and its callbacks, called in the event loop.

    `done` when it has been executed or its instance has died under it.
    `flags` are those of any of its records.
    `unwanted` holds the ids of requests that were settled by somebody else meanwhile; `batch` is set while it runs.
    """

    records: Sequence[RequestRecord]
    """Empty in a batch of waves."""
    done: Callable[[SubmittedBatch, Executed], None]
    header: BatchHeader | None = None
    entry_id: bytes = b""
    flags: int = 0
    waves: Sequence[Wave] = ()
    settler: WaveAnswers | None = None
    """Who answers these from the thread of an instance."""
    planned: Sequence[Planned] = ()
    """What of it is executed, once its execution has begun. Set in the instance's thread."""
    start_unreported: bool = False
    """Some of it is journalled, and the journal does not say yet that its execution has begun."""
    unwanted: frozenset[bytes] = frozenset()
    execution: Batch | WaveBatch | None = None
    stream: StreamedBatch | None = None
    """The batch once it runs on an instance whose requests have several responses, which go to `responses`."""
    responses: Responses | None = None
    allowed: dict[bytes, int] = field(default_factory=dict)
    """How many responses of its requests are wanted, by id, as far as that was said before it ran (S55)."""
    ended: set[bytes] = field(default_factory=set)
    """The requests of such a batch that had their final response, by id."""
    steps: BatchSteps | None = None
    """Those of its sequences, once it runs, with an instance in this `life`."""
    generation: int = 0
    written: dict[bytes, SequenceStep] = field(default_factory=dict)
    """What the log is to remember of its sequences, by request id."""
    before: dict[int, Remembered | None] = field(default_factory=dict)
    unsure: bool = False
    """A settlement of it went unanswered: it may have been the one that counted."""
    put: Put | None = None
    """Where large answers go, unless they travel in their records."""
    put_columns: PutColumns | None = None
    """The same for waves."""
    referred: Sequence[bytes] | None = None
    """Its answers as they travel, once the large ones among them were put beside the log."""
    abandoned: bool = False
    """It outlasted its ceiling and was reported: what still comes of it is not heard."""


SettlePart = Callable[[SubmittedBatch, Executed, Sequence[tuple[str, bytes]], bool], Awaitable[None]]
"""Settles what of a batch has ended: the job, that part, (endpoint, record) of responses before, whether it was all."""


def take_all(queue: asyncio.Queue[SubmittedBatch | None]) -> list[SubmittedBatch]:
    """The batches in a queue, which nobody will get from it; the ends that workers wait for stay in it."""
    taken: list[SubmittedBatch] = []
    ends = 0
    with contextlib.suppress(asyncio.QueueEmpty):
        while True:
            batch = queue.get_nowait()
            if batch is None:
                ends += 1
            else:
                taken.append(batch)
    for _ in range(ends):
        queue.put_nowait(None)
    return taken


def decode_entry(entry: Entry) -> tuple[BatchHeader, list[RequestRecord | Wave]]:
    """The header and the requests, or waves, of a batch stream's entry. Raises `InvalidRecord`."""
    fields = entry.fields
    if len(fields) < 2 or fields[0] != FIELD_HEADER:
        raise InvalidRecord("no batch header")
    header = BatchHeader.unpack(fields[1])
    records = work_in(fields)
    try:
        attempts = len(header.attempts)
    except TypeError:
        raise InvalidRecord("the batch header has no list of attempts") from None
    if attempts != len(records):
        raise InvalidRecord(f"{attempts} attempts for {len(records)} requests")
    if len(header.waves) != sum(isinstance(record, Wave) for record in records) or (
        header.waves and attempts != len(header.waves)
    ):
        raise InvalidRecord(f"entries of {len(header.waves)} waves for what is not as many waves")
    return header, records


def instance_died_error(instance: str) -> InternalError:
    """P19's text: the instance's process is gone."""
    return InternalError(f"Stub process '{instance}' is not healthy.")
