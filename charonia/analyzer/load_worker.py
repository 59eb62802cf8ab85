"""Worker processes that send the load: what runs in one (`main`), and `Workers`, how `benching` drives them all.

Both sides exchange maps in MessagePack behind four bytes of length, over the worker's standard input and output.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgpack

from charonia.errors import CharoniaError, Unavailable

from .encoded_requests import GrpcRequests, HttpRequests, RequestPlan
from .http1_lane import Destination, Http1Lane
from .http2_lane import LANES_PER_CONNECTION, Http2Connection, Http2Lane
from .load_loop import Lane, LoadLoop, SequencePlan, Sequences
from .send_schedule import SendSchedule, send_times

MAX_LANES = 1024
"""Of one worker in an open loop, which has no other bound; requests beyond them wait, and their latency counts."""

_ENDS_WITHIN_S = 10.0


# -- the process -------------------------------------------------------------------------------------------------------


class _Worker:
    """Carries out the commands of one worker."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        plan = RequestPlan.unpacked(setup["plan"])
        self._number, self._workers, self._seed = setup["number"], setup["workers"], setup["seed"]
        self._lanes = setup["lanes"]
        self._plan = plan
        self._destination = Destination(
            setup["host"], setup["port"], _context(setup["tls"], setup["is_grpc"]), setup["socket"]
        )
        self._connections: list[Http2Connection] = []
        self._made = 0
        steps = [len(stream) for stream in plan.steps]
        sequences = None
        if setup["sequences"] is not None:
            sequences = Sequences(SequencePlan(**setup["sequences"]), steps, self._seed + self._number)
        self._grpc: GrpcRequests | None = GrpcRequests(plan) if setup["is_grpc"] else None
        self._loop = LoadLoop(
            self._grpc or HttpRequests(plan), steps, self._make_lane, sequences, MAX_LANES, self._number
        )

    def _make_lane(self, loop: LoadLoop) -> Lane:
        if self._grpc is None:
            return Http1Lane(self._destination, loop.ended)
        if self._made % LANES_PER_CONNECTION == 0:
            self._connections.append(Http2Connection(self._destination))
        self._made += 1
        return Http2Lane(
            self._connections[-1],
            self._grpc.header_block,
            streaming=self._plan.streaming,
            decoupled=self._plan.decoupled,
            on_end=loop.ended,
            on_response=loop.responded,
        )

    async def obey(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a command; `error` in it is a sentence."""
        try:
            match command["do"]:
                case "closed":
                    await self._loop.start_closed(command["lanes"], command["limit"])
                case "open":
                    kind, rate, intervals = command["schedule"]
                    schedule = SendSchedule(kind, rate, tuple(intervals))
                    times = send_times(schedule, self._number, self._workers, self._seed)
                    await self._loop.start_open(self._lanes, times, command["limit"])
                case "cut":
                    return self._loop.cut()
                case "count":
                    return {"ended": self._loop.ended_requests}
                case "stop":
                    await self._loop.stop()
                case "end":
                    self._loop.close()
        except OSError as error:
            return {"error": f"the server cannot be reached: {error}"}
        return {}


def _context(tls: Mapping[str, Any] | None, is_grpc: bool) -> ssl.SSLContext | None:
    if tls is None:
        return None
    context = ssl.create_default_context(cafile=tls["ca_file"] or None)
    if tls["certificate_file"]:
        context.load_cert_chain(tls["certificate_file"], tls["key_file"] or None)
    context.set_alpn_protocols(["h2"] if is_grpc else ["http/1.1"])
    return context


async def _serve(output: int) -> None:
    reader = asyncio.StreamReader(limit=2**31 - 1)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    worker: _Worker | None = None
    while True:
        try:
            size = int.from_bytes(await reader.readexactly(4), "big")
            command = msgpack.unpackb(await reader.readexactly(size), strict_map_key=False)
        except asyncio.IncompleteReadError:  # the parent is gone
            return
        try:
            if worker is None:
                worker, answer = _Worker(command), {}
                gc.freeze()
                gc.set_threshold(50_000, 50, 50)
            else:
                answer = await worker.obey(command)
        except (OSError, CharoniaError) as error:
            answer = {"error": str(error)}
        _write(output, answer)


def _write(descriptor: int, answer: Mapping[str, Any]) -> None:
    data = msgpack.packb(answer)
    rest = memoryview(len(data).to_bytes(4, "big") + data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def main() -> None:
    """The worker's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it, after it has asked for the last figures
    output = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints stays out of the answers
    try:
        import uvloop
    except ImportError:
        asyncio.run(_serve(output))
        return
    uvloop.run(_serve(output))


# -- the parent --------------------------------------------------------------------------------------------------------


class Workers:
    """The worker processes of a run; a context manager. Raises `Unavailable` when one ends or reaches no server."""

    def __init__(self, setups: Sequence[Mapping[str, Any]]) -> None:
        self._setups = setups
        self._processes: list[subprocess.Popen[bytes]] = []

    def __len__(self) -> int:
        return len(self._setups)

    def __enter__(self) -> Self:
        command = [sys.executable, "-P", "-m", "charonia.analyzer.load_worker"]
        try:
            for _ in self._setups:
                self._processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            self.ask_each(self._setups)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, command: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Every worker's answer to the same command."""
        return self.ask_each([command] * len(self._processes))

    def ask_each(self, commands: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Each worker's answer to its command; they carry them out at the same time."""
        try:
            for process, command in zip(self._processes, commands, strict=True):
                assert process.stdin is not None
                data = msgpack.packb(command)
                process.stdin.write(len(data).to_bytes(4, "big"))
                process.stdin.write(data)
                process.stdin.flush()
        except BrokenPipeError:
            raise Unavailable("a worker process ended") from None
        answers = [self._read(process) for process in self._processes]
        for answer in answers:
            if "error" in answer:
                raise Unavailable(answer["error"])
        return answers

    def _read(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        assert process.stdout is not None
        head = process.stdout.read(4)
        data = process.stdout.read(int.from_bytes(head, "big")) if len(head) == 4 else b""
        if not data:
            raise Unavailable("a worker process ended")
        answer: dict[str, Any] = msgpack.unpackb(data, strict_map_key=False)
        return answer

    def close(self) -> None:
        """Ends the processes: each does when its input is closed."""
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.close()
            except BrokenPipeError:
                pass
        for process in self._processes:
            try:
                process.wait(_ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._processes.clear()


if __name__ == "__main__":
    main()
