"""An executor's capabilities as labels for placement: devices, memory, processors, host, backends.

Configured labels override detected ones. Finding the backends reads the metadata of every installed distribution, so
labels are detected only when they are first needed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from executors.backends.registry import BackendRegistry

_GIB = 1024**3


class Capabilities:
    """One executor's labels: `configured` and detected ones."""

    def __init__(self, registry: BackendRegistry, *, gpus: int, configured: Mapping[str, str]) -> None:
        self.gpus = gpus
        self._registry = registry
        self._configured = dict(configured)
        self._labels: dict[str, str] = {}

    def labels(self) -> dict[str, str]:
        """Return all labels; several values of one are joined by commas. The first call blocks: call it in a thread."""
        if not self._labels:
            self._labels = {
                "host": socket.gethostname(),
                "device": "cpu,gpu" if self.gpus else "cpu",
                "gpus": str(self.gpus),
                "cpus": str(len(os.sched_getaffinity(0))),
                "memory_gib": f"{memory_bytes() / _GIB:.2f}",
                "backend": ",".join(self._registry.available()),
                **self._configured,
            }
        return dict(self._labels)


def memory_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """The memory that this process may use: the machine's or its container's limit; 0 when neither can be read."""
    found: list[int] = []
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                found.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError, IndexError):
        pass
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            found.append(int((cgroup / name).read_text()))  # "max" means no limit, and raises ValueError
        except (OSError, ValueError):
            continue
    return min(found, default=0)
