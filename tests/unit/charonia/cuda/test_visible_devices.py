"""Which devices a process sees: its server's variable counts, however often the process chooses."""

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
    [(None, 0, "0"), (None, 3, "3"), ("4,6", 0, "4"), ("4,6", 1, "6"), ("GPU-aa, MIG-bb", 1, "MIG-bb"), ("", 2, "2")],
)
def test_a_process_sees_the_servers_device_of_that_number(of_server: str | None, number: int, of_process: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    environment |= {} if of_server is None else {"CUDA_VISIBLE_DEVICES": of_server}
    code = CHOOSES.format(number=number)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == [of_process] * 2
