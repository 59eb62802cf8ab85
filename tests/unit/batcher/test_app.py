"""What a batcher takes from its environment: the hooks of Triton's own tests (S43)."""

from __future__ import annotations

import pytest
from memory_log.log import MemoryLog

from batcher.app import BatcherApp
from batcher.scheduling.sequences.sequence_scheduler import Delays
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
