"""Appends to and reads the progress of requests of resumable models. `append_progress.lua` has the rule,
`take_groups.lua` deletes what is settled.
"""

from __future__ import annotations

from collections.abc import Sequence

from charonia import keys
from charonia.eventlog.port import ProgressPart, Reply

from . import scripts
from .commands import Commands
from .server.transport import UNCOPIED_BYTES, Argument, pack, pack_pieces

_MOST_PARTS = 1000
_MOST_FIELDS = 4000
"""Of an entry that a script appends: unpack() has a bounded stack."""
_MOST_READ = 100


class Progress:
    """The port's methods about progress."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands

    async def append_progress(self, model: str, parts: Sequence[ProgressPart]) -> list[int]:
        lengths: list[int] = []
        for at in range(0, len(parts), _MOST_PARTS):
            lengths += await self._append_some(model, parts[at : at + _MOST_PARTS], ())
        return lengths

    async def append_progress_and_replies(
        self, model: str, parts: Sequence[ProgressPart], replies: Sequence[Reply]
    ) -> tuple[list[int], bool]:
        if not parts or not replies or len(parts) > _MOST_PARTS:
            return await self.append_progress(model, parts), False
        if any(len(reply.fields) > _MOST_FIELDS for reply in replies):
            return await self.append_progress(model, parts), False
        *lengths, sent = await self._append_some(model, parts, replies)
        return lengths, bool(sent)

    async def _append_some(self, model: str, parts: Sequence[ProgressPart], replies: Sequence[Reply]) -> list[int]:
        names = [keys.unsettled(model), keys.counters(model), keys.progress_index(model)]
        arguments: list[Argument] = []
        for part in parts:
            names.append(keys.progress(model, part.id))
            arguments += (part.id, part.attempt, part.first_index, len(part.records), *part.records)
        for reply in replies:
            arguments += (reply.stream, len(reply.fields), *reply.fields)
        script = scripts.APPEND_PROGRESS
        command = (b"EVALSHA", script.digest, len(names), *names, *arguments)
        # a step of 16 texts has a hundred small arguments: to pack them one by one in Python takes longer than all else
        is_large = any(len(field) >= UNCOPIED_BYTES for reply in replies for field in reply.fields)
        pieces = pack_pieces(command) if is_large else (pack(command),)
        lengths: list[int] = await self._commands.run(script, pieces)
        return lengths

    async def progress(self, model: str, ids: Sequence[bytes]) -> list[list[bytes]]:
        found: list[list[bytes]] = []
        for at in range(0, len(ids), _MOST_READ):
            names = [keys.progress(model, one) for one in ids[at : at + _MOST_READ]]
            found += await self._commands.each([("LRANGE", name, 0, -1) for name in names])
        return found

    async def progress_ids(self, model: str) -> list[bytes]:
        ids: list[bytes] = await self._commands.execute("SMEMBERS", keys.progress_index(model))
        return ids

    async def drop_progress(self, model: str, ids: Sequence[bytes]) -> None:
        if ids:
            await self._commands.each([("UNLINK", keys.progress(model, one)) for one in ids])
            await self._commands.execute("SREM", keys.progress_index(model), *ids)
