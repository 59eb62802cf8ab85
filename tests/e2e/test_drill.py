"""The short form of `make drill`: every part killed at a few steps of a request's life, under load, nothing lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from e2e_server import REPOSITORY

ROLES, STEPS = 5, 3
WAVE_ROLES, WAVE_STEPS = 3 + 2, 2
"""Of a server with a batcher of its own, and of one whose executor holds it."""


@pytest.mark.long
def test_every_part_may_be_killed_and_nothing_is_lost(few_models: Path, tmp_path: Path) -> None:
    command = (
        *(
            sys.executable,
            "-m",
            "loadtest.drill",
            "--json",
            "--loads=mixed",
            "--clients=8",
            "--steps=c,h,j",
            "--stall-secs=3",
            "--recovery-secs=60",
        ),
        f"--model-repository={few_models}",
    )
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["problems"] == []
    assert len(report["kills"]) == ROLES * STEPS + 1  # and one executor that stood still
    assert all(kill["reached"] for kill in report["kills"]), report
    assert report["counts"]["keyed answered"] == report["counts"]["keyed sent"] > 0
    # at least once: what died may have been the note that it was delivered
    assert report["webhooks"]["deliveries"] >= report["webhooks"]["jobs"] > 0


@pytest.mark.long
def test_every_part_may_be_killed_while_requests_travel_in_waves(few_models: Path) -> None:
    command = (
        *(sys.executable, "-m", "loadtest.drill", "--json", "--loads=waves,colocated", "--clients=8"),
        *(
            "--roles=gateway,batcher,executor,executor+batcher",
            "--steps=f2,i2",
            "--stall-secs=0",
            "--recovery-secs=60",
            f"--model-repository={few_models}",
        ),
    )
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert len(report["kills"]) == WAVE_ROLES * WAVE_STEPS
    assert all(kill["reached"] for kill in report["kills"]), report
    assert report["counts"]["waves: requests answered"] > 0


@pytest.mark.long
def test_no_part_that_lives_is_lost_under_overload(few_models: Path) -> None:
    """The short form of `make overload`; how soon ends are known, and for how long a busy process may be silent,
    depends on the machine, so its limits are wide.
    """
    leases = {"CHARONIA_HEARTBEAT_TTL_SECS": "5", "CHARONIA_GATEWAY_HEARTBEAT_TTL_SECS": "5"}
    command = (
        *(sys.executable, "-m", "loadtest.drill.overload", "--json", "--minutes=0.1", "--factor=1", "--kills=2"),
        *("--large-numbers=300000", "--process-secs=10", "--machine-secs=20", f"--model-repository={few_models}"),
    )
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, **leases},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["losses"] == []
    assert report["requests"]["small: 200"] > 0
    assert set(report["longest_silence_ms"]) >= {"gateway", "executor", "batcher"}
    assert len(report["process_known_s"]) == len(report["machine_known_s"]) == 2
