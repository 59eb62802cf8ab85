"""Options: Triton's spelling, precedence, and one sentence for everything that cannot be."""

from __future__ import annotations

import pytest

from charonia.errors import StartupError
from charonia.options.role_settings import grpc_delays
from charonia.options.settings import GrpcDelays
from charonia.options.values import OPTIONS, options_of, parse, render, usage

ROLES = ("gateway", "batcher", "executor", "serve")


def serve(*argv: str, environment: dict[str, str] | None = None, file: dict[str, object] | None = None) -> dict:
    return parse("serve", argv, environment or {}, file or {})


def test_both_spellings_and_the_last_one_wins() -> None:
    assert serve("--http-port=1", "--http-port", "2")["http_port"] == 2
    assert serve("--model-repository=a", "--model-repository", "b")["model_repository"] == ("a", "b")


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("1", True), ("ON", True), ("false", False), ("no", False)]
)
def test_truth(text: str, value: bool) -> None:
    assert serve(f"--allow-grpc={text}")["allow_grpc"] is value


def test_a_bare_flag_is_true_whatever_follows() -> None:
    values = serve("--disable-auto-complete-config", "--strict-readiness", "--http-port=1")
    assert (values["disable_auto_complete_config"], values["strict_readiness"], values["http_port"]) == (True, True, 1)


def test_precedence() -> None:
    environment = {"CHARONIA_HTTP_PORT": "2", "CHARONIA_MODEL_REPOSITORY": "a\nb"}
    file = {"http-port": 3, "grpc-port": 4, "allow-http": False}
    values = serve("--http-port=1", environment=environment, file=file)
    assert (values["http_port"], values["grpc_port"], values["metrics_port"]) == (1, 4, 8002)
    assert (values["allow_http"], values["model_repository"]) == (False, ("a", "b"))
    assert serve(environment=environment, file=file)["http_port"] == 2


@pytest.mark.parametrize(
    ("argv", "environment", "file", "sentence"),
    [
        (["x"], {}, {}, "unexpected argument 'x'"),
        (["--none=1"], {}, {}, "unknown option '--none'"),
        (["--log-url:redis://me:secret@host"], {}, {}, "unknown option '--***@host'"),
        (["--executors"], {}, {}, "option '--executors' needs a value"),
        (["--executors=two"], {}, {}, "--executors must be a number, got 'two'"),
        (["--executors=0"], {}, {}, "--executors must be between 1 and 1024, got '0'"),
        (["--gateways=0"], {}, {}, "--gateways must be between 1 and 64, got '0'"),
        (["--gateways=65"], {}, {}, "--gateways must be between 1 and 64, got '65'"),
        (["--gateways=all"], {}, {}, "--gateways must be a number, got 'all'"),
        (["--http-port=99999"], {}, {}, "--http-port must be between 0 and 65535, got '99999'"),
        (["--exit-timeout-secs=-1"], {}, {}, "--exit-timeout-secs must be at least 0, got '-1'"),
        (["--repository-poll-secs=nan"], {}, {}, "--repository-poll-secs must be at least 0, got 'nan'"),
        (["--heartbeat-ttl-secs=0.9"], {}, {}, "--heartbeat-ttl-secs must be between 1 and 60, got '0.9'"),
        ([], {"CHARONIA_GATEWAY_HEARTBEAT_TTL_SECS": "0"}, {}, "must be between 1 and 60, got '0'"),
        (["--grpc-infer-thread-count=1"], {}, {}, "--grpc-infer-thread-count must be between 2 and 128, got '1'"),
        (["--grpc-max-response-pool-size=0"], {}, {}, "--grpc-max-response-pool-size must be at least 1, got '0'"),
        (["--log-verbose=yes"], {}, {}, "--log-verbose must be a number, got 'yes'"),
        (["--allow-http=maybe"], {}, {}, "--allow-http must be true or false, got 'maybe'"),
        (["--model-load-gpu-limit=1"], {}, {}, "option '--model-load-gpu-limit' is known but not supported"),
        ([], {"CHARONIA_HTTP_PORT": "x"}, {}, "CHARONIA_HTTP_PORT must be a number, got 'x'"),
        (
            [],
            {"CHARONIA_MODEL_LOAD_GPU_LIMIT": "x"},
            {},
            "'CHARONIA_MODEL_LOAD_GPU_LIMIT' in the environment is known but not supported",
        ),
        ([], {}, {"none": 1}, "unknown option 'none' in the configuration file"),
        (
            [],
            {},
            {"model-load-gpu-limit": "x"},
            "in the configuration file is known but not supported",
        ),
    ],
)
def test_one_sentence(argv: list[str], environment: dict[str, str], file: dict[str, object], sentence: str) -> None:
    with pytest.raises(StartupError) as caught:
        serve(*argv, environment=environment, file=file)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_role_takes_its_own_options_only() -> None:
    with pytest.raises(StartupError, match="unknown option '--http-port'; 'charonia batcher --help'"):
        parse("batcher", ["--http-port=1"], {}, {})
    assert "http_port" not in parse("batcher", [], {}, {"http-port": 1})


@pytest.mark.parametrize("role", ROLES)
def test_defaults_need_no_flags_and_every_option_is_listed(role: str) -> None:
    values = parse(role, [], {}, {})
    assert render(role, values) == []
    assert all(f"--{option.name}" in usage(role) for option in options_of(role))


def test_names_are_unique() -> None:
    assert len({option.name for option in OPTIONS}) == len(OPTIONS)


def test_delays_of_the_grpc_front() -> None:
    assert grpc_delays({}) == GrpcDelays()
    variables = {
        "TRITONSERVER_DELAY_GRPC_PROCESS_ENTRY": "1000",
        "TRITONSERVER_DELAY_GRPC_PROCESS": "500",
        "TRITONSERVER_DELAY_RESPONSE_COMPLETION": "2000",
        "TRITONSERVER_DELAY_GRPC_COMPLETE": "250",
        "TRITONSERVER_DELAY_GRPC_ENQUEUE": "4000",
        "TRITONSERVER_SERVER_DELAY_GRPC_RESPONSE_SEC": "3",
    }
    assert grpc_delays(variables) == GrpcDelays(1.5, 2.0, 0.25, 4.0, 3.0)
    with pytest.raises(StartupError, match="TRITONSERVER_DELAY_GRPC_PROCESS in the environment must be a whole number"):
        grpc_delays({"TRITONSERVER_DELAY_GRPC_PROCESS": "1s"})
