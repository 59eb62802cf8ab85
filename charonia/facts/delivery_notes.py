"""What a gateway notes when it first gives the outcome of a job to a caller: a note in the log. Pure.

The gateway writes it (`gateway.jobs.job_deliveries`), the console reads it (`charonia.console.stories`). A call that is
no job has none: its settlement is its reply (ADR 0070).
"""

from __future__ import annotations

from dataclasses import dataclass

import msgpack

from charonia.errors import InvalidRecord


@dataclass(frozen=True, slots=True)
class DeliveryNote:
    """`at_us` is a Unix time in microseconds, by the clock of `gateway`, an incarnation."""

    at_us: int
    gateway: str

    def pack(self) -> bytes:
        return bytes(msgpack.packb([self.at_us, self.gateway]))

    @staticmethod
    def unpack(data: bytes) -> DeliveryNote:
        """Raises `InvalidRecord`."""
        try:
            at_us, gateway, *_ = msgpack.unpackb(data)
            return DeliveryNote(int(at_us), str(gateway))
        except Exception as error:
            raise InvalidRecord(f"a note of a job's delivery cannot be read: {error}") from None
