from __future__ import annotations

from pathlib import Path

import pytest

from charonia.backend import ModelSource
from executors.backends.pytorch.torch_model import PyTorchBackend
from executors.repository.pbtxt import parse


@pytest.mark.parametrize("graphs", [True, False])
async def test_cuda_graphs_that_change_nothing_are_logged(graphs: bool, caplog: pytest.LogCaptureFixture) -> None:
    config = parse(f"backend: 'pytorch' optimization {{ cuda {{ graphs: {str(graphs).lower()} }} }}")
    await PyTorchBackend().load(ModelSource("m", 1, Path("m"), config))
    assert [record.getMessage() for record in caplog.records] == graphs * [
        "model 'm': the pytorch backend runs without CUDA graphs, 'optimization.cuda.graphs' changes nothing"
    ]
