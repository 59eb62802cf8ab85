"""`charonia state`: shows which server wrote a state, and exports and imports states as files.

For a stopped state directory this starts a private server, of a program that can read it, for the time of the work.
`charonia.eventlog.redis.portable` defines the file.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from charonia.clock import wall_ns
from charonia.errors import InvalidArgument, StartupError
from charonia.eventlog.embedded import PrivateServer, find_server, short_directory
from charonia.eventlog.embedded.append_tail import KEPT, REPORTED
from charonia.eventlog.embedded.holder import LOCK, hold_state_directory, holder_of, in_words, is_held
from charonia.eventlog.embedded.private_server import of_former_runs
from charonia.eventlog.embedded.state_files import (
    APPEND_DIRECTORY,
    RECORD,
    STOPPED,
    WEBHOOK_SECRET,
    StateFiles,
    read_object,
    write_whole,
)

if TYPE_CHECKING:
    from charonia.eventlog.redis.portable.state_file import Summary
    from charonia.eventlog.redis.server.hot_connection import Connection

_BUILD = "import.partial"
_PATIENCE_S = 600.0
"""Time for a server that saves a large state before it ends."""
_PROGRESS_S = 1.0
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a state: a log at `url`, or a state directory, read with `program`, "" for a suitable one."""

    url: str
    password_file: str
    directory: str
    program: str = ""

    @property
    def path(self) -> Path:
        return Path(self.directory).expanduser().absolute()


async def show(place: Place) -> dict[str, Any]:
    """Information about a state without reading it. Raises `StartupError` if there is none."""
    if place.url:
        from charonia.eventlog.redis.portable.exporting import living, program

        async with _log(place.url, place.password_file) as connection:
            keys, users = await connection.execute("DBSIZE"), await living(connection)
            about = {"log": connection.address.text, "program": await program(connection), "keys": keys}
            return {**about, "used_by": ", ".join(users), "repairs": []}
    files = _existing(place)
    writer, lock = files.writer, files.directory / LOCK
    found = map(read_object, sorted(files.directory.glob(f"{KEPT}*.json")))
    repairs = [repair for repair in found if repair.keys() >= REPORTED]
    return {
        "directory": str(files.directory),
        "program": writer.text if writer is not None else "",
        "path": writer.path if writer is not None else "",
        "format": files.format,
        "since": files.record.get("since", ""),
        "size_bytes": files.size_bytes,
        "used_by": in_words(holder_of(lock)) if is_held(lock) else "",
        "repairs": repairs,
    }


async def export_state(place: Place, file: Path, *, overwrite: bool) -> dict[str, Any]:
    """Export a state to a file. Raises `InvalidArgument` and `StartupError`; then no file is left."""
    from charonia.eventlog.redis.portable.exporting import export_keys, living, program
    from charonia.eventlog.redis.portable.state_file import StateWriter, refuse_existing

    async def write(connection: Connection, source: str) -> dict[str, Any]:
        name = await program(connection)
        header = {"charonia": version("charonia"), "program": name, "from": source, "exported_us": wall_ns() // 1000}
        with StateWriter(file, header, overwrite=overwrite) as writer:
            left_out = of_former_runs if not place.url else _nothing
            await export_keys(connection, writer, left_out, _Progress("export"))
            if place.url:
                _refuse_living(
                    await living(connection), connection
                )  # a process that joined in the meantime may have written
            elif (secret := place.path / WEBHOOK_SECRET).is_file():
                writer.add(["f", WEBHOOK_SECRET, secret.read_bytes()])
            writer.finish()
        return {"file": str(file), "keys": writer.keys, "bytes": writer.size_bytes, "program": name, "repaired": None}

    if not overwrite:
        refuse_existing(file)
    if place.url:
        async with _log(place.url, place.password_file) as connection:
            _refuse_living(await living(connection), connection)
            return await write(connection, connection.address.text)
    files = _existing(place)
    with _held(files.directory, "export"):
        server = PrivateServer(files.directory, find_server(place.program or None, files))
        async with _running(server) as connection:
            document = await write(connection, "a state directory")
        repaired = server.repaired.text if server.repaired is not None else None
        return {**document, "repaired": repaired}


async def import_state(place: Place, file: Path, *, replace: bool) -> dict[str, Any]:
    """Import a file into a state directory or a log. Raises `InvalidArgument` and `StartupError`; then nothing has
    changed.

    The previous contents of a directory are kept aside; a log is emptied first, and again if the import fails.
    """
    from charonia.eventlog.redis.portable.state_file import check

    summary = check(file)
    exported = {"exported_by": f"charonia {summary.header.get('charonia', '?')}", "from": summary.header.get("program")}
    if place.url:
        return exported | await _into_log(place, file, summary, replace=replace)
    return exported | await _into_directory(place, file, summary, replace=replace)


async def _into_log(place: Place, file: Path, summary: Summary, *, replace: bool) -> dict[str, Any]:
    from charonia.eventlog.redis.portable.exporting import living, program
    from charonia.eventlog.redis.portable.importing import import_keys

    async with _log(place.url, place.password_file) as connection:
        _refuse_living(await living(connection), connection)
        where = connection.address.text
        if keys := await connection.execute("DBSIZE"):
            if not replace:
                raise InvalidArgument(f"the log at {where} holds {keys} keys; --replace deletes them first")
            await connection.execute("FLUSHDB")
        try:
            written, left_out = await import_keys(connection, file, summary, _Progress("import"))
        except BaseException:
            await connection.execute("FLUSHDB")  # part of a state is useless
            raise
        about = {"into": where, "program": await program(connection), "keys": written, "replaced": None}
    return {**about, "expired": summary.keys - written, "files_left_out": sorted(left_out)}


async def _into_directory(place: Place, file: Path, summary: Summary, *, replace: bool) -> dict[str, Any]:
    from charonia.eventlog.redis.portable.importing import import_keys

    directory, files = place.path, StateFiles(place.path)
    program = find_server(place.program or None)
    with _held(directory, "import"):
        if files.exist and not replace:
            wrote = f", written by {files.writer.text}" if files.writer is not None else ""
            raise InvalidArgument(f"'{directory}' holds a state{wrote}; --replace puts it aside")
        build = directory / _BUILD
        shutil.rmtree(build, ignore_errors=True)
        try:
            server = PrivateServer(build, program)
            async with _running(server) as connection:
                written, found = await import_keys(connection, file, summary, _Progress("import"))
            replaced = _put_in_place(build, directory)
        finally:
            shutil.rmtree(build, ignore_errors=True)
        left_out = [name for name in found if name != WEBHOOK_SECRET]
        if WEBHOOK_SECRET in found:
            write_whole(directory / WEBHOOK_SECRET, found[WEBHOOK_SECRET])
    about = {"into": str(directory), "program": program.writer.text, "keys": written, "replaced": replaced}
    return {**about, "expired": summary.keys - written, "files_left_out": sorted(left_out)}


def _put_in_place(build: Path, directory: Path) -> str | None:
    """Replace the directory's files by those in `build`, in one step; returns where the previous files are now."""
    made, there = build / APPEND_DIRECTORY, directory / APPEND_DIRECTORY
    replaced: str | None = None
    if there.exists():
        aside = directory / f"{APPEND_DIRECTORY}.replaced-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
        if aside.exists():
            raise InvalidArgument(f"'{aside}' exists: nothing was replaced")
        if _exchange(made, there):
            made.rename(aside)
        else:
            there.rename(aside)
            made.rename(there)
        with suppress(FileNotFoundError):
            (directory / RECORD).rename(aside / RECORD)
        replaced = str(aside)
    else:
        made.rename(there)
    for name in (RECORD, STOPPED):  # what they say is checked: a stop between these steps does no harm
        (directory / name).unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            (build / name).rename(directory / name)
    return replaced


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two directories atomically; False if the system cannot."""
    if sys.platform != "linux":
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


# -- places ------------------------------------------------------------------------------------------------------------


def _existing(place: Place) -> StateFiles:
    files = StateFiles(place.path)
    if not files.exist:
        raise StartupError(
            f"there is no state in '{place.path}': name another directory with --state-dir, or a log with --log-url"
        )
    return files


@contextmanager
def _held(directory: Path, action: str) -> Iterator[None]:
    lock = hold_state_directory(directory, f"charonia state {action}")
    try:
        yield
    finally:
        os.close(lock)


@asynccontextmanager
async def _running(server: PrivateServer) -> AsyncIterator[Connection]:
    """A connection to a private server that is started here, and stopped once all of it is on disk."""
    server.start()
    try:
        server.wait_ready(_PATIENCE_S)
        async with _log(server.url, "") as connection:
            yield connection
    finally:
        server.stop(_PATIENCE_S)
        if server.socket_path.parent != server.state_dir:
            shutil.rmtree(short_directory(server.state_dir), ignore_errors=True)


@asynccontextmanager
async def _log(url: str, password_file: str) -> AsyncIterator[Connection]:
    from charonia.eventlog.redis import RedisLog
    from charonia.eventlog.redis.server.address import parse_address, with_password

    address = parse_address(with_password(url, password_file))
    if address.nodes:
        raise StartupError(f"the event log at {address.text} is a cluster: name one server's log, or a state directory")
    log = RedisLog(address)
    await log.open()
    try:
        yield log.connection
    finally:
        await log.close()


def _refuse_living(processes: list[str], connection: Connection) -> None:
    if processes:
        raise StartupError(
            f"the event log at {connection.address.text} is used by {', '.join(processes)}: stop them first"
        )


def _nothing(_key: bytes) -> bool:
    return False


class _Progress:
    """Reports the progress of long work on stderr once a second."""

    def __init__(self, action: str) -> None:
        self._action = action
        self._next_s = time.monotonic() + _PROGRESS_S

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + _PROGRESS_S
            sys.stderr.write(f"charonia state {self._action}: {done} of {total} keys\n")
            sys.stderr.flush()
