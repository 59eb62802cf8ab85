"""A request's responses between the server's loop and the threads that read them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from charonia.errors import CharoniaError, InvalidArgument, Unavailable
from charonia.inference import InferenceRequest, InferenceResponse
from charonia.inprocess.host import Exchange

REQUEST = InferenceRequest("m", -1, [])


class Service:
    """Answers so many times, or with an error before or after the first suspension."""

    def __init__(self, count: int = 1, refusal: CharoniaError | None = None, late: CharoniaError | None = None) -> None:
        self.given = 0
        self.closed = False
        self._count, self._refusal, self._late = count, refusal, late

    async def stream(self, request: InferenceRequest) -> AsyncGenerator[InferenceResponse]:
        try:
            if self._refusal is not None:
                raise self._refusal
            await asyncio.sleep(0)
            if self._late is not None:
                raise self._late
            for number in range(self._count):
                self.given += 1
                yield InferenceResponse("m", 1, [], str(number), final=number == self._count - 1)
        finally:
            self.closed = True


def exchange(also: Any = None) -> Exchange[InferenceResponse]:
    return Exchange(lambda response: response, also, InferenceResponse("m", -1, []))


def begin(one: Exchange[InferenceResponse], service: Any, *, is_over: bool = False) -> asyncio.Task[None]:
    one.task = asyncio.get_running_loop().create_task(one.run(service, REQUEST, lambda: is_over))
    return one.task


async def steps() -> None:
    """Let everything run that can."""
    for _ in range(200):
        await asyncio.sleep(0)


async def test_what_is_refused_at_once_is_no_response() -> None:
    one, refusal = exchange(), InvalidArgument("no")
    task = begin(one, Service(refusal=refusal))
    await asyncio.sleep(0)  # its first step
    assert one.sent() is refusal
    await task
    assert not one.next().done()


async def test_what_fails_later_is_the_last_response() -> None:
    one = exchange()
    task = begin(one, Service(late=Unavailable("late")))
    await asyncio.sleep(0)
    assert one.sent() is None
    await task
    response = one.next().result(0)
    assert (str(response.error), response.final) == ("late", True)


@pytest.mark.parametrize(("is_over", "text"), [(False, "request was cancelled"), (True, "Server exiting")])
async def test_a_cancelled_request_has_a_last_response(is_over: bool, text: str) -> None:
    one, service = exchange(), Service(1000)
    task = begin(one, service, is_over=is_over)
    await steps()
    one.cancel()
    await task
    assert service.closed
    responses = [one.next().result(0) for _ in range(service.given + 1)]
    assert [str(response.error) for response in responses if response.final] == [text]
    one.cancel()


async def test_a_stream_waits_for_its_reader() -> None:
    one, service = exchange(), Service(1000)
    task = begin(one, service)
    await steps()
    assert service.given == 64
    assert one.next().result(0).id == "0"
    await steps()
    assert service.given == 65
    read = [one.next() for _ in range(999)]  # readers may be ahead, too
    await task
    assert [future.result(0).id for future in read] == [str(number) for number in range(1, 1000)]


async def test_it_does_not_wait_for_one_that_is_gone_or_has_a_queue() -> None:
    one, service = exchange(), Service(1000)
    task = begin(one, service)
    await steps()
    one.abandon()
    await task
    assert service.given == 1000
    seen: list[InferenceResponse] = []
    one = exchange(seen.append)
    await begin(one, Service(1000))
    assert len(seen) == 1000
    assert [one.next().result(0) for _ in range(1000)] == seen


async def test_a_queue_that_takes_nothing_does_not_stop_the_responses() -> None:
    def full(_response: InferenceResponse) -> None:
        raise RuntimeError("full")

    one = exchange(full)
    await begin(one, Service(3))
    assert [one.next().result(0).id for _ in range(3)] == ["0", "1", "2"]


async def test_a_reader_that_gave_up_leaves_its_response_to_the_next() -> None:
    one = exchange()
    gave_up = one.next()
    one.give_back(gave_up)
    await begin(one, Service(2))
    got = one.next()
    one.give_back(got)  # it had come already
    assert [one.next().result(0).id for _ in range(2)] == ["0", "1"]


async def test_readers_are_threads() -> None:
    one, service, read = exchange(), Service(500), list[str]()

    def reads() -> None:
        for _ in range(500):
            read.append(one.next().result(60).id)

    reader = threading.Thread(target=reads)
    reader.start()
    await begin(one, service)
    await asyncio.to_thread(reader.join, 60)
    assert read == [str(number) for number in range(500)]
