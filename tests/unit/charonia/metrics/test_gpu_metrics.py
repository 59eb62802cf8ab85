"""Figures of GPUs (M8). NVML is played here: the machines of the tests have no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from charonia.metrics.gpu_metrics import GpuMetrics, load_nvml


class NVMLError(Exception): ...


class Nvml:
    """Two GPUs, the second without figures of energy."""

    NVMLError = NVMLError

    def __init__(self) -> None:
        self.energy_mj = 5_000_000

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, device: int) -> str | bytes:
        return b"GPU-a" if device == 0 else "GPU-b"

    def nvmlDeviceGetUtilizationRates(self, device: int) -> Any:
        return SimpleNamespace(gpu=25 + device)

    def nvmlDeviceGetMemoryInfo(self, device: int) -> Any:
        return SimpleNamespace(total=1000, used=100 + device)

    def nvmlDeviceGetPowerUsage(self, device: int) -> int:
        return 70_500

    def nvmlDeviceGetEnforcedPowerLimit(self, device: int) -> int:
        return 350_000

    def nvmlDeviceGetTotalEnergyConsumption(self, device: int) -> int:
        if device:
            raise NVMLError("not supported")
        return self.energy_mj


def values(page: bytes) -> dict[str, float]:
    lines = [line for line in page.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_the_families_in_their_units() -> None:
    nvml = Nvml()
    metrics = GpuMetrics(nvml)
    assert values(metrics.render()) == {
        'nv_gpu_utilization{gpu_uuid="GPU-a"}': 0.25,
        'nv_gpu_utilization{gpu_uuid="GPU-b"}': 0.26,
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-a"}': 1000,
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-b"}': 1000,
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-a"}': 100,
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-b"}': 101,
        'nv_gpu_power_usage{gpu_uuid="GPU-a"}': 70.5,
        'nv_gpu_power_usage{gpu_uuid="GPU-b"}': 70.5,
        'nv_gpu_power_limit{gpu_uuid="GPU-a"}': 350,
        'nv_gpu_power_limit{gpu_uuid="GPU-b"}': 350,
        'nv_energy_consumption{gpu_uuid="GPU-a"}': 0,
    }
    nvml.energy_mj += 2500
    assert values(metrics.render())['nv_energy_consumption{gpu_uuid="GPU-a"}'] == 0, "until it is read again"
    metrics.read()
    assert values(metrics.render())['nv_energy_consumption{gpu_uuid="GPU-a"}'] == 2.5
    assert b"# TYPE nv_energy_consumption counter\n" in metrics.render()


def test_nothing_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GpuMetrics(None).render() == b""
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert load_nvml() is None
