"""The backend pytorch in a server: real models, each form, answers as of torch itself."""

from __future__ import annotations

import importlib.util
import shutil
import warnings
from pathlib import Path
from typing import Any

import build_torch_models
import numpy as np
import pytest
import torch
from e2e_server import serving
from safetensors.torch import load_file
from torch_models import (
    STRUCTURE,
    as_package,
    dense,
    eager,
    exported,
    nested,
    nested_inputs,
    nested_tensors,
    package,
)
from tritonclient import http as client

__all__ = ["package"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    others = shutil.ignore_patterns("sentence_*", "silero_vad_stream")  # test_torch_examples.py has those
    return Path(
        shutil.copytree(build_torch_models.ensure(), tmp_path_factory.mktemp("served") / "models", ignore=others)
    )


@pytest.fixture(scope="module")
def server(models: Path, package: bytes, tmp_path_factory: pytest.TempPathFactory) -> Any:
    exported(dense(), models / "dense" / "1" / "model.pt2")
    (models / "dense" / "config.pbtxt").write_text('backend: "pytorch"')
    as_package(models / "compiled", package)
    (models / "compiled" / "config.pbtxt").write_text(
        f'platform: "torch_aoti" max_batch_size: 8 {nested_tensors()} dynamic_batching {{ }}'
    )
    state = tmp_path_factory.mktemp("state")
    with serving(models, state, f"--allow-native-models={models}") as running:
        yield running


def infer(server: Any, model: str, inputs: dict[str, np.ndarray], output: str, **rest: Any) -> np.ndarray:
    names = {"float32": "FP32", "int64": "INT64"}
    with client.InferenceServerClient(server.http, network_timeout=120, connection_timeout=120) as asked:
        tensors = []
        for name, array in inputs.items():
            tensor = client.InferInput(name, list(array.shape), names[array.dtype.name])
            tensor.set_data_from_numpy(array)
            tensors.append(tensor)
        found = asked.infer(model, tensors, **rest).as_numpy(output)
        assert found is not None
        return found


def embedder(models: Path) -> torch.nn.Module:
    """The example's class, as anybody would load it."""
    spec = importlib.util.spec_from_file_location("minilm_example", models / "minilm" / "1" / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model: torch.nn.Module = module.Embedder()
    model.load_state_dict(load_file(models / "minilm" / "1" / "model.safetensors"))
    return model.eval()


SENTENCES = (
    (101, 1037, 3899, 3216, 1999, 1996, 2380, 102, 0, 0),  # a dog runs in the park
    (101, 1037, 17022, 2003, 2770, 2083, 1996, 3871, 102, 0),  # a puppy is running through the garden
    (101, 1996, 3976, 1997, 3514, 3062, 2011, 2048, 3867, 102),  # the price of oil fell by two percent
)
"""By the model's vocabulary."""


def test_torch_is_imported_in_the_processes_of_its_models_alone(server: Any) -> None:
    """Imported in the executor it would hold the interpreter's lock for longer than a heartbeat may take."""
    infer(server, "dense", {"INPUT__0": np.ones((1, 4), np.float32)}, "OUTPUT__0")
    with_torch = [pid for pid in own_processes(server) if "libtorch" in read_of(pid, "maps")]
    assert with_torch, "a model has run"
    assert all("executors.isolation.child" in read_of(pid, "cmdline") for pid in with_torch)


def own_processes(server: Any) -> list[int]:
    """All processes of the server: children of its parts, and theirs."""
    found = [server.process.pid]
    parents = {
        int(entry.name): int(stat.rpartition(")")[2].split()[1])
        for entry in Path("/proc").glob("[0-9]*")
        if (stat := read_of(int(entry.name), "stat"))
    }
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def read_of(pid: int, file: str) -> str:
    """A file of a process, "" once it has ended."""
    try:
        return Path(f"/proc/{pid}/{file}").read_text(errors="replace")
    except OSError:
        return ""


def test_minilm_gives_the_vectors_of_eager_torch(server: Any, models: Path) -> None:
    ids = np.array(SENTENCES, np.int64)
    mask = (ids != 0).astype(np.int64)
    found = infer(server, "minilm", {"input_ids": ids, "attention_mask": mask}, "embedding")
    assert np.array_equal(found, eager(embedder(models), ids, mask))
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)
    near, far = found[0] @ found[1], found[0] @ found[2]
    assert near > 0.4 > 0.2 > far
    # padding is not seen
    short = infer(server, "minilm", {"input_ids": ids[:1, :8], "attention_mask": mask[:1, :8]}, "embedding")
    np.testing.assert_allclose(short[0], found[0], atol=1e-5)


def test_silero_vad_hears_a_recording_as_in_eager_torch(server: Any, models: Path) -> None:
    """Its state goes on from request to request: one instance, in order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = torch.jit.load(str(models / "silero_vad_torch" / "1" / "model.pt"))
    time = np.arange(12 * 512, dtype=np.float32) / 16000
    recording = (0.3 * np.sin(2 * np.pi * 140 * time) * np.sin(2 * np.pi * 3 * time)).astype(np.float32)
    rate = np.array([16000])
    answers, wanted = [], []
    for window in recording.reshape(12, 1, 512):
        answers.append(infer(server, "silero_vad_torch", {"x": window, "sr": rate}, "speech_prob").item())
        with torch.inference_mode():
            wanted.append(model(torch.tensor(window), 16000).item())
    np.testing.assert_allclose(answers, wanted, atol=1e-6)
    assert len(set(answers)) == len(answers)


def test_an_exported_program_without_a_configuration(server: Any) -> None:
    with client.InferenceServerClient(server.http) as asked:
        config = asked.get_model_config("dense")
    assert [(one["name"], one["data_type"], one["dims"]) for one in config["input"]] == [("INPUT__0", "TYPE_FP32", [4])]
    given = np.random.default_rng(1).standard_normal((3, 4), np.float32)
    assert np.array_equal(infer(server, "dense", {"INPUT__0": given}, "OUTPUT__0"), eager(dense(), given))


def test_a_package_of_machine_code_answers_one_row(server: Any) -> None:
    given = nested_inputs(1)
    found = infer(server, "compiled", dict(zip(STRUCTURE, given, strict=False)), "OUTPUT__2")
    np.testing.assert_allclose(found, nested(*given)[2], rtol=1e-5)


def test_where_they_run(server: Any) -> None:
    """Torch is imported in processes of the models, none of them in the executor."""
    with client.InferenceServerClient(server.http) as asked:
        where = {
            name: asked.get_model_config(name)["parameters"]["charonia.isolation"]["string_value"]
            for name in ("minilm", "silero_vad_torch", "dense", "compiled")
        }
    assert where["minilm"] == where["compiled"] == "process"
    assert {where["silero_vad_torch"], where["dense"]} <= {"sandbox", "process"}
    (executor,) = server.pids("executor+batcher")
    assert "libtorch" not in Path(f"/proc/{executor}/maps").read_text()
