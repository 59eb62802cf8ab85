"""The newest stock tritonclient, unchanged, against the example models; raw onnxruntime is the oracle."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpcaio
import tritonclient.http as httpclient
import tritonclient.http.aio as httpaio
from e2e_asking import infer, on_the_page, until
from e2e_models import WIDTH, scaling
from e2e_server import serving
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

# the stock asyncio HTTP client warns about its own way of sending large bodies
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")

MODELS = ["magika", "magika_features", "silero_vad", "ocr_det", "ocr_rec", "identity"]
PIPELINE = ["ocr", "ocr_page", "ocr_lines", "ocr_text"]
ONNX_MODELS = [m for m in MODELS if m != "magika_features"]


def _inputs(module: Any, tensors: dict[str, np.ndarray], **options: bool) -> list[Any]:
    inputs = []
    for name, array in tensors.items():
        tensor = module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array, **options)
        inputs.append(tensor)
    return inputs


def _outputs(result: Any, names: Any) -> dict[str, np.ndarray]:
    return {name: result.as_numpy(name) for name in names}


def _call(
    kind: str,
    server: Any,
    model: str,
    tensors: dict[str, np.ndarray],
    names: list[str],
    sequence: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, np.ndarray]:
    """One inference through one of the four clients; `sequence` has parameters of a request of one."""
    if kind == "http":
        with httpclient.InferenceServerClient(server.http) as client:
            return _outputs(client.infer(model, _inputs(httpclient, tensors), **sequence), names)
    if kind == "http-json":
        with httpclient.InferenceServerClient(server.http) as client:
            wanted = [httpclient.InferRequestedOutput(name, binary_data=False) for name in names]
            inputs = _inputs(httpclient, tensors, binary_data=False)
            return _outputs(client.infer(model, inputs, outputs=wanted, **sequence), names)
    if kind == "grpc":
        with grpcclient.InferenceServerClient(server.grpc) as client:
            return _outputs(client.infer(model, _inputs(grpcclient, tensors), **sequence), names)

    async def aio() -> dict[str, np.ndarray]:
        if kind == "http-aio":
            async with httpaio.InferenceServerClient(server.http) as client:
                return _outputs(await client.infer(model, _inputs(httpclient, tensors), **sequence), names)
        async with grpcaio.InferenceServerClient(server.grpc) as client:
            return _outputs(await client.infer(model, _inputs(grpcclient, tensors), **sequence), names)

    return asyncio.run(aio())


@pytest.mark.parametrize("kind", ["http", "http-aio", "grpc", "grpc-aio"])
@pytest.mark.parametrize("model", MODELS)
def test_real_inputs_give_the_expected_answers(
    kind: str, model: str, server: Any, examples: ModuleType, expected: ModuleType, example_models: Path
) -> None:
    tensors = examples.REQUESTS[model]()
    outputs = _call(kind, server, model, tensors, list(expected.OUTPUTS[model]), examples.sequence(model))
    expected.check(model, outputs, example_models)
    if model in ONNX_MODELS:
        oracle = expected.onnxruntime_outputs(example_models, model, tensors)
        for name in expected.OUTPUTS[model]:
            np.testing.assert_allclose(outputs[name], oracle[name], rtol=1e-5, atol=1e-5)


def test_an_ensemble_reads_a_page(
    server: Any, examples: ModuleType, expected: ModuleType, example_models: Path
) -> None:
    outputs = _call("grpc", server, "ocr", examples.REQUESTS["ocr"](), list(expected.OUTPUTS["ocr"]))
    expected.check("ocr", outputs, example_models)


@pytest.mark.parametrize("model", ["magika", "identity", "magika_features", "silero_vad"])
def test_json_carries_the_same_answers(
    model: str, server: Any, examples: ModuleType, expected: ModuleType, example_models: Path
) -> None:
    if model == "magika_features":
        pytest.skip("its input is a file's raw bytes, which JSON cannot carry (T4)")
    names, sequence = list(expected.OUTPUTS[model]), examples.sequence(model)
    outputs = _call("http-json", server, model, examples.REQUESTS[model](), names, sequence)
    expected.check(model, outputs, example_models)


def test_http_control_calls(server: Any) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("magika")
        assert client.is_model_ready("magika", "1")
        assert not client.is_model_ready("magika", "7")
        assert not client.is_model_ready("nope")
        assert client.get_server_metadata()["name"] == "triton"
        metadata = client.get_model_metadata("magika")
        assert metadata["inputs"] == [{"name": "bytes", "datatype": "INT32", "shape": [-1, 2048]}]
        assert metadata["outputs"] == [{"name": "target_label", "datatype": "FP32", "shape": [-1, 214]}]
        assert metadata["platform"] == "onnxruntime_onnx"
        config = client.get_model_config("magika")
        assert config["max_batch_size"] == 64
        assert config["backend"] == "onnxruntime"
        assert {row["name"] for row in client.get_model_repository_index()} == {*MODELS, *PIPELINE}
        assert {row["state"] for row in client.get_model_repository_index()} == {"READY"}
        assert client.get_inference_statistics("identity")["model_stats"][0]["name"] == "identity"
        with pytest.raises(InferenceServerException, match="polling is enabled"):
            client.load_model("magika")


def test_grpc_control_calls(server: Any) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("magika")
        assert not client.is_model_ready("nope")
        assert client.get_server_metadata().name == "triton"
        metadata = client.get_model_metadata("silero_vad")
        assert next(list(i.shape) for i in metadata.inputs) == [-1, 576]
        assert client.get_model_config("silero_vad").config.max_batch_size == 0
        assert {m.name for m in client.get_model_repository_index().models} == {*MODELS, *PIPELINE}
        assert client.get_inference_statistics("identity").model_stats[0].name == "identity"


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_the_format_of_log_lines_changes_at_run_time(kind: str, server: Any) -> None:
    """L3: later lines of the gateway that was asked."""
    clients: Any = {"http": httpclient, "grpc": grpcclient}[kind]

    def format_of(answer: Any) -> str:
        return str(answer["log_format"] if kind == "http" else answer.settings["log_format"].string_param)

    with clients.InferenceServerClient(getattr(server, kind)) as client:
        assert format_of(client.get_log_settings()) == "default"
        try:
            assert format_of(client.update_log_settings({"log_format": "ISO8601"})) == "ISO8601"
            assert format_of(client.get_log_settings()) == "ISO8601"
            pattern = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ I \d+ gateway\.\S+\] log settings"
            until("its lines have it", lambda: re.search(pattern, server.log(), re.M))
        finally:
            assert format_of(client.update_log_settings({"log_format": "default"})) == "default"


def test_classification_names_the_file_type(server: Any, examples: ModuleType) -> None:
    tensors = examples.REQUESTS["magika"]()
    with httpclient.InferenceServerClient(server.http) as client:
        wanted = [httpclient.InferRequestedOutput("target_label", class_count=2)]
        best = client.infer("magika", _inputs(httpclient, tensors), outputs=wanted).as_numpy("target_label")
    assert best.shape == (1, 2)
    assert best[0, 0].decode().split(":")[2] == "python"
    with grpcclient.InferenceServerClient(server.grpc) as client:
        wanted = [grpcclient.InferRequestedOutput("target_label", class_count=2)]
        again = client.infer("magika", _inputs(grpcclient, tensors), outputs=wanted).as_numpy("target_label")
    assert (best == again).all()


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_errors_say_what_is_wrong(kind: str, server: Any) -> None:
    wrong = {"INPUT0": np.zeros((1, 8), np.float32)}
    with pytest.raises(InferenceServerException, match=r"unexpected shape for input 'INPUT0' .*Expected \[-1,16\]"):
        _call(kind, server, "identity", wrong, ["OUTPUT0"])
    with pytest.raises(InferenceServerException, match="Request for unknown model: 'nope' is not found"):
        _call(kind, server, "nope", wrong, ["OUTPUT0"])


def test_statistics_and_metrics_count_each_inference(server: Any) -> None:
    def counted() -> tuple[int, int]:
        with httpclient.InferenceServerClient(server.http) as client:
            stats = client.get_inference_statistics("identity")["model_stats"][0]
            return stats["inference_count"], stats["inference_stats"]["success"]["count"]

    rows, requests = counted()
    _call("http", server, "identity", {"INPUT0": np.ones((3, 16), np.float32)}, ["OUTPUT0"])
    assert counted() == (rows + 3, requests + 1)
    families = (
        "nv_inference_request_success",
        "nv_inference_request_failure",
        "nv_inference_count",
        "nv_inference_exec_count",
        "nv_inference_request_duration_us",
        "nv_inference_queue_duration_us",
        "nv_inference_compute_input_duration_us",
        "nv_inference_compute_infer_duration_us",
        "nv_inference_compute_output_duration_us",
        "nv_inference_pending_request_count",
    )
    on_the_page(server, *families)


def test_the_example_of_jobs(server: Any, examples: ModuleType) -> None:
    script = Path(examples.__file__ or "").with_name("jobs.py")

    def run() -> str:
        command = [sys.executable, str(script), "--model", "magika", "--url", server.http, "--key", "the-example"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=180).stdout

    said = run()
    assert [line.split()[0] for line in said.splitlines()[1:4]] == ["accepted", "batched", "succeeded"]
    assert said.splitlines()[4].endswith("python")
    again = run()
    assert again.replace(": succeeded,", ": queued,", 1) == said, "the same key is the same job"


@pytest.mark.long
def test_variables_that_delay_grpc(tmp_path: Path) -> None:
    """Triton's hooks for tests of clients (G33): no call, first or later, is answered sooner."""
    scaling(tmp_path / "models", "double", 2)
    environment = {"TRITONSERVER_DELAY_GRPC_PROCESS": "400", "TRITONSERVER_DELAY_RESPONSE_COMPLETION": "300"}
    with serving(tmp_path / "models", tmp_path / "state", environment=environment) as server:
        for _ in range(4):
            began_s = time.monotonic()
            answer = infer(server, "double", "grpc", INPUT0=np.ones((1, WIDTH), np.float32))
            assert time.monotonic() - began_s >= 0.7
            assert answer.as_numpy("OUTPUT0")[0, 0] == 2
