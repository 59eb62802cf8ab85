"""Options of the in-process API: Triton's defaults, what they become, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from charonia.inprocess import (
    InvalidArgumentError,
    LogFormat,
    ModelControlMode,
    ModelLoadDeviceLimit,
    Options,
    RateLimiterResource,
    RateLimitMode,
)
from charonia.inprocess.kinds import InstanceGroupKind
from charonia.inprocess.options import serve_values


def values(**fields: Any) -> dict[str, Any]:
    return serve_values(Options(**{"model_repository": "models", **fields}), {})


def test_defaults_are_tritons() -> None:
    made = values()
    expected = {
        "model_repository": ("models",),
        "id": "triton",
        "model_control_mode": "none",
        "load_model": (),
        "exit_on_error": True,
        "strict_readiness": True,
        "exit_timeout_secs": 30,
        "model_load_thread_count": 4,
        "log_info": False,
        "log_warning": False,
        "log_error": False,
        "allow_metrics": True,
        "backend_directory": "",
        "repoagent_directory": "",
        "rate_limit": "off",
    }
    assert {key: made[key] for key in expected} == expected
    assert (made["allow_http"], made["allow_grpc"], made["allow_webhooks"], made["gateways"]) == (
        False,
        False,
        False,
        1,
    )
    assert made["state_dir"] == "", "whoever starts it makes one that is thrown away"


def test_each_field_becomes_the_commands_option(tmp_path: Path) -> None:
    made = values(
        model_repository=["a", "b"],
        server_id="mine",
        model_control_mode=ModelControlMode.EXPLICIT,
        startup_models=["x", "y"],
        strict_model_config=True,
        rate_limiter_mode=RateLimitMode.EXEC_COUNT,
        rate_limiter_resources=[RateLimiterResource("R", 3, 0), RateLimiterResource("S", 1, -1)],
        pinned_memory_pool_size=0,
        cuda_memory_pool_sizes={0: 5},
        cache_config={"local": {"size": 4096}},
        exit_on_error=False,
        exit_timeout=5,
        model_load_retry_count=2,
        model_namespacing=True,
        log_warn=True,
        log_format=LogFormat.ISO8601,
        metrics_interval=100,
        metrics_configuration={"": {"summary_latencies": "true"}},
        backend_directory=str(tmp_path),
        backend_configuration={"python": {"shm-default-byte-size": "1"}, "": {"min-compute": "1"}},
        host_policies={"p": {"cpu-cores": "0"}},
        serve_options={"executors": 2, "durability": "fsync", "label": ["a=b", "c=d"], "state_dir": tmp_path},
    )
    expected = {
        "model_repository": ("a", "b"),
        "id": "mine",
        "model_control_mode": "explicit",
        "load_model": ("x", "y"),
        "disable_auto_complete_config": True,
        "rate_limit": "execution_count",
        "rate_limit_resource": ("R:3:0", "S:1"),
        "pinned_memory_pool_byte_size": 0,
        "cuda_memory_pool_byte_size": ("0:5",),
        "cache_config": ("local,size=4096",),
        "exit_on_error": False,
        "exit_timeout_secs": 5,
        "model_load_retry_count": 2,
        "model_namespacing": True,
        "log_info": False,
        "log_warning": True,
        "log_error": True,
        "log_format": "ISO8601",
        "metrics_interval_ms": 100,
        "metrics_config": ("summary_latencies=true",),
        "backend_directory": str(tmp_path),
        "backend_config": ("python,shm-default-byte-size=1", ",min-compute=1"),
        "host_policy": ("p,cpu-cores=0",),
        "executors": 2,
        "durability": "fsync",
        "label": ("a=b", "c=d"),
        "state_dir": str(tmp_path),
    }
    assert {key: made[key] for key in expected} == expected


def test_startup_models_are_only_for_explicit_mode() -> None:
    assert values(startup_models=["x"])["load_model"] == ()


def test_verbose_logging_switches_the_others_on() -> None:
    made = values(log_verbose=2)
    assert (made["log_verbose"], made["log_info"], made["log_warning"], made["log_error"]) == (2, True, True, True)


def test_the_environment_is_heard_but_not_about_listeners_and_state() -> None:
    options = Options(model_repository="models")
    made = serve_values(
        options, {"CHARONIA_EXECUTORS": "3", "CHARONIA_STATE_DIR": "/shared", "CHARONIA_ALLOW_HTTP": "true"}
    )
    assert (made["executors"], made["state_dir"], made["allow_http"]) == (3, "", False)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"model_repository": None}, r"^Model repository must be specified\.$"),
        ({"model_repository": []}, "^--model-repository must be specified$"),
        ({"model_repository": ""}, "^--model-repository must be specified$"),
        ({"log_file": "server.log"}, "log_file is not supported"),
        ({"min_supported_compute_capability": 7.5}, "min_supported_compute_capability is not supported"),
        (
            {"model_load_device_limits": [ModelLoadDeviceLimit(InstanceGroupKind.GPU, 0, 0.5)]},
            "model_load_device_limits are not supported",
        ),
        ({"model_load_thread_count": 0}, "--model-load-thread-count must be between 1 and 1024, got '0'"),
        ({"serve_options": {"nonsense": 1}}, "charonia serve has no option 'nonsense'"),
        ({"serve_options": {"id": "x"}}, "'id' has a field of its own in Options"),
        ({"serve_options": {"http_port": 8000}}, "'http_port' has no meaning for a server that listens nowhere"),
        ({"serve_options": {"gateways": 2}}, "'gateways' has no meaning"),
        ({"serve_options": {"executors": "many"}}, "--executors must be a number, got 'many'"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        values(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"server_id": 1},
        {"model_repository": 1},
        {"model_repository": [1]},
        {"startup_models": "x"},
        {"startup_models": [None]},
        {"model_control_mode": 2},
        {"rate_limiter_mode": "off"},
        {"exit_timeout": -1},
        {"exit_timeout": 1.5},
        {"exit_timeout": 2**32},
        {"exit_on_error": "yes"},
        {"log_file": 3},
        {"cache_config": []},
    ],
)
def test_wrong_types_are_type_errors(fields: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"Options.{next(iter(fields))} must "):
        values(**fields)
