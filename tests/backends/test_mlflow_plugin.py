"""The plug-in for MLflow, as it is installed: models that MLflow saved against MLflow's own answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import mlflow_models
import numpy as np
import pandas as pd
import pytest
from backend_calls import instance_of, signature_of
from e2e_server import serving
from mlflow_models import CELLARS, LABELLED, WINE, infer_signature, mlflow
from tritonclient import http as client
from tritonclient.utils import InferenceServerException

from charonia.backend import ENTRY_POINT_GROUP, TensorSignature
from charonia.errors import CharoniaError, InternalError, InvalidArgument, NotFound, Unsupported
from charonia.testing.backend_contract import CHECKS, Check, ReferenceModel
from executors.backends.registry import BackendRegistry
from executors.checking.repository_check import check_repository
from executors.isolation.isolated_model import IsolatedModel

pytestmark = pytest.mark.filterwarnings("ignore")

ROWS = WINE.to_numpy()
TENSORS = """
max_batch_size: 32 input { name: "inputs" data_type: TYPE_FP64 dims: 13 }
output { name: "predictions" data_type: TYPE_FP64 dims: 3 }
"""
TABLE = """
max_batch_size: 16 input { name: "alcohol" data_type: TYPE_FP64 dims: 1 }
input { name: "colour" data_type: TYPE_STRING dims: 1 } output { name: "kind" data_type: TYPE_STRING dims: 1 }
"""
LABELS = """
max_batch_size: 8 input { name: "text" data_type: TYPE_STRING dims: 1 }
input { name: "count" data_type: TYPE_INT64 dims: 1 } input { name: "day" data_type: TYPE_STRING dims: 1 }
output { name: "label" data_type: TYPE_STRING dims: 1 } output { name: "double" data_type: TYPE_INT64 dims: 1 }
"""


def words(values: Any) -> np.ndarray:
    """A column of BYTES, [rows, 1]."""
    return np.array([str(value).encode() for value in values], object)[:, np.newaxis]


def table(start: int, count: int) -> dict[str, np.ndarray]:
    rows = CELLARS[start : start + count]
    return {"alcohol": rows["alcohol"].to_numpy()[:, np.newaxis], "colour": words(rows["colour"])}


def labelled(rows: Any = slice(None)) -> dict[str, np.ndarray]:
    some = LABELLED[rows]
    days = [day.isoformat() for day in some["day"]]
    return {"text": words(some["text"]), "count": some["count"].to_numpy()[:, np.newaxis], "day": words(days)}


def reference(directory: Path, make: Callable[[Path], Any], config: str) -> ReferenceModel:
    pyfunc = make(directory / "1")

    def of_table(inputs: Any) -> dict[str, np.ndarray]:
        colours = [colour.decode() for colour in inputs["colour"][:, 0]]
        frame = pd.DataFrame({"alcohol": inputs["alcohol"][:, 0], "colour": colours})
        return {"kind": words(np.ravel(pyfunc.predict(frame)))}

    if make is mlflow_models.wine:
        expected = lambda inputs: {"predictions": pyfunc.predict(inputs["inputs"])}  # noqa: E731
        requests = [{"inputs": ROWS[:5]}, {"inputs": ROWS[70:71]}, {"inputs": ROWS[150:170]}]
        failing = {"inputs": np.zeros((2, 5))}
    else:
        expected = of_table
        requests = [table(0, 3), table(60, 1), table(140, 5)]
        failing = {"alcohol": np.zeros((1, 1)), "colour": words(["green"])}
    of = ReferenceModel.of(directory, config, expected=expected, requests=requests, failing=failing, rtol=1e-12)
    return replace(of, source=replace(of.source, native_code=True))


def source(directory: Path, config: str, **fields: Any) -> ReferenceModel:
    of = ReferenceModel.of(directory, config, expected=lambda _: {}, requests=[], failing={})
    return replace(of, source=replace(of.source, **{"native_code": True, **fields}))


async def error_of(of: ReferenceModel) -> CharoniaError:
    with pytest.raises(CharoniaError) as caught:
        await instance_of(BackendRegistry().get("mlflow"), of.spec())
    return caught.value


def test_it_is_installed_as_a_distribution_of_its_own() -> None:
    (entry,) = metadata.entry_points(group=ENTRY_POINT_GROUP, name="mlflow")
    assert entry.dist is not None
    assert entry.dist.name == "charonia-mlflow"
    assert entry.load().isolation == "sandbox"


@pytest.mark.parametrize(("make", "config"), [(mlflow_models.wine, TENSORS), (mlflow_models.cellars, TABLE)])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_it_keeps_the_contract(check: Check, make: Any, config: str, tmp_path: Path) -> None:
    await check(BackendRegistry().get("mlflow"), reference(tmp_path / "m", make, config))


async def test_tables_have_texts_dates_params_and_outputs_by_name(tmp_path: Path) -> None:
    pyfunc = mlflow_models.labels(tmp_path / "m" / "1")
    params = 'parameters { key: "PARAMS" value { string_value: "{\\"end\\": \\".\\"}" } }'
    of = source(tmp_path / "m", LABELS + params)
    found = await signature_of(BackendRegistry().get("mlflow"), of.source)
    assert found.inputs == (
        TensorSignature("text", "BYTES", (-1, 1)),
        TensorSignature("count", "INT64", (-1, 1)),
        TensorSignature("day", "BYTES", (-1, 1)),
    )
    instance = await instance_of(BackendRegistry().get("mlflow"), of.spec())
    answer = instance.execute(labelled(), ["label", "double"])
    wanted = pyfunc.predict(LABELLED, params={"end": "."})
    assert answer["label"].tolist() == words(wanted["label"]).tolist()
    assert answer["double"].tolist() == [[6], [1 << 41]]
    with pytest.raises(InvalidArgument, match="input 'day' has no date and time of ISO 8601"):
        instance.execute(labelled() | {"day": words(["soon", "later"])}, ["label"])
    with pytest.raises(InvalidArgument, match="a text is not UTF-8"):
        instance.execute(labelled() | {"text": np.array([[b"\xff"], [b"x"]], object)}, ["label"])
    with pytest.raises(InternalError, match="MLflow: 'bad' has no label"):
        instance.execute(labelled() | {"text": words(["bad", "x"])}, ["label"])

    for said, text in (
        ("[1]", "parameter 'PARAMS' of 'm' must be an object of JSON"),
        ("{", "parameter 'PARAMS' of 'm' must be an object of JSON"),
        ('{"start": 1}', "model 'm' has no params ['start'], its signature has ['end']"),
    ):
        params = f'parameters {{ key: "PARAMS" value {{ string_value: {json.dumps(said)} }} }}'
        assert text in (await error_of(source(tmp_path / "m", LABELS + params))).message


async def test_code_runs_in_a_sandbox_or_with_leave_only(tmp_path: Path) -> None:
    mlflow_models.opener(tmp_path / "m" / "1", tmp_path / "secret")
    for isolation in ("none", "process"):
        error = await error_of(source(tmp_path / "m", "", native_code=False, isolation=isolation))
        assert isinstance(error, Unsupported)
        assert error.message == (
            "model 'm' brings code: flavour python_function of MLflow is Python code and pickles. It runs in a sandbox "
            "('charonia.isolation'), or in repositories that are named with --allow-native-models"
        )
        await instance_of(BackendRegistry().get("mlflow"), source(tmp_path / "m", "", isolation=isolation).spec())


async def test_a_model_has_an_environment_of_its_own_with_leave_only(tmp_path: Path) -> None:
    mlflow_models.adder(tmp_path / "m" / "1", tmp_path / "m" / "env")
    config = """
    backend: "mlflow" max_batch_size: 4 input { name: "inputs" data_type: TYPE_FP64 dims: 2 }
    output { name: "predictions" data_type: TYPE_FP64 dims: 2 }
    """
    text = 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "$$TRITON_MODEL_DIRECTORY/env" } }'
    of = source(tmp_path / "m", config + text, isolation="sandbox")
    refused = IsolatedModel(replace(of.source, native_code=False), ceiling_s=0)
    with pytest.raises(Unsupported, match=r"brings machine code: an interpreter, 'EXECUTION_ENV_PATH' .*/m/env"):
        await refused.create_instance(of.spec())
    without = IsolatedModel(source(tmp_path / "m", config, isolation="sandbox").source, ceiling_s=0)
    allowed = IsolatedModel(of.source, ceiling_s=0)
    try:
        with pytest.raises(CharoniaError, match="No module named 'only_here'"):
            await without.create_instance(source(tmp_path / "m", config).spec())
        instance: Any = await allowed.create_instance(of.spec())
        answer = await asyncio.to_thread(instance.execute, {"inputs": np.ones((1, 2))}, ["predictions"])
        assert answer["predictions"].tolist() == [[43, 43]]
        instance.close()
    finally:
        await without.close()
        await allowed.close()


async def test_files_and_configurations_that_are_wrong(tmp_path: Path) -> None:
    mlflow_models.wine(tmp_path / "good" / "1")
    error = await error_of(source(tmp_path / "good", TENSORS.replace('"inputs"', '"rows"')))
    assert error.message == "model 'good' has no tensor 'rows', its signature has ['inputs']"
    error = await error_of(source(tmp_path / "good", 'default_model_filename: "../../x"' + TENSORS))
    assert "outside the version directory" in error.message
    assert isinstance(await error_of(source(tmp_path / "good", 'default_model_filename: "x"' + TENSORS)), NotFound)
    file = tmp_path / "good" / "1" / "MLmodel"
    text = file.read_text()
    for content, wanted in (
        ("{", "MLflow cannot read 'MLmodel' of model 'good': "),
        ("flavors: {sklearn: {}}", "model 'good' has no flavour python_function, only sklearn"),
        (text.replace("loader_module: mlflow.sklearn", "loader_module: not_there"), "No module named 'not_there'"),
        (text.replace("float64", "complex128"), "has type complex128, which no tensor can hold"),
    ):
        file.write_text(content)
        assert wanted in (await error_of(source(tmp_path / "good", ""))).message
    file.write_text(text[: text.index("signature:")])
    with pytest.raises(InvalidArgument, match="the signature of model 'good' has no inputs: write them into"):
        await signature_of(BackendRegistry().get("mlflow"), source(tmp_path / "good", "").source)
    for broken in (b"", b"junk"):
        file.write_text(text)
        (tmp_path / "good" / "1" / "model.pkl").write_bytes(broken)
        error = await error_of(source(tmp_path / "good", TENSORS))
        assert "MLflow cannot open model 'good': " in error.message


async def test_several_tensors_by_name_and_a_signature_without_outputs(tmp_path: Path) -> None:
    class Sum(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
        def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
            return (model_input["a"] + model_input["b"]).sum(1)

    signature = infer_signature({"a": np.ones((2, 3), np.float32), "b": np.ones((2, 3), np.float32)})
    mlflow.pyfunc.save_model(tmp_path / "m" / "1", python_model=Sum(), signature=signature, pip_requirements=[])
    of = source(
        tmp_path / "m",
        'max_batch_size: 4 input { name: "a" data_type: TYPE_FP32 dims: 3 } '
        'input { name: "b" data_type: TYPE_FP32 dims: 3 } output { name: "sum" data_type: TYPE_FP32 dims: 1 }',
    )
    assert await signature_of(BackendRegistry().get("mlflow"), of.source) is None
    instance = await instance_of(BackendRegistry().get("mlflow"), of.spec())
    given = {"a": np.full((2, 3), 2, np.float32), "b": np.ones((2, 3), np.float32)}
    assert instance.execute(given, ["sum"])["sum"].tolist() == [[9], [9]]


async def test_a_check_reads_signatures_and_runs_no_code(tmp_path: Path) -> None:
    mlflow_models.opener(tmp_path / "models" / "m" / "1", tmp_path / "secret")
    (tmp_path / "secret").unlink()  # its code would fail without
    config = tmp_path / "models" / "m" / "config.pbtxt"
    config.write_text("max_batch_size: 8")
    report = await check_repository(tmp_path / "models", gpus=0)
    assert (report.faults, report.notes) == ([], [])
    config.write_text('max_batch_size: 8 input { name: "row" data_type: TYPE_FP64 dims: 2 }')
    (fault,) = (await check_repository(tmp_path / "models", gpus=0)).faults
    assert "model 'm' has no tensor 'row', its signature has ['inputs']" in fault.problem


def test_they_are_served_with_configurations_that_are_completed(tmp_path: Path) -> None:
    models = tmp_path / "models"
    wine = mlflow_models.wine(models / "wine" / "1")
    cellars = mlflow_models.cellars(models / "cellars" / "1")
    mlflow_models.labels(models / "labels" / "1")
    mlflow_models.opener(models / "opener" / "1", tmp_path / "secret")
    (models / "wine" / "config.pbtxt").write_text("max_batch_size: 8")
    loaded = [f"--load-model={name}" for name in ("wine", "cellars", "labels")]

    with (
        serving(models, tmp_path / "state", "--model-control-mode=explicit", *loaded) as server,
        client.InferenceServerClient(server.http, network_timeout=120) as asked,
    ):

        def ask(name: str, given: dict[str, np.ndarray]) -> Any:
            tensors = []
            for key, array in given.items():
                kind = "BYTES" if array.dtype == object else {"f": "FP64", "i": "INT64"}[array.dtype.kind]
                tensors.append(client.InferInput(key, list(array.shape), kind))
                tensors[-1].set_data_from_numpy(array)
            return asked.infer(name, tensors)

        config = asked.get_model_config("wine")
        assert config["backend"] == "mlflow"
        assert config["parameters"]["charonia.isolation"]["string_value"] == "sandbox"
        answer = ask("wine", {"inputs": ROWS[40:43]}).as_numpy("predictions")
        np.testing.assert_allclose(answer, wine.predict(ROWS[40:43]), rtol=1e-12)
        answer = ask("cellars", table(55, 4)).as_numpy("kind")
        assert answer.tolist() == words(np.ravel(cellars.predict(CELLARS[55:59]))).tolist()
        assert ask("labels", labelled()).as_numpy("label")[:, 0].tolist() == ["älter 2021!".encode(), b"younger 1999!"]
        with pytest.raises(InferenceServerException, match="'bad' has no label"):
            ask("labels", labelled() | {"text": words(["bad", "x"])})
        with pytest.raises(InferenceServerException, match="Permission denied"):
            asked.load_model("opener")  # its code runs in the sandbox
