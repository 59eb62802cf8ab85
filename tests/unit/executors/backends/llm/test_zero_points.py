"""Zero points are computed again from a GGUF file, for whatever order the converter left the rows in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from gguf_files import write_gguf

from executors.backends.llm.zero_points import correct_zero_points

ROWS, BLOCKS = 6, 2
COLUMNS = 32 * BLOCKS
Q4_1 = 3


@pytest.fixture
def written() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float16], npt.NDArray[np.float16]]:
    """Weights [rows, blocks, 32] of four bits, scales and minima [rows, blocks] whose quotients are not whole."""
    rng = np.random.default_rng(3)
    quants = rng.integers(0, 16, (ROWS, BLOCKS, 32), dtype=np.uint8)
    scales = rng.uniform(0.01, 0.02, (ROWS, BLOCKS)).astype(np.float16)
    minima = (-scales * rng.uniform(6, 9, (ROWS, BLOCKS))).astype(np.float16)
    return quants, scales, minima


def gguf(path: Path, quants: npt.NDArray[np.uint8], *halves: npt.NDArray[np.float16], kind: int = Q4_1) -> Path:
    packed = quants[..., :16] | quants[..., 16:] << 4
    blocks = np.concatenate([*(half[..., None].view(np.uint8) for half in halves), packed], axis=-1)
    return write_gguf(path, {"key": "value"}, {"w": ((ROWS, COLUMNS), kind, blocks.tobytes())})


def graph(path: Path, quants: npt.NDArray[np.uint8], scales: npt.NDArray[np.float16], zeros: object) -> Path:
    """What the converter writes for one product: (weights - zero points) * scales, of four bits."""
    openvino = pytest.importorskip("openvino")
    from openvino import opset13 as ops

    four = openvino.Type.u4
    packed = (quants[..., 0::2] | quants[..., 1::2] << 4).reshape(-1)
    weights = ops.constant(openvino.Tensor(packed, [ROWS, BLOCKS, 32], four), shared_memory=False)
    low = np.asarray(zeros, np.uint8).reshape(-1)
    zero = ops.constant(openvino.Tensor(low[0::2] | low[1::2] << 4, [ROWS, BLOCKS, 1], four), shared_memory=False)
    shifted = ops.subtract(ops.convert(weights, "f16"), ops.convert(zero, "f16"))
    scaled = ops.reshape(ops.multiply(shifted, ops.constant(scales[..., None])), [ROWS, COLUMNS], False)
    taken = ops.parameter([-1, COLUMNS], np.float32, name="x")
    product = ops.matmul(taken, ops.convert(scaled, "f32"), False, True)
    openvino.save_model(openvino.Model([product], [taken]), str(path), compress_to_fp16=False)
    return path


def weights_of(path: Path) -> npt.NDArray[np.float32]:
    """[rows, columns], as the graph computes them."""
    import openvino

    compiled = openvino.Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    settled = compiled(np.eye(COLUMNS, dtype=np.float32))[0]
    return np.array(settled).T


@pytest.mark.parametrize("order", [list(range(ROWS)), [3, 0, 5, 1, 4, 2]])
def test_weights_are_those_of_the_file(tmp_path: Path, written: tuple[np.ndarray, ...], order: list[int]) -> None:
    quants, scales, minima = written
    file = gguf(tmp_path / "m.gguf", quants, scales, minima)
    rounded = np.rint(-minima.astype(np.float32) / scales)
    made = graph(tmp_path / "m.xml", quants[order], scales[order], rounded[order])
    exact = (quants * scales[..., None].astype(np.float32) + minima[..., None].astype(np.float32))[order]
    exact = exact.reshape(ROWS, COLUMNS)
    step = float(scales.max())
    assert np.abs(weights_of(made) - exact).max() > step / 4
    assert correct_zero_points(made, file) == 1
    assert np.abs(weights_of(made) - exact).max() < step / 30  # half a sixteenth, and the rounding of activations
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.bin", "m.gguf", "m.xml"]
    assert correct_zero_points(made, file) == 0  # there are no weights of four bits now


def test_other_tensors_stay(tmp_path: Path, written: tuple[np.ndarray, ...]) -> None:
    quants, scales, minima = written
    made = graph(tmp_path / "m.xml", quants, scales, np.full((ROWS, BLOCKS), 8))
    before = made.read_bytes(), made.with_suffix(".bin").read_bytes()
    assert correct_zero_points(made, gguf(tmp_path / "a.gguf", quants, scales, minima, kind=2)) == 0
    assert correct_zero_points(made, gguf(tmp_path / "b.gguf", quants, scales * 2, minima)) == 0
    assert (made.read_bytes(), made.with_suffix(".bin").read_bytes()) == before
