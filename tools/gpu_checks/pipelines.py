"""Models of other frameworks: a JAX export on the device, and an ensemble of torch and trees.

The export is served by the plug-in for JAX where it is installed, otherwise by a python model that runs the same file.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from charonia.client import Client

from .outcome import FAILED, NOT_RUN, PASSED, Outcome
from .serving import Array, Served, has_backend, write_model, write_torch_model

_JAX_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils
from jax import export


class TritonPythonModel:
    def initialize(self, args):
        with open(f"{args['model_repository']}/{args['model_version']}/model.stablehlo", "rb") as file:
            self.function = export.deserialize(bytearray(file.read()))

    def execute(self, requests):
        answers = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.asarray(self.function.call(given)))]))
        return answers
"""


def pipelines(device: str) -> Outcome:
    """Run both, if what they need is installed, and compare with the frameworks' own answers."""
    figures, reasons, failed = [], [], False
    for name, run in (("JAX", _jax), ("torch → trees", _trees)):
        try:
            difference = run(device)
        except ModuleNotFoundError as error:
            reasons.append(f"{name}: the module {error.name} is not installed")
            continue
        if isinstance(difference, str):
            reasons.append(f"{name}: {difference}")
            continue
        failed = failed or difference > 1e-4
        figures.append(f"{name} differs by {difference:.1e}")
    verdict = FAILED if failed else PASSED if len(figures) == 2 else NOT_RUN
    return Outcome(verdict, ", ".join(figures), "; ".join(reasons))


def _jax(device: str) -> float | str:
    # else this process takes three quarters of the card, and the server's finds too little; it inherits the setting
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    from jax import export
    from jax import numpy as jnp

    if device == "cuda" and jax.default_backend() != "gpu":
        return "the installed JAX sees no GPU"
    weights = np.random.default_rng(7).standard_normal((64, 8)).astype(np.float32)
    array = np.random.default_rng(8).random((4, 64), np.float32)

    def function(x: Any) -> Any:
        return jnp.tanh(x @ weights)

    exported = export.export(jax.jit(function))(jax.ShapeDtypeStruct((4, 64), jnp.float32))
    wanted = np.asarray(jax.jit(function)(array))
    kind = "KIND_GPU" if device == "cuda" else "KIND_CPU"
    name, output = ("INPUT__0", "OUTPUT__0") if has_backend("jax") else ("x", "y")
    config = (
        f'instance_group {{ kind: {kind} }} input {{ name: "{name}" data_type: TYPE_FP32 dims: [4, 64] }} '
        f'output {{ name: "{output}" data_type: TYPE_FP32 dims: [4, 8] }}'
    )
    content = bytes(exported.serialize())
    with tempfile.TemporaryDirectory() as folder:
        if has_backend("jax"):
            write_model(Path(folder), "m", f'backend: "jax" {config}', {"model.jax": content})
        else:
            files = {"model.py": _JAX_MODEL, "model.stablehlo": content}
            write_model(Path(folder), "m", f'backend: "python" {config}', files)
        return _difference(Path(folder), "m", name, array, output, wanted)


def _trees(device: str) -> float | str:
    if not has_backend("fil"):
        return "the backend fil is not installed"
    import torch
    import xgboost

    torch.manual_seed(9)
    module = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Tanh()).eval()
    array = np.random.default_rng(9).random((8, 16), np.float32)
    with torch.inference_mode():
        features = module(torch.from_numpy(array)).numpy()
    model = xgboost.XGBRegressor(n_estimators=20, max_depth=4, device="cpu").fit(features, features.sum(1))
    wanted = model.predict(features).reshape(-1, 1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trees.json"
        model.save_model(file)
        models = Path(folder) / "models"
        scripted = Path(folder) / "module.pt"
        torch.jit.save(torch.jit.trace(module, torch.from_numpy(array)), str(scripted))
        tensors = _tensors(("INPUT__0", 16), ("OUTPUT__0", 8))
        write_torch_model(models, "features", scripted.read_bytes(), device, f"max_batch_size: 8 {tensors}")
        trees = f'backend: "fil" max_batch_size: 8 {_tensors(("input__0", 8), ("output__0", 1))}'
        kind = 'parameters { key: "model_type" value { string_value: "xgboost_json" } } '
        write_model(
            models, "trees", f"{trees} {kind} instance_group {{ kind: KIND_CPU }}", {"xgboost.json": file.read_bytes()}
        )
        write_model(models, "both", _ENSEMBLE, {})
        return _difference(models, "both", "x", array, "y", wanted)


_ENSEMBLE = """platform: "ensemble" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 16 } output { name: "y" data_type: TYPE_FP32 dims: 1 }
ensemble_scheduling {
  step { model_name: "features" model_version: -1
         input_map { key: "INPUT__0" value: "x" } output_map { key: "OUTPUT__0" value: "features" } }
  step { model_name: "trees" model_version: -1
         input_map { key: "input__0" value: "features" } output_map { key: "output__0" value: "y" } }
}"""


def _tensors(given: tuple[str, int], found: tuple[str, int]) -> str:
    return " ".join(
        f'{side} {{ name: "{name}" data_type: TYPE_FP32 dims: {width} }}'
        for side, (name, width) in (("input", given), ("output", found))
    )


def _difference(models: Path, model: str, name: str, array: Array, output: str, wanted: Array) -> float:
    """The largest difference between the served answer and the wanted one."""
    with Served(models) as server, Client(server.url) as client:
        server.wait_ready(model)
        return float(np.abs(client.infer(model, {name: array})[output] - wanted).max())
