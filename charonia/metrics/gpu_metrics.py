"""What Triton tells of NVIDIA GPUs (M8), read through NVML; nothing without a driver or the package `nvidia-ml-py`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Family:
    name: str
    kind: str
    text: str
    read: Callable[[Any, Any], float]
    """(NVML, device) to the value, in the unit that `text` names."""


_FAMILIES = (
    _Family(
        "nv_gpu_utilization",
        "gauge",
        "GPU utilization rate [0.0 - 1.0)",
        lambda nvml, device: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100,
    ),
    _Family(
        "nv_gpu_memory_total_bytes",
        "gauge",
        "GPU total memory, in bytes",
        lambda nvml, device: nvml.nvmlDeviceGetMemoryInfo(device).total,
    ),
    _Family(
        "nv_gpu_memory_used_bytes",
        "gauge",
        "GPU used memory, in bytes",
        lambda nvml, device: nvml.nvmlDeviceGetMemoryInfo(device).used,
    ),
    _Family(
        "nv_gpu_power_usage",
        "gauge",
        "GPU power usage in watts",
        lambda nvml, device: nvml.nvmlDeviceGetPowerUsage(device) / 1000,
    ),
    _Family(
        "nv_gpu_power_limit",
        "gauge",
        "GPU power management limit in watts",
        lambda nvml, device: nvml.nvmlDeviceGetEnforcedPowerLimit(device) / 1000,
    ),
    _Family(
        "nv_energy_consumption",
        "counter",
        "GPU energy consumption in joules since the Triton Server started",
        lambda nvml, device: nvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1000,
    ),
)


def load_nvml() -> Any:
    """NVML's Python module, initialised; None where there is no driver, no GPU or no such package."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml if pynvml.nvmlDeviceGetCount() else None
    except pynvml.NVMLError as error:
        _log.info("no figures of GPUs: %s", error)
        return None


class GpuMetrics:
    """The families of this machine's GPUs, labelled by `gpu_uuid`. A figure that a GPU does not have is left out.

    Figures hold until `read` is called again. `nvml` is None where there are no GPUs.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._devices: list[tuple[str, Any]] = []
        for index in range(nvml.nvmlDeviceGetCount() if nvml is not None else 0):
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = nvml.nvmlDeviceGetUUID(device)
            self._devices.append((uuid.decode() if isinstance(uuid, bytes) else uuid, device))
        self._energy_at_start: dict[str, float] = {}
        self._page = b""
        self.read()

    def read(self) -> None:
        """Ask NVML again."""
        lines: list[str] = []
        for family in _FAMILIES if self._devices else ():
            lines += [f"# HELP {family.name} {family.text}\n# TYPE {family.name} {family.kind}\n"]
            lines += [f'{family.name}{{gpu_uuid="{uuid}"}} {value}\n' for uuid, value in self._values(family)]
        self._page = "".join(lines).encode()

    def _values(self, family: _Family) -> Iterable[tuple[str, float]]:
        for uuid, device in self._devices:
            with contextlib.suppress(self._nvml.NVMLError):  # not every GPU has every figure
                value = float(family.read(self._nvml, device))
                if family.kind == "counter":
                    value -= self._energy_at_start.setdefault(uuid, value)
                yield uuid, value

    def render(self) -> bytes:
        """Text exposition 0.0.4; empty without GPUs."""
        return self._page
