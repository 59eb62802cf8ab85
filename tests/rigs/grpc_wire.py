"""Calls as no client of gRPC would make them: any headers, any data, by the library `h2`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import h2.config
import h2.connection
import h2.events

LIMIT_S = 30

Fields = Sequence[tuple[str, str]]

CALL: Fields = (
    (":method", "POST"), (":scheme", "http"), (":authority", "here"), (":path", "/"), ("te", "trailers"),
    ("content-type", "application/grpc"),
)  # fmt: skip


def fields(path: str, **changed: str | None) -> Fields:
    """Those of a call; `changed` are in place of them or new, '_' in names for '-', None leaves one out."""
    values: dict[str, str | None] = {**dict(CALL), ":path": path}
    for name, value in changed.items():
        values[(":" + name if ":" + name in values else name).replace("_", "-")] = value
    return [(name, value) for name, value in values.items() if value is not None]


@dataclass
class Told:
    """What a server said: `headers` are those of the answer, or all there are; `ended` what ended the stream."""

    headers: dict[str, str] = field(default_factory=dict)
    data: bytes = b""
    trailers: dict[str, str] = field(default_factory=dict)
    reset: int | None = None

    @property
    def status(self) -> tuple[str | None, str]:
        """gRPC's status and message, wherever they are."""
        words = {**self.headers, **self.trailers}
        return words.get("grpc-status"), words.get("grpc-message", "")


async def told(port: int, headers: Fields, data: bytes = b"") -> Told:
    """One call on a connection of its own."""
    config = h2.config.H2Configuration(
        header_encoding="utf-8", validate_outbound_headers=False, normalize_outbound_headers=False
    )
    client = h2.connection.H2Connection(config)
    client.initiate_connection()
    client.send_headers(1, list(headers))
    client.send_data(1, data, end_stream=True)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        return await asyncio.wait_for(_read(client, reader, writer), LIMIT_S)
    finally:
        writer.close()


async def _read(client: h2.connection.H2Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Told:
    said = Told()
    while True:
        writer.write(client.data_to_send())
        data = await reader.read(65_536)
        assert data, f"the connection is closed after {said}"
        for event in client.receive_data(data):
            match event:
                case h2.events.ResponseReceived():
                    said.headers = dict(event.headers)
                case h2.events.TrailersReceived():
                    said.trailers = dict(event.headers)
                case h2.events.DataReceived():
                    said.data += event.data
                case h2.events.StreamReset():
                    said.reset = int(event.error_code)
                    return said
                case h2.events.StreamEnded():
                    return said
