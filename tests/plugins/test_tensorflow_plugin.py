"""The plug-in for TensorFlow (`make test-tensorflow`): what OpenVINO cannot convert, and the same names as there."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import inputs as examples
import numpy as np
import onnxruntime
import published_models as published
import pytest
import tensorflow_model as written
from backend_calls import instance_of, signature_of
from charonia_tensorflow import TensorFlowBackend
from e2e_server import serving
from tritonclient import http as client
from tritonclient.utils import InferenceServerException

from charonia.backend import InstanceSpec, ModelSource, TensorSignature
from charonia.errors import InternalError, InvalidArgument, NotFound
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from charonia.testing.backend_contract import CHECKS, Check, ReferenceModel
from executors.backends.registry import BackendRegistry
from executors.configuration.config import normalise

IMAGE = np.array([[1, 2, 3, 4], [-1, 0, 2, 0.5], [0, 0, 0, 0]], np.float32)
SAVED = """
max_batch_size: 8 input { name: "picture" data_type: TYPE_FP32 dims: 4 }
output { name: "scores" data_type: TYPE_FP32 dims: 3 }
"""
GRAPH = SAVED.replace("picture", "image")


def source(directory: Path, platform: str, text: str = "", **parameters: str) -> ModelSource:
    said = "".join(f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}' for k, v in parameters.items())
    config = normalise(parse(f'name: "m" backend: "tensorflow" platform: "tensorflow_{platform}" {text} {said}'))
    return ModelSource("m", 1, directory, config)


def spec(of: ModelSource) -> InstanceSpec:
    return InstanceSpec("m_0", "CPU", -1, of, ModelInterface.of(of.config))


def made(directory: Path, platform: str) -> ModelSource:
    if platform == "savedmodel":
        written.saved_model(directory / "1" / "model.savedmodel", {"serving_default": written.SERVING})
        return source(directory, platform, SAVED)
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "model.graphdef").write_bytes(written.frozen_graph(written.scoring()))
    return source(directory, platform, GRAPH)


@pytest.mark.parametrize("platform", ["savedmodel", "graphdef"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_it_keeps_the_contract(check: Check, platform: str, tmp_path: Path) -> None:
    of = made(tmp_path, platform)
    name = "picture" if platform == "savedmodel" else "image"
    model = ReferenceModel(
        source=of,
        interface=ModelInterface.of(of.config),
        expected=lambda inputs: {"scores": written.scores(inputs[name])},
        requests=[{name: IMAGE[:2]}, {name: IMAGE[2:]}, {name: IMAGE}],
        failing={name: np.zeros((2, 5), np.float32)},
        loads=3,
        rtol=1e-5,
    )
    await check(TensorFlowBackend(), model)


async def test_signatures_and_tags_are_chosen_as_in_the_shipped_backend(tmp_path: Path) -> None:
    written.saved_model(
        tmp_path / "1" / "model.savedmodel",
        {"serving_default": written.SERVING, "add": written.ADDING},
        (("train",), ("serve", "fast")),
    )
    for tag in ({}, {"TF_GRAPH_TAG": "serve"}, {"TF_GRAPH_TAG": "fast"}):
        found = await signature_of(TensorFlowBackend(), source(tmp_path, "savedmodel", TF_SIGNATURE_DEF="add", **tag))
        assert sorted(found.inputs, key=lambda tensor: tensor.name) == [
            TensorSignature("left", "FP32", (-1, 4)),
            TensorSignature("right", "FP32", (-1, 4)),
        ]
        assert sorted(tensor.name for tensor in found.outputs) == ["echo", "sum"]
    for parameters, text in (
        ({"TF_SIGNATURE_DEF": "other"}, "expected 'other' signature"),
        ({"TF_GRAPH_TAG": "gpu"}, r"expected 'gpu' tag; the graphs of the file have \['fast', 'serve', 'train'\]"),
    ):
        with pytest.raises((InvalidArgument, InternalError), match=text):
            await signature_of(TensorFlowBackend(), source(tmp_path, "savedmodel", **parameters))


async def test_strings_and_files_which_openvino_cannot_convert(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    nodes = [written.placeholder("text", (-1, 1), written.STRING), written.node("upper", "StringUpper", ["text"])]
    (tmp_path / "1" / "model.graphdef").write_bytes(written.frozen_graph(nodes))
    text = """
    max_batch_size: 8 input { name: "text" data_type: TYPE_STRING dims: 1 }
    output { name: "upper" data_type: TYPE_STRING dims: 1 }
    """
    instance = await instance_of(TensorFlowBackend(), spec(source(tmp_path, "graphdef", text)))
    words = np.array([[b"one"], [b"two"]], np.object_)
    assert instance.execute({"text": words}, ["upper"])["upper"].tolist() == [[b"ONE"], [b"TWO"]]


async def test_operations_that_initialise_a_graph(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    shape = {"shape": {"dim": [{"size": 4}, {"size": 3}]}}
    nodes = [
        written.placeholder("image", (-1, 4)),
        written.constant("weights", written.WEIGHTS),
        written.node("kept", "VariableV2", dtype={"type": written.FLOAT}, shape=shape),
        written.node("init", "Assign", ["kept", "weights"], T={"type": written.FLOAT}),
        written.node("scores", "MatMul", ["image", "kept"], T={"type": written.FLOAT}),
    ]
    (tmp_path / "1" / "model.graphdef").write_bytes(written.frozen_graph(nodes))
    (tmp_path / "init.json").write_text(json.dumps({"init_ops": ["init"]}))
    of = source(tmp_path, "graphdef", GRAPH, TF_INIT_OPS_FILE="init.json")
    answer = (await instance_of(TensorFlowBackend(), spec(of))).execute({"image": IMAGE}, ["scores"])["scores"]
    np.testing.assert_allclose(answer, IMAGE @ written.WEIGHTS, rtol=1e-6)
    with pytest.raises(InvalidArgument, match=r"there is no file '../../init.json' in the model"):
        await instance_of(
            TensorFlowBackend(), spec(source(tmp_path, "graphdef", GRAPH, TF_INIT_OPS_FILE="../../init.json"))
        )


async def test_files_and_tensors_that_there_are_not(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="unable to find"):
        await signature_of(TensorFlowBackend(), source(tmp_path, "savedmodel"))
    of = made(tmp_path / "m", "graphdef")
    other = source(tmp_path / "m", "graphdef", GRAPH.replace('"scores"', '"nothing"'))
    with pytest.raises(InvalidArgument, match="model 'm' has no tensor 'nothing'"):
        await instance_of(TensorFlowBackend(), spec(other))
    (of.version_directory / "model.graphdef").write_bytes(b"nothing")
    with pytest.raises(InternalError, match="TensorFlow cannot open model 'm'"):
        await instance_of(TensorFlowBackend(), spec(of))


def test_it_stands_in_for_the_shipped_backend_and_is_served(tmp_path: Path) -> None:
    """A table, which TensorFlow itself saved, and strings."""
    import tensorflow as tf

    assert isinstance(BackendRegistry().get("tensorflow"), TensorFlowBackend)

    class Table(tf.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            entries = tf.lookup.KeyValueTensorInitializer(["one", "two"], [1, 2], tf.string, tf.int64)
            self.table = tf.lookup.StaticHashTable(entries, -1)

        @tf.function(input_signature=[tf.TensorSpec([None, 1], tf.string, name="word")])  # type: ignore[untyped-decorator]
        def number(self, word: Any) -> dict[str, Any]:
            return {"number": self.table.lookup(tf.strings.lower(word))}

    table = Table()
    folder = tmp_path / "models" / "table" / "1" / "model.savedmodel"
    tf.saved_model.save(table, str(folder), signatures={"serving_default": table.number})
    with (
        serving(tmp_path / "models", tmp_path / "state") as server,
        client.InferenceServerClient(server.http, network_timeout=120) as asked,
    ):
        words = np.array([[b"TWO"], [b"three"], [b"one"]], np.object_)
        tensor = client.InferInput("word", [3, 1], "BYTES")
        tensor.set_data_from_numpy(words)
        assert asked.infer("table", [tensor]).as_numpy("number").tolist() == [[2], [-1], [1]]
        titles = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):  # it has ended meanwhile
                titles.append(path.read_bytes())
        assert any(b"executors.isolation" in title and b"table" in title for title in titles), "its own process"


async def test_a_published_model_answers_as_its_onnx_file_does(tmp_path: Path) -> None:
    """Basic Pitch, which its authors saved with TensorFlow; it is in `tests/backends` for OpenVINO."""
    files = published.BASIC_PITCH_FILES
    published.extract(published.BASIC_PITCH, f"{files}nmp/", tmp_path / "1" / "model.savedmodel")
    published.extract(published.BASIC_PITCH, f"{files}nmp.onnx", tmp_path / "nmp.onnx")
    of = source(
        tmp_path,
        "savedmodel",
        """max_batch_size: 4 input { name: "input_2" data_type: TYPE_FP32 dims: [43844, 1] }
        output { name: "note" data_type: TYPE_FP32 dims: [172, 88] }
        output { name: "onset" data_type: TYPE_FP32 dims: [172, 88] }""",
    )
    heard = np.resize(examples.samples(examples.VOICE), (2, 43844, 1))
    answer = (await instance_of(TensorFlowBackend(), spec(of))).execute({"input_2": heard}, ["note", "onset"])
    session = onnxruntime.InferenceSession(str(tmp_path / "nmp.onnx"), providers=["CPUExecutionProvider"])
    names = {"note": "StatefulPartitionedCall:1", "onset": "StatefulPartitionedCall:2"}
    for name, wanted in zip(
        names, session.run(list(names.values()), {"serving_default_input_2:0": heard}), strict=True
    ):
        np.testing.assert_allclose(answer[name], wanted, atol=1e-4)


@pytest.mark.parametrize("isolation", ["process", ""])
def test_a_model_that_reads_files_reads_none_in_its_sandbox(tmp_path: Path, isolation: str) -> None:
    """TensorFlow's operations on files work through requests where only a process was asked for."""
    text = {"type": written.STRING}
    nodes = [
        written.placeholder("path", (1,), written.STRING),
        written.node("scalar", "Squeeze", ["path"], T=text),
        written.node("read", "ReadFile", ["scalar"]),
        written.node("content", "Pack", ["read"], T=text, N={"i": 1}),
    ]
    version = tmp_path / "models" / "reader" / "1"
    version.mkdir(parents=True)
    (version / "model.graphdef").write_bytes(written.frozen_graph(nodes))
    secret = tmp_path / "secret"
    secret.write_text("of another")
    (tmp_path / "models" / "reader" / "config.pbtxt").write_text(
        'platform: "tensorflow_graphdef" input { name: "path" data_type: TYPE_STRING dims: 1 } '
        'output { name: "content" data_type: TYPE_STRING dims: 1 } '
        + (f'parameters {{ key: "charonia.isolation" value {{ string_value: "{isolation}" }} }}' if isolation else "")
    )
    with (
        serving(tmp_path / "models", tmp_path / "state") as server,
        client.InferenceServerClient(server.http, network_timeout=120) as asked,
    ):
        tensor = client.InferInput("path", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([str(secret).encode()], np.object_))
        if isolation:
            assert asked.infer("reader", [tensor]).as_numpy("content").tolist() == [b"of another"]
        else:
            with pytest.raises(InferenceServerException, match="Permission denied"):
                asked.infer("reader", [tensor])
