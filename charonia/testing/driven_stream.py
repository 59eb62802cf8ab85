"""Drives a `StreamingInstance` as the executor does, for `backend_contract`: what it sent, and in what order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from charonia.backend import InstanceDied, ModelRequest, ModelResponse, StreamingInstance
from charonia.errors import InternalError


class KeptResponses:
    """A `ResponseStream` that keeps all it gets: `responses[i]` are those of request `i`."""

    def __init__(self, count: int) -> None:
        self.responses: list[list[ModelResponse]] = [[] for _ in range(count)]
        self.ended = [False] * count
        self.freed = asyncio.Event()
        self.broken: str = ""

    def send(self, index: int, response: ModelResponse | None, *, final: bool) -> None:
        if self.ended[index]:
            self.broken = f"the instance sent to request {index + 1} after its final response"
            raise InternalError("a response came after the final one of its request")
        if response is None and not final:
            self.broken = "the instance sent neither a response nor a final flag"
            raise ValueError("neither a response nor a final flag")
        if response is not None:
            self.responses[index].append(response)
        self.ended[index] = final

    @property
    def full(self) -> bool:
        return False

    @property
    def blocked(self) -> bool:
        return False

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def free(self) -> None:
        self.freed.set()


async def stream(instance: StreamingInstance, requests: Sequence[ModelRequest]) -> list[list[ModelResponse]]:
    """The responses to each request, in their order. Raises `AssertionError` for an instance that breaks the rules.

    A call that fails gives each request without a final response that failure, as the executor does.
    """
    kept = KeptResponses(len(requests))
    failure: Exception | None = None
    try:
        await instance.execute_stream(requests, kept)
    except InstanceDied as death:
        raise AssertionError(f"the instance died: {death} {death.stderr}".rstrip()) from death
    except Exception as error:
        failure = error
    if kept.broken:
        raise AssertionError(kept.broken)
    for index, ended in enumerate(kept.ended):
        if ended:
            continue
        if failure is None:
            raise AssertionError(f"execute_stream returned before the final response of request {index + 1}")
        told = InternalError(f"{type(failure).__name__}: {failure}")
        kept.responses[index].append(ModelResponse(error=told))
    return kept.responses
