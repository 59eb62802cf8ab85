from __future__ import annotations

import pytest

from charonia.errors import StartupError
from charonia.options.cloud_options import check_ports, sagemaker_settings, vertex_ai_settings
from charonia.options.settings import SageMakerSettings, VertexAiSettings
from charonia.options.values import GATEWAY, SERVE, Values, parse, render

PREDICTION = {"AIP_MODE": "PREDICTION", "AIP_HTTP_PORT": "7080", "AIP_STORAGE_URI": "gs://bucket/models"}
ROUTES = {"AIP_PREDICT_ROUTE": "/p", "AIP_HEALTH_ROUTE": "/h"}


def serve(*argv: str, environment: dict[str, str] | None = None) -> Values:
    return parse(SERVE, argv, environment or {}, {})


def test_vertex_ai_changes_defaults() -> None:
    values = serve(environment=PREDICTION)
    assert (values["allow_vertex_ai"], values["allow_http"], values["allow_grpc"]) == (True, False, False)
    assert values["vertex_ai_port"] == 7080
    assert values["model_repository"] == ("gs://bucket/models",)
    flagged = serve("--allow-http=true", "--model-repository=here", "--vertex-ai-port=1", environment=PREDICTION)
    assert (flagged["allow_http"], flagged["model_repository"], flagged["vertex_ai_port"]) == (True, ("here",), 1)
    plain = serve(environment={"AIP_MODE": "TRAINING"})
    assert (plain["allow_vertex_ai"], plain["allow_http"], plain["vertex_ai_port"]) == (False, True, 8080)
    with pytest.raises(StartupError, match="AIP_HTTP_PORT must be a number, got 'x'"):
        serve(environment={"AIP_HTTP_PORT": "x"})


def test_parts_have_the_values_of_serve_in_the_same_environment() -> None:
    for argv in ((), ("--allow-http=true", "--vertex-ai-port=8080"), ("--allow-vertex-ai=false", "--allow-grpc=true")):
        values = serve(*argv, environment=PREDICTION)
        again = parse(GATEWAY, render(GATEWAY, values, PREDICTION), PREDICTION, {})
        assert {key: again[key] for key in values.keys() & again.keys()} == {
            key: values[key] for key in values.keys() & again.keys()
        }


def test_settings_of_vertex_ai() -> None:
    assert vertex_ai_settings(serve(), ROUTES) is None
    values = serve("--allow-vertex-ai=true", "--vertex-ai-default-model=m", "--vertex-ai-address=::1")
    assert vertex_ai_settings(values, ROUTES) == VertexAiSettings("/p", "/h", "::1", 8080, "m")
    for missing, name in (("AIP_PREDICT_ROUTE", "API_PREDICT_ROUTE"), ("AIP_HEALTH_ROUTE", "AIP_HEALTH_ROUTE")):
        with pytest.raises(StartupError, match=f"{name} is not defined for Vertex AI endpoint"):
            vertex_ai_settings(values, {**ROUTES, missing: ""})


def test_settings_of_sagemaker() -> None:
    values = serve("--allow-sagemaker=true", "--sagemaker-thread-count=4")
    assert sagemaker_settings(serve(), {}) is None
    assert sagemaker_settings(values, {}) == SageMakerSettings()
    environment = {
        "SAGEMAKER_TRITON_PING_MODE": "live",
        "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "m",
        "SAGEMAKER_TRITON_INFERENCE_TYPE": "generate",
    }
    assert sagemaker_settings(values, environment) == SageMakerSettings("0.0.0.0", 8080, "live", "m", "generate")
    with pytest.raises(StartupError, match="Invalid SAGEMAKER_TRITON_INFERENCE_TYPE 'train'"):
        sagemaker_settings(values, {"SAGEMAKER_TRITON_INFERENCE_TYPE": "train"})


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--http-port=1", "--grpc-port=1"], "HTTP requests and GRPC requests at the same address and port 0.0.0.0:1"),
        (["--http-port=8002"], "HTTP requests and metrics requests at the same address and port 0.0.0.0:8002"),
        (
            ["--allow-sagemaker", "--allow-vertex-ai"],
            "SageMaker requests and Vertex AI requests at the same address and port 0.0.0.0:8080",
        ),
        (
            ["--allow-sagemaker", "--sagemaker-safe-port-range=8000-8001"],
            "cannot listen to metrics requests at port 8002, allowed port range is [8000, 8001]",
        ),
        (["--sagemaker-safe-port-range=8000"], "must be <integer>-<integer>, got '8000'"),
    ],
)
def test_ports_that_fronts_cannot_have(argv: list[str], sentence: str) -> None:
    with pytest.raises(StartupError) as caught:
        check_ports(serve(*argv))
    assert sentence in str(caught.value)


def test_ports_that_fronts_can_have() -> None:
    check_ports(serve())
    check_ports(serve("--http-port=0", "--grpc-port=0", "--metrics-port=0"))
    check_ports(serve("--http-port=1", "--grpc-port=1", "--allow-grpc=false"))
    check_ports(serve("--http-port=1", "--grpc-port=1", "--grpc-address=127.0.0.1"))
    check_ports(serve("--allow-sagemaker", "--sagemaker-port=9", "--sagemaker-safe-port-range=8000-8002"))
