"""Reading a reply stream, and finding what no reply will come for: the gateway's pending map and callers alike do both.

Who waits for which answer, and what it is told, is theirs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from charonia import keys
from charonia.errors import InvalidRecord
from charonia.eventlog.control import facts_of
from charonia.eventlog.port import START, Entry, Streams, Work
from charonia.facts.events import BatchFinished
from charonia.tensors import Buffer
from charonia.wire import Reference, ResponseRecord, records_of, response_id, unpack_response

_log = logging.getLogger(__name__)

OUTCOME_UNKNOWN = "the request or its reply was lost while it was in flight: its outcome is unknown"

_MOST_IDS = 1000


def answers_in(
    entries: Sequence[Entry], take: Callable[[Reference], Buffer] | None
) -> Iterator[tuple[ResponseRecord, int]]:
    """Every answer of these entries with the size of its record, in order.

    What cannot be read is dropped and logged; its neighbours are other callers' answers.
    """
    for entry in entries:
        try:
            records = records_of(entry.fields)
        except InvalidRecord as error:
            _log.error("dropped unreadable replies in entry %s: %s", entry.id.decode(errors="replace"), error)
            continue
        for record in records:
            try:
                answer = unpack_response(record, take)
            except InvalidRecord as error:
                _log.error("dropped an unreadable reply in entry %s: %s", entry.id.decode(errors="replace"), error)
                continue
            yield answer, len(record)


async def no_longer_open(log: Work, ids_by_model: Mapping[str, Sequence[bytes]]) -> set[bytes]:
    """Which requests are settled or unknown to the log: no reply is on its way to them, unless it was sent already."""
    found: set[bytes] = set()
    for model, ids in ids_by_model.items():
        for at in range(0, len(ids), _MOST_IDS):
            part = ids[at : at + _MOST_IDS]
            attempts = await log.unsettled(model, part)
            found.update(request_id for request_id, attempt in zip(part, attempts, strict=True) if attempt < 0)
    return found


async def without_held(log: Streams, ids: set[bytes], models: Iterable[str]) -> set[bytes]:
    """These requests of these models, less those that were answered through their owner (S6), which has it still.

    It waits for the answers before it, however long these take. Costs a look at all facts of a model: for the few that
    seem lost.
    """
    left = set(ids)
    for model in models if left else ():
        after = START
        while left and (entries := await log.range(keys.facts(model), after)):
            after = entries[-1].id
            for fact in (fact for entry in entries for fact in facts_of(entry)):
                if isinstance(fact, BatchFinished):
                    left.difference_update(response_id(record) for _, record in fact.replies)
    return left
