"""The server of `--blob-url`: it holds payloads of work at the durability level `memory`, and need not persist
anything.

Only blobs whose names begin with `keys.PASSING` are stored there; `charonia.calls` decides which payloads those are. If
such a server loses a payload, its request fails with an error; nothing else is affected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from charonia import keys
from charonia.errors import LogUnavailable, StartupError
from charonia.eventlog.port import EventLog
from charonia.tensors import Buffer

_KEY = keys.blob(keys.PASSING)


class BlobServer:
    """Blobs on a server beside the log. Raises `LogUnavailable` while it cannot be reached."""

    def __init__(self, log: EventLog) -> None:
        self._log = log

    async def open(self) -> None:
        """Connect. Raises `StartupError`."""
        try:
            await self._log.open()
        except StartupError as error:
            raise StartupError(_named(str(error))) from None

    async def close(self) -> None:
        await self._log.close()

    async def put(self, blob_id: str, data: Buffer, ttl_s: int) -> None:
        with _its_own_words():
            await self._log.put_blob(blob_id, data, ttl_s)

    async def get(self, blob_id: str) -> bytes | None:
        with _its_own_words():
            return await self._log.blob(blob_id)

    async def delete(self, names: Iterable[bytes]) -> None:
        with _its_own_words():
            await self._log.delete_keys(names)

    async def delete_its_own(self, names: Iterable[bytes]) -> list[bytes]:
        """Delete the keys that this server holds; returns the others."""
        others: list[bytes] = []
        mine: list[bytes] = []
        for name in names:
            (mine if name.startswith(_KEY) else others).append(name)
        if mine:
            await self.delete(mine)
        return others


def is_passing(blob_id: str) -> bool:
    """Whether a blob belongs to work at the level `memory`."""
    return blob_id.startswith(keys.PASSING)


@contextmanager
def _its_own_words() -> Iterator[None]:
    try:
        yield
    except LogUnavailable as error:
        raise LogUnavailable(_named(error.message)) from None


def _named(text: str) -> str:
    return text.replace("the event log", "the blob server")
