"""What a gateway tells of its open streams, requests whose responses are sent one by one: a note in the log. Pure.

The gateway that has them writes it (`gateway.metrics`), the console reads it (`charonia.console.log_views`).
"""

from __future__ import annotations

from dataclasses import dataclass

import msgpack

from charonia.errors import InvalidRecord

TTL_S = 10
"""Five times the interval at which gateways write: the streams of one that was killed are shown no longer than that."""
MOST = 200
"""Streams in one note, those that are open the longest: about 30 KB."""
_MOST_ID = 64
"""Characters of a client's id: clients may send long ones."""


@dataclass(frozen=True, slots=True)
class StreamRow:
    """An open stream. Times are Unix times in microseconds; `last_us` is 0 before the first response."""

    model: str
    version: int
    tenant: str
    client_id: str
    since_us: int
    last_us: int
    responses: int


@dataclass(frozen=True, slots=True)
class StreamsNote:
    """Of one gateway: how many streams are open there, and the first of them."""

    open: int
    time_us: int
    rows: tuple[StreamRow, ...] = ()

    def pack(self) -> bytes:
        rows = [
            [one.model, one.version, one.tenant, one.client_id[:_MOST_ID], one.since_us, one.last_us, one.responses]
            for one in self.rows[:MOST]
        ]
        return bytes(msgpack.packb([self.open, self.time_us, rows]))

    @staticmethod
    def unpack(data: bytes) -> StreamsNote:
        """Raises `InvalidRecord`."""
        try:
            count, time_us, rows, *_ = msgpack.unpackb(data, use_list=False)
            read = tuple(
                StreamRow(
                    str(model), int(version), str(tenant), str(client_id), int(since_us), int(last_us), int(responses)
                )
                for model, version, tenant, client_id, since_us, last_us, responses, *_ in rows
            )
            return StreamsNote(int(count), int(time_us), read)
        except Exception as error:
            raise InvalidRecord(f"a note of open streams cannot be read: {error}") from None
