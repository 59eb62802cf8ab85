"""Inputs of requests: made ones, JSON files, directories, batches, and what a model cannot take."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from charonia.analyzer.bench_options import BenchOptions, parsed
from charonia.analyzer.input_data import ModelView, Step, batch_of, intervals_of, model_view, streams_of
from charonia.errors import InvalidArgument

METADATA = {
    "inputs": [
        {"name": "X", "datatype": "FP32", "shape": [-1, 2, 3]},
        {"name": "T", "datatype": "BYTES", "shape": [-1, -1]},
    ],
    "outputs": [{"name": "Y", "datatype": "FP32", "shape": [-1, 2, 3]}],
}
CONFIG: dict[str, Any] = {"max_batch_size": 8}


def options(*words: str) -> BenchOptions:
    return parsed(["bench", "-m", "model", "--shape", "T:2", *words])


def view(config: dict[str, Any] | None = CONFIG, **more: Any) -> ModelView:
    return model_view("model", "", METADATA, None if config is None else {**config, **more}, {})


def arrays(step: Step) -> dict[str, Any]:
    return {name: tensor.array().tolist() for name, tensor in step.items()}


def written(folder: Path, document: Any) -> str:
    (folder / "data.json").write_text(json.dumps(document))
    return str(folder / "data.json")


def test_the_view_of_a_model() -> None:
    found = view(sequence_batching={}, model_transaction_policy={"decoupled": True}, response_cache={"enable": True})
    assert (found.batches, found.max_batch, found.sequences, found.decoupled, found.caches) == (
        True,
        8,
        True,
        True,
        True,
    )
    assert [port.dims for port in found.inputs] == [(2, 3), (-1,)]
    plain = view(None)
    assert (plain.batches, plain.sequences, plain.steps) == (True, False, ())
    unbatched = view({"ensemble_scheduling": {"step": [{"model_name": "a"}, {"model_name": "b"}, {"model_name": "a"}]}})
    assert unbatched.steps == ("a", "b")
    assert [port.dims for port in unbatched.inputs] == [(-1, 2, 3), (-1, -1)]
    assert not model_view("model", "", METADATA, None, {"X": (4, 2, 3)}).batches


def test_made_inputs() -> None:
    ((zeros,),) = streams_of(options("--input-data", "zero"), view())
    assert arrays(zeros) == {"X": [[0, 0, 0], [0, 0, 0]], "T": [b"", b""]}
    ((random,),) = streams_of(options("--string-length", "5"), view())
    assert {len(text) for text in arrays(random)["T"]} == {5}
    assert len(set(np.ravel(arrays(random)["X"]).tolist())) == 6
    ((same,),) = streams_of(options("--string-data", "hi"), view())
    assert arrays(same)["T"] == [b"hi", b"hi"]


def test_files(tmp_path: Path) -> None:
    content = base64.b64encode(np.arange(6, dtype=np.float32).tobytes()).decode()
    path = written(tmp_path, {"data": [
        {"X": [0, 1, 2, 3, 4, 5], "T": ["a", "b"]},
        {"X": {"content": [[5, 4, 3], [2, 1, 0]], "shape": [2, 3]}, "T": {"content": ["c"], "shape": [1]}},
        {"X": {"b64": content}, "T": ["d", "e"]},
    ]})  # fmt: skip
    (steps,) = streams_of(parsed(["bench", "-m", "model", "--input-data", path]), view())
    assert [arrays(step)["T"] for step in steps] == [[b"a", b"b"], [b"c"], [b"d", b"e"]]
    assert arrays(steps[0]) == arrays(steps[2]) | {"T": [b"a", b"b"]}
    batch = batch_of([steps[0], steps[2]], 1, 3, view())
    assert [tensor.shape for tensor in batch] == [(3, 2, 3), (3, 2)]
    assert batch[1].array().tolist() == [[b"d", b"e"], [b"a", b"b"], [b"d", b"e"]]
    with pytest.raises(InvalidArgument, match="not the same shape"):
        batch_of(steps, 0, 2, view())


def test_streams_are_kept_for_sequences(tmp_path: Path) -> None:
    step = {"X": [0] * 6, "T": ["a", "b"]}
    path = written(tmp_path, {"data": [[step], [step, step]]})
    assert [len(stream) for stream in streams_of(options("--input-data", path), view(sequence_batching={}))] == [1, 2]
    assert [len(stream) for stream in streams_of(options("--input-data", path), view())] == [3]


def test_directories(tmp_path: Path) -> None:
    (tmp_path / "X").write_bytes(np.arange(6, dtype=np.float32).tobytes())
    (tmp_path / "T").write_text("one\ntwo\n")
    ((step,),) = streams_of(options("--input-data", str(tmp_path)), view())
    assert arrays(step) == {"X": [[0, 1, 2], [3, 4, 5]], "T": [b"one", b"two"]}


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"data": []}, "has no list 'data'"),
        ([], "has no list 'data'"),
        ({"data": [[]]}, "has no data"),
        ({"data": [3]}, "a step is an object"),
        ({"data": [{"X": [1] * 6}]}, "without the input 'T'"),
        ({"data": [{"X": [1] * 5, "T": ["a", "b"]}]}, "has 24 bytes"),
        ({"data": [{"Z": [1], "X": [1] * 6, "T": ["a", "b"]}]}, "has the input 'Z'"),
        ({"data": [{"X": ["x"] * 6, "T": ["a", "b"]}]}, "cannot be read"),
        ({"data": [{"X": {"b64": "?"}, "T": ["a", "b"]}]}, "cannot be read"),
        ({"data": [{"X": [1] * 6, "T": ["a", "b"]}], "validation_data": []}, "answers are not compared"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, data: Any, sentence: str) -> None:
    with pytest.raises(InvalidArgument, match=sentence):
        streams_of(options("--input-data", written(tmp_path, data)), view())


def test_what_the_model_cannot_take(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="free shape"):
        streams_of(parsed(["bench", "-m", "model"]), view())
    with pytest.raises(InvalidArgument, match="which model 'model' has not"):
        streams_of(options("--shape", "Z:1"), view())
    with pytest.raises(InvalidArgument, match="--shape of input 'X'"):
        streams_of(options("--shape", "X:3,3"), view())
    ((step,),) = streams_of(options(), view())
    with pytest.raises(InvalidArgument, match="at most 8"):
        batch_of([step], 0, 9, view())
    with pytest.raises(InvalidArgument, match="does not batch"):
        batch_of([step], 0, 2, view({"max_batch_size": 0}))
    with pytest.raises(InvalidArgument, match="cannot be read"):
        streams_of(options("--input-data", str(tmp_path / "none.json")), view())


def test_intervals(tmp_path: Path) -> None:
    (tmp_path / "intervals").write_text("100\n200\n")
    assert intervals_of(str(tmp_path / "intervals")) == (100, 200)
    (tmp_path / "intervals").write_text("100\n-2\n")
    with pytest.raises(InvalidArgument, match="no list of microseconds"):
        intervals_of(str(tmp_path / "intervals"))
    with pytest.raises(InvalidArgument, match="cannot be read"):
        intervals_of(str(tmp_path / "none"))
