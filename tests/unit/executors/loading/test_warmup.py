"""Warm-up requests made from a configuration (C17)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from charonia.datatypes import DataType
from charonia.errors import InternalError, InvalidArgument
from charonia.models.interface import ModelInterface, TensorSpec, Warmup, WarmupInput
from executors.batches.assembly import Planner
from executors.loading.warmup import warmup_records


def interface(datatype: DataType, max_batch_size: int = 4) -> ModelInterface:
    return ModelInterface(
        "m", "b", "", max_batch_size, {"x": TensorSpec("x", datatype, (3,))}, {"y": TensorSpec("y", datatype, (3,))}
    )


def warmup(datatype: DataType, source: str, filename: str = "", batch_size: int = 1) -> Warmup:
    return Warmup("w", batch_size, 1, {"x": WarmupInput(datatype, (3,), source, filename)})


@pytest.mark.parametrize("datatype", list(DataType))
@pytest.mark.parametrize("source", ["zero", "random"])
def test_made_up_data_fits_every_type(tmp_path: Path, datatype: DataType, source: str) -> None:
    model = interface(datatype)
    records = warmup_records(model, 1, tmp_path, warmup(datatype, source, batch_size=2))
    assert len(records) == 2
    assert Planner(model).plan(records[0]).rows == 1
    (tensor,) = records[0].inputs()
    array = tensor.array()
    assert array.shape == (1, 3)
    if source == "zero":
        assert array.tolist() == ([[b"", b"", b""]] if datatype is DataType.BYTES else np.zeros((1, 3)).tolist())


def test_without_batching_there_is_one_request_of_the_exact_shape(tmp_path: Path) -> None:
    records = warmup_records(interface(DataType.FP32, 0), 1, tmp_path, warmup(DataType.FP32, "zero", batch_size=5))
    assert [record.inputs()[0].shape for record in records] == [(3,)]


def test_data_comes_from_a_file_of_the_warmup_directory_only(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    values = np.array([1, 2, 3, 4], np.float32)
    (tmp_path / "warmup" / "data").write_bytes(values.tobytes())
    (tmp_path / "secret").write_bytes(values.tobytes())
    (tmp_path / "warmup" / "link").symlink_to(tmp_path / "secret")
    model = interface(DataType.FP32)
    (record,) = warmup_records(model, 1, tmp_path, warmup(DataType.FP32, "file", "data"))
    assert record.inputs()[0].array().tolist() == [[1.0, 2.0, 3.0]]
    for outside in ("../secret", "link", str(tmp_path / "secret")):
        with pytest.raises(InvalidArgument, match="is outside the model's 'warmup' directory"):
            warmup_records(model, 1, tmp_path, warmup(DataType.FP32, "file", outside))
    with pytest.raises(InternalError, match=r"^failed to open text file for read .*/warmup/none: No such file"):
        warmup_records(model, 1, tmp_path, warmup(DataType.FP32, "file", "none"))
    (tmp_path / "warmup" / "data").write_bytes(b"short")
    with pytest.raises(InvalidArgument, match="expects 12 bytes for input 'x'"):
        warmup_records(model, 1, tmp_path, warmup(DataType.FP32, "file", "data"))
    with pytest.raises(InvalidArgument):
        warmup_records(interface(DataType.BYTES), 1, tmp_path, warmup(DataType.BYTES, "file", "data"))
