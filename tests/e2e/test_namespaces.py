"""Models of one name in several repositories (`--model-namespacing`, R2), by the public clients."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from e2e_asking import client, infer, on_the_page, until
from e2e_models import SCALING_IO, WIDTH, put, python, scaling, scaling_graph
from e2e_server import serving
from tritonclient.utils import InferenceServerException

ONES = np.ones((1, WIDTH), np.float32)
LEFT, RIGHT = 2.0, 3.0
AMBIGUOUS = "model namespace must be provided to resolve ambiguity"

CALLER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            called = pb_utils.InferenceRequest(
                model_name="part", requested_output_names=["OUTPUT0"], inputs=request.inputs()
            )
            response = called.exec()
            answers.append(
                pb_utils.InferenceResponse(error=response.error())
                if response.has_error()
                else pb_utils.InferenceResponse(response.output_tensors())
            )
        return answers
"""


def ensemble(repository: Path, name: str, model: str) -> None:
    """One step: INPUT0 -> the model -> OUTPUT0."""
    (repository / name / "1").mkdir(parents=True)
    step = (
        f'step {{ model_name: "{model}" model_version: -1 input_map {{ key: "INPUT0" value: "INPUT0" }} '
        'output_map { key: "OUTPUT0" value: "OUTPUT0" } }'
    )
    put(
        repository / name / "config.pbtxt",
        f'platform: "ensemble"\nmax_batch_size: 8\n{SCALING_IO}\nensemble_scheduling {{ {step} }}\n',
    )


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server in explicit mode over two repositories, with everything loaded but `late`."""
    directory = tmp_path_factory.mktemp("namespaces")
    left, right, third = (directory / name for name in ("left", "right", "third"))
    for repository, factor, side in ((left, LEFT, "left"), (right, RIGHT, "right")):
        scaling(repository, "part", factor)
        ensemble(repository, f"pipe_{side}", "part")
        scaling(repository, f"only_{side}", factor)
        ensemble(repository, "twin", f"only_{side}")
        python(repository, f"caller_{side}", CALLER, f"max_batch_size: 8\n{SCALING_IO}")
    ensemble(left, "borrower", "only_right")
    ensemble(third, "torn", "part")
    scaling(left, "late", LEFT)
    wanted = ("part", "pipe_left", "pipe_right", "twin", "caller_left", "caller_right", "borrower")
    flags = [
        f"--model-repository={right}",
        f"--model-repository={third}",
        "--model-namespacing",
        "--model-control-mode=explicit",
    ]
    with serving(left, directory / "state", *flags, *(f"--load-model={name}" for name in wanted)) as server:
        yield SimpleNamespace(server=server, left=left, right=right, third=third, directory=directory)


def factor(two: Any, model: str, kind: str = "http") -> float:
    answer = infer(two.server, model, kind, INPUT0=ONES)
    said = answer.get_response()
    assert (said["model_name"] if kind == "http" else said.model_name) == model
    found = answer.as_numpy("OUTPUT0")
    assert (found == found[0, 0]).all()
    return float(found[0, 0])


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_ensembles_and_calls_take_their_own_repository_first(two: Any, kind: str) -> None:
    for name in ("pipe", "caller"):
        assert factor(two, f"{name}_left", kind) == LEFT
        assert factor(two, f"{name}_right", kind) == RIGHT
    assert factor(two, "borrower", kind) == RIGHT, "what its own repository does not have comes from the only other"


@pytest.mark.parametrize("kind", ["http", "grpc"])
@pytest.mark.parametrize("name", ["part", "twin"])
def test_an_ambiguous_name_is_refused(two: Any, name: str, kind: str) -> None:
    text = f"There are 2 identifiers of model '{name}' in global map, {AMBIGUOUS}."
    with pytest.raises(InferenceServerException) as raised:
        infer(two.server, name, kind, INPUT0=ONES)
    assert raised.value.message() == text
    assert raised.value.status() == ("400" if kind == "http" else "StatusCode.INVALID_ARGUMENT")
    with client(kind, two.server) as asking:
        assert not asking.is_model_ready(name)
        with pytest.raises(InferenceServerException, match="resolve ambiguity"):
            asking.get_model_metadata(name)
        with pytest.raises(InferenceServerException, match="resolve ambiguity"):
            asking.get_model_config(name)
        with pytest.raises(InferenceServerException, match=f"requested model '{name}' is not available"):
            asking.get_inference_statistics(name)


def test_what_clients_see_has_names_only(two: Any) -> None:
    with client("http", two.server) as asking:
        assert asking.get_model_metadata("pipe_left")["name"] == "pipe_left"
        steps = asking.get_model_config("pipe_left")["ensemble_scheduling"]["step"]
        assert [(step["model_name"], step["model_namespace"]) for step in steps] == [("part", str(two.left))]
        rows = asking.get_model_repository_index()
        assert [row.get("state") for row in rows if row["name"] == "part"] == ["READY", "READY"]
        assert [row for row in rows if row["name"] == "late"] == [{"name": "late"}]
        assert factor(two, "pipe_left") == LEFT
        counted = asking.get_inference_statistics()["model_stats"]
        assert sum(int(one["inference_count"]) for one in counted if one["name"] == "part") > 0
        assert len([one for one in counted if one["name"] == "part"]) == 2
    for side in (two.left, two.right):
        labels = f'{{model="part",namespace="{side}",version="1"}}'
        on_the_page(two.server, f"nv_inference_request_success{labels}")


def test_a_load_and_an_unload_mean_all_of_a_name(two: Any) -> None:
    shutil.copytree(two.left / "late", two.right / "late")
    put(two.right / "late" / "config.pbtxt", 'backend: "onnxruntime"\nmax_batch_size: 8\nunknown: 1\n')
    with client("http", two.server) as asking:
        with pytest.raises(InferenceServerException) as raised:
            asking.load_model("late")
        assert raised.value.message() == "failed to load 'late', failed to poll from model repository"
        put(two.right / "late" / "config.pbtxt", 'backend: "onnxruntime"\nmax_batch_size: 8\n')
        (two.right / "late" / "1" / "model.onnx").write_bytes(b"none")
        with pytest.raises(InferenceServerException) as raised:
            asking.load_model("late")
        assert raised.value.message().startswith(f"load failed for model '{two.right}::late': version 1 is at UNAVAIL")
        with pytest.raises(InferenceServerException, match="There are 2 identifiers of model 'late'"):
            factor(two, "late")
        scaling(two.right, "late", RIGHT)
        asking.load_model("late")
        asking.unload_model("late")

        def unloaded() -> bool:
            rows = [row for row in asking.get_model_repository_index() if row["name"] == "late"]
            return [row.get("reason") for row in rows] == ["unloaded", "unloaded"]

        until("both are unloaded", unloaded)
        with pytest.raises(InferenceServerException, match="Request for unknown model: 'late'"):
            factor(two, "late")


def test_an_ensemble_follows_its_repository(two: Any) -> None:
    """What a load finds decides: the model of its own repository comes and goes (R26)."""
    aside = two.directory / "aside"
    scaling(two.left, "guest", LEFT)
    scaling(two.right, "guest", RIGHT)
    ensemble(two.left, "host", "guest")
    with client("http", two.server) as asking:
        shutil.move(two.left / "guest", aside)
        asking.load_model("host")
        assert factor(two, "host") == RIGHT
        assert factor(two, "guest") == RIGHT, "one that nobody else has the name of is meant by it"
        shutil.move(aside, two.left / "guest")
        asking.load_model("host")
        assert factor(two, "host") == LEFT
        with pytest.raises(InferenceServerException, match="There are 2 identifiers of model 'guest'"):
            factor(two, "guest")


def test_an_ensemble_of_an_ambiguous_model_is_refused(two: Any) -> None:
    with client("http", two.server) as asking, pytest.raises(InferenceServerException) as raised:
        asking.load_model("torn")
    key = f"{two.third}::torn"
    assert raised.value.message() == (
        f"load failed for model '{key}': ensemble {key} contains models that are not available or ambiguous: part\n"
    )


def test_files_of_a_load_request_have_no_namespace(two: Any) -> None:
    """R25: a third model of the name."""
    config = (
        f'{{"backend": "onnxruntime", "max_batch_size": 8, "input": [{{"name": "INPUT0", "data_type": "TYPE_FP32", '
        f'"dims": [{WIDTH}]}}], "output": [{{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [{WIDTH}]}}]}}'
    )
    with client("http", two.server) as asking:
        asking.load_model("brought", config=config, files={"file:1/model.onnx": scaling_graph(7.0)})
        assert factor(two, "brought") == 7.0
        asking.unload_model("brought")
        until("it is gone", lambda: not asking.is_model_ready("brought"))
