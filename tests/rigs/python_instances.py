"""Instances of the python backend over model code that a test writes down."""

from __future__ import annotations

import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from backend_calls import instance_of
from google.protobuf import text_format

from charonia.backend import InstanceSpec, ModelRequest, ModelResponse, ModelSource
from charonia.errors import CharoniaError
from charonia.models.interface import ModelInterface
from charonia.tensors import Tensor
from executors.backends.python import PythonBackend
from executors.backends.python.python_instance import PythonInstance
from protos.model_config_pb2 import ModelConfig

IDENTITY = 'input { name: "IN" data_type: TYPE_FP32 dims: -1 } output { name: "OUT" data_type: TYPE_FP32 dims: -1 }'
Load = Callable[..., Awaitable[PythonInstance]]


def source(
    directory: Path, code: str, config: str = IDENTITY, settings: Mapping[str, str] | None = None
) -> ModelSource:
    version = directory / "m" / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version / "model.py").write_text(
        "import triton_python_backend_utils as pb_utils\nimport numpy as np\n" + textwrap.dedent(code)
    )
    parsed = text_format.Parse(f'name: "m" backend: "python" max_batch_size: 8 {config}', ModelConfig())
    return ModelSource("m", 1, directory / "m", parsed, settings or {})


@asynccontextmanager
async def loading(tmp_path: Path) -> AsyncIterator[Load]:
    """Loads model code as an instance, by default `m_0_0`; all are closed at the end."""
    loaded: list[PythonInstance] = []

    async def create(code: str, config: str = IDENTITY, name: str = "m_0_0", **settings: str) -> PythonInstance:
        model = source(tmp_path, code, config, {key.replace("_", "-"): value for key, value in settings.items()})
        spec = InstanceSpec(name, "CPU", -1, model, ModelInterface.of(model.config))
        instance = await instance_of(PythonBackend(), spec)
        loaded.append(instance)
        return instance

    yield create
    for instance in loaded:
        await instance.close_instance()


def request(*inputs: Tensor, **fields: object) -> ModelRequest:
    values: dict[str, object] = {"id": "", "correlation_id": 0, "outputs": (), "parameters": {}, **fields}
    return ModelRequest(inputs=list(inputs), **values)  # type: ignore[arg-type]


def numbers(*values: float) -> Tensor:
    return Tensor.of("IN", np.array([values], dtype=np.float32))


def error_of(response: ModelResponse) -> CharoniaError:
    assert response.error is not None
    return response.error


ECHO = """
    class TritonPythonModel:
        def execute(self, requests):
            return [
                pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())])
                for request in requests
            ]
"""
