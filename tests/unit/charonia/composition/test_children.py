"""What is left of a process that could not be started."""

from __future__ import annotations

import errno
import os
import subprocess
from typing import Any

import pytest

from charonia.composition.children import Child


async def test_a_start_without_a_process_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, "no process")

    pipes: list[tuple[int, int]] = []
    pipe = os.pipe

    def noted() -> tuple[int, int]:
        pipes.append(pipe())
        return pipes[-1]

    monkeypatch.setattr(subprocess, "Popen", none)
    monkeypatch.setattr(os, "pipe", noted)
    child = Child("console", ["console"], lambda *_: None, lambda *_: None)
    with pytest.raises(BlockingIOError):
        child.start()
    for descriptor in pipes[0]:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    assert child.pid == 0


async def test_one_that_cannot_be_watched_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Process:
        pid = 0

        def kill(self) -> None:
            done.append("kill")

        def wait(self) -> int:
            done.append("wait")
            return -9

    def none(_pid: int) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: Process())
    monkeypatch.setattr(os, "pidfd_open", none)
    child = Child("console", ["console"], lambda *_: None, lambda *_: None)
    with pytest.raises(OSError, match="too many open files"):
        child.start()
    assert done == ["kill", "wait"]
    assert child.pid == 0
