"""What an executor has written of requests with several responses."""

from __future__ import annotations

from typing import Any

from executor_bench import Bench, Follower

from charonia import keys
from charonia.facts.events import VersionLoaded
from charonia.wire import FLAG_JOB, FLAG_JOURNALLED, ResponseRecord, records_of, unpack_response

DURABLE = FLAG_JOB | FLAG_JOURNALLED
MODEL = "repeat"


class Reader:
    """What one endpoint gets."""

    def __init__(self, bench: Bench, endpoint: str = "gw") -> None:
        self.follower = Follower(bench.log, keys.replies(endpoint))

    def all(self) -> list[ResponseRecord]:
        return [unpack_response(record) for entry in self.follower.entries for record in records_of(entry.fields)]

    def of(self, request_id: bytes) -> list[ResponseRecord]:
        return [record for record in self.all() if record.id == request_id]

    async def count(self, request_id: bytes, count: int) -> list[ResponseRecord]:
        await self.follower.until(lambda: len(self.of(request_id)) >= count)
        return self.of(request_id)

    async def ended(self, request_id: bytes) -> list[ResponseRecord]:
        await self.follower.until(lambda: any(record.final for record in self.of(request_id)))
        return self.of(request_id)


def told(records: list[ResponseRecord]) -> list[Any]:
    """Each response in short: its number, "end" for an empty final one, or the text of its error."""
    found: list[Any] = []
    for record in records:
        if record.error is not None:
            found.append(record.error.message)
        else:
            found.append(int(record.outputs[0].array()[0, 0]) if record.outputs else "end")
    return found


def facts(follower: Follower, kind: type) -> list[Any]:
    return [fact for fact in follower.facts() if isinstance(fact, kind)]


async def statistics(bench: Bench) -> dict[str, int]:
    loaded = await bench.control.fact(VersionLoaded, model=MODEL)
    return await bench.log.statistics(keys.statistics(MODEL, 1, loaded.content_hash))
