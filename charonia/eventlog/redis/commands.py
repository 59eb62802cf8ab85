"""Sends commands and scripts on the hot connection; all settlements are sent here.

`work` and `jobs` define their meaning, `hot_connection` matches replies, `durability` handles durability levels.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import hiredis

from charonia import keys
from charonia.errors import LogUnavailable
from charonia.eventlog.durability_levels import parse_level
from charonia.eventlog.port import Fields, Reply
from charonia.tasks import Tasks
from charonia.tensors import Buffer

from .durability import Durability, Writes
from .scripts import WRITE, Script
from .server.hot_connection import Connection
from .server.transport import UNCOPIED_BYTES, Argument, Refused, lost, pack, pack_pieces

_LANE = re.compile(rb"([0-9]{1,20}):([0-9]{1,3})")


class Commands:
    """Sends the commands of the port's methods."""

    def __init__(self, connection: Connection, durability: Durability) -> None:
        self._connection = connection
        self._durability = durability
        self._tasks = Tasks()

    async def execute(self, *command: Argument) -> Any:
        return await self._connection.execute(*command)

    async def lanes(self, model: str) -> list[tuple[int, int]]:
        """`Work.lanes`."""
        members = await self.execute("SMEMBERS", keys.lanes(model))
        # other members were not added by an acceptance
        return sorted((int(found[1]), int(found[2])) for member in members if (found := _LANE.fullmatch(member)))

    async def each(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """Send commands with one key each in one write: a command must not name keys of several slots."""
        if not commands:
            return []
        replies = await self._connection.execute_all([pack(command) for command in commands], len(commands))
        for reply in replies:
            if isinstance(reply, hiredis.ReplyError):
                raise Refused(str(reply))
        return replies

    async def write(self, command: Argument, key: bytes, *arguments: Argument) -> Any:
        """Write one key with a command that the server accepts even when it is out of memory."""
        words = (b"EVALSHA", WRITE.digest, 1, key, command, *arguments)
        return await self.run(WRITE, pack_pieces(words))

    async def script(self, script: Script, names: Sequence[bytes], arguments: Sequence[Argument]) -> Any:
        return await self.run(script, (call_of(script, names, arguments),))

    async def run(self, script: Script, pieces: Sequence[Buffer], through: Connection | Writes | None = None) -> Any:
        """Send the packed call of a single script."""
        connection = through or self._connection
        try:
            return await connection.execute_pieces(pieces)
        except Refused as error:
            if not error.reply.startswith("NOSCRIPT"):
                raise
        return await self._reload(script, pieces, connection)

    # -- decisions ----------------------------------------------------------------------------------------------------

    async def writes(self, durability: str) -> Writes:
        """The writer for an acceptance at a level, "" for the default. Raises `Unsupported`, `InvalidArgument`."""
        if durability in ("", self._durability.default.text):
            return await self._durability.writes(None)
        return await self._durability.writes(parse_level(durability))

    async def accept(self, script: Script, pieces: Sequence[Buffer], writes: Writes) -> Any:
        """The reply to a packed call that accepts work; its durability level is awaited by `Writes.reached`."""
        return await self.run(script, pieces, writes)

    async def settle(
        self,
        script: Script,
        pieces: Sequence[Buffer],
        replies: Sequence[Reply],
        facts: Sequence[Reply],
    ) -> Any:
        """The reply to a packed call that settles, with entries appended before and after it in one write."""
        if not replies and not facts:
            return await self.run(script, pieces)
        out = _joint(replies, pieces, facts)
        answers = await self._connection.execute_all(out, len(replies) + 1 + len(facts))
        return await self._settled(answers, script, pieces, replies, facts)

    def settle_now(
        self,
        script: Script,
        pieces: Sequence[Buffer],
        replies: Sequence[Reply],
        facts: Sequence[Reply],
        done: Callable[[Any], None],
        *,
        soon: bool = False,
    ) -> bool:
        """As `settle`, but written before this returns, or `soon`: with this tick. `done` gets reply or error. False:
        nothing was written.
        """

        def answered(answers: list[Any] | None) -> None:
            try:
                if answers is None:
                    done(lost())
                elif hiredis.ReplyError in map(type, answers):
                    self._tasks.spawn(_report(self._settled(answers, script, pieces, replies, facts), done))
                else:
                    done(answers[len(replies)])
            except Exception as error:  # the connection is not the cause
                context = {"message": "what follows a settlement failed", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)

        out = _joint(replies, pieces, facts)
        send = self._connection.batch_soon if soon else self._connection.batch_now
        return send(out, len(replies) + 1 + len(facts), answered)

    async def _settled(
        self,
        appended: list[Any],
        script: Script,
        pieces: Sequence[Buffer],
        replies: Sequence[Reply],
        facts: Sequence[Reply],
    ) -> Any:
        """The result of a settlement; a refusal with a known remedy is repaired."""
        result = appended.pop(len(replies))
        if isinstance(result, hiredis.ReplyError):
            # Scripts are loaded at every connect: only a SCRIPT FLUSH on a running server leads here. The other entries
            # are sent already; their readers recognise duplicates, and the settlement follows at once.
            if not str(result).startswith("NOSCRIPT"):
                raise Refused(str(result))
            result = await self._reload(script, pieces, self._connection)
        for entry, entry_id in zip((*replies, *facts), appended, strict=True):
            if isinstance(entry_id, hiredis.ReplyError):
                refusal = Refused(str(entry_id))
                if not refusal.out_of_memory:
                    raise refusal
                await self.write("XADD", entry.stream, "*", *entry.fields)
        return result

    async def _reload(self, script: Script, pieces: Sequence[Buffer], connection: Connection | Writes) -> Any:
        """Run a script that the server no longer has; it has not run before, so nothing happens twice."""
        _, result = await connection.execute_all([pack(("SCRIPT", "LOAD", script.source)), *pieces], 2)
        if isinstance(result, hiredis.ReplyError):
            raise Refused(str(result))
        return result


async def _report(work: Coroutine[Any, Any, Any], done: Callable[[Any], None]) -> None:
    try:
        result = await work
    except LogUnavailable as error:
        result = error
    done(result)


def _joint(replies: Sequence[Reply], pieces: Sequence[Buffer], facts: Sequence[Reply]) -> list[Buffer]:
    out: list[Buffer] = []
    for reply in replies:
        out.extend(pack_append(reply.stream, reply.fields))
    out.extend(pieces)
    for fact in facts:
        out.extend(pack_append(fact.stream, fact.fields))
    return out


def call_of(script: Script, names: Sequence[bytes], arguments: Sequence[Argument]) -> bytes:
    """The packed call of a script without large arguments."""
    return pack((b"EVALSHA", script.digest, len(names), *names, *arguments))


def pack_append(stream: bytes, fields: Fields) -> Sequence[Buffer]:
    command = (b"XADD", stream, b"*", *fields)
    return pack_pieces(command) if is_large(fields) else (pack(command),)


def is_large(fields: Fields) -> bool:
    """Whether an entry has large values, which are written as separate pieces."""
    return sum(map(len, fields)) >= UNCOPIED_BYTES
