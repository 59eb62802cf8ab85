"""The last executor with the files of a load request is killed; the one that takes its model over fails at first."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from e2e_asking import client, inputs, until_requests_wait_without
from e2e_models import SCALING_IO, WIDTH, python
from e2e_parts import Part, parts_over_a_log

SCALING = """
import os
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        if os.path.exists({short!r}):
            raise MemoryError("there is no memory for the weights now")

    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", {factor} * array)]) for array in arrays]
"""
X = np.full((1, WIDTH), 3, np.float32)


def answer(gateway: Part) -> list[float]:
    """What `m` answers, also to a request that waits for an executor."""
    with httpclient.InferenceServerClient(gateway.http, network_timeout=240) as asking:
        return list(asking.infer("m", inputs("http", INPUT0=X)).as_numpy("OUTPUT0")[0])


@pytest.mark.long
def test_a_model_is_taken_over_although_memory_is_short_at_first(tmp_path: Path) -> None:
    short = tmp_path / "memory_is_short"
    models = tmp_path / "models"
    python(models, "m", SCALING.format(short=str(short), factor=2), f"max_batch_size: 8\n{SCALING_IO}")
    tensor = {"data_type": "TYPE_FP32", "dims": [WIDTH]}
    config = {"backend": "python", "max_batch_size": 8}
    config |= {"input": [{"name": "INPUT0", **tensor}], "output": [{"name": "OUTPUT0", **tensor}]}
    flags = (f"--model-repository={models}", "--model-control-mode=explicit", "--load-model=m")
    with parts_over_a_log(tmp_path) as parts, ThreadPoolExecutor(1) as pool:
        parts.start("batcher", "batcher")
        first = parts.start("executor", "first", *flags)
        gateway = parts.gateway("gateway")
        with client("http", gateway) as asking:
            brought = SCALING.format(short="", factor=5).encode()
            asking.load_model("m", config=json.dumps(config), files={"file:1/model.py": brought})
        assert answer(gateway) == [15] * WIDTH
        second = parts.start("executor", "second", *flags)
        left = second.until_says(r"m is not loaded here: executor (\S+) serves files of a load request")
        second.until_says("executor is up")
        until_requests_wait_without(parts.log_url, left[1], "m")
        short.touch()
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        second.until_says("failed to load m.*there is no memory for the weights now")
        waiting = pool.submit(answer, gateway)
        second.until_says("failed to load m, trying again in 10 s: .*there is no memory for the weights now")
        assert not waiting.done()
        short.unlink()
        assert waiting.result(timeout=120) == [6] * WIDTH
        second.until_says(r"loaded m, versions \[1\]")
