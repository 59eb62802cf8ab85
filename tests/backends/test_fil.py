"""The fil backend on models that XGBoost, LightGBM and scikit-learn trained on scikit-learn's sets."""

from __future__ import annotations

import json
import random
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pytest
import treelite
import xgboost
from backend_calls import instance_of, signature_of
from e2e_server import serving
from sklearn import datasets, ensemble
from threadpoolctl import threadpool_limits
from tritonclient import http as client
from tritonclient.utils import InferenceServerException

from charonia.backend import InstanceSpec, Interrupted, ModelSource, TensorSignature
from charonia.errors import CharoniaError, InvalidArgument, NotFound, Unsupported
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from charonia.testing.backend_contract import CHECKS, Check, ReferenceModel
from executors.backends.fil import FilBackend, fil_backend, model_reader
from executors.backends.fil import contributions as fil_contributions
from executors.backends.fil.engines import TreeliteEngine
from executors.configuration.autofill import from_graph
from executors.configuration.config import normalise

Array = np.ndarray[Any, Any]
SETS = {"binary": datasets.load_breast_cancer, "digits": datasets.load_digits, "regression": datasets.load_diabetes}
FILES = {
    "json": ("xgboost_json", "xgboost.json"),
    "ubj": ("xgboost_ubj", "xgboost.ubj"),
    "txt": ("lightgbm", "model.txt"),
    "tl": ("treelite_checkpoint", "checkpoint.tl"),
}


@dataclass(frozen=True)
class Trained:
    """A model file, its set's features as FP32, and what the library that trained it answers for them."""

    suffix: str
    content: bytes
    rows: Array
    answers: Array
    """[rows, classes]: probabilities of a classifier, else values."""
    contributions: Array | None = None

    @property
    def width(self) -> int:
        return int(self.rows.shape[1])

    def put(self, directory: Path) -> Path:
        path = directory / "1" / FILES[self.suffix][1]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.content)
        return path


def table(name: str) -> tuple[Array, Array]:
    rows, labels = SETS[name](return_X_y=True)
    return rows.astype(np.float32), labels


def of_xgboost(name: str, suffix: str = "ubj", rounds: int = 50, **parameters: Any) -> Trained:
    rows, labels = table(name)
    matrix = xgboost.DMatrix(rows, labels)
    booster = xgboost.train({"max_depth": 5, "nthread": 1, **parameters}, matrix, rounds)
    answers = booster.predict(matrix)
    if parameters["objective"] == "multi:softmax":
        booster.set_param("objective", "multi:softprob")
        answers = booster.predict(matrix)
        booster.set_param("objective", "multi:softmax")
    return Trained(
        suffix,
        bytes(booster.save_raw("json" if suffix == "json" else "ubj")),
        rows,
        answers.reshape(len(rows), -1),
        booster.predict(matrix, pred_contribs=True),
    )


def of_lightgbm(name: str, rounds: int = 30, **parameters: Any) -> Trained:
    rows, labels = table(name)
    booster = lightgbm.train(
        {"verbose": -1, "num_threads": 1, **parameters}, lightgbm.Dataset(rows.astype(np.float64), labels), rounds
    )
    answers, contributions = booster.predict(rows), booster.predict(rows, pred_contrib=True)
    return Trained(
        "txt", booster.model_to_string().encode(), rows, np.asarray(answers).reshape(len(rows), -1), contributions
    )


def of_sklearn(name: str, made: Any) -> Trained:
    rows, labels = table(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with threadpool_limits(1):  # threads of OpenMP spin for each other: minutes on a busy machine
            made.fit(rows, labels)
        content = treelite.sklearn.import_model(made).serialize_bytes()
    if hasattr(made, "predict_proba"):
        answers = made.predict_proba(rows)
    elif isinstance(made, ensemble.IsolationForest):
        answers = -made.score_samples(rows)
    else:
        answers = made.predict(rows)
    if content_classes(content) == 1 and answers.ndim == 2:
        answers = answers[:, 1]
    return Trained("tl", content, rows, answers.reshape(len(rows), -1))


def content_classes(checkpoint: bytes) -> int:
    model = treelite.Model.deserialize_bytes(checkpoint)  # whose memory the field is
    return int(model.get_header_accessor().get_field("num_class")[0])


def with_categories() -> Trained:
    """Features that are lists of categories, some of them missing, by LightGBM."""
    random_state = np.random.default_rng(5)
    rows = random_state.integers(0, 40, (3000, 4)).astype(np.float32)
    rows[random_state.random(rows.shape) < 0.1] = np.nan
    labels = (np.nan_to_num(rows[:, 0]) % 3 == 0) ^ (np.nan_to_num(rows[:, 1]) % 5 < 2)
    data = lightgbm.Dataset(rows.astype(np.float64), labels.astype(int), categorical_feature=[0, 1, 2])
    booster = lightgbm.train(
        {"objective": "binary", "verbose": -1, "min_data_per_group": 1, "cat_smooth": 1, "max_cat_to_onehot": 1},
        data,
        30,
    )
    return Trained("txt", booster.model_to_string().encode(), rows, np.asarray(booster.predict(rows)).reshape(-1, 1))


def with_categories_of_xgboost() -> Trained:
    random_state = np.random.default_rng(6)
    rows = random_state.integers(0, 30, (3000, 3)).astype(np.float32)
    rows[random_state.random(rows.shape) < 0.1] = np.nan
    labels = (np.nan_to_num(rows[:, 0]) % 3 == 0).astype(int)
    matrix = xgboost.DMatrix(rows, labels, feature_types=["c", "c", "q"], enable_categorical=True)
    booster = xgboost.train({"objective": "binary:logistic", "max_cat_to_onehot": 1}, matrix, 20)
    return Trained(
        "json",
        bytes(booster.save_raw("json")),
        rows,
        booster.predict(matrix).reshape(-1, 1),
        booster.predict(matrix, pred_contribs=True),
    )


MODELS: dict[str, tuple[Callable[[], Trained], float]] = {
    "xgboost binary json": (lambda: of_xgboost("binary", "json", objective="binary:logistic"), 3e-7),
    "xgboost binary ubj": (lambda: of_xgboost("binary", objective="binary:logistic"), 3e-7),
    "xgboost softprob": (lambda: of_xgboost("digits", objective="multi:softprob", num_class=10), 5e-7),
    "xgboost softmax": (lambda: of_xgboost("digits", "json", objective="multi:softmax", num_class=10), 5e-7),
    "xgboost regression": (lambda: of_xgboost("regression", objective="reg:squarederror"), 3e-4),
    "xgboost poisson": (lambda: of_xgboost("regression", objective="count:poisson"), 1e-3),
    "xgboost hinge": (lambda: of_xgboost("binary", objective="binary:hinge"), 0),
    "xgboost dart": (lambda: of_xgboost("binary", booster="dart", rate_drop=0.2, objective="binary:logistic"), 1e-6),
    "xgboost forest": (
        lambda: of_xgboost("binary", rounds=1, num_parallel_tree=40, subsample=0.7, objective="binary:logistic"),
        3e-7,
    ),
    "xgboost categories": (with_categories_of_xgboost, 3e-7),
    "lightgbm binary": (lambda: of_lightgbm("binary", objective="binary"), 1e-7),
    "lightgbm multiclass": (lambda: of_lightgbm("digits", objective="multiclass", num_class=10), 1e-7),
    "lightgbm one against all": (lambda: of_lightgbm("digits", objective="multiclassova", num_class=10), 1e-7),
    "lightgbm regression": (lambda: of_lightgbm("regression", objective="regression"), 3e-5),
    "lightgbm forest": (
        lambda: of_lightgbm("binary", objective="binary", boosting="rf", bagging_fraction=0.7, bagging_freq=1),
        1e-7,
    ),
    "lightgbm categories": (with_categories, 1e-7),
    "random forest, binary": (lambda: of_sklearn("binary", ensemble.RandomForestClassifier(50, random_state=1)), 1e-7),
    "random forest, 10 classes": (
        lambda: of_sklearn("digits", ensemble.RandomForestClassifier(50, random_state=1)),
        1e-7,
    ),
    "random forest, regression": (
        lambda: of_sklearn("regression", ensemble.RandomForestRegressor(50, random_state=1)),
        3e-5,
    ),
    "extra trees": (lambda: of_sklearn("digits", ensemble.ExtraTreesClassifier(50, random_state=1)), 1e-7),
    "gradient boosting, binary": (
        lambda: of_sklearn("binary", ensemble.GradientBoostingClassifier(n_estimators=40, random_state=1)),
        1e-7,
    ),
    "gradient boosting, 10 classes": (
        lambda: of_sklearn("digits", ensemble.GradientBoostingClassifier(n_estimators=10, random_state=1)),
        1e-7,
    ),
    "gradient boosting, regression": (
        lambda: of_sklearn("regression", ensemble.GradientBoostingRegressor(n_estimators=40, random_state=1)),
        3e-5,
    ),
    "histogram boosting": (
        lambda: of_sklearn("digits", ensemble.HistGradientBoostingClassifier(max_iter=10, random_state=1)),
        1e-7,
    ),
    "isolation forest": (lambda: of_sklearn("binary", ensemble.IsolationForest(n_estimators=50, random_state=1)), 1e-7),
}
"""With the largest difference to the answers of the library that trained the model."""


@cache
def trained(name: str) -> Trained:
    return MODELS[name][0]()


@pytest.fixture(autouse=True)
def files_that_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads a file's content once for all tests: each time takes a process that imports treelite."""

    def remembered(name: str, path: Path, *words: str, **flags: bool) -> Any:
        key = (path.read_bytes(), *words, *flags.items())
        if key not in _READ:
            _READ[key] = model_reader.read_model(name, path, *words, **flags)
        return _READ[key]

    monkeypatch.setattr(fil_backend, "read_model", remembered)


_READ: dict[tuple[Any, ...], Any] = {}


def source(directory: Path, text: str = "max_batch_size: 4096", **parameters: str) -> ModelSource:
    said = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()
    )
    return ModelSource("m", 1, directory, normalise(parse(f'name: "m" backend: "fil" {text} {said}')))


async def completed(of: ModelSource) -> ModelSource:
    """The source with the tensors that the file has."""
    config = normalise(from_graph(of.config, await signature_of(FilBackend(), of)))
    return ModelSource(of.name, of.version, of.directory, config)


def spec(of: ModelSource, kind: str = "CPU") -> InstanceSpec:
    return InstanceSpec("m_0", kind, -1 if kind == "CPU" else 0, of, ModelInterface.of(of.config))


async def loaded(directory: Path, text: str = "max_batch_size: 4096", **parameters: str) -> Any:
    return await instance_of(FilBackend(), spec(await completed(source(directory, text, **parameters))))


def answer(instance: Any, rows: Array, output: str = "output__0") -> Array:
    found: Array = instance.execute({"input__0": rows}, [output])[output]
    return found


@pytest.mark.parametrize("name", MODELS)
async def test_answers_are_those_of_the_library_that_trained_the_model(name: str, tmp_path: Path) -> None:
    model = trained(name)
    model.put(tmp_path)
    instance = await loaded(tmp_path, predict_proba="true")
    got = answer(instance, model.rows)
    assert got.dtype == np.float32
    assert got.shape == model.answers.shape
    np.testing.assert_allclose(got, model.answers, rtol=0, atol=MODELS[name][1])


@pytest.mark.parametrize("name", MODELS)
async def test_strange_values_are_answered_as_by_treelite(name: str, tmp_path: Path) -> None:
    """Missing, infinite, negative, fractional and huge values, and the thresholds of the trees themselves."""
    model = trained(name)
    path = model.put(tmp_path)
    forest = {
        "txt": treelite.frontend.load_lightgbm_model,
        "tl": treelite.Model.deserialize,
    }.get(model.suffix, treelite.frontend.load_xgboost_model)(path)
    thresholds = np.unique(forest.get_tree_accessor(0).get_field("threshold")).astype(np.float32)
    near = [np.nextafter(thresholds, np.float32(end)) for end in (np.inf, -np.inf)]
    strange = [np.nan, np.inf, -np.inf, -0.0, 0.0, -0.5, 0.5, 2.5, 39.9, 1e-40, 16777216, 3e38, -3e38]
    strange += [*thresholds, *near[0], *near[1]]
    rows = np.random.default_rng(3).choice(np.array(strange, np.float32), (2000, model.width))
    instance = await loaded(tmp_path, predict_proba="true")
    wanted = treelite.gtil.predict(forest, rows.astype(forest.input_type)).reshape(len(rows), -1)
    np.testing.assert_allclose(answer(instance, rows), wanted, rtol=2e-6, atol=MODELS[name][1])


def reference(name: str, rows_per_request: int, **parameters: str) -> Callable[[Path], ReferenceModel]:
    """A model for the suite; a request that has a column too many is one it cannot run."""

    def made(directory: Path) -> ReferenceModel:
        model = trained(name)
        model.put(directory)
        shap = parameters.pop("shap", "")
        width, classes = model.width, model.answers.shape[1]
        decides = "predict_proba" not in parameters
        text = (
            f'max_batch_size: 64 input {{ name: "input__0" data_type: TYPE_FP32 dims: {width} }} '
            f'output {{ name: "output__0" data_type: TYPE_FP32 dims: {1 if decides else classes} }}'
        )
        if shap:
            text += f' output {{ name: "treeshap_output" data_type: TYPE_FP32 dims: {classes * (width + 1)} }}'
        of = source(directory, text, **parameters)
        numbers = {row.tobytes(): index for index, row in enumerate(model.rows)}

        def expected(inputs: Mapping[str, Array]) -> dict[str, Array]:
            chosen = [numbers[row.tobytes()] for row in inputs["input__0"]]
            found = model.answers[chosen].astype(np.float32)
            if decides:
                found = found.argmax(axis=1)[:, None].astype(np.float32)
            answers = {"output__0": found}
            if shap:
                assert model.contributions is not None
                answers["treeshap_output"] = model.contributions[chosen].reshape(len(chosen), -1).astype(np.float32)
            return answers

        begins = range(0, 3 * rows_per_request, rows_per_request)
        requests = [{"input__0": model.rows[begin : begin + rows_per_request]} for begin in begins]
        failing = {"input__0": np.zeros((1, width + 1), np.float32)}
        return ReferenceModel(of, ModelInterface.of(of.config), expected, requests, failing, loads=5, atol=2e-5)

    return made


REFERENCES = {
    "probabilities": reference("xgboost softprob", 5, predict_proba="true"),
    "classes": reference("random forest, 10 classes", 4),
    "values": reference("lightgbm regression", 1, predict_proba="true"),
    "contributions of xgboost": reference("xgboost binary ubj", 3, predict_proba="true", shap="1"),
    "contributions of lightgbm": reference("lightgbm multiclass", 2, predict_proba="true", shap="1"),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", REFERENCES)
async def test_contract(name: str, check: Check, tmp_path: Path) -> None:
    await check(FilBackend(), REFERENCES[name](tmp_path))


async def test_a_model_without_tensors_is_completed_from_its_file(tmp_path: Path) -> None:
    model = trained("xgboost softprob")
    model.put(tmp_path)
    found = await signature_of(FilBackend(), source(tmp_path, predict_proba="true"))
    assert found.inputs == (TensorSignature("input__0", "FP32", (-1, 64)),)
    assert found.outputs == (TensorSignature("output__0", "FP32", (-1, 10)),)
    (decides,) = (await signature_of(FilBackend(), source(tmp_path))).outputs
    assert decides.dims == (-1, 1)
    (values,) = (await signature_of(FilBackend(), source(tmp_path, is_classifier="false"))).outputs
    assert values.dims == (-1, 10)


async def test_classes_and_thresholds(tmp_path: Path) -> None:
    model = trained("xgboost binary ubj")
    model.put(tmp_path)
    for threshold in ("0.5", "0.9"):
        got = answer(await loaded(tmp_path, threshold=threshold), model.rows)
        assert np.array_equal(got, (model.answers > float(threshold)).astype(np.float32))
    got = answer(await loaded(tmp_path, output_class="false", is_classifier="true"), model.rows)
    np.testing.assert_allclose(got, model.answers, atol=3e-7)  # the older parameter counts


async def test_two_columns_for_a_binary_model(tmp_path: Path) -> None:
    model = trained("xgboost binary ubj")
    model.put(tmp_path)
    text = 'max_batch_size: 4096 output { name: "output__0" data_type: TYPE_FP32 dims: 2 }'
    got = answer(await loaded(tmp_path, text, predict_proba="true"), model.rows)
    np.testing.assert_allclose(got, np.concatenate([1 - model.answers, model.answers], axis=1), atol=4e-7)
    with pytest.raises(InvalidArgument, match="'output__0': the model expects 2 dimensions"):
        await loaded(tmp_path, text)  # a class is one number


@pytest.mark.parametrize("name", ["xgboost softprob", "lightgbm multiclass", "xgboost categories"])
async def test_contributions_add_up_to_the_margin(name: str, tmp_path: Path) -> None:
    model = trained(name)
    path = model.put(tmp_path)
    text = 'max_batch_size: 4096 output { name: "output__0" } output { name: "treeshap_output" data_type: TYPE_FP32 }'
    instance = await loaded(tmp_path, text, predict_proba="true")
    rows = model.rows[:50]
    got = answer(instance, rows, "treeshap_output")
    classes = model.answers.shape[1]
    assert got.shape == ((50, classes, model.width + 1) if classes > 1 else (50, model.width + 1))
    read = treelite.frontend.load_lightgbm_model if model.suffix == "txt" else treelite.frontend.load_xgboost_model
    forest = read(path)
    margins = treelite.gtil.predict(forest, rows.astype(forest.input_type), pred_margin=True).reshape(50, -1)
    np.testing.assert_allclose(got.reshape(50, classes, -1).sum(axis=2), margins, atol=1e-4)


async def test_contributions_of_what_cannot_give_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained("extra trees").put(tmp_path)
    text = 'max_batch_size: 8 output { name: "output__0" } output { name: "treeshap_output" data_type: TYPE_FP32 }'
    with pytest.raises(Unsupported, match="which a treelite checkpoint cannot give: only models of XGBoost"):
        await loaded(tmp_path, text)
    (tmp_path / "1" / "checkpoint.tl").unlink()
    trained("xgboost binary ubj").put(tmp_path)
    real = fil_contributions.importlib.util.find_spec
    monkeypatch.setattr(
        fil_contributions.importlib.util, "find_spec", lambda name: None if name == "xgboost" else real(name)
    )
    with pytest.raises(Unsupported, match="xgboost computes, and xgboost is not installed"):
        await loaded(tmp_path, text)


@pytest.mark.parametrize(
    ("parameters", "error", "text"),
    [
        ({"model_type": "xgboost"}, Unsupported, "is in XGBoost's old binary format"),
        (
            {"model_type": "catboost"},
            InvalidArgument,
            "must be one of xgboost_json, xgboost_ubj, lightgbm, treelite_ch",
        ),
        ({"model_type": "lightgbm"}, NotFound, "unable to find"),
        ({"threshold": "high"}, InvalidArgument, "'threshold' of 'm' must be a number, got 'high'"),
        ({"threshold": "nan"}, InvalidArgument, "'threshold' of 'm' must be a number, got 'nan'"),
        ({"predict_proba": "perhaps"}, InvalidArgument, "'predict_proba' of 'm' must be 0 or 1, got 'perhaps'"),
        ({"cpu_nthread": "-2"}, InvalidArgument, "'cpu_nthread' of 'm' must be an integer of at least 0, got '-2'"),
        ({"chunk_size": "many"}, InvalidArgument, "'chunk_size' of 'm' must be an integer"),
    ],
)
async def test_parameters_that_make_no_sense(
    parameters: dict[str, str], error: type[CharoniaError], text: str, tmp_path: Path
) -> None:
    trained("xgboost binary ubj").put(tmp_path)
    with pytest.raises(error, match=text):
        await loaded(tmp_path, **parameters)


async def test_parameters_of_today_load_and_those_that_retired_warn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained("xgboost binary ubj").put(tmp_path)
    today = {"layout": "layered", "chunk_size": "4", "transfer_threshold": "2", "cpu_nthread": "-1"}
    await loaded(tmp_path, model_type="xgboost_ubj", use_experimental_optimizations="true", **today)
    assert not caplog.records
    await loaded(tmp_path, algo="ALGO_AUTO", storage_type="AUTO", threads_per_tree="1", blocks_per_sm="0")
    texts = {record.getMessage() for record in caplog.records}
    assert texts == {
        "model 'm': the fil backend has no parameter 'algo' any more; use 'layout' instead",
        "model 'm': the fil backend has no parameter 'threads_per_tree' any more; use 'chunk_size' instead",
        "model 'm': the fil backend has no parameter 'storage_type' any more",
        "model 'm': the fil backend has no parameter 'blocks_per_sm' any more",
    }


async def test_file_names(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"one of xgboost.json, xgboost.ubj, model.txt, checkpoint.tl, or another"):
        await loaded(tmp_path)
    version = tmp_path / "1"
    version.mkdir()
    (version / "xgboost.model").write_bytes(b"binf")
    with pytest.raises(Unsupported, match="old binary format"):
        await loaded(tmp_path)
    model = trained("lightgbm binary")
    (version / "mine.txt").write_bytes(model.content)
    named = 'max_batch_size: 4096 default_model_filename: "{}"'
    assert answer(await loaded(tmp_path, named.format("mine.txt")), model.rows).any()
    (version / "mine.trees").write_bytes(model.content)
    with pytest.raises(InvalidArgument, match=r"the format of 'mine.trees' is not known; set parameter 'model_type'"):
        await loaded(tmp_path, named.format("mine.trees"))
    assert answer(await loaded(tmp_path, named.format("mine.trees"), model_type="lightgbm"), model.rows).any()
    with pytest.raises(InvalidArgument, match="outside the version directory"):
        await loaded(tmp_path, named.format("../2/model.txt"), model_type="lightgbm")
    with pytest.raises(NotFound, match="unable to find"):
        await loaded(tmp_path, named.format("none.txt"))


async def test_fields_that_treelite_does_not_know(tmp_path: Path) -> None:
    model = trained("xgboost binary json")
    path = model.put(tmp_path)
    content = json.loads(model.content)
    content["learner"]["of_tomorrow"] = 1
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidArgument, match=r"'xgboost.json' cannot be loaded: .*of_tomorrow"):
        await loaded(tmp_path)
    instance = await loaded(tmp_path, xgboost_allow_unknown_field="true", predict_proba="true")
    np.testing.assert_allclose(answer(instance, model.rows), model.answers, atol=3e-7)


async def test_widths_and_kinds_that_do_not_fit(tmp_path: Path) -> None:
    trained("xgboost binary ubj").put(tmp_path)
    instance = await loaded(tmp_path)
    for width in (29, 31):
        with pytest.raises(InvalidArgument, match=rf"expects input 'input__0' of shape \[-1,30\], got \[2,{width}\]"):
            answer(instance, np.zeros((2, width), np.float32))
    with pytest.raises(InvalidArgument, match="has no output 'treeshap_output'"):
        answer(instance, np.zeros((2, 30), np.float32), "treeshap_output")
    narrow = 'max_batch_size: 8 input { name: "input__0" data_type: TYPE_FP32 dims: 29 }'
    with pytest.raises(InvalidArgument, match=r"'input__0': the model expects 2 dimensions \(shape \[-1,30\]\)"):
        await loaded(tmp_path, narrow)
    with pytest.raises(Unsupported, match="asks for a GPU instance, but the fil backend runs on CPUs"):
        await instance_of(FilBackend(), spec(await completed(source(tmp_path)), "GPU"))


@pytest.mark.parametrize(
    ("said", "why"), [("zero_as_missing", "it takes zeros for missing values"), ("linear_tree", "linear functions")]
)
async def test_what_treelite_passes_over_is_refused(said: str, why: str, tmp_path: Path) -> None:
    rows, labels = table("regression")
    parameters = {"objective": "regression", "verbose": -1, said: True}
    booster = lightgbm.train(parameters, lightgbm.Dataset(rows.astype(np.float64), labels), 3)
    (tmp_path / "1").mkdir()
    booster.save_model(tmp_path / "1" / "model.txt")
    with pytest.raises(InvalidArgument, match=why):
        await loaded(tmp_path)


async def test_an_equality_is_run_by_treelite(tmp_path: Path) -> None:
    built = treelite.model_builder.ModelBuilder(
        threshold_type="float32",
        leaf_output_type="float32",
        metadata=treelite.model_builder.Metadata(
            num_feature=1,
            task_type="kRegressor",
            average_tree_output=False,
            num_target=1,
            num_class=[1],
            leaf_vector_shape=(1, 1),
        ),
        tree_annotation=treelite.model_builder.TreeAnnotation(num_tree=1, target_id=[0], class_id=[0]),
        postprocessor=treelite.model_builder.PostProcessorFunc(name="identity"),
        base_scores=[0.5],
    )
    built.start_tree()
    for key, step in ((0, None), (1, 3.0), (2, 4.0)):
        built.start_node(key)
        if step is None:
            built.numerical_test(0, 7.0, default_left=True, opname="==", left_child_key=1, right_child_key=2)
        else:
            built.leaf(step)
        built.end_node()
    built.end_tree()
    (tmp_path / "1").mkdir()
    built.commit().serialize(tmp_path / "1" / "checkpoint.tl")
    instance = await loaded(tmp_path)
    assert isinstance(instance._engine, TreeliteEngine)
    assert answer(instance, np.array([[7], [8], [np.nan]], np.float32)).tolist() == [[3.5], [4.5], [3.5]]


async def test_without_onnxruntime_treelite_runs_the_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fil_backend, "has_onnxruntime", lambda: False)
    for name in ("xgboost softprob", "random forest, 10 classes"):
        model = trained(name)
        path = model.put(tmp_path)
        instance = await loaded(tmp_path, predict_proba="true")
        assert isinstance(instance._engine, TreeliteEngine)
        np.testing.assert_allclose(answer(instance, model.rows), model.answers, atol=5e-7)
        path.unlink()


async def test_an_execution_is_interrupted_between_steps(tmp_path: Path) -> None:
    model = trained("xgboost binary ubj")
    model.put(tmp_path)
    instance = await loaded(tmp_path, predict_proba="true")
    instance._step = 100
    engine = instance._engine

    class Interrupting:
        def margins(self, rows: Array) -> Array:
            assert len(rows) <= 100
            instance.interrupt()
            found: Array = engine.margins(rows)
            return found

    instance._engine = Interrupting()
    with pytest.raises(Interrupted):
        answer(instance, model.rows)
    instance._engine = engine
    np.testing.assert_allclose(answer(instance, model.rows), model.answers, atol=3e-7)


async def refused(path: Path) -> str:
    """Why a file is refused; "" when it loads, and answers a row then."""
    instance = None
    try:
        instance = await loaded(path.parent.parent, predict_proba="true")
    except CharoniaError as error:
        return str(error)
    width = instance._features
    assert answer(instance, np.zeros((1, min(width, 10_000)), np.float32)).size if width <= 10_000 else True
    return ""


def edited_tree(change: Callable[[dict[str, Any]], None]) -> Callable[[], bytes]:
    def made() -> bytes:
        content = json.loads(trained("xgboost binary json").content)
        change(content["learner"]["gradient_booster"]["model"]["trees"][0])
        return json.dumps(content).encode()

    return made


def edited_list(name: str, index: int, value: str) -> Callable[[], bytes]:
    def made() -> bytes:
        text = trained("lightgbm binary").content.decode()
        found = re.search(rf"^{name}=(.*)$", text, re.MULTILINE)
        assert found is not None
        numbers = found[1].split()
        numbers[index] = value
        return (text[: found.start(1)] + " ".join(numbers) + text[found.end(1) :]).encode()

    return made


HOSTILE: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "a cycle": ("json", edited_tree(lambda tree: tree["left_children"].__setitem__(1, 0)), "the child of two nodes"),
    "a child that there is not": (
        "json",
        edited_tree(lambda tree: tree["left_children"].__setitem__(1, 10**8)),
        "Node",
    ),
    "a feature that there is not": (
        "json",
        edited_tree(lambda tree: tree["split_indices"].__setitem__(0, 2 * 10**9)),
        "feature that there is not",
    ),
    "a negative feature": (
        "json",
        edited_tree(lambda tree: tree["split_indices"].__setitem__(0, -5)),
        "feature that there is not",
    ),
    "deep brackets": ("json", lambda: b"[" * 2_000_000, "cannot be loaded"),
    "a cycle of lightgbm": ("txt", edited_list("left_child", 1, "0"), "too much memory|more memory"),
    "a child out of range": ("txt", edited_list("left_child", 1, "100000000"), "treelite crashed while it read it"),
    "no leaf": ("txt", edited_list("left_child", 1, "-100000000"), "treelite crashed while it read it"),
    "nothing": ("tl", lambda: b"", "cannot be loaded"),
    "another format": ("tl", lambda: trained("xgboost binary ubj").content, "cannot be loaded"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_files_that_crash_treelite_or_never_end(name: str, tmp_path: Path) -> None:
    suffix, made, why = HOSTILE[name]
    path = tmp_path / "1" / FILES[suffix][1]
    path.parent.mkdir()
    path.write_bytes(made())
    assert re.search(why, await refused(path)), name


@pytest.mark.parametrize("name", ["xgboost binary json", "xgboost binary ubj", "lightgbm binary", "extra trees"])
async def test_files_with_changed_bytes_are_refused_or_run(name: str, tmp_path: Path) -> None:
    model = trained(name)
    path = model.put(tmp_path)
    chance = random.Random(7)
    outcomes = []
    for _ in range(6):
        content = bytearray(model.content)
        for _ in range(chance.choice((1, 3, 12))):
            content[chance.randrange(min(len(content), 20_000))] = chance.randrange(256)
        path.write_bytes(content)
        outcomes.append(await refused(path))
    assert any(outcomes)


def test_sandboxed_models_read_their_files_themselves(tmp_path: Path) -> None:
    """A file that crashes treelite ends its own process, whose load fails; the other model has every answer."""
    models = tmp_path / "models"
    boxed = 'parameters { key: "charonia.isolation" value { string_value: "sandbox" } }'
    text = f'backend: "fil" max_batch_size: 1024 {boxed}'
    trained("random forest, 10 classes").put(models / "forest")
    (models / "forest" / "config.pbtxt").write_text(text)
    whys = {
        "a cycle": "is the child of two nodes",
        "a child out of range": "SIGSEGV",
        "another format": "cannot be loaded",
    }
    for number, name in enumerate(whys):
        suffix, made, _ = HOSTILE[name]
        (models / f"broken{number}" / "1").mkdir(parents=True)
        (models / f"broken{number}" / "1" / FILES[suffix][1]).write_bytes(made())
        (models / f"broken{number}" / "config.pbtxt").write_text(text)
    rows = trained("random forest, 10 classes").rows[:300]
    with (
        serving(models, tmp_path / "state", "--model-control-mode", "explicit", "--load-model", "forest") as server,
        client.InferenceServerClient(server.http, network_timeout=120, connection_timeout=120) as asked,
    ):
        tensor = client.InferInput("input__0", list(rows.shape), "FP32")
        tensor.set_data_from_numpy(rows)
        assert asked.get_model_config("forest")["parameters"]["charonia.isolation"] == {"string_value": "sandbox"}
        for number, why in enumerate(whys.values()):
            with pytest.raises(InferenceServerException, match=why):
                asked.load_model(f"broken{number}")
            classes = asked.infer("forest", [tensor]).as_numpy("output__0")
            assert np.array_equal(classes[:, 0], trained("random forest, 10 classes").answers[:300].argmax(axis=1))


def test_served_models_answer_and_a_broken_one_harms_nothing(tmp_path: Path) -> None:
    """Probabilities, contributions and classes over HTTP; requests go on while broken files are loaded."""
    text = 'backend: "fil" max_batch_size: 1024 dynamic_batching {} '
    shap = 'output { name: "output__0" } output { name: "treeshap_output" data_type: TYPE_FP32 } '
    proba = 'parameters { key: "predict_proba" value { string_value: "true" } } '
    served = {"digits": ("xgboost softprob", proba + shap), "forest": ("random forest, 10 classes", "")}
    broken = {"cycle": "a cycle", "crash": "a child out of range"}
    models = tmp_path / "models"
    for name, (of, more) in served.items():
        trained(of).put(models / name)
        (models / name / "config.pbtxt").write_text(text + more)
    for name, of in broken.items():
        suffix, made, _ = HOSTILE[of]
        (models / name / "1").mkdir(parents=True)
        (models / name / "1" / FILES[suffix][1]).write_bytes(made())
    flags = ("--model-control-mode", "explicit", *(word for name in served for word in ("--load-model", name)))
    rows = trained("xgboost softprob").rows[:300]
    with (
        serving(models, tmp_path / "state", *flags) as server,
        client.InferenceServerClient(server.http, network_timeout=120, connection_timeout=120) as asked,
    ):

        def infer(name: str, *outputs: str) -> list[Array]:
            tensor = client.InferInput("input__0", list(rows.shape), "FP32")
            tensor.set_data_from_numpy(rows)
            found = asked.infer(name, [tensor], outputs=[client.InferRequestedOutput(output) for output in outputs])
            return [found.as_numpy(output) for output in outputs]

        model = trained("xgboost softprob")
        probabilities, contributions = infer("digits", "output__0", "treeshap_output")
        np.testing.assert_allclose(probabilities, model.answers[:300], atol=5e-7)
        np.testing.assert_allclose(contributions, model.contributions[:300], atol=1e-5)
        (written,) = (item for item in asked.get_model_config("forest")["input"])
        assert written["dims"] == [64]
        for name in broken:
            with pytest.raises(InferenceServerException, match="cannot be loaded"):
                asked.load_model(name)
            (classes,) = infer("forest", "output__0")
            assert np.array_equal(classes[:, 0], trained("random forest, 10 classes").answers[:300].argmax(axis=1))
        narrow = client.InferInput("input__0", [1, 63], "FP32")
        narrow.set_data_from_numpy(np.zeros((1, 63), np.float32))
        with pytest.raises(InferenceServerException, match="unexpected shape for input 'input__0'"):
            asked.infer("forest", [narrow])
