"""Arrays from one model of a process to the next, through DLPack: the second reads the memory that the first wrote.

On CPUs alone. Nothing of an ensemble does this: its steps exchange bytes (docs/adr/0038).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import device_models
import numpy as np
import pytest
import torch

from charonia.exchange.exchanging_instance import ExchangingInstance


def instance(directory: Path, module: torch.nn.Module, seen: list[torch.Tensor]) -> ExchangingInstance:
    """One whose model wants DLPack arrays; `seen` gets its inputs and outputs."""

    def execute(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        given = torch.from_dlpack(inputs["x"])
        with torch.inference_mode():
            made = module(given)
        seen.extend((given, made))
        return {"y": made}

    spec = device_models.spec(directory, kind="CPU")
    return ExchangingInstance(device_models.Given("device", execute), "device", spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
def test_the_second_model_reads_what_the_first_has_written(dtype: torch.dtype, tmp_path: Path) -> None:
    class Doubled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    of_first: list[torch.Tensor] = []
    of_second: list[torch.Tensor] = []
    first, second = instance(tmp_path, Doubled(), of_first), instance(tmp_path, Doubled(), of_second)
    given = torch.arange(12).reshape(3, 4).to(dtype).numpy()
    between = first.execute({"x": given}, ["y"])
    assert isinstance(between, Mapping)
    answer = second.execute({"x": between["y"]}, ["y"])
    assert isinstance(answer, Mapping)
    (read, wrote), (read_then, _) = of_first, of_second
    assert read.data_ptr() == given.ctypes.data
    assert wrote.data_ptr() == between["y"].ctypes.data == read_then.data_ptr(), "no copy lies between them"
    assert np.array_equal(answer["y"], given * 4)
    for one in (first, second):
        one.close()
