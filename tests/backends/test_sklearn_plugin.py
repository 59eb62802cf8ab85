"""The plug-in for scikit-learn, as it is installed: pipelines over real sets against scikit-learn itself."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import skops.io
from e2e_server import serving
from sklearn.datasets import load_iris, load_wine
from sklearn.ensemble import RandomForestClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from tritonclient import http as client

from charonia.backend import ENTRY_POINT_GROUP, InstanceSpec
from charonia.errors import CharoniaError, InternalError, InvalidArgument, NotFound
from charonia.testing.backend_contract import CHECKS, Check, ReferenceModel
from executors.backends.registry import BackendRegistry

WINE, KINDS = load_wine(return_X_y=True)
CONFIG = """
max_batch_size: 64 input { name: "features" data_type: TYPE_FP64 dims: 13 }
output { name: "predict" data_type: TYPE_INT64 dims: 1 } output { name: "predict_proba" data_type: TYPE_FP32 dims: 3 }
"""


def pipeline() -> Any:
    return make_pipeline(StandardScaler(), LogisticRegression(max_iter=500)).fit(WINE, KINDS)


def saved(directory: Path, model: Any) -> Path:
    (directory / "1").mkdir(parents=True)
    skops.io.dump(model, directory / "1" / "model.skops")
    return directory


def reference(directory: Path, model: Any, config: str = CONFIG) -> ReferenceModel:
    return ReferenceModel.of(
        saved(directory, model),
        config,
        expected=lambda inputs: {
            "predict": model.predict(inputs["features"])[:, np.newaxis],
            "predict_proba": model.predict_proba(inputs["features"]).astype(np.float32),
        },
        requests=[{"features": WINE[:5]}, {"features": WINE[70:71]}, {"features": WINE[150:170]}],
        failing={"features": np.zeros((2, 5))},
        loads=5,
        rtol=1e-6,
    )


def test_it_is_installed_as_a_distribution_of_its_own() -> None:
    (entry,) = metadata.entry_points(group=ENTRY_POINT_GROUP, name="sklearn")
    assert entry.dist is not None
    assert entry.dist.name == "charonia-sklearn"
    assert entry.load().isolation == "process"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_it_keeps_the_contract(check: Check, tmp_path: Path) -> None:
    await check(BackendRegistry().get("sklearn"), reference(tmp_path / "m", pipeline()))


async def error_of(directory: Path, config: str) -> CharoniaError:
    of = ReferenceModel.of(directory, config, expected=lambda _: {}, requests=[], failing={})
    with pytest.raises(CharoniaError) as caught:
        await BackendRegistry().get("sklearn").load(of.source)
    return caught.value


async def test_types_that_are_not_trusted_are_refused_by_name(tmp_path: Path) -> None:
    """No code of the file runs: the type is refused before it is made."""
    hostile = saved(tmp_path / "hostile", make_pipeline(FunctionTransformer(os.system)))
    error = await error_of(hostile, CONFIG)
    assert isinstance(error, InvalidArgument)
    assert "has types that are not trusted: posix.system; name those that you trust" in error.message
    forest = RandomForestClassifier(3).fit(WINE, KINDS)
    error = await error_of(saved(tmp_path / "forest", forest), CONFIG)
    assert "not trusted: sklearn.tree._tree.Tree; " in error.message
    trusting = CONFIG + 'parameters { key: "TRUSTED_TYPES" value { string_value: "a.B, sklearn.tree._tree.Tree" } }'
    of = reference(tmp_path / "again", forest, trusting)
    model = await BackendRegistry().get("sklearn").load(of.source)
    instance = await model.create_instance(InstanceSpec("m_0", "CPU", -1, of.source, of.interface))
    answer = instance.execute({"features": WINE}, ["predict"])
    np.testing.assert_array_equal(answer["predict"][:, 0], forest.predict(WINE))


async def test_files_and_configurations_that_are_wrong(tmp_path: Path) -> None:
    good = saved(tmp_path / "good", pipeline())
    assert isinstance(await error_of(good, 'default_model_filename: "none.skops"' + CONFIG), NotFound)
    error = await error_of(good, 'default_model_filename: "../../x"' + CONFIG)
    assert "outside the version directory" in error.message
    error = await error_of(good, CONFIG.replace('"predict"', '"score"'))
    assert "outputs are methods of the pipeline, ['predict', 'predict_proba', 'decision_function']" in error.message
    error = await error_of(good, CONFIG + 'input { name: "more" data_type: TYPE_FP64 dims: 1 }')
    assert "must have one input, a row of features, got 2" in error.message
    for content in (b"", b"junk", (good / "1" / "model.skops").read_bytes()[:200]):
        (tmp_path / "broken" / "1").mkdir(parents=True, exist_ok=True)
        (tmp_path / "broken" / "1" / "model.skops").write_bytes(content)
        assert isinstance(await error_of(tmp_path / "broken", CONFIG), InternalError)


def test_they_are_served_with_configurations_that_are_completed(tmp_path: Path) -> None:
    """Labels that are words, several targets, and texts."""
    flowers = load_iris()
    names = flowers.target_names[flowers.target]
    words = make_pipeline(StandardScaler(), LogisticRegression(max_iter=500)).fit(flowers.data, names)
    targets = make_pipeline(StandardScaler(), Ridge()).fit(WINE, WINE[:, :2])
    texts = make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(["good day", "bad night"] * 5, [1, 0] * 5)
    for name, model in (("words", words), ("targets", targets), ("texts", texts)):
        (saved(tmp_path / "models" / name, model) / "config.pbtxt").write_text("max_batch_size: 8")

    with serving(tmp_path / "models", tmp_path / "state") as server, client.InferenceServerClient(server.http) as asked:

        def ask(name: str, rows: np.ndarray, datatype: str) -> Any:
            tensor = client.InferInput("features", list(rows.shape), datatype)
            tensor.set_data_from_numpy(rows)
            return asked.infer(name, [tensor])

        some = flowers.data[48:52]
        answer = ask("words", some, "FP64")
        assert [label.decode() for label in answer.as_numpy("predict")[:, 0]] == list(words.predict(some))
        np.testing.assert_allclose(answer.as_numpy("predict_proba"), words.predict_proba(some))
        np.testing.assert_allclose(ask("targets", WINE[:3], "FP64").as_numpy("predict"), targets.predict(WINE[:3]))
        answer = ask("texts", np.array([[b"a good one"], [b"bad"]], object), "BYTES").as_numpy("predict")
        assert answer.tolist() == [[1], [0]]
        outputs = {one["name"]: one["dims"] for one in asked.get_model_config("words")["output"]}
        assert outputs == {"predict": [1], "predict_proba": [3], "decision_function": [3]}
