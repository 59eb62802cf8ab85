"""What python models have besides their answers: metrics, health, environments, backends of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from e2e_asking import client, index, infer, infer_json, until
from e2e_models import put, python
from e2e_server import serving
from prometheus_client.parser import text_string_to_metric_families

KINDS = ["http", "grpc"]
IO = """
max_batch_size: 4
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
TEXT = """
max_batch_size: 4
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] } ]
"""

METERED = """
import json, os
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        name = args["model_instance_name"]
        self.seen = pb_utils.MetricFamily("seen_requests", "Requests seen", pb_utils.MetricFamily.COUNTER)
        self.of_model = self.seen.Metric(labels={"model": args["model_name"]})
        self.sizes = pb_utils.MetricFamily("input_sizes", "Elements of an input", pb_utils.MetricFamily.HISTOGRAM)
        self.size = self.sizes.Metric(labels={}, buckets=[1, 4])
        self.states = pb_utils.MetricFamily("instance_up", "1 while it is", pb_utils.MetricFamily.GAUGE)
        self.up = self.states.Metric(labels={"instance": name})
        self.up.set(1)

    def execute(self, requests):
        responses = []
        for request in requests:
            if json.loads(request.parameters()).get("die"):
                os._exit(3)
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            self.of_model.increment(1)
            self.size.observe(x.size)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)]))
        return responses
"""

PATIENT = """
import os
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sick = os.path.join(args["model_repository"], "..", "..", "sick")

    def is_ready(self):
        return not os.path.exists(self.sick)

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())]) for r in requests]
"""

SURROUNDED = """
import sys
import numpy as np
import only_here
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        told = np.array([[sys.prefix, only_here.WORD]], dtype=object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", told)]) for _ in requests]
"""

FACTS = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            facts = {
                "id": request.request_id(),
                "timeout": request.timeout(),
                "flags": request.flags(),
                "correlation": request.correlation_id(),
                "outputs": sorted(request.requested_output_names()),
                "parameters": json.loads(request.parameters()),
                "memory": request.preferred_memory().preferred_memory_type,
                "context": request.trace().get_context(),
                "directory": pb_utils.get_model_dir().rpartition("/")[2],
            }
            text = np.array([[json.dumps(facts)]], dtype=object)
            answer = pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", text)], parameters={"seen": True, "of": "f"})
            responses.append(answer)
        return responses
"""

SWAPPED = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(0)
        config.add_input({"name": "IN", "data_type": "TYPE_BF16", "dims": [-1]})
        config.add_output({"name": "OUT", "data_type": "TYPE_BF16", "dims": [-1]})
        config.set_model_transaction_policy({"decoupled": False})
        return config

    def execute(self, requests):
        responses = []
        for request in requests:
            there = pb_utils.Tensor.from_dlpack("THERE", pb_utils.get_input_tensor_by_name(request, "IN"))
            back = pb_utils.Tensor.from_dlpack("OUT", there.to_dlpack())
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", back.as_numpy()[::-1])]))
        return responses
"""

TELLER = """
import json, os
import numpy as np
import triton_python_backend_utils as pb_utils
from words import GREETING


class TritonPythonModel:
    def initialize(self, args):
        with open(os.path.join(pb_utils.get_model_dir(), "model.json")) as file:
            self.whom = json.load(file)["whom"]

    def execute(self, requests):
        told = np.array([[f"{GREETING} {self.whom}"]], dtype=object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", told)]) for _ in requests]
"""

X = np.array([[1, 2]], np.float32)


def write_models(models: Path, backends: Path, environment: Path) -> None:
    python(models, "metered", METERED, IO + "instance_group [ { count: 2 } ]")
    often = 'parameters { key: "charonia.health_interval_s" value { string_value: "0.02" } }'
    python(models, "patient", PATIENT, IO + often)
    python(models, "patient_stream", PATIENT, IO + often + "model_transaction_policy { decoupled: true }")
    env = 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "$$TRITON_MODEL_DIRECTORY/env.tar.gz" } }'
    python(models, "surrounded", SURROUNDED, TEXT + env)
    with tarfile.open(models / "surrounded/env.tar.gz", "w:gz") as tar:
        tar.add(environment, ".")
    lost = env.replace("env.tar.gz", "nothing.tar.gz")
    python(models, "lost", SURROUNDED, TEXT + lost)
    put(models / "facts/1/other_name.py", FACTS)
    put(models / "facts/config.pbtxt", 'backend: "python" default_model_filename: "other_name.py"' + TEXT)
    python(models, "swapped", SWAPPED, "")
    put(backends / "teller/model.py", TELLER)
    put(backends / "teller/words.py", "GREETING = 'good morning'")
    for whom in ("alice", "bob"):
        put(models / f"to_{whom}/1/model.json", json.dumps({"whom": whom}))
        put(models / f"to_{whom}/config.pbtxt", 'backend: "teller" runtime: "model.py"' + TEXT)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("features")
    environment = directory / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "only_here.py").write_text("WORD = 'of the environment'")
    write_models(directory / "models", directory / "backends", environment)
    flags = [
        f"--backend-directory={directory / 'backends'}",
        "--backend-config=python,shm-default-byte-size=1048576",
        "--http-header-forward-pattern=X-Forwarded-.*",
        "--exit-on-error=false",
        "--strict-readiness=false",
    ]
    with serving(directory / "models", directory / "state", *flags) as running:
        running.sick = directory / "sick"
        yield running


def metrics(server: Any) -> dict[str, float]:
    """The custom ones, as a scraper reads them."""
    found = {}
    for family in text_string_to_metric_families(server.scrape()):
        if family.name.startswith(("seen_requests", "input_sizes", "instance_up")):
            for sample in family.samples:
                found[sample.name + "".join(f" {value}" for _, value in sorted(sample.labels.items()))] = sample.value
    return found


def told(server: Any, model: str) -> list[str]:
    return [text.decode() for text in infer(server, model, X=X).as_numpy("TEXT")[0]]


def test_what_models_count_is_on_the_servers_page(server: Any) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: infer(server, "metered", X=X), range(12)))
    infer(server, "metered", X=np.zeros((1, 5), np.float32))
    seen = until("they are counted", lambda: next((key for key in metrics(server) if key.startswith("seen")), ""))

    def counts(number: int) -> dict[str, float]:
        """All metrics, once so many requests are counted: a page may lack a part for a moment."""
        return until(f"{number} are counted", lambda: (page := metrics(server)).get(seen) == number and page)

    until("the sizes are counted too", lambda: metrics(server).get("input_sizes_count") == 13)
    found = counts(13)
    assert found["input_sizes_bucket 1"] == 0
    assert found["input_sizes_bucket 4"] == 12
    assert found["input_sizes_bucket +Inf"] == found["input_sizes_count"] == 13
    assert found["input_sizes_sum"] == 12 * 2 + 5
    assert found["instance_up metered_0_0"] == found["instance_up metered_0_1"] == 1
    # an instance that dies takes its gauge along; what it counted stays
    with pytest.raises(Exception, match="is not healthy"):
        infer(server, "metered", "http", {"parameters": {"die": True}}, X=X)
    counts(13)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: infer(server, "metered", X=X), range(4)))
    until("both are up again", lambda: metrics(server).keys() == found.keys())
    counts(17)


@pytest.mark.parametrize("kind", KINDS)
def test_the_ready_endpoint_asks_the_models_health(kind: str, server: Any) -> None:
    names = ("patient", "patient_stream")
    with client(kind, server) as asking:
        until("they are ready", lambda: all(asking.is_model_ready(name) for name in names))
        server.sick.touch()
        until("they are not ready", lambda: not any(asking.is_model_ready(name) for name in names))
        assert asking.is_model_ready("metered")
        assert asking.is_server_ready()
        assert (infer(server, "patient", kind, X=X).as_numpy("Y") == X).all(), "requests are accepted all the same"
        server.sick.unlink()
        until("they are ready again", lambda: all(asking.is_model_ready(name) for name in names))


def test_a_model_runs_in_the_environment_it_brings(server: Any) -> None:
    prefix, word = told(server, "surrounded")
    assert Path(prefix).is_relative_to(server.state_dir / "environments")
    assert word == "of the environment"
    assert "Failed to get the canonical path for" in index(server)["lost", "1"]["reason"]


def test_a_python_based_backend_serves_all_models_that_name_it(server: Any) -> None:
    assert told(server, "to_alice") == ["good morning alice"]
    assert told(server, "to_bob") == ["good morning bob"]
    assert json.loads(server.get("/v2/models/to_bob/config")[1])["backend"] == "teller"


def test_a_model_sees_its_request(server: Any) -> None:
    body = {
        "id": "r7",
        "parameters": {"text": "é", "count": 3, "yes": True, "timeout": 5_000_000},
        "inputs": [{"name": "X", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}],
        "outputs": [{"name": "TEXT"}],
    }
    headers = {"X-Forwarded-For": "somebody", "X-Other": "nobody"}
    status, raw = server.request("POST", "/v2/models/facts/infer", json.dumps(body).encode(), headers)
    assert status == 200, raw
    answer = json.loads(raw)
    assert answer["parameters"] == {"seen": True, "of": "f"}
    facts = json.loads(answer["outputs"][0]["data"][0])
    forwarded = {name.lower(): value for name, value in facts.pop("parameters").items()}
    assert forwarded == {"text": "é", "count": 3, "yes": True, "x-forwarded-for": "somebody"}
    assert facts == {
        "id": "r7",
        "timeout": 5_000_000,
        "flags": 0,
        "correlation": 0,
        "outputs": ["TEXT"],
        "memory": 0,
        "context": None,
        "directory": "1",
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("correlation_id", [7, 2**63 - 1, "call-1"])
def test_a_model_without_a_sequence_batcher_sees_the_correlation_id_too(
    correlation_id: int | str, kind: str, server: Any
) -> None:
    options = {"sequence_id": correlation_id, "sequence_start": True, "sequence_end": False}
    text = infer(server, "facts", kind, options, X=X).as_numpy("TEXT")[0, 0]
    facts = json.loads(text)
    assert (facts["correlation"], facts["flags"], facts["parameters"]) == (correlation_id, 1, {})


@pytest.mark.parametrize("kind", KINDS)
def test_response_parameters_come_with_binary_answers(kind: str, server: Any) -> None:
    answer = infer(server, "facts", kind, X=X).get_response()
    if kind == "http":
        assert answer["parameters"] == {"seen": True, "of": "f"}
    else:
        assert answer.parameters["seen"].bool_param is True
        assert answer.parameters["of"].string_param == "f"


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_through_dlpack_and_back(kind: str, server: Any) -> None:
    answer = infer(server, "swapped", kind, IN=np.array([1.0, 2.0, -3.0], ml_dtypes.bfloat16)).as_numpy("OUT")
    assert answer.astype(np.float32).tolist() == [-3.0, 2.0, 1.0]


def test_what_is_wrong_with_a_request_is_its_own(server: Any) -> None:
    status, answer = infer_json(
        server, "swapped", {"inputs": [{"name": "IN", "shape": [1], "datatype": "BF16", "data": [1]}]}
    )
    assert status == 400
    assert "BF16" in answer["error"]
