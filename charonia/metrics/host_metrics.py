"""What Triton tells of the machine it runs on (M7, M8): processor time and memory, from /proc, and GPUs, from NVML.

Read when scraped, at most once in `--metrics-interval-ms`. On a page that joins several parts it stands once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from charonia.clock import monotonic_ns
from charonia.options.settings import MetricsSettings

from .gpu_metrics import GpuMetrics, load_nvml

_PROC = Path("/proc")
_GAUGES = (
    ("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]"),
    ("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes"),
    ("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes"),
)
_PINNED = (
    ("nv_pinned_memory_pool_total_bytes", "Pinned memory pool total memory size, in bytes"),
    ("nv_pinned_memory_pool_used_bytes", "Pinned memory pool used memory size, in bytes"),
)
"""Always 0: pools are of processes."""


def busy_and_total(stat: str) -> tuple[int, int]:
    """Ticks of all processors together from the text of /proc/stat. Raises `ValueError`."""
    name, *fields = stat.partition("\n")[0].split()
    if name != "cpu" or len(fields) < 5:
        raise ValueError("no line of all processors")
    ticks = [int(field) for field in fields[:8]]  # time of guests is included in that of users
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def total_and_used(meminfo: str) -> tuple[int, int]:
    """Bytes of memory from the text of /proc/meminfo. Raises `ValueError`."""
    found: dict[str, int] = {}
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            found[name] = int(value.split()[0]) * 1024
    if len(found) < 2:
        raise ValueError("no total or no available memory")
    return found["MemTotal"], found["MemTotal"] - found["MemAvailable"]


class HostMetrics:
    """The families of this machine. `proc` is another directory in tests."""

    def __init__(self, settings: MetricsSettings, proc: Path = _PROC) -> None:
        self._settings = settings
        self._proc = proc
        self._gpus = GpuMetrics(load_nvml() if settings.gpu else None)
        self._ticks = (0, 0)
        self._utilization = 0.0
        self._read_ns = monotonic_ns()
        self._read()

    def render(self) -> bytes:
        """Text exposition 0.0.4."""
        if monotonic_ns() - self._read_ns >= self._settings.interval_ms * 1_000_000:
            self._read_ns = monotonic_ns()
            self._read()
            self._gpus.read()
        others = _page(_PINNED, [0, 0]) + self._gpus.render()
        if not self._settings.cpu:
            return others
        try:
            memory = total_and_used((self._proc / "meminfo").read_text())
        except (OSError, ValueError):
            return others
        return _page(_GAUGES, [round(self._utilization, 6), *memory]) + others

    def _read(self) -> None:
        try:
            busy, total = busy_and_total((self._proc / "stat").read_text())
        except (OSError, ValueError):
            return
        before_busy, before = self._ticks
        if total > before:
            self._utilization = min(1.0, max(0.0, (busy - before_busy) / (total - before)))
        self._ticks = (busy, total)


def beside_host(render: Callable[[], bytes], settings: MetricsSettings) -> Callable[[], bytes]:
    """A part's own page, with its machine's families."""
    host = HostMetrics(settings)
    return lambda: render() + host.render()


def _page(gauges: tuple[tuple[str, str], ...], values: list[float]) -> bytes:
    lines = [f"# HELP {n} {text}\n# TYPE {n} gauge\n{n} {v}\n" for (n, text), v in zip(gauges, values, strict=True)]
    return "".join(lines).encode()
