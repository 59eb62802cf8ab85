"""The tensorflow backend, over OpenVINO: SavedModels and frozen graphs; their names, signatures, tags and errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow_model as tf
from backend_calls import instance_of, signature_of
from e2e_server import serving
from tritonclient import http as client

from charonia.backend import InstanceSpec, ModelSource, TensorSignature
from charonia.errors import InternalError, InvalidArgument, NotFound, Unsupported
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from charonia.testing.backend_contract import CHECKS, Check, ReferenceModel
from executors.backends.openvino import OpenVinoBackend, TensorFlowBackend
from executors.configuration.autofill import from_graph
from executors.configuration.config import normalise

IMAGE = np.array([[1, 2, 3, 4], [-1, 0, 2, 0.5], [0, 0, 0, 0]], np.float32)
GRAPH = """
max_batch_size: 8 input { name: "image" data_type: TYPE_FP32 dims: 4 }
output { name: "scores" data_type: TYPE_FP32 dims: 3 }
"""
SAVED = """
max_batch_size: 8 input { name: "picture" data_type: TYPE_FP32 dims: 4 }
output { name: "scores" data_type: TYPE_FP32 dims: 3 }
"""


def source(directory: Path, platform: str, text: str = "", **parameters: str) -> ModelSource:
    said = "".join(f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}' for k, v in parameters.items())
    config = normalise(parse(f'name: "m" backend: "tensorflow" platform: "tensorflow_{platform}" {text} {said}'))
    return ModelSource("m", 1, directory, config)


def completed(of: ModelSource, signature: Any) -> InstanceSpec:
    config = normalise(from_graph(of.config, signature))
    return InstanceSpec("m_0", "CPU", -1, ModelSource("m", 1, of.directory, config), ModelInterface.of(config))


async def opened(of: ModelSource) -> tuple[Any, Any]:
    """What auto-complete sees, and an instance of the configuration that it makes."""
    found = await signature_of(TensorFlowBackend(), of)
    return found, await instance_of(TensorFlowBackend(), completed(of, found))


def frozen(directory: Path, nodes: Any = None, file: str = "model.graphdef") -> None:
    (directory / "1").mkdir(parents=True)
    (directory / "1" / file).write_bytes(tf.frozen_graph(tf.scoring() if nodes is None else nodes))


def reference(platform: str) -> Callable[[Path], ReferenceModel]:
    def made(directory: Path) -> ReferenceModel:
        if platform == "graphdef":
            frozen(directory)
        else:
            tf.saved_model(directory / "1" / "model.savedmodel", {"serving_default": tf.SERVING})
        name = "image" if platform == "graphdef" else "picture"
        of = source(directory, platform, GRAPH if platform == "graphdef" else SAVED)
        return ReferenceModel(
            source=of,
            interface=ModelInterface.of(of.config),
            expected=lambda inputs: {"scores": tf.scores(inputs[name])},
            requests=[{name: IMAGE[:2]}, {name: IMAGE[2:]}, {name: IMAGE}],
            failing={name: np.zeros((2, 5), np.float32)},
            loads=5,
            rtol=1e-6,
        )

    return made


@pytest.mark.parametrize("platform", ["savedmodel", "graphdef"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_it_keeps_the_contract(check: Check, platform: str, tmp_path: Path) -> None:
    await check(TensorFlowBackend(), reference(platform)(tmp_path))


async def test_a_saved_model_has_the_names_of_its_signature(tmp_path: Path) -> None:
    tf.saved_model(tmp_path / "1" / "model.savedmodel", {"serving_default": tf.SERVING, "add": tf.ADDING})
    found, instance = await opened(source(tmp_path, "savedmodel"))
    assert found.inputs == (TensorSignature("picture", "FP32", (-1, 4)),)
    assert {tensor.name: tensor.dims for tensor in found.outputs} == {"scores": (-1, 3), "raw": (-1, 3)}
    answer = instance.execute({"picture": IMAGE}, ["scores", "raw"])
    np.testing.assert_allclose(answer["scores"], tf.scores(IMAGE), rtol=1e-6)
    np.testing.assert_allclose(answer["raw"], IMAGE @ tf.WEIGHTS, rtol=1e-6)


@pytest.mark.parametrize(
    ("signatures", "tags", "parameters"),
    [
        ({"serving_default": tf.SERVING, "add": tf.ADDING}, (("serve",),), {"TF_SIGNATURE_DEF": "add"}),
        ({"add": tf.ADDING}, (("serve",),), {}),  # the only one there is
        ({"add": tf.ADDING}, (("train",), ("serve", "fast")), {"TF_GRAPH_TAG": "fast"}),
        ({"serving_default": tf.ADDING}, (("train",), ("serve",)), {}),
    ],
)
async def test_the_signature_and_the_graph_that_are_asked_for(
    tmp_path: Path, signatures: Any, tags: Any, parameters: dict[str, str]
) -> None:
    tf.saved_model(tmp_path / "1" / "model.savedmodel", signatures, tags)
    found, instance = await opened(source(tmp_path, "savedmodel", **parameters))
    assert [tensor.name for tensor in found.inputs] == ["left", "right"]
    assert sorted(tensor.name for tensor in found.outputs) == ["echo", "sum"]
    answer = instance.execute({"left": IMAGE, "right": 2 * IMAGE}, ["echo", "sum"])
    np.testing.assert_array_equal(answer["echo"], IMAGE, "an input that is an output")
    np.testing.assert_allclose(answer["sum"], 3 * IMAGE @ tf.WEIGHTS, rtol=1e-6)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"TF_SIGNATURE_DEF": "other"}, "expected 'other' signature; the file has 'add', 'serving_default'"),
        ({"TF_GRAPH_TAG": "gpu"}, "expected 'gpu' tag; the graphs of the file have 'serve'"),
    ],
)
async def test_a_signature_or_tag_that_there_is_not(tmp_path: Path, parameters: dict[str, str], text: str) -> None:
    tf.saved_model(tmp_path / "1" / "model.savedmodel", {"serving_default": tf.SERVING, "add": tf.ADDING})
    with pytest.raises(InvalidArgument, match=f"unable to load model 'm', {text}"):
        await signature_of(TensorFlowBackend(), source(tmp_path, "savedmodel", **parameters))


@pytest.mark.parametrize("file", ["model.graphdef", "other.pb"])
async def test_a_frozen_graph_has_the_names_of_its_nodes(tmp_path: Path, file: str) -> None:
    frozen(tmp_path, tf.scores_alone(), file)
    named = f'default_model_filename: "{file}"'
    found, instance = await opened(source(tmp_path, "graphdef", "" if file == "model.graphdef" else named))
    assert found.inputs == (TensorSignature("image", "FP32", (-1, 4)),)
    assert found.outputs == (TensorSignature("scores", "FP32", (-1, 3)),)
    np.testing.assert_allclose(instance.execute({"image": IMAGE}, ["scores"])["scores"], tf.scores(IMAGE), rtol=1e-6)


async def test_a_frozen_graph_is_cut_at_the_tensors_of_the_configuration(tmp_path: Path) -> None:
    """An output may be a node that others use, and what the configuration does not need is not asked for."""
    frozen(tmp_path)
    of = source(tmp_path, "graphdef", GRAPH.replace('"scores"', '"logits"'))
    found, instance = await opened(of)
    assert [tensor.name for tensor in (*found.inputs, *found.outputs)] == ["image", "logits"]
    np.testing.assert_allclose(instance.execute({"image": IMAGE}, ["logits"])["logits"], IMAGE @ tf.WEIGHTS, rtol=1e-6)


async def test_a_tensor_that_the_graph_has_not_is_named(tmp_path: Path) -> None:
    frozen(tmp_path)
    of = source(tmp_path, "graphdef", GRAPH.replace('"scores"', '"nothing"'))
    with pytest.raises(InvalidArgument, match="unexpected inference output 'nothing', allowed outputs are: "):
        await instance_of(TensorFlowBackend(), InstanceSpec("m_0", "CPU", -1, of, ModelInterface.of(of.config)))


async def test_operations_that_cannot_be_converted_are_named_with_the_plug_in(tmp_path: Path) -> None:
    nodes = [tf.placeholder("image", (-1,), tf.STRING), tf.node("scores", "StringUpper", ["image"])]
    frozen(tmp_path, nodes)
    with pytest.raises(Unsupported, match=r"cannot convert: StringUpper; install the plug-in charonia-tensorflow"):
        await signature_of(TensorFlowBackend(), source(tmp_path, "graphdef"))
    with pytest.raises(Unsupported, match=r"'TF_INIT_OPS_FILE' .* install the plug-in charonia-tensorflow"):
        await signature_of(TensorFlowBackend(), source(tmp_path, "graphdef", TF_INIT_OPS_FILE="init.json"))


async def test_files_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="unable to find"):
        await signature_of(TensorFlowBackend(), source(tmp_path, "savedmodel"))
    folder = tmp_path / "1" / "model.savedmodel"
    folder.mkdir(parents=True)
    with pytest.raises(NotFound, match="unable to find"):
        await signature_of(TensorFlowBackend(), source(tmp_path, "savedmodel"))
    for content in (b"\xff" * 20, b"nothing"):
        (folder / "saved_model.pb").write_bytes(content)
        with pytest.raises(InternalError, match=r"the file 'saved_model.pb' of 'm' is no SavedModel"):
            await signature_of(TensorFlowBackend(), source(tmp_path, "savedmodel"))
    (tmp_path / "1" / "model.graphdef").write_bytes(b"nothing")
    with pytest.raises(InternalError, match=r"^openvino error: "):
        await signature_of(TensorFlowBackend(), source(tmp_path, "graphdef"))


async def test_a_part_of_a_saved_model_that_lies_outside_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "m" / "1" / "model.savedmodel"
    tf.saved_model(folder, {"serving_default": tf.SERVING})
    (tmp_path / "weights").write_bytes(b"secret")
    (folder / "variables" / "variables.index").symlink_to(tmp_path / "weights")
    with pytest.raises(InvalidArgument, match="a file of the SavedModel of 'm' is outside the version directory"):
        await signature_of(TensorFlowBackend(), source(tmp_path / "m", "savedmodel"))


async def test_openvino_serves_the_same_folder_under_its_own_name(tmp_path: Path) -> None:
    tf.saved_model(tmp_path / "1" / "model.savedmodel", {"serving_default": tf.SERVING})
    config = parse(f'name: "m" backend: "openvino" default_model_filename: "model.savedmodel" {SAVED}')
    of = ModelSource("m", 1, tmp_path, normalise(config))
    instance = await instance_of(OpenVinoBackend(), InstanceSpec("m_0", "CPU", -1, of, ModelInterface.of(of.config)))
    answer = instance.execute({"picture": IMAGE}, ["scores"])["scores"]
    np.testing.assert_allclose(answer, tf.scores(IMAGE), rtol=1e-6)


def test_a_repository_of_both_platforms_is_served(tmp_path: Path) -> None:
    """One has a configuration, the other only its folder."""
    tf.saved_model(tmp_path / "models" / "saved" / "1" / "model.savedmodel", {"serving_default": tf.SERVING})
    frozen(tmp_path / "models" / "graph")
    (tmp_path / "models" / "graph" / "config.pbtxt").write_text(f'platform: "tensorflow_graphdef" {GRAPH}')
    with (
        serving(tmp_path / "models", tmp_path / "state") as server,
        client.InferenceServerClient(server.http, network_timeout=120) as asked,
    ):
        assert asked.get_model_config("saved")["platform"] == "tensorflow_savedmodel"
        for model, name in (("saved", "picture"), ("graph", "image")):
            tensor = client.InferInput(name, list(IMAGE.shape), "FP32")
            tensor.set_data_from_numpy(IMAGE)
            found = asked.infer(model, [tensor]).as_numpy("scores")
            np.testing.assert_allclose(found, tf.scores(IMAGE), rtol=1e-6)
