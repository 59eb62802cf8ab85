"""`RedisLog` against a real server that is killed, restarted, flushed and asked for what it cannot do."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Callable

import pytest
from own_server import PATIENCE_S, admin

from charonia.errors import CharoniaError, LogUnavailable
from charonia.eventlog.embedded import PrivateServer
from charonia.eventlog.port import Entry, Limits, Reply
from charonia.eventlog.redis import RedisLog
from charonia.eventlog.redis.reader import RedisReader
from charonia.eventlog.redis.server.address import parse_address
from charonia.eventlog.redis.server.hot_connection import Connection

pytestmark = pytest.mark.integration


def kill(server: PrivateServer) -> None:
    os.kill(server.pid, signal.SIGKILL)
    while server.poll() is None:
        time.sleep(0.001)


def restart(server: PrivateServer) -> None:
    server.start()
    server.wait_ready()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


async def back(log: RedisLog) -> None:
    """Return once the log answers again."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await log.pending("m")
                return
            except LogUnavailable:
                await asyncio.sleep(0.001)


async def test_a_killed_and_restarted_server_loses_and_doubles_nothing(server: PrivateServer) -> None:
    """Under `appendfsync always`: with everysec a killed server may forget writes that it has confirmed."""
    await admin(server, "CONFIG", "SET", "appendfsync", "always")
    states: list[bool] = []
    log = RedisLog(server.url, on_state=states.append)
    await log.open()
    reader = log.reader()
    got: list[bytes] = []
    reader_states: list[bool] = []

    def on_entries(stream: bytes, entries: list[Entry]) -> None:
        got.extend(bytes(entry.fields[1]) for entry in entries)

    reader.add(b"r:1", consume=True)
    reader.start(on_entries, reader_states.append)
    acknowledged: list[bytes] = []
    unknown: list[bytes] = []
    writing = True

    async def write(writer: int) -> None:
        number = 0
        while writing:
            value = b"%d:%d" % (writer, number)
            number += 1
            try:
                await log.append(b"r:1", [b"r", value])
                acknowledged.append(value)
            except LogUnavailable:
                unknown.append(value)
                await asyncio.sleep(0.001)  # without it, they take the processor that the server needs to start

    writers = [asyncio.ensure_future(write(n)) for n in range(8)]
    for round_ in range(2):
        reached = len(acknowledged) + 500
        await until(lambda reached=reached: len(acknowledged) > reached)
        kill(server)
        await until(lambda round_=round_: states.count(False) > round_)
        with pytest.raises(LogUnavailable):
            await log.append(b"r:1", [b"r", b"never"])
        restart(server)
        await admin(server, "CONFIG", "SET", "appendfsync", "always")
        # the reader has a back-off of its own: killed again before it is back, it would see one loss, not two
        await until(lambda round_=round_: min(states.count(True), reader_states.count(True)) > round_ + 1)
    reached = len(acknowledged) + 500
    await until(lambda: len(acknowledged) > reached)
    writing = False
    await asyncio.gather(*writers)

    await until(lambda: set(acknowledged) <= set(got))
    assert len(got) == len(set(got)), "an entry was delivered twice"
    assert set(got) <= set(acknowledged) | set(unknown)
    assert states == [True, False, True, False, True]
    assert reader_states == states
    async with asyncio.timeout(PATIENCE_S):
        while await log.range(b"r:1"):  # deletions that were under way have been made up for
            await asyncio.sleep(0.001)
    await reader.close()
    await log.close()


async def test_deletions_the_server_confirmed_and_forgot_are_made_again(server: PrivateServer, log: RedisLog) -> None:
    """A server killed between a reply and its append-only file (everysec allows that) brings consumed entries back."""
    got: list[bytes] = []
    states: list[bool] = []
    old = await log.append(b"s", [b"r", b"before the reader's place"])
    written = [b"%d" % number for number in range(200)]  # more than one read or sweep holds
    for value in written:
        await log.append(b"s", [b"r", value])
    while b"aof_buffer_length:0\r" not in await admin(server, "INFO", "persistence"):
        await asyncio.sleep(0.001)  # it postpones writes while the disk is busy, and would forget these
    kill(server)
    files, forgotten = server.state_dir / "appendonlydir", server.state_dir / "copy"
    shutil.copytree(files, forgotten)
    restart(server)
    await back(log)

    reader = log.reader()
    reader.start(lambda _, entries: got.extend(bytes(entry.fields[1]) for entry in entries), states.append)
    reader.add(b"s", old, consume=True)
    await until(lambda: len(got) == len(written))
    async with asyncio.timeout(PATIENCE_S):
        while len(await log.range(b"s")) > 1:
            await asyncio.sleep(0.001)
    kill(server)
    shutil.rmtree(files)
    forgotten.rename(files)
    restart(server)
    await back(log)
    await until(lambda: states[-1] and states.count(True) == 2)
    await log.append(b"s", [b"r", b"after"])
    await until(lambda: got[-1] == b"after")

    assert got == [*written, b"after"], "nothing is delivered again"
    async with asyncio.timeout(PATIENCE_S):
        while len(left := await log.range(b"s")) > 1:
            await asyncio.sleep(0.001)
    assert [entry.id for entry in left] == [old]
    await reader.close()


async def test_outstanding_calls_end_when_the_server_dies_and_new_ones_fail_at_once(
    server: PrivateServer, log: RedisLog
) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    calls = [asyncio.ensure_future(log.append(b"s", [b"r", b"%d" % n])) for n in range(50)]
    calls.append(asyncio.ensure_future(log.settle("m", [(b"a", 0)], None, [Reply(b"r", [b"r", b"x"])])))
    done, _ = await asyncio.wait(calls, timeout=0.05)
    assert not done
    kill(server)

    outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), PATIENCE_S)
    assert {type(outcome) for outcome in outcomes} == {LogUnavailable}
    assert all("unknown" in str(outcome) for outcome in outcomes)
    with pytest.raises(LogUnavailable, match="cannot be reached"):
        await log.append(b"s", [b"r", b"x"])


async def test_accepted_work_survives_the_server(server: PrivateServer, log: RedisLog) -> None:
    await log.accept("m", 0, 0, [(b"a", 10), (b"b", 20)], [b"r", b"A", b"r", b"B"], Limits())
    token = await log.take_ownership("m", "me", "")
    # a disk that is slow to sync holds up what goes into the file, for two seconds at most, and answers go on
    while b"aof_buffer_length:0\r" not in await admin(server, "INFO", "persistence"):
        await asyncio.sleep(0.01)
    kill(server)
    restart(server)
    await back(log)

    assert await log.pending("m") == (2, 30)
    assert await log.begin_attempt("m", token, [b"a"], 1) == [True]
    assert await log.settle("m", [(b"a", 1), (b"b", 0)], (b"s", {"n": 1}), []) == [True, True]
    assert await log.statistics(b"s") == {"n": 1}


async def test_scripts_come_back_after_a_script_flush(server: PrivateServer, log: RedisLog) -> None:
    await log.accept("m", 0, 0, [(b"a", 1), (b"b", 1), (b"c", 1)], [b"r", b"x"], Limits())

    await admin(server, "SCRIPT", "FLUSH")
    assert await log.settle("m", [(b"a", 0)], (b"s", {"n": 1}), []) == [True]
    await admin(server, "SCRIPT", "FLUSH")
    assert await log.settle("m", [(b"b", 0)], (b"s", {"n": 1}), [Reply(b"r:1", [b"r", b"x"])]) == [True]
    await admin(server, "SCRIPT", "FLUSH")
    outcomes = await asyncio.gather(
        *[log.accept("m", 0, 0, [(b"%d" % n, 1)], [b"r", b"x"], Limits(requests=11)) for n in range(20)],
        return_exceptions=True,
    )

    assert outcomes.count(None) == 10
    assert await log.pending("m") == (11, 11)
    assert await log.statistics(b"s") == {"n": 2}
    assert len(await log.range(b"r:1")) == 1


async def test_a_reader_follows_on_when_only_its_own_connection_is_lost(server: PrivateServer, log: RedisLog) -> None:
    got: list[bytes] = []
    reader = log.reader()
    reader.start(lambda _, entries: got.extend(bytes(entry.fields[1]) for entry in entries))
    reader.add(b"s")
    for number in range(30):
        await log.append(b"s", [b"r", b"%d" % number])
        if number % 3 == 0:
            await until(lambda number=number: len(got) == number + 1)
            # all normal connections: the reader's blocked one and the commands' own
            await admin(server, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await back(log)
        if number % 3 == 1:
            reader.add(b"more-%d" % number)

    await until(lambda: len(got) == 30)
    assert got == [b"%d" % number for number in range(30)]
    await reader.close()


class Gate:
    """A socket before the server's that can hold back what its clients send."""

    def __init__(self, server: PrivateServer) -> None:
        self.path = server.state_dir / "gate.sock"
        self.held: list[bytes] = []
        self.holds = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        self._behind = server.url.removeprefix("unix://")

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def serve(self) -> asyncio.Server:
        return await asyncio.start_unix_server(self._pass_on, self.path)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, to_server = await asyncio.open_unix_connection(self._behind)
        answers = asyncio.ensure_future(self._copy(behind, writer))
        await self._copy(reader, to_server, gated=True)
        await answers

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, gated: bool = False) -> None:
        while data := await source.read(65536):
            if gated and not self._open.is_set():
                self.held.append(data)
                self.holds.set()
                await self._open.wait()
            target.write(data)
        target.close()
        await target.wait_closed()


async def test_a_stream_added_before_the_read_has_reached_the_server_is_followed(server: PrivateServer) -> None:
    """The command that ends a blocked read overtakes the read itself: it finds nothing to end and must be repeated."""
    gate = Gate(server)
    front = await gate.serve()
    commands = Connection(parse_address(server.url), name="test")
    await commands.open()
    got: list[bytes] = []
    up = asyncio.Event()
    reader = RedisReader(parse_address(f"unix://{gate.path}"), commands)
    reader.start(lambda stream, _: got.append(stream), lambda _: up.set())
    await asyncio.wait_for(up.wait(), PATIENCE_S)

    gate.shut()
    reader.add(b"first")
    await asyncio.wait_for(gate.holds.wait(), PATIENCE_S)
    assert b"XREAD" in gate.held[0]
    await commands.execute("XADD", "second", "*", "r", "x")
    reader.add(b"second")
    await until(lambda: reader._unblocking > 0)  # it is on its way ...
    await commands.execute("PING")  # ... and answered: nothing was blocked
    gate.open()

    await until(lambda: got == [b"second"])
    await reader.close()
    await commands.close()
    front.close()
    await front.wait_closed()


async def test_a_stream_that_cannot_be_read_is_tried_again_until_it_can(server: PrivateServer, log: RedisLog) -> None:
    got: list[bytes] = []
    states: list[bool] = []
    await admin(server, "SET", "s", "no stream")
    reader = log.reader()
    reader.start(lambda _, entries: got.extend(bytes(entry.fields[1]) for entry in entries), states.append)
    reader.add(b"s")
    await until(lambda: False in states)
    await log.delete_keys([b"s"])
    await log.append(b"s", [b"r", b"x"])

    await until(lambda: got == [b"x"])
    await reader.close()


async def test_a_settlement_without_waiting_makes_up_for_a_forgotten_script(
    server: PrivateServer, log: RedisLog
) -> None:
    await log.accept("m", 0, 0, [(b"a", 1)], [b"r", b"a"], Limits())
    await admin(server, "SCRIPT", "FLUSH")
    outcome: asyncio.Future[list[bool] | CharoniaError] = asyncio.get_running_loop().create_future()

    assert log.settle_now("m", [(b"a", 0)], None, [Reply(b"r:g", [b"r", b"x"])], [], outcome.set_result)

    assert await asyncio.wait_for(outcome, PATIENCE_S) == [True]
    assert [bytes(entry.fields[1]) for entry in await log.range(b"r:g")] == [b"x"]
    assert await log.pending("m") == (0, 0)


async def test_a_settlement_without_waiting_tells_of_a_lost_server(server: PrivateServer, log: RedisLog) -> None:
    await log.accept("m", 0, 0, [(b"a", 1)], [b"r", b"a"], Limits())
    os.kill(server.pid, signal.SIGSTOP)
    outcome: asyncio.Future[list[bool] | CharoniaError] = asyncio.get_running_loop().create_future()

    assert log.settle_now("m", [(b"a", 0)], None, [], [Reply(b"f", [b"e", b"x"])], outcome.set_result)
    kill(server)

    assert isinstance(await asyncio.wait_for(outcome, PATIENCE_S), LogUnavailable)
    assert not log.settle_now("m", [(b"a", 0)], None, [], [], outcome.set_result)


async def test_what_was_consumed_while_commands_could_not_be_sent_is_deleted_all_the_same(
    server: PrivateServer, log: RedisLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader's connection lives, and nothing more comes that would make it look again."""
    seen: list[Entry] = []

    def lose_commands(_stream: bytes, entries: list[Entry]) -> None:
        seen.extend(entries)
        log._connection.drop()

    reader = log.reader()
    reader.start(lose_commands)
    reader.add(b"r:1", consume=True)
    monkeypatch.setattr("charonia.eventlog.redis.server.hot_connection.random.uniform", lambda *_: 0.1)  # to come back
    await admin(server, "XADD", "r:1", "*", "r", "x")
    await until(lambda: len(seen) == 1)
    async with asyncio.timeout(PATIENCE_S):
        while await admin(server, "XLEN", "r:1"):
            await asyncio.sleep(0.01)
    await reader.close()
