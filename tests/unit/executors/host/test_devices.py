"""Counting devices by their files."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from executors.host.devices import count_gpus, missing_gpu_warning


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 2),
        ("", 0),
        ("1", 1),
        ("1,0", 2),
        ("0,-1,1", 1),
        ("5", 0),
        ("GPU-8932f937", 1),
        ("0,1,GPU-8932f937", 2),
    ],
)
def test_visible_devices(tmp_path: Path, visible: str | None, count: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_gpus(environment, tmp_path) == count


def test_no_device_directory_means_no_devices(tmp_path: Path) -> None:
    assert count_gpus({}, tmp_path / "none") == 0


def test_a_gpu_build_without_a_gpu_is_told() -> None:
    def nothing(name: str) -> object:
        raise PackageNotFoundError(name)

    assert missing_gpu_warning(0, installed=nothing) == ""
    assert missing_gpu_warning(1, installed=str) == ""
    assert missing_gpu_warning(0, installed=str).startswith("no GPU is visible here")
