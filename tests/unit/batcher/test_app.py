"""What a batcher takes from its environment: the hooks of Triton's own tests (S43); and when it is ready."""

from __future__ import annotations

import asyncio

import pytest
from memory_log.log import MemoryLog

from batcher.app import BatcherApp
from batcher.scheduling.sequences.sequence_dispatch import Delays
from charonia.options.settings import BatcherSettings, LogSettings


def delays() -> Delays:
    return BatcherApp(MemoryLog(), BatcherSettings("b"), LogSettings()).service._context.delays


async def test_hooks_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITONSERVER_DELAY_SCHEDULER", "TRITONSERVER_BACKLOG_DELAY_SCHEDULER"):
        monkeypatch.delenv(name, raising=False)
    assert delays() == Delays(0, 0)
    monkeypatch.setenv("TRITONSERVER_DELAY_SCHEDULER", "4")
    monkeypatch.setenv("TRITONSERVER_BACKLOG_DELAY_SCHEDULER", "2")
    assert delays() == Delays(4, 2)
    monkeypatch.setenv("TRITONSERVER_DELAY_SCHEDULER", "none")
    assert delays() == Delays(0, 2)


async def test_it_is_ready_while_it_is_a_member_that_takes_no_model_over() -> None:
    app = BatcherApp(MemoryLog(), BatcherSettings("b"), LogSettings(heartbeat_ttl_ms=600_000))
    assert app.health.unready() == "it starts"
    await app.start()
    assert app.health.unready() == ""
    takeover = asyncio.get_running_loop().create_future()
    app.service._taking |= {"b": takeover, "a": takeover}  # type: ignore[dict-item]
    assert app.health.unready() == "it is taking over model 'a'"
    app.service._taking.clear()
    app.membership._leased_until_s = 0.0
    assert "lease" in app.health.unready()
    stopping = asyncio.create_task(app.stop())
    await asyncio.sleep(0)
    assert app.health.unready() == "it drains"
    await stopping
    assert app.health.unready() == "it drains"
