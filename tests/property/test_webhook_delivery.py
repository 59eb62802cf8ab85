"""Webhooks over a log that fails at every other step and senders that are cut off: each is told, none for ever."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from example_counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_log.log import MemoryLog

from charonia import keys
from charonia.errors import LogUnavailable
from charonia.eventlog.port import Limits
from charonia.facts.jobs import JobEnd, JobState, NewJob
from gateway.webhooks.addresses import Allowed, Endpoint
from gateway.webhooks.deliveries import delivery_of
from gateway.webhooks.keyring import Keyring
from gateway.webhooks.posting import Answer, Poster
from gateway.webhooks.retries import DeliveryState
from gateway.webhooks.sender import Sender

MODELS = ("m", "n")
FIRST_RETRY_S = 0.002


class FailingLog:
    """A log that is away at some calls: before anything is done, or after it was done and before it is said."""

    def __init__(self, log: MemoryLog, chance: random.Random) -> None:
        self._log = log
        self._chance = chance
        self.rate = 0.3

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._log, name)
        if name == "reader":
            return method

        async def call(*args: Any) -> Any:
            await asyncio.sleep(0)
            if self._chance.random() < self.rate:
                raise LogUnavailable("away before")
            result = await method(*args)
            await asyncio.sleep(0)
            if self._chance.random() < self.rate:
                raise LogUnavailable("away after")
            return result

        return call


class Endpoints(Poster):
    """Answers 500 to some first calls of a message, 204 or 410 after that, and remembers what was said."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(Allowed())
        self._chance = chance
        self.calls: Counter[str] = Counter()
        self.final: Counter[str] = Counter()
        self.bodies: dict[str, set[bytes]] = {}

    async def post(
        self, endpoint: Endpoint, headers: Sequence[tuple[str, str]], body: bytes, tenant: bytes = b""
    ) -> Answer:
        message_id = dict(headers)["webhook-id"]
        self.calls[message_id] += 1
        self.bodies.setdefault(message_id, set()).add(body)
        for _ in range(self._chance.randrange(4)):
            await asyncio.sleep(0)
        if self.calls[message_id] == 1 and self._chance.random() < 0.5:
            return Answer(500)
        self.final[message_id] += 1
        return Answer(410 if endpoint.target == "/gone" else 204)


@given(seed=st.integers(0, 2**32), jobs=st.integers(1, 12), cuts=st.integers(0, 3))
@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_webhook_is_told_whatever_fails(tmp_path: Path, seed: int, jobs: int, cuts: int) -> None:
    asyncio.run(_tell(tmp_path, random.Random(seed), jobs, cuts))


async def _tell(directory: Path, chance: random.Random, jobs: int, cuts: int) -> None:
    (directory / "secret").write_text("whsec_" + "QUJD" * 8)
    memory = MemoryLog()
    log: Any = FailingLog(memory, chance)
    endpoints = Endpoints(chance)

    def start() -> Sender:
        sender = Sender(
            log,
            lambda models: models,
            endpoints,
            Keyring(str(directory / "secret")),
            Allowed(),
            first_retry_s=FIRST_RETRY_S,
        )
        sender.start()
        return sender

    sender = start()
    accepted: list[tuple[str, bytes, str]] = []
    for _ in range(jobs):
        model, job_id, path = chance.choice(MODELS), chance.randbytes(16), chance.choice(("/hook", "/gone"))
        webhook = {"url": f"http://{chance.choice('abc')}.example.org{path}"}
        await memory.accept_job(
            model, 0, 0, NewJob(job_id, 1, 1, 60, about={"webhook": webhook}), [b"r", b""], Limits()
        )
        await memory.settle(model, [(job_id, 0)], None, [], ends={job_id: JobEnd(JobState.FAILED)})
        accepted.append((model, job_id, path))
        await asyncio.sleep(chance.choice((0, FIRST_RETRY_S)))
    for _ in range(cuts):
        await asyncio.sleep(chance.random() * 3 * FIRST_RETRY_S)
        await sender.close(0)
        sender = start()
    with contextlib.suppress(TimeoutError):  # most have been called, or tried to be, while everything fails
        async with asyncio.timeout(50 * FIRST_RETRY_S):
            while sum(endpoints.final.values()) < jobs:
                await asyncio.sleep(FIRST_RETRY_S)
    log.rate = 0.0
    async with asyncio.timeout(60):
        while any([await memory.count_times(keys.webhook_times(model)) for model in MODELS]) or any(
            [await memory.range(keys.webhooks(model)) for model in MODELS]
        ):
            await asyncio.sleep(FIRST_RETRY_S)
    await sender.close(0)
    for model, job_id, path in accepted:
        message_id = f"msg_{job_id.hex()}"
        delivery = await delivery_of(memory, model, job_id)
        assert delivery is not None
        assert delivery.state is (DeliveryState.DISABLED if path == "/gone" else DeliveryState.DELIVERED)
        # told again only by the successor of a sender that was cut off before it could write down that it had told
        assert 1 <= endpoints.final[message_id] <= 1 + cuts
        assert len(endpoints.bodies[message_id]) == 1
