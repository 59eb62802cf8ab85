"""A batch on its way through an executor: the records from the log, its callbacks, and its progress."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct, field

from charonia.errors import InternalError, InvalidRecord
from charonia.eventlog.port import Entry
from charonia.facts.sequence_states import SequenceStep
from charonia.wire import FIELD_HEADER, BatchHeader, Reference, RequestRecord, Wave, work_in
from executors.batches.answers import Put
from executors.batches.batch_results import Executed
from executors.batches.execution import Batch, Planned
from executors.batches.sequence_batch import BatchSteps
from executors.batches.sequences import KnownSequence

if TYPE_CHECKING:
    from executors.batches.wave_execution import ExecutedWaves, PutColumns, WaveBatch

    from .streamed_batch import Outgoing, StreamedBatch


class WaveAnswers(Protocol):
    """Answers executed waves. Implemented by `executors.settling.wave_settler.WaveSettler`."""

    def answer(self, batch: SubmittedBatch, executed: ExecutedWaves) -> None:
        """Send the answers that can be sent at once. Called in the instance's thread or in the event loop."""


class ResponseLog(Protocol):
    """Writes responses of streamed batches. Implemented by `executors.settling.response_writer.ResponseWriter`."""

    def open(self, streamed: StreamedBatch, batch: SubmittedBatch, settle: SettlePart) -> None: ...

    def close(self, streamed: StreamedBatch) -> None: ...

    def put(self, outgoing: Outgoing) -> None: ...

    def freed(self, streamed: StreamedBatch) -> None: ...

    async def written(self, streamed: StreamedBatch) -> None: ...


@dataclass(frozen=True, slots=True)
class Responses:
    """The writer of a batch's responses, and the function that settles those of its requests that have ended."""

    writer: ResponseLog
    settle: SettlePart


class SubmittedBatch(Struct, eq=False):
    """A batch that was submitted to an instance pool.

    `done` is called in the event loop when the batch was executed or its instance died. `flags` is the union of its
    records' flags. `unwanted` holds the ids of requests that were settled elsewhere meanwhile. `execution` is set while
    a cooperative instance runs the batch.
    """

    records: Sequence[RequestRecord]
    """Empty in a batch of waves."""
    done: Callable[[SubmittedBatch, Executed], None]
    header: BatchHeader | None = None
    entry_id: bytes = b""
    flags: int = 0
    waves: Sequence[Wave] = ()
    settler: WaveAnswers | None = None
    """Sends the answers of `waves` before they are settled."""
    planned: Sequence[Planned] = ()
    """The requests that are executed. Set in the instance's thread when the execution starts."""
    start_unreported: bool = False
    """It has journalled requests whose start is not in the journal yet."""
    unwanted: frozenset[bytes] = frozenset()
    cancelled: frozenset[bytes] = frozenset()
    """The ids of requests whose callers cancelled them and read on."""
    execution: Batch | WaveBatch | None = None
    stream: StreamedBatch | None = None
    """Its progress on a streaming instance, once it runs there. Its responses go to `responses`."""
    responses: Responses | None = None
    allowed: dict[bytes, int] = field(default_factory=dict)
    """By request id: how many responses are wanted, as far as reported before the batch ran."""
    progress: dict[bytes, list[bytes]] = field(default_factory=dict)
    """By request id: what the log accepted from earlier attempts, of a resumable model."""
    ended: set[bytes] = field(default_factory=set)
    """The ids of its requests that had their final response."""
    steps: BatchSteps | None = None
    """The steps of its sequences once it runs, on an instance of this `generation`."""
    generation: int = 0
    written: dict[bytes, SequenceStep] = field(default_factory=dict)
    """By request id: the sequence steps to write to the log."""
    before: dict[int, KnownSequence | None] = field(default_factory=dict)
    unsure: bool = False
    """The log did not answer one of its settlements, which may have taken effect."""
    put: Put | None = None
    """Stores large answers out of band; None when all travel in their records."""
    put_columns: PutColumns | None = None
    """The same for waves."""
    take_back: Callable[[Reference], None] | None = None
    """Ends what `put_columns` stored, when no reply will refer to it."""
    referred: Sequence[bytes] | None = None
    """Its answers as sent, once the large ones were stored out of band."""
    abandoned: bool = False
    """It exceeded its time limit and was reported as hung: a later result is ignored."""


SettlePart = Callable[[SubmittedBatch, Executed, Sequence[tuple[str, bytes]], bool], Coroutine[Any, Any, None]]
"""Settles requests of a batch that have ended: (batch, results, (endpoint, record) responses before, is last)."""


def take_all(queue: asyncio.Queue[SubmittedBatch | None]) -> list[SubmittedBatch]:
    """Remove and return the batches in a queue. The ends (None) stay in it for the workers."""
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
    """Return the header and the requests, or waves, of an entry of a batch stream. Raises `InvalidRecord`."""
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
    """The error for requests whose instance's process is gone, in Triton's words (P19)."""
    return InternalError(f"Stub process '{instance}' is not healthy.")
