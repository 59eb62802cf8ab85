"""Controls and states beside the clients' tensors: rows at their slots, nulls between, states stacked and taken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format

from charonia.errors import InternalError, InvalidArgument
from charonia.models.interface import ModelInterface
from executors.batches.sequence_tensors import SequenceTensors, Step
from executors.configuration.config import normalise
from protos.model_config_pb2 import ModelConfig

CONTROLS = """
control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 3, 4 ] } }
control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY fp32_false_true: [ 0, 1 ] } }
control_input { name: "END" control { kind: CONTROL_SEQUENCE_END bool_false_true: [ false, true ] } }
control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_%s } }
"""
STATE = 'state { input_name: "h" output_name: "hn" data_type: TYPE_FP32 dims: [ 2 ] %s }'


def tensors(block: str, rows: int = 4, directory: Path = Path("/none")) -> SequenceTensors:
    text = f'name: "m" backend: "python" max_batch_size: {rows} sequence_batching {{ {block} }}'
    return SequenceTensors(ModelInterface.of(normalise(text_format.Parse(text, ModelConfig()))), directory)


def step(number: int | str, slot: int, flags: str = "", h: float = 0) -> Step:
    return Step(number, "s" in flags, "e" in flags, slot, {"h": np.full(2, h, np.float32)})


def test_a_direct_batch_covers_slots_that_nobody_has() -> None:
    made = tensors(CONTROLS % "UINT64" + STATE % "")
    steps = [step(7, 1, "s", 1), step(2**64 - 1, 3, "e", 3)]
    fed = made.feed(steps, 4, {"x": np.array([[10], [30]], np.int32), "w": np.array([[b"a"], [b"b"]], object)})
    assert fed["x"].tolist() == [[0], [10], [0], [30]]
    assert fed["w"].tolist() == [[b""], [b"a"], [b""], [b"b"]]
    assert fed["START"].tolist() == [[3], [4], [3], [3]]
    assert (fed["READY"].tolist(), fed["READY"].dtype) == ([[0], [1], [0], [1]], np.float32)
    assert (fed["END"].tolist(), fed["END"].dtype) == ([[False], [False], [False], [True]], np.bool_)
    assert (fed["ID"].ravel().tolist(), fed["ID"].dtype) == ([0, 7, 0, 2**64 - 1], np.uint64)
    assert fed["h"].tolist() == [[0, 0], [1, 1], [0, 0], [3, 3]]
    after = np.arange(8, dtype=np.float32).reshape(4, 2)
    taken = made.take(steps, 4, {"y": fed["x"] * 2, "hn": after})
    assert taken["y"].tolist() == [[20], [60]]
    assert [one.state_after and one.state_after["h"].tolist() for one in steps] == [[2, 3], [6, 7]]
    after[:] = 0
    assert steps[0].state_after is not None
    assert steps[0].state_after["h"].tolist() == [2, 3], "a state is its own"


@pytest.mark.parametrize(("datatype", "values"), [("INT32", [5, -1]), ("UINT32", [5, 2**32 - 1]), ("INT64", [5, -1])])
def test_narrow_correlation_ids_wrap(datatype: str, values: list[int]) -> None:
    fed = tensors(CONTROLS % datatype).feed([step(5, 0), step(2**64 - 1, 1)], 0, {})
    assert fed["ID"].ravel().tolist() == values


def test_strings_name_sequences_and_members_lie_close() -> None:
    made = tensors(CONTROLS % "STRING")
    fed = made.feed([step("a", 3), step("é", 1)], 0, {"x": np.array([[1], [2]])})
    assert fed["ID"].ravel().tolist() == [b"a", "é".encode()]
    assert fed["x"].tolist() == [[1], [2]]


def test_without_batching_there_is_no_batch_dimension() -> None:
    made = tensors(CONTROLS % "INT32" + STATE % "", rows=0)
    one = step(9, 0, "s", 2)
    fed = made.feed([one], 0, {"x": np.array([1])})
    assert [fed[name].shape for name in ("START", "ID", "h", "x")] == [(1,), (1,), (2,), (1,)]
    assert made.take([one], 0, {"hn": np.array([5, 6], np.float32)})["hn"].tolist() == [5, 6]
    assert one.state_after is not None
    assert one.state_after["h"].tolist() == [5, 6]


@pytest.mark.parametrize(
    ("results", "text"),
    [
        ({"hn": np.zeros((1, 2), np.float32)}, "expecting a batch dimension of 2"),
        ({"hn": np.zeros((2, 3), np.float32)}, "unexpected state output 'hn' of model 'm': float32 of shape"),
        ({"hn": np.zeros((2, 2), np.float64)}, "unexpected state output 'hn' of model 'm': float64"),
        ({}, "did not produce state output 'hn'"),
    ],
)
def test_a_state_that_is_none_is_refused(results: dict[str, np.ndarray], text: str) -> None:
    made = tensors(STATE % "")
    with pytest.raises(InternalError, match=text):
        made.take([step(1, 0), step(2, 1)], 0, results)


def test_initial_states(tmp_path: Path) -> None:
    assert tensors(STATE % "").initial["h"].tolist() == [0, 0]
    written = 'initial_state { name: "i" data_type: TYPE_FP32 dims: [ 2 ] data_file: "f" }'
    with pytest.raises(InternalError, match=r"^failed to open text file for read .*/initial_state/f: No such file"):
        tensors(STATE % written, directory=tmp_path)
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "f").write_bytes(np.array([1, 2], np.float32).tobytes())
    assert tensors(STATE % written, directory=tmp_path).initial["h"].tolist() == [1, 2]
    (tmp_path / "initial_state" / "f").write_bytes(b"1234")
    with pytest.raises(InvalidArgument, match="expects 8 bytes, but the data provided from 'f' has 4 bytes"):
        tensors(STATE % written, directory=tmp_path)
    (tmp_path / "initial_state" / "f").unlink()
    (tmp_path / "outside").write_bytes(bytes(8))
    (tmp_path / "initial_state" / "f").symlink_to(tmp_path / "outside")
    with pytest.raises(InvalidArgument, match="outside the model's 'initial_state' directory"):
        tensors(STATE % written, directory=tmp_path)
