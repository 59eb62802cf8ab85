"""The start of an isolated model's process, when it is cancelled, and what its end is blamed on.

tests/integration/test_isolation.py has the rest.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from charonia.backend import InstanceDied, ModelSource
from charonia.models.config_forms import parse
from executors.backends.python.custom_metrics import CustomMetrics
from executors.configuration.config import normalise
from executors.host import owned_folders
from executors.isolation.process_handle import ModelProcess


@pytest.mark.parametrize("fails", [False, True])
async def test_a_start_that_is_cancelled_while_its_folder_is_made_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: bool
) -> None:
    """The thread that makes it cannot be cancelled: it holds a lock on a folder that nobody knows."""
    entered, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    made, make, remove = [], owned_folders.make, owned_folders.remove

    def slowly() -> Path:
        entered.set()
        go_on.wait(30)
        if fails:
            raise OSError("no space")
        made.append(make())
        return made[-1]

    def noting(folder: Path) -> None:
        remove(folder)
        ended.set()

    monkeypatch.setattr(owned_folders, "make", slowly)
    monkeypatch.setattr(owned_folders, "remove", noting)
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
    metrics = CustomMetrics()
    source = ModelSource("m", 1, tmp_path, normalise(parse('name: "m" backend: "onnxruntime"')))
    board = metrics.open(source)
    starting = asyncio.create_task(ModelProcess.start(source, sandboxed=True, board=board))
    assert await asyncio.to_thread(entered.wait, 30)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    go_on.set()
    if not fails:
        assert await asyncio.to_thread(ended.wait, 30)
        assert not made[0].exists()
        assert made[0] not in owned_folders._locks
    await asyncio.get_running_loop().shutdown_default_executor()
    assert board not in metrics._boards
    assert problems == []


@pytest.fixture
async def process(monkeypatch: pytest.MonkeyPatch) -> ModelProcess:
    """One that runs, without a process."""
    made = ModelProcess("m", "m")
    made._process = cast(asyncio.subprocess.Process, SimpleNamespace(returncode=None))
    monkeypatch.setattr(made, "_kill_group", lambda: None)
    return made


async def test_an_instance_that_went_on_is_not_blamed_for_a_later_end(process: ModelProcess) -> None:
    first, second = object(), object()
    process.executing |= {first, second}
    process.blame(first, "it ran too long")
    process.excuse(second)
    process.excuse(first)
    process.executing.discard(first)
    process._end(InstanceDied(process._ending(-9)))
    assert "was ended by signal 9" in str(process.death_of(second))
    assert (process.death_of(first).blameless, process.death_of(second).blameless) == (True, False)


async def test_the_instance_that_a_process_was_killed_for_stays_to_blame(process: ModelProcess) -> None:
    first, second = object(), object()
    process.executing |= {first, second}
    process.blame(first, "it ran too long")
    process.kill_for(first, "it ran too long")
    process.excuse(first)
    process._end(InstanceDied(process._ending(-9)))
    assert "was killed: it ran too long" in str(process.death_of(second))
    assert (process.death_of(first).blameless, process.death_of(second).blameless) == (False, True)
