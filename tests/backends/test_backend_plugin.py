"""The example of a backend from another distribution, as it is installed: the contract, and served over HTTP."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import tflite_model
from e2e_server import serving
from tritonclient import http as client

from charonia.backend import ENTRY_POINT_GROUP
from charonia.testing.backend_contract import CHECKS, Check, Inputs, ReferenceModel
from executors.backends.registry import BackendRegistry


def expected(inputs: Inputs) -> dict[str, np.ndarray]:
    return {"y": tflite_model.expected(inputs["x"])}


def written(directory: Path) -> Path:
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "model.tflite").write_bytes(tflite_model.model_bytes())
    (directory / "config.pbtxt").write_text("max_batch_size: 8")
    return directory


def reference(directory: Path) -> ReferenceModel:
    numbers = np.arange(18, dtype=np.float32).reshape(6, 3)
    return ReferenceModel.of(
        written(directory),
        'max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: 3 } '
        'output { name: "y" data_type: TYPE_FP32 dims: 2 }',
        expected=expected,
        requests=[{"x": numbers[:2]}, {"x": numbers[2:3]}, {"x": numbers[3:]}],
        failing={"x": np.zeros((2, 5), np.float32)},
        rtol=1e-6,
    )


def test_it_is_installed_as_a_distribution_of_its_own() -> None:
    (entry,) = metadata.entry_points(group=ENTRY_POINT_GROUP, name="litert")
    assert entry.dist is not None
    assert entry.dist.name == "charonia-litert"
    assert entry.load().name == "litert"


def test_it_is_as_short_as_its_page_says() -> None:
    source = Path(__file__).parents[2] / "examples" / "backend-plugin" / "charonia_litert.py"
    assert len(source.read_text().splitlines()) <= 60


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_it_keeps_the_contract(check: Check, tmp_path: Path) -> None:
    await check(BackendRegistry().get("litert"), reference(tmp_path / "m"))


def test_it_is_served_with_a_configuration_that_is_completed(tmp_path: Path) -> None:
    written(tmp_path / "models" / "dense")
    with serving(tmp_path / "models", tmp_path / "state") as server, client.InferenceServerClient(server.http) as asked:
        config = asked.get_model_config("dense")
        assert [(one["name"], one["data_type"], one["dims"]) for one in config["input"]] == [("x", "TYPE_FP32", [3])]
        given = np.array([[1, 2, 3], [-1, 0, 1]], np.float32)
        tensor = client.InferInput("x", list(given.shape), "FP32")
        tensor.set_data_from_numpy(given)
        answer = asked.infer("dense", [tensor]).as_numpy("y")
        np.testing.assert_allclose(answer, tflite_model.expected(given), rtol=1e-6)
