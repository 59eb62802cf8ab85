"""Streams of a resumable model while processes are killed and stalled: each token once, and the same.

Real processes over a real log; the test plays the gateway but where it kills one.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import resumable_backend as chain
import role_processes as roles
from gateway_side import GatewaySide

from charonia.calls.request_endings import end_requests
from charonia.calls.waiters import Visible
from charonia.errors import StreamInterrupted
from charonia.facts.jobs import JobState
from charonia.tensors import Tensor
from charonia.wire import (
    ResponseRecord,
    unpack_response,
)

pytestmark = pytest.mark.integration

PATIENCE_S = 60.0
STREAMS = 16
KILLS = int(os.environ.get("CHARONIA_TEST_KILLS", "12"))
CANCELS = int(os.environ.get("CHARONIA_TEST_CANCELS", "40"))
STEP_MS = 5 * max(1, KILLS // 12)
"""Each executor repeats all tokens so far: more kills take more time, not more tokens."""
ENDLESS = 1_000_000


class Stream:
    """What the reader of one request sees: each token once, in order."""

    def __init__(self, seed: int, count: int) -> None:
        self.seed, self.count = seed, count
        self.tokens: list[int] = []
        self.processes: list[int] = []
        self.attempts: set[int] = set()
        self.sent = 0
        """How many responses came, repeated ones among them."""
        self.ended = False
        self.error: Exception | None = None
        self._visible = Visible(repeatable=True)

    def take(self, response: ResponseRecord) -> None:
        self.ended |= response.final
        self.error = response.error or self.error
        if response.place is None:
            return
        self.sent += 1
        self.attempts.add(response.place[0])
        try:
            admitted = self._visible.admits(response.place, final=response.final)
        except StreamInterrupted as error:
            self.error = error
            return
        if admitted and response.outputs:
            token, process, _ = chain.value(response)
            self.tokens.append(token)
            self.processes.append(process)

    @property
    def is_whole(self) -> bool:
        return self.ended and self.error is None and self.tokens == chain.tokens_of(self.seed, self.count)


class Stack(GatewaySide):
    """Reads the stream of each request."""

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self.streams: dict[bytes, Stream] = {}

    def take(self, response: ResponseRecord) -> None:
        self.streams[response.id].take(response)

    async def ask(self, model: str, count: int, *, job: bool = False, **said: Any) -> bytes:
        seed = len(self.streams) + 1
        request_id = seed.to_bytes(16, "big")
        self.streams[request_id] = Stream(seed, count)
        parameters = {"seed": seed, "gate": str(self.gate), **said}
        await self.send(model, request_id, [Tensor.of("N", np.array([count], np.int32))], parameters, job=job)
        return request_id

    async def ended(self, request_id: bytes) -> Stream:
        stream = self.streams[request_id]
        await self.until(lambda: stream.ended)
        return stream


CHECKED = """
parameters { key: "charonia.isolation" value { string_value: "process" } }
parameters { key: "charonia.health_interval_s" value { string_value: "0.01" } }
parameters { key: "check_ms" value { string_value: "2500" } }
parameters { key: "checking" value { string_value: "CHECKING" } }
"""
"""A check is under way nearly always; the file CHECKING is made when one begins."""


@pytest.fixture
async def stack(fresh_log_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stack]:
    plugin = chain.install(tmp_path / "plugin")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(plugin), os.environ.get("PYTHONPATH", "")]))
    for name, more in (
        ("chain", ""),
        ("apart", 'parameters { key: "charonia.isolation" value { string_value: "process" } }'),
        ("checked", CHECKED.replace("CHECKING", str(tmp_path / "checking"))),
    ):
        chain.write_model(tmp_path / "models", name, chain.RESUMABLE + more, STEP_MS)
    async with Stack.over(fresh_log_url, tmp_path, tmp_path / "models") as stack:
        yield stack


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.long
async def test_executors_are_killed_again_and_again(stack: Stack) -> None:
    _, executor = await asyncio.gather(stack.start("batcher"), stack.start("executor"))
    until = stack.directory / "until"
    ids = [await stack.ask("chain", ENDLESS, job=number % 4 == 0, until=str(until)) for number in range(STREAMS)]
    streams = [stack.streams[one] for one in ids]
    for _ in range(KILLS):
        seen = [len(stream.tokens) for stream in streams]
        await stack.until(lambda seen=seen: all(len(s.tokens) > n for s, n in zip(streams, seen, strict=True)))
        executor.kill()
        executor = await stack.start("executor")
    until.touch()
    for one in ids:
        stream = await stack.ended(one)
        assert stream.error is None, stream.error
        assert stream.tokens == chain.tokens_of(stream.seed, len(stream.tokens)), "none lost, none twice, all the same"
        assert len(stream.attempts) > KILLS, "more when a loaded machine lets an executor be presumed dead"
        assert len(stream.processes) == len(stream.tokens) >= KILLS
    for one in ids[::4]:
        kept = await stack.log.job_responses("chain", one, count=ENDLESS)
        assert [chain.value(unpack_response(r))[0] for _, _, r in kept] == stack.streams[one].tokens
        record = await stack.log.job("chain", one)
        assert record is not None
        assert record.state is JobState.SUCCEEDED
    await stack.left_nothing("chain", [*stack.streams])


@pytest.mark.parametrize("model", ["chain", "apart"])
@pytest.mark.long
async def test_executors_are_replaced_one_by_one(stack: Stack, model: str) -> None:
    """What outlasts the drain of one goes on at the other, and is not suspected."""
    brief = "--exit-timeout-secs=1"
    _, *serving = await asyncio.gather(
        stack.start("batcher"), stack.start("executor", brief), stack.start("executor", brief)
    )
    until = stack.directory / "until"
    ids = [await stack.ask(model, ENDLESS, until=str(until)) for _ in range(STREAMS)]
    streams = [stack.streams[one] for one in ids]
    for old in serving:
        seen = [len(stream.tokens) for stream in streams]
        await stack.until(lambda seen=seen: all(len(s.tokens) > n for s, n in zip(streams, seen, strict=True)))
        await stack.start("executor", brief)
        old.process.terminate()
        await asyncio.to_thread(old.process.wait)
    seen = [len(stream.tokens) for stream in streams]
    await stack.until(lambda: all(len(s.tokens) > n for s, n in zip(streams, seen, strict=True)))
    until.touch()
    for one in ids:
        stream = await stack.ended(one)
        assert stream.error is None, stream.error
        assert stream.tokens == chain.tokens_of(stream.seed, len(stream.tokens)), "none lost, none twice, all the same"
        assert len(stream.attempts) > 1
    await stack.left_nothing(model, [*stack.streams])


@pytest.mark.parametrize("model", ["chain", "apart"])
async def test_a_stalled_executor_is_refused_when_it_goes_on(stack: Stack, model: str) -> None:
    _, old = await asyncio.gather(stack.start("batcher"), stack.start("executor"))
    until = stack.directory / "until"
    one = await stack.ask(model, ENDLESS, until=str(until))
    stream = stack.streams[one]
    await stack.until(lambda: len(stream.tokens) >= 3)
    stalled = [old.process.pid, *_children(old.process.pid)]
    for pid in stalled:
        os.kill(pid, signal.SIGSTOP)
    await stack.start("executor")
    await stack.until(lambda: len(stream.attempts) >= 2 and stream.processes[-1] != stream.processes[0])
    repeated = stream.sent
    for pid in reversed(stalled):
        os.kill(pid, signal.SIGCONT)
    # what it has at hand now comes too late; the other one goes on
    seen = len(stream.tokens)
    await stack.until(lambda: len(stream.tokens) >= seen + 50)
    until.touch()
    await stack.ended(one)
    assert stream.error is None
    assert stream.tokens == chain.tokens_of(stream.seed, len(stream.tokens))
    first = stream.processes[0]
    last = max(place for place, process in enumerate(stream.processes) if process == first)
    assert set(stream.processes[: last + 1]) == {first}, "the lost run gave nothing after the next had begun"
    assert stream.sent - repeated <= len(stream.tokens) - seen + 2 + STREAMS
    dropped = "1 requests run elsewhere by now, or have ended: their responses are dropped"
    await asyncio.to_thread(roles.until, "the late responses are dropped", lambda: dropped in old.log())
    await stack.left_nothing(model, [*stack.streams])


async def test_a_request_that_ends_executors_ends_alone(stack: Stack) -> None:
    """It gives no new token before each death; the others do, and are not suspected with it."""
    _, executor = await asyncio.gather(stack.start("batcher"), stack.start("executor"))
    until = stack.directory / "until"
    others = [await stack.ask("chain", ENDLESS, until=str(until)) for _ in range(4)]
    await stack.until(lambda: all(len(stack.streams[one].tokens) > 1 for one in others))
    deadly = await stack.ask("chain", 10, deadly=2)
    end = stack.streams[deadly]
    deaths = 0
    while not end.ended:
        dying = asyncio.create_task(asyncio.to_thread(executor.process.wait))
        ending = asyncio.create_task(stack.ended(deadly))
        await asyncio.wait({dying, ending}, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if dying.done():
            deaths += 1
            executor = await stack.start("executor", waits=False)
        else:
            executor.kill()
        await dying
        until.touch()  # what is suspected runs when nothing else does
    assert 3 <= deaths <= 5
    assert "alone" in str(end.error)
    assert end.tokens == chain.tokens_of(end.seed, 2)
    await stack.start("executor")
    for one in others:
        stream = await stack.ended(one)
        assert stream.error is None, stream.error
        assert stream.tokens == chain.tokens_of(stream.seed, len(stream.tokens))
    await stack.left_nothing("chain", [*stack.streams])


async def test_a_silent_neighbour_is_run_again_when_a_health_check_finds_the_death(stack: Stack) -> None:
    """The stream is spared as it had new responses; its neighbour did not run alone, so it is not condemned."""
    _, executor = await asyncio.gather(stack.start("batcher"), stack.start("executor"))
    until, begun = stack.directory / "until", stack.directory / "begun"
    one = await stack.ask("checked", ENDLESS, until=str(until))
    stream = stack.streams[one]
    await stack.until(lambda: len(stream.tokens) >= 3)
    silent = await stack.ask("checked", 5, hold=0, begun=str(begun))
    async with asyncio.timeout(PATIENCE_S):
        while not begun.exists():
            await asyncio.sleep(0.01)
    # a check that has just begun is the first to find the process dead
    checking = stack.directory / "checking"
    checking.unlink()
    async with asyncio.timeout(PATIENCE_S):
        while not checking.exists():
            await asyncio.sleep(0.01)
    os.kill(stream.processes[-1], signal.SIGKILL)
    stack.gate.touch()
    await stack.until(lambda: stream.processes[-1] != stream.processes[0])
    until.touch()  # what is suspected runs when nothing else does
    assert (await stack.ended(silent)).is_whole, stack.streams[silent].error
    await stack.ended(one)
    assert stream.error is None
    assert "was found dead by its health check" in executor.log()
    await stack.left_nothing("checked", [*stack.streams])


async def test_a_replay_that_disagrees_ends_the_stream(stack: Stack) -> None:
    _, executor = await asyncio.gather(stack.start("batcher"), stack.start("executor"))
    ids = [await stack.ask("chain", ENDLESS, stray=True, job=job) for job in (False, True)]
    await stack.until(lambda: all(len(stack.streams[one].tokens) > 1 for one in ids))
    executor.kill()
    await stack.start("executor")
    for one in ids:
        stream = await stack.ended(one)
        assert str(stream.error).startswith("STREAM_INTERRUPTED: ")
        assert stream.tokens == chain.tokens_of(stream.seed, len(stream.tokens)), "nothing of the other run was seen"
    record = await stack.log.job("chain", ids[1])
    assert record is not None
    assert record.state is JobState.FAILED
    await stack.left_nothing("chain", [*stack.streams])


async def test_everybody_dies_at_once(stack: Stack) -> None:
    until = stack.directory / "until"
    batcher, executor = await asyncio.gather(stack.start("batcher"), stack.start("executor"))
    ids = [await stack.ask("chain", ENDLESS, until=str(until), job=job) for job in (False, True) * 2]
    for _ in range(3):
        seen = [len(stack.streams[one].tokens) for one in ids]
        await stack.until(
            lambda seen=seen: all(len(stack.streams[one].tokens) > n for one, n in zip(ids, seen, strict=True))
        )
        batcher.kill()
        executor.kill()
        batcher, executor = await asyncio.gather(stack.start("batcher"), stack.start("executor"))
    until.touch()
    for one in ids:
        stream = await stack.ended(one)
        assert stream.error is None, stream.error
        assert stream.tokens == chain.tokens_of(stream.seed, len(stream.tokens))
    await stack.left_nothing("chain", [*stack.streams])


async def test_cancelled_requests_leave_nothing(stack: Stack) -> None:
    await asyncio.gather(stack.start("batcher"), stack.start("executor"))
    ids = [await stack.ask("chain", ENDLESS) for _ in range(CANCELS)]
    for number, one in enumerate(ids):
        stream = stack.streams[one]
        await stack.until(lambda stream=stream, number=number: len(stream.tokens) > number % 3)
        (won,) = await end_requests(stack.log, "chain", [one], JobState.CANCELLED)
        assert won
    await stack.left_nothing("chain", [*stack.streams])
    # nor does the executor go on with them
    whole = await stack.ask("chain", 5)
    assert (await stack.ended(whole)).is_whole
    sent = [stack.streams[one].sent for one in ids]
    again = await stack.ask("chain", 20)
    assert (await stack.ended(again)).is_whole
    assert [stack.streams[one].sent for one in ids] == sent


async def test_a_job_is_read_on_at_another_gateway(stack: Stack) -> None:
    until = stack.directory / "until"
    _, executor, first, second = await asyncio.gather(
        stack.start("batcher"), stack.start("executor"), stack.start("gateway"), stack.start("gateway")
    )
    for gateway in (first, second):
        await asyncio.to_thread(gateway.until_serves, "chain")
    body = {"inputs": [{"name": "N", "shape": [1], "datatype": "INT32", "data": [ENDLESS]}]}
    body["parameters"] = {"seed": 77, "until": str(until)}  # type: ignore[assignment]
    path = "/v2/models/chain/infer"
    status, view = await asyncio.to_thread(first.ask, "POST", path, json.dumps(body).encode(), Prefer="respond-async")
    assert status == 202, view

    tokens: list[int] = []
    last = await asyncio.to_thread(_read_events, first, view["id"], "", 20, tokens)
    first.kill()
    executor.kill()
    starting = asyncio.create_task(stack.start("executor"))
    last = await asyncio.to_thread(_read_events, second, view["id"], last, 20, tokens)
    await starting
    last = await asyncio.to_thread(_read_events, second, view["id"], last, 20, tokens)
    until.touch()
    await asyncio.to_thread(_read_events, second, view["id"], last, ENDLESS, tokens)
    assert len(tokens) >= 60
    assert tokens == chain.tokens_of(77, len(tokens))
    await stack.left_nothing("chain", [*stack.streams])


def _read_events(gateway: Any, job: str, last: str, count: int, tokens: list[int]) -> str:
    """Read so many tokens of a job's events, or to its end, as a reader that comes back; returns where it was."""
    connection = http.client.HTTPConnection(gateway.http, timeout=PATIENCE_S)
    try:
        connection.request("GET", f"/v2/jobs/{job}/events", headers={"Last-Event-ID": last} if last else {})
        answer = connection.getresponse()
        assert answer.status == 200
        event, wanted = "", len(tokens) + count
        while len(tokens) < wanted:
            read = answer.readline()
            assert read, "the events ended without an end of the job"
            line = read.decode().rstrip("\n")
            name, _, said = line.partition(": ")
            if name == "id":
                last = said
            elif name == "event":
                event = said
                if said in ("succeeded", "failed", "cancelled"):
                    assert said == "succeeded"
                    return last
            elif name == "data" and event == "response":
                response = json.loads(said).get("response")
                if response is not None and response.get("outputs"):
                    tokens.append(response["outputs"][0]["data"][0])
        return last
    finally:
        connection.close()
