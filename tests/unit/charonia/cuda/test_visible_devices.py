"""Which device a process sees: one that its server may use, however often the process chooses."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CHOOSES = """
import os
from charonia.cuda.visible_devices import see_one_device
for _ in range(2):
    see_one_device({number})
    print(os.environ["CUDA_VISIBLE_DEVICES"])
"""


@pytest.mark.parametrize(
    ("of_server", "number", "of_process"),
    [(None, 0, "0"), (None, 3, "3"), ("4,6", 0, "4"), ("4,6", 1, "6"), ("GPU-aa, MIG-bb", 1, "MIG-bb")],
)
def test_a_process_sees_the_servers_device_of_that_number(of_server: str | None, number: int, of_process: str) -> None:
    done = choose(of_server, number)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [of_process] * 2


@pytest.mark.parametrize(
    ("of_server", "number", "listed"), [("4,6", 2, 2), ("4,-1,6", 1, 1), ("GPU-aa", 1, 1), ("", 0, 0), ("-1", 0, 0)]
)
def test_a_device_that_the_operator_excluded_is_refused(of_server: str, number: int, listed: int) -> None:
    done = choose(of_server, number)
    assert done.returncode == 1
    said = (
        f"GPU {number} was asked for, but CUDA_VISIBLE_DEVICES of the server is '{of_server}', which lists {listed}: "
    )
    assert done.stderr.splitlines()[-1].startswith(f"charonia.errors.Unsupported: {said}")


def choose(of_server: str | None, number: int) -> subprocess.CompletedProcess[str]:
    """Choose twice in a process whose server has that variable, and print what it is then."""
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    environment |= {} if of_server is None else {"CUDA_VISIBLE_DEVICES": of_server}
    code = CHOOSES.format(number=number)
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
