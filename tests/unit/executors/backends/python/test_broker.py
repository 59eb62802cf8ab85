"""Which EXECUTE a call of a model belongs to."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from executors.backends.python.broker import Broker
from executors.backends.python.frames import Kind


class Wire:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def deliver_answers_to(self, *_: object) -> None: ...

    def receive_in_background(self) -> None: ...

    def send(self, kind: Kind, call: int, content: Any, data: object = ()) -> None:
        self.sent.append(content)


def test_a_coroutine_calls_for_its_own_execute_and_a_thread_for_the_last() -> None:
    wire = Wire()
    broker = Broker(wire)  # type: ignore[arg-type]
    loop = asyncio.new_event_loop()
    running = threading.Thread(target=loop.run_forever)
    running.start()
    begun, go = threading.Event(), asyncio.Event()

    async def model() -> None:
        begun.set()
        await go.wait()
        broker.call(["coroutine"], (), lambda _: None)

    broker.begin(1)
    first = asyncio.run_coroutine_threadsafe(model(), loop)
    assert begun.wait(30)
    broker.begin(2)
    broker.call(["execute"], (), lambda _: None)
    thread = threading.Thread(target=broker.call, args=(["thread"], (), lambda _: None))
    thread.start()
    thread.join(30)
    loop.call_soon_threadsafe(go.set)
    first.result(30)
    loop.call_soon_threadsafe(loop.stop)
    running.join(30)
    loop.close()
    assert wire.sent == [[2, True, "execute"], [2, True, "thread"], [1, True, "coroutine"]]
