"""The compose stack as an object: up, down, scale, roll, kill, ask. It judges nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadtest.model import LoadTestError

FILE = Path(__file__).resolve().parents[2] / "infra" / "docker-compose.yml"
_HEALTHY_WITHIN_S = 120.0
_LOOK_S = 0.2


class Stack:
    """One compose project. `environment` is what the compose file's variables are set to."""

    def __init__(self, project: str, environment: dict[str, str]) -> None:
        self._base = ["docker", "compose", "-p", project, "-f", str(FILE)]
        self._environment = {**os.environ, **environment}

    def compose(self, *words: str, given: str = "") -> str:
        """Run one compose command with `given` as its input; its output. Raises LoadTestError with what it said."""
        done = subprocess.run(
            [*self._base, *words], capture_output=True, text=True, check=False, env=self._environment, input=given
        )
        if done.returncode:
            raise LoadTestError(f"docker compose {' '.join(words)} failed:\n{done.stderr.strip()[-3000:]}")
        return done.stdout

    def up(self, *words: str) -> float:
        """Bring up what is missing and wait until it is healthy; seconds."""
        began_s = time.monotonic()
        self.compose("up", "-d", "--wait", *words)
        return time.monotonic() - began_s

    def down(self) -> None:
        self.compose("down", "-v", "-t", "5")

    def containers(self, service: str) -> list[dict[str, Any]]:
        """Id, name, state and health of the containers of a service that run or are about to."""
        lines = self.compose("ps", "--format", "json", service).splitlines()
        found = [one for line in lines for one in _as_list(json.loads(line))]
        return [one for one in found if one["State"] in ("running", "restarting")]

    def scale(self, service: str, number: int) -> float:
        """Grow or shrink a service and wait until it is healthy; seconds."""
        began_s = time.monotonic()
        self.up("--no-recreate", "--no-deps", "--scale", f"{service}={number}", service)
        return time.monotonic() - began_s

    def stop(self, container: str, patience_s: int = 45) -> float:
        """Drain one container (SIGTERM) and remove it; seconds it took to end."""
        began_s = time.monotonic()
        _docker("stop", "-t", str(patience_s), container)
        ended_s = time.monotonic() - began_s
        _docker("rm", "-f", container)
        return ended_s

    def roll(self, service: str) -> float:
        """Replace every container of a service, the new ones first; the longest time one took to drain, seconds."""
        old = [one["ID"] for one in self.containers(service)]
        self.scale(service, 2 * len(old))
        if service == "gateway":
            wait_for(lambda: self.proxied() >= 2 * len(old), "the proxy sends work to the new gateways")
        slowest = max(self.stop(one) for one in old)
        self.scale(service, len(old))
        return slowest

    def proxied(self) -> int:
        """The number of gateways that the proxy sends work to, over both protocols."""
        ask = "import urllib.request as u; print(u.urlopen('http://proxy:8404/;csv', timeout=5).read().decode())"
        lines = self.compose("exec", "-T", "gateway", "python3", "-c", ask).splitlines()
        rows = [line.split(",") for line in lines if line.startswith("gateways-")]
        up = [row[0] for row in rows if row[1] not in ("FRONTEND", "BACKEND") and row[17].startswith("UP")]
        return min(up.count("gateways-http"), up.count("gateways-grpc"))

    def kill(self, service: str) -> float:
        """SIGKILL one container's process from outside, so that its restart policy holds; seconds until healthy."""
        number = len(self.containers(service))
        victim = self.containers(service)[0]["ID"]
        pid = int(_docker("inspect", "-f", "{{.State.Pid}}", victim))
        began_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: int(_docker("inspect", "-f", "{{.State.Pid}}", victim)) not in (0, pid), f"{service} restarts")
        wait_for(
            lambda: len([c for c in self.containers(service) if c["Health"] in ("healthy", "")]) >= number,
            f"{service} is healthy again",
        )
        return time.monotonic() - began_s

    def charonia(self, *words: str) -> Any:
        """A `charonia` command in a container of its own, as the log's operator; its JSON."""
        text = self.compose("run", "--rm", "-T", "--no-deps", "operator", *words, "--json")
        return json.loads(text)

    def refused_commands(self) -> dict[str, int]:
        """How often the log refused each command, in scripts as well, since it was started."""
        ask = 'redis-cli --no-auth-warning --user operator -a "$(cat /run/secrets/redis_operator)" info commandstats'
        text = self.compose("exec", "-T", "redis", "sh", "-c", ask)
        found = re.findall(r"^cmdstat_(\S+?):.*\brejected_calls=([1-9]\d*)", text, re.MULTILINE)
        return {command: int(times) for command, times in found}

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--tail", "15")


def wait_for(look: Callable[[], bool], what: str) -> None:
    """Raises LoadTestError when it has not come true in two minutes."""
    give_up_s = time.monotonic() + _HEALTHY_WITHIN_S
    while not look():
        if time.monotonic() > give_up_s:
            raise LoadTestError(f"waited {_HEALTHY_WITHIN_S:.0f} s in vain: {what}")
        time.sleep(_LOOK_S)


def _docker(*words: str) -> str:
    done = subprocess.run(["docker", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LoadTestError(f"docker {' '.join(words)} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def _as_list(document: Any) -> list[dict[str, Any]]:
    return document if isinstance(document, list) else [document]
