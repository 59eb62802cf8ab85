"""Environment variables of SageMaker and Vertex AI that Triton reads, and the ports that fronts may use (H55)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from charonia.errors import StartupError

from .settings import SageMakerSettings, VertexAiSettings

_INFERENCES = ("infer", "generate", "generate_stream")
_FRONTS = {
    "http": "HTTP",
    "grpc": "GRPC",
    "metrics": "metrics",
    "sagemaker": "SageMaker",
    "vertex_ai": "Vertex AI",
    "openai": "OpenAI",
}
VARIABLES = frozenset({"AIP_MODE", "AIP_HTTP_PORT", "AIP_STORAGE_URI"})
"""What `vertex_ai_defaults` reads."""


def vertex_ai_defaults(environment: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Defaults of options in a Vertex AI container, as text, and the variable of each, by option."""
    defaults: dict[str, tuple[str, str]] = {}
    if environment.get("AIP_MODE") == "PREDICTION":
        for option, text in (("allow-vertex-ai", "true"), ("allow-http", "false"), ("allow-grpc", "false")):
            defaults[option] = (text, "AIP_MODE")
    for option, variable in (("vertex-ai-port", "AIP_HTTP_PORT"), ("model-repository", "AIP_STORAGE_URI")):
        if text := environment.get(variable, ""):
            defaults[option] = (text, variable)
    return defaults


def vertex_ai_settings(values: Mapping[str, Any], environment: Mapping[str, str]) -> VertexAiSettings | None:
    """The settings of the Vertex AI front; None where it is off. Raises `StartupError` for a missing path."""
    if not values["allow_vertex_ai"]:
        return None
    predict, health = (environment.get(variable, "") for variable in ("AIP_PREDICT_ROUTE", "AIP_HEALTH_ROUTE"))
    for route, name in ((predict, "API_PREDICT_ROUTE"), (health, "AIP_HEALTH_ROUTE")):
        if not route:  # Triton's text has the first name as it is here
            raise StartupError(
                f"failed to start Vertex AI service: Invalid argument - {name} is not defined for Vertex AI endpoint"
            )
    return VertexAiSettings(
        predict,
        health,
        values["vertex_ai_address"],
        values["vertex_ai_port"],
        values["vertex_ai_default_model"],
        values.get("joint_metrics_socket", ""),
    )


def sagemaker_settings(values: Mapping[str, Any], environment: Mapping[str, str]) -> SageMakerSettings | None:
    """The settings of the SageMaker front; None where it is off. Raises `StartupError` for an unknown inference."""
    if not values["allow_sagemaker"]:
        return None
    plain = SageMakerSettings()
    inference = environment.get("SAGEMAKER_TRITON_INFERENCE_TYPE") or plain.inference
    if inference not in _INFERENCES:
        raise StartupError(
            f"Invalid SAGEMAKER_TRITON_INFERENCE_TYPE '{inference}'. Must be one of: {', '.join(_INFERENCES)}"
        )
    ping_mode = environment.get("SAGEMAKER_TRITON_PING_MODE") or plain.ping_mode
    return SageMakerSettings(
        values["sagemaker_address"],
        values["sagemaker_port"],
        "live" if ping_mode == "live" else "ready",
        environment.get("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME") or plain.default_model,
        inference,
        f"{environment.get('SAGEMAKER_BASE_DIR') or '/opt/ml'}/models",
    )


def check_ports(values: Mapping[str, Any]) -> None:
    """Raises `StartupError` if two fronts have the same port, or one is outside `--sagemaker-safe-port-range`."""
    metrics_address = values["metrics_address"] or values["http_address"]
    found: list[tuple[str, str, int]] = []
    for front, name in _FRONTS.items():
        if values[f"allow_{front}"] and values[f"{front}_port"]:
            address = metrics_address if front == "metrics" else values[f"{front}_address"]
            found.append((name, address, values[f"{front}_port"]))
    least, most = _safe_range(values["sagemaker_safe_port_range"])
    for at, (name, address, port) in enumerate(found):
        if values["allow_sagemaker"] and name != "SageMaker" and not least <= port <= most:
            raise StartupError(
                f"The server cannot listen to {name} requests at port {port}, allowed port range is [{least}, {most}]"
            )
        for other, its_address, its_port in found[at + 1 :]:
            if (address, port) == (its_address, its_port):
                raise StartupError(
                    f"The server cannot listen to {name} requests and {other} requests at the same address and port "
                    f"{address}:{port}"
                )


def _safe_range(text: str) -> tuple[int, int]:
    """The ports of `<min>-<max>`, all for "". Raises `StartupError`."""
    least, dash, most = text.partition("-")
    if not text:
        return 0, 65535
    if not dash or not all(number.isascii() and number.isdecimal() for number in (least, most)):
        raise StartupError(f"--sagemaker-safe-port-range must be <integer>-<integer>, got '{text}'")
    return int(least), int(most)
