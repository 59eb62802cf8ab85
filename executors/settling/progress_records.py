"""Appends the progress of a resumable model's responses to the log before they are visible, and reads that of earlier
attempts. All requests that answered since the last write are one call of a script for each model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from charonia.eventlog.port import FENCED, OTHERWISE, Progress, ProgressPart, Reply
from charonia.tasks import insist
from executors.running.streamed_batch import Outgoing, StreamedBatch
from executors.running.submitted_batch import SubmittedBatch

_NOT_TAKEN = "the progress of requests cannot be written"

_Refused = dict[StreamedBatch, set[int]]
_Part = tuple[StreamedBatch, int, ProgressPart]
"""The part of a request: its batch, its index there."""


async def read_progress(log: Progress, batch: SubmittedBatch) -> None:
    """Read what the log accepted from earlier attempts. Their executors add nothing more: this attempt fences them."""
    header = batch.header
    assert header is not None
    ids = [record.id for record, attempt in zip(batch.records, header.attempts, strict=True) if attempt > 1]

    async def read() -> None:
        found = await log.progress(header.model, ids)
        batch.progress = {request_id: records for request_id, records in zip(ids, found, strict=True) if records}

    await insist(read, f"the progress of requests of '{header.model}' cannot be read")


async def append_progress(
    log: Progress,
    batches: Mapping[StreamedBatch, SubmittedBatch],
    outgoing: Mapping[StreamedBatch, list[Outgoing]],
    replies: Sequence[Reply] = (),
) -> tuple[_Refused, _Refused, bool]:
    """Append the progress of these responses, repeating until the log answers. Pass `replies`, their entries of the
    reply streams, only if all responses are of one model and nothing else is to be written: the log may append them in
    the same step.

    Returns the requests whose records are refused, by their indices: those that have ended, or run elsewhere by now;
    and those of which the log has other records, as when it lost the begin of this attempt with its last moments and
    the attempt before goes on: no other process would end these. Last, whether the replies were appended.
    """
    by_model: dict[str, list[_Part]] = {}
    for streamed, batch in batches.items():
        if streamed.resumable and batch.header is not None:
            by_model.setdefault(batch.header.model, []).extend(_parts_of(streamed, batch, outgoing[streamed]))
    fenced: _Refused = {}
    otherwise: _Refused = {}
    sent = False
    calls = [_append(log, model, parts, replies) for model, parts in by_model.items() if parts]
    # a task for the only call would be a turn of the event loop more
    for found, replied in [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls):
        sent |= replied
        for streamed, index, why in found:
            (fenced if why == FENCED else otherwise).setdefault(streamed, set()).add(index)
    return fenced, otherwise, sent


def _parts_of(streamed: StreamedBatch, batch: SubmittedBatch, outgoing: Iterable[Outgoing]) -> Iterable[_Part]:
    header = batch.header
    assert header is not None
    first: dict[int, int] = {}
    records: dict[int, list[bytes]] = {}
    for one in outgoing:
        if one.progress is not None and streamed.wanted(one.index) and one.index not in streamed.interrupted:
            first.setdefault(one.index, one.response_index)
            records.setdefault(one.index, []).append(one.progress)
    for index, some in records.items():
        yield streamed, index, ProgressPart(batch.records[index].id, header.attempts[index], first[index], some)


async def _append(
    log: Progress, model: str, parts: list[_Part], replies: Sequence[Reply]
) -> tuple[list[tuple[StreamedBatch, int, int]], bool]:
    replied = False
    refused: list[tuple[StreamedBatch, int, int]] = []
    while parts:
        lengths: list[int] = []
        sent = [part for _, _, part in parts]

        async def append(sent: list[ProgressPart] = sent, replies: Sequence[Reply] = replies) -> None:
            nonlocal lengths, replied
            if replies:
                lengths, replied = await log.append_progress_and_replies(model, sent, replies)
            else:
                lengths = await log.append_progress(model, sent)

        await insist(append, _NOT_TAKEN)
        replies = ()
        missing: list[_Part] = []
        for (streamed, index, part), length in zip(parts, lengths, strict=True):
            if length in (FENCED, OTHERWISE):
                refused.append((streamed, index, length))
            elif length < part.first_index:  # a log that lost its last moments
                last = part.first_index + len(part.records)
                records = streamed.kept(index, length, last)
                missing.append((streamed, index, ProgressPart(part.id, part.attempt, length, records)))
        parts = missing
    return refused, replied
