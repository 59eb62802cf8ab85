"""Drives lanes over HTTP/1.1 with the binary-tensor extension: one keep-alive connection per lane, one event loop.

Requests are bytes made beforehand and answers are read by `http1`; no HTTP library stands between, because the
generator must cost less than the server it measures.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, cast
from urllib.parse import quote

from charonia.analyzer.http1_lane import AnswerReader, Head, ProtocolError

from .closed_loop import RECONNECT_DELAY_S, Gate, Plan, Recorder
from .measurement import Tally
from .model import ELEMENT_SIZES, LoadTestError, Model
from .payloads import Bodies

_HEADS_KEPT = 1024


class HttpRequests:
    """Whole request messages, one after the other, each with the tensor bytes it carries."""

    def __init__(
        self, model: Model, bodies: Bodies, host: str, port: int, headers: Sequence[tuple[str, str]] = ()
    ) -> None:
        sizes = [len(content) for content in bodies.pool[0]]
        header = json.dumps(
            {
                "inputs": [
                    {
                        "name": spec.name,
                        "datatype": spec.datatype,
                        "shape": list(spec.shape),
                        "parameters": {"binary_data_size": size},
                    }
                    for spec, size in zip(model.inputs, sizes, strict=True)
                ],
                "parameters": {"binary_data_output": True},
            },
            separators=(",", ":"),
        ).encode()
        version = f"/versions/{model.version}" if model.version else ""
        authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        lines = [
            f"POST /v2/models/{quote(model.name, safe='')}{version}/infer HTTP/1.1",
            f"Host: {authority}",
            "Content-Type: application/octet-stream",
            f"Inference-Header-Content-Length: {len(header)}",
            f"Content-Length: {len(header) + sum(sizes)}",
            *(f"{name}: {value}" for name, value in headers),
        ]
        self._prefix = "\r\n".join([*lines, "", ""]).encode("latin-1") + header
        self._tensors = [b"".join(body) for body in bodies.pool]
        self._serial = bodies.serial

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        prefix, tensors, count = self._prefix, self._tensors, len(self._tensors)
        number = 0
        if self._serial is None:
            messages = [(prefix + tensor, tensor) for tensor in tensors]
            while True:
                yield messages[number % count]
                number += 1
        pack, modulus = self._serial.format.pack, self._serial.modulus
        rests = [tensor[self._serial.size_bytes :] for tensor in tensors]
        while True:
            tensor = pack(number % modulus) + rests[number % count]
            yield prefix + tensor, tensor
            number += 1


class HttpAnswers:
    """Checks answers: status, declared sizes against the body's length and, if asked, the bytes themselves."""

    def __init__(self, outputs: Sequence[str]) -> None:
        self._outputs = set(outputs)
        self._known: dict[bytes, int | str] = {}

    def fault(self, head: Head, body: bytes, expected: bytes | None) -> str | None:
        """What is wrong with an answer, None when nothing is. `expected` is the concatenation of all outputs."""
        if head.status != 200:
            return f"HTTP {head.status}: {_error_text(body)}"
        json_length = head.json_length
        if json_length is None:
            return "answer without Inference-Header-Content-Length"
        part = body[:json_length]
        total = self._known.get(part)
        if total is None:
            if len(self._known) >= _HEADS_KEPT:
                self._known.clear()
            total = self._known[part] = self._declared_bytes(part)
        if isinstance(total, str):
            return total
        if len(body) - json_length != total:
            return f"answer holds {len(body) - json_length} tensor bytes, declares {total}"
        if expected is not None and (len(expected) != total or not body.endswith(expected)):
            return "output bytes differ from the bytes of the request"
        return None

    def _declared_bytes(self, part: bytes) -> int | str:
        """Tensor bytes that the JSON part announces, or what is wrong with it."""
        try:
            outputs = json.loads(part)["outputs"]
            total = 0
            for output in outputs:
                size = int(output["parameters"]["binary_data_size"])
                element = ELEMENT_SIZES.get(output["datatype"])
                if element is not None and size != math.prod(output["shape"]) * element:
                    return f"output '{output['name']}' has {size} bytes for shape {output['shape']}"
                total += size
            if {output["name"] for output in outputs} != self._outputs:
                return f"outputs {sorted(output['name'] for output in outputs)} are not the model's"
        except (ValueError, KeyError, TypeError) as error:
            return f"bad JSON part of an answer: {error!r}"
        return total


def _error_text(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


class _Lane(asyncio.Protocol):
    """One connection with at most one request in flight."""

    def __init__(self, driver: HttpDriver) -> None:
        self._driver = driver
        self._reader = AnswerReader()
        self._transport: asyncio.Transport | None = None
        self._expected: bytes | None = None
        self.started_ns = 0
        self.in_flight = False
        self.finished = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by behaviour, not by class
        self._reader = AnswerReader()

    def data_received(self, data: bytes) -> None:
        try:
            answer = self._reader.feed(data)
        except ProtocolError as error:
            self.give_up(f"protocol error: {error}")
            return
        if answer is None:
            return
        now_ns = time.perf_counter_ns()
        if not self.in_flight:
            self.give_up("an answer nobody asked for")
            return
        self.in_flight = False
        driver = self._driver
        fault = driver.answers.fault(answer[0], answer[1], self._expected)
        if fault is None:
            driver.recorder.right(self.started_ns, now_ns)
        else:
            driver.recorder.wrong(fault)
        if answer[0].close:
            self.give_up(None)
        else:
            self.send_next()

    def send_next(self) -> None:
        driver = self._driver
        if self._transport is None:  # closed by the server while idle
            driver.reconnect(self)
            return
        now_ns = time.perf_counter_ns()
        if not driver.recorder.gate.may_send(now_ns):
            self.finish()
            return
        message, tensors = next(driver.messages)
        self._expected = tensors if driver.verify else None
        self.in_flight = True
        self.started_ns = now_ns
        self._transport.write(message)

    def give_up(self, text: str | None) -> None:
        """Counts `text` as an error when a request is lost by it, drops the connection and opens another."""
        if self.in_flight and text is not None:
            self._driver.recorder.wrong(text)
        self.in_flight = False
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        if not self.finished:
            self._driver.reconnect(self)

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is None:
            return
        self._transport = None
        self.give_up(f"connection closed by the server: {error}" if error else "connection closed by the server")

    def close(self) -> None:
        self.finished = True
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    def finish(self) -> None:
        if not self.finished:
            self.finished = True
            self._driver.lane_finished()


class HttpDriver:
    """Runs a plan over HTTP; see `closed_loop.Driver`."""

    def __init__(
        self, host: str, port: int, model: Model, bodies: Bodies, plan: Plan, verify: bool,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:  # fmt: skip
        if plan.connections not in (None, plan.concurrency):
            raise LoadTestError("HTTP/1.1 carries one request per connection: --connections must equal --concurrency")
        self._host, self._port, self._plan = host, port, plan
        self.messages = iter(HttpRequests(model, bodies, host, port, headers))
        self.answers = HttpAnswers(model.outputs)
        self.recorder = Recorder(Gate(plan))
        self.verify = verify
        self._loop = _new_loop()
        self._lanes: list[_Lane] = []
        self._running = 0
        self._done: asyncio.Event | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def connect(self) -> None:
        self._loop.run_until_complete(self._connect_all())

    async def _connect_all(self) -> None:
        for _ in range(self._plan.concurrency):
            lane = _Lane(self)
            try:
                await self._connect(lane)
            except OSError as error:
                raise LoadTestError(f"cannot connect to {self._host}:{self._port}: {error}") from None
            self._lanes.append(lane)

    async def _connect(self, lane: _Lane) -> None:
        transport, _ = await self._loop.create_connection(lambda: lane, self._host, self._port)
        connected = transport.get_extra_info("socket")
        if connected is not None:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run(self, progress: Callable[[int, int], None] | None) -> Tally:
        cpu_ns = time.process_time_ns()
        try:
            self._loop.run_until_complete(self._run(progress))
        except KeyboardInterrupt:
            self.recorder.gate.shut()
        tally = self.recorder.finish()
        tally.cpu_ns = time.process_time_ns() - cpu_ns
        return tally

    async def _run(self, progress: Callable[[int, int], None] | None) -> None:
        self._done = asyncio.Event()
        self._running = len(self._lanes)
        self._spawn(self._watch(progress))
        self.recorder.gate.open(time.perf_counter_ns())
        for lane in self._lanes:
            lane.send_next()
        await self._done.wait()

    def lane_finished(self) -> None:
        self._running -= 1
        if self._running == 0 and self._done is not None:
            self._done.set()

    def reconnect(self, lane: _Lane) -> None:
        if self._done is not None:
            self._spawn(self._reconnect(lane))

    async def _reconnect(self, lane: _Lane) -> None:
        while True:
            try:
                await self._connect(lane)
            except OSError as error:
                # The request that would have left fails here, so it is taken from the number to send.
                if not self.recorder.gate.may_send(time.perf_counter_ns()):
                    lane.finish()
                    return
                self.recorder.wrong(f"cannot connect: {error}")
                await asyncio.sleep(RECONNECT_DELAY_S)
            else:
                lane.send_next()
                return

    async def _watch(self, progress: Callable[[int, int], None] | None) -> None:
        """Once a second: tells the progress and gives up requests that wait longer than the limit."""
        timeout_s = self._plan.timeout_s
        while True:
            await asyncio.sleep(min(1.0, timeout_s))
            now_ns = time.perf_counter_ns()
            for lane in self._lanes:
                if lane.in_flight and now_ns - lane.started_ns > timeout_s * 1e9:
                    lane.give_up(f"no answer within {timeout_s:g} s")
            if progress is not None:
                progress(self.recorder.tally.completed_total, self.recorder.tally.errors.total())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()


def _new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's loop where it is installed: it spends about a third less per message."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
