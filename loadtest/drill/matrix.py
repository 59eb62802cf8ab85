"""Which part is killed at which step, and one kill: arm the point, wait, kill, let go, recover."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from .clients import Client, Disconnected, Told, request_body

ROLES = ("gateway", "batcher", "executor", "executor+batcher", "webhooks", "redis")

LOADS: dict[str, tuple[str, ...]] = {
    "mixed": ("gateway", "batcher", "executor", "webhooks", "redis"),
    "waves": ("gateway", "batcher", "executor", "redis"),
    "colocated": ("gateway", "executor+batcher", "redis"),
}
"""What is asked, and the parts there are to kill: jobs, keyed and keyless requests of a server that keeps a journal;
requests in waves of one with two executors and a batcher; the same of one whose executor holds its batcher."""

STEPS: dict[str, str] = {
    "a": "gateway.receiving",
    "b": "gateway.parsed",
    "c": "gateway.stored",
    "d": "gateway.waiting",
    "e": "batcher.picked",
    "f": "batcher.formed",
    "g": "batcher.dispatched",
    "h": "executor.executing",
    "i": "executor.executed",
    "j": "executor.settled",
    "k": "batcher.finished",
    "l": "gateway.notified",
    "l2": "webhooks.posting",
    "m": "gateway.read",
}

WAVE_STEPS: dict[str, str] = {
    "b": "gateway.parsed",
    "c": "gateway.stored",
    "e": "batcher.picked",
    "f": "batcher.formed",
    "f2": "batcher.bursting",
    "g": "batcher.dispatched",
    "h": "executor.executing",
    "i": "executor.executed",
    "i2": "executor.answered",
    "j": "executor.settled",
    "k": "batcher.finished",
    "l": "gateway.notified",
    "l3": "gateway.answering",
}
"""The steps of requests that travel in waves."""

_BURSTING = "batcher.bursting"
REACHED_WITHIN_S = 15.0
_LOOK_S = 0.005
_TRIES = 3
_BURST_WITHIN_S = 10.0

T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """One kill of the matrix."""

    role: str
    step: str
    load: str = "mixed"

    @property
    def point(self) -> str:
        return (STEPS if self.load == "mixed" else WAVE_STEPS)[self.step]

    def __str__(self) -> str:
        load = "" if self.load == "mixed" else f"{self.load}: "
        return f"{load}{self.role} at {self.step} ({self.point})"


@dataclass(frozen=True)
class Kill:
    """What one kill showed. `recovered_s` counts from the start of the part that came in its place."""

    cell: Cell
    reached: bool
    recovered_s: float
    problem: str = ""


def cells(load: str, roles: list[str], steps: list[str]) -> Iterator[Cell]:
    """The kills under a load: of the roles there are in its server, at the steps that its requests pass."""
    for role in roles:
        if role not in LOADS[load]:
            continue
        for step in steps:
            if step in (STEPS if load == "mixed" else WAVE_STEPS):
                yield Cell(role, step, load)


class Matrix:
    """Carries out the kills of one running stack. `state_dir` is that of `charonia serve`.

    `is_loaded` says whether requests of the wanted kind are under way: until then nothing is killed.
    """

    def __init__(
        self,
        state_dir: Path,
        points: Path,
        address: Callable[[], str],
        model: str,
        told: Told,
        recovered_within_s: float,
        is_loaded: Callable[[], bool] = lambda: True,
    ) -> None:
        self._state_dir = state_dir
        self._points = points
        self._address = address
        self._model = model
        self._told = told
        self._recovered_within_s = recovered_within_s
        self._is_loaded = is_loaded

    def pids(self, role: str) -> list[int]:
        processes = json.loads((self._state_dir / "processes.json").read_text())
        return [p["pid"] for p in processes if p["role"] == role]

    def kill(self, cell: Cell) -> Kill:
        """One kill -9 at one step; returns when a request of ours has been answered again."""
        # serve starts its sender of webhooks after it is ready
        if not self._wait_for(lambda: self.pids(cell.role), REACHED_WITHIN_S):
            return Kill(cell, False, 0.0, f"no process of role {cell.role} runs")
        if not self._wait_for(self._is_loaded, REACHED_WITHIN_S):
            return Kill(cell, False, 0.0, "no request rode in a wave")
        armed, hit = (self._points / f"{cell.point}.{kind}" for kind in ("armed", "hit"))
        provoked, stopped = 0, None
        if cell.point == _BURSTING:
            self._told.calm_since_s = math.inf  # to provoke it an executor is killed, maybe the only one
        for _ in range(_TRIES if cell.point == _BURSTING else 0):  # what is killed may run requests that are no wave
            provoked = self._provoke(armed)
            if provoked and (stopped := self._wait_for(lambda: _read_pid(hit), _BURST_WITHIN_S)):
                break
        if cell.point != _BURSTING:
            armed.touch()
            stopped = self._wait_for(lambda: _read_pid(hit), REACHED_WITHIN_S)
        if not stopped:
            armed.unlink(missing_ok=True)
            hit.unlink(missing_ok=True)
            self._told.calm_since_s = time.monotonic()
            return Kill(cell, False, 0.0, "no request came by this step")
        candidates = [pid for pid in self.pids(cell.role) if pid != provoked]
        victim = stopped if stopped in candidates else candidates[0]
        # a call that is open now at a gateway or the log which is killed may be cut off; its outcome is unknown
        self._told.excused = cell.role in ("gateway", "redis")
        self._told.calm_since_s = math.inf
        os.kill(victim, signal.SIGKILL)
        hit.unlink(missing_ok=True)
        started = self._wait_for(lambda: self._replaced(cell.role, victim, len(candidates)), 30.0)
        if not started:
            self._told.excused = False
            self._told.calm_since_s = time.monotonic()
            return Kill(cell, True, 0.0, f"no other {cell.role} was started within 30 s")
        began_s = time.monotonic()
        answered = self._wait_for(self._answers, 30.0)
        recovered_s = time.monotonic() - began_s
        self._told.calm_since_s = time.monotonic()
        self._told.excused_until_s = self._told.calm_since_s + 0.5
        self._told.excused = False
        if not answered:
            return Kill(cell, True, recovered_s, "no request was answered within 30 s of the restart")
        late = f"recovery took {recovered_s:.1f} s" if recovered_s > self._recovered_within_s else ""
        return Kill(cell, True, recovered_s, late)

    def _provoke(self, armed: Path) -> int:
        """Kill an executor that runs a wave, so that its owner bursts it; the pid, 0 where none came to run one.

        `armed` is set before: the burst follows at once.
        """
        running, hit = (self._points / f"executor.executing.{kind}" for kind in ("armed", "hit"))
        running.touch()
        victim = self._wait_for(lambda: _read_pid(hit), REACHED_WITHIN_S)
        if not victim:
            running.unlink(missing_ok=True)
            return 0
        armed.touch()
        os.kill(victim, signal.SIGKILL)
        hit.unlink(missing_ok=True)
        return victim

    def stall(self, seconds: float, fenced: Callable[[], float], load: str) -> Kill:
        """Stop an executor between a run and its settlement, for so long, then let it go on.

        `fenced()` counts settlements that came too late; the one of that run must be among them.
        """
        cell = Cell("executor", "i", load)
        before = fenced()
        armed, hit = (self._points / f"{cell.point}.{kind}" for kind in ("armed", "hit"))
        armed.touch()
        victim = self._wait_for(lambda: _read_pid(hit), REACHED_WITHIN_S)
        if not victim:
            armed.unlink(missing_ok=True)
            return Kill(cell, False, 0.0, "no request came by this step")
        os.kill(victim, signal.SIGSTOP)
        hit.unlink(missing_ok=True)
        began_s = time.monotonic()
        try:
            answered = self._wait_for(self._answers, 30.0)
            recovered_s = time.monotonic() - began_s
            time.sleep(max(0.0, seconds - recovered_s))
        finally:
            os.kill(victim, signal.SIGCONT)
        if not answered:
            return Kill(cell, True, recovered_s, "no request was answered while an executor stood still")
        if not self._wait_for(lambda: fenced() > before, 30.0):
            return Kill(cell, True, recovered_s, "the late settlement was not fenced off, or not counted")
        late = f"recovery took {recovered_s:.1f} s" if recovered_s > self._recovered_within_s else ""
        return Kill(cell, True, recovered_s, late)

    def _replaced(self, role: str, victim: int, number: int) -> bool:
        pids = self.pids(role)
        return victim not in pids and len(pids) >= number

    def _answers(self) -> bool:
        client = Client(self._address())
        try:
            status, _, _ = client.ask("POST", f"/v2/models/{self._model}/infer", request_body([0.5] * 16))
            ready, _, _ = client.ask("GET", "/v2/health/ready")
            return status == 200 and ready == 200
        except Disconnected:
            return False
        finally:
            client.close()

    @staticmethod
    def _wait_for(look: Callable[[], T], within_s: float) -> T | None:
        give_up_s = time.monotonic() + within_s
        while time.monotonic() < give_up_s:
            try:
                if found := look():
                    return found
            except (OSError, ValueError):
                pass
            time.sleep(_LOOK_S)
        return None


def _read_pid(file: Path) -> int:
    return int(file.read_text() or 0)
