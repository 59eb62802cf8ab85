"""The runner of the checks for GPUs: verdicts, limits, no GPU; and how figures are compared."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import gpu_check
import pytest
from fake_tensorrt import driver_file
from gpu_checks import machine
from gpu_checks.outcome import FAILED, NOT_JUDGED, NOT_RUN, PASSED, judged
from gpu_checks.table import CHECKS, Check

from executors.isolation import sandbox

__all__ = ["driver_file"]

PAGE = """# TYPE nv_gpu_memory_total_bytes gauge
nv_gpu_memory_total_bytes{gpu_uuid="GPU-a"} 85520809984
nv_gpu_memory_used_bytes{gpu_uuid="GPU-a"} 1073741824.0
nv_gpu_power_limit{gpu_uuid="GPU-a"} 700.0
nv_gpu_power_limit{gpu_uuid="GPU-b"} 500.0
nv_cpu_utilization 0.5
"""
SMI = "GPU-a, 81559, 1040, 700.00\nGPU-b, 81559, 0, [N/A]\n"


@pytest.mark.skipif(not sandbox.is_available(), reason="this kernel has no Landlock")
def test_the_driver_is_tried_in_a_sandbox(driver_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver_file.parent))
    assert machine.driver_in_sandbox() == ""
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "0")
    assert machine.driver_in_sandbox().endswith("CudaError: no device")


def test_there_are_nine_and_they_take_less_than_ten_minutes() -> None:
    assert len(CHECKS) == 9
    assert sum(check.limit_s for check in CHECKS.values()) < 600


def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("charonia.cuda.cuda_library.LIBRARY", "libno-such-driver.so.1")
    assert gpu_check.main(["--json", str(tmp_path / "found.json")]) == 3
    assert capsys.readouterr().out == "no GPU\n"
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["gpus"], found["checks"]) == (0, [])


def test_a_check_is_ended_at_its_limit() -> None:
    outcome = gpu_check.run_apart(CHECKS["metrics"], "cpu", 0.05)
    assert outcome.verdict == FAILED
    assert outcome.reason.startswith("not done within 0.05 s")
    assert outcome.took_s < 20


def test_an_interrupted_run_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if timeout is not None:
                started.append(self)
                raise KeyboardInterrupt
            return super().wait()

    monkeypatch.setattr(gpu_check.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        gpu_check.run_apart(CHECKS["metrics"], "cpu", 60)
    assert started[0].poll() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("function", "verdict", "reason"),
    [
        ("missing_module", NOT_RUN, "the module no_such_module is not installed"),
        ("broken", FAILED, "ValueError: it is broken"),
        ("whole", PASSED, ""),
    ],
)
def test_what_a_check_meets_is_its_outcome(
    function: str, verdict: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing_module(device: str) -> Any:
        raise ModuleNotFoundError(name="no_such_module")

    def broken(device: str) -> Any:
        raise ValueError("it is broken")

    def whole(device: str) -> Any:
        return judged("cuda", True, f"on {device}", {"rate": 1 / 3})

    monkeypatch.setattr(
        machine, "metrics", {"missing_module": missing_module, "broken": broken, "whole": whole}[function]
    )
    gpu_check._run_here(Check("x", 1, "", "machine:metrics"), "cpu", tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["verdict"], found["reason"]) == (verdict, reason)
    assert function != "whole" or (found["figure"], found["values"]) == ("on cpu", {"rate": 0.3333})


@pytest.mark.parametrize(
    ("device", "reached", "verdict"),
    [("cuda", True, PASSED), ("cuda", False, FAILED), ("cpu", True, NOT_JUDGED), ("cpu", False, NOT_JUDGED)],
)
def test_speed_is_judged_on_a_gpu_alone(device: str, reached: bool, verdict: str) -> None:
    assert judged(device, reached, "", {}).verdict == verdict


def test_figures_that_agree_within_five_percent() -> None:
    found, truth = machine.families(PAGE), machine.smi(SMI)
    assert found["nv_gpu_power_limit"] == {"GPU-a": 700.0, "GPU-b": 500.0}
    assert truth["nv_gpu_power_limit"] == {"GPU-a": 700.0}  # the other has none
    del truth["nv_gpu_memory_total_bytes"]["GPU-b"], truth["nv_gpu_memory_used_bytes"]["GPU-b"]
    outcome = machine.compare(found, truth, True)
    assert (outcome.verdict, outcome.figure) == (PASSED, "six families, off by 1.5 % at most, energy moves")
    assert machine.compare(found, truth, False).verdict == FAILED
    truth["nv_gpu_memory_used_bytes"]["GPU-a"] *= 1.1
    assert machine.compare(found, truth, True).verdict == FAILED


def test_a_card_that_the_page_does_not_have() -> None:
    outcome = machine.compare(machine.families(PAGE), machine.smi(SMI), True)
    assert (outcome.verdict, outcome.reason) == (FAILED, "nv_gpu_memory_total_bytes has no value of GPU-b")


@pytest.mark.parametrize(
    ("one", "two", "unpinned", "verdict"),
    [(99, 99, 40, PASSED), (94, 130, 130, FAILED), (130, 94, 130, FAILED)],
)
def test_each_number_of_instances_has_to_reach_the_goal(one: int, two: int, unpinned: int, verdict: str) -> None:
    torch_speed = pytest.importorskip("gpu_checks.torch_speed", reason="torch is not installed")
    values = {"net_bare": 100.0, "net_1": float(one), "net_2": float(two), "net_1_unpinned": float(unpinned)}
    outcome = torch_speed.judged_rates("cuda", ["net"], values)
    figure = f"net 100 bare, {one / 100:.2f}/{two / 100:.2f}/{unpinned / 100:.2f}x (rows/s)"
    assert (outcome.verdict, outcome.figure) == (verdict, figure)
