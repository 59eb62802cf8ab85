"""What the private servers of a run get from their surroundings."""

from __future__ import annotations

from pathlib import Path

from charonia.options.cloud_options import vertex_ai_defaults
from charonia.options.values import SERVE, parse
from charonia.tuner.trial_server import ModelCopies, server_arguments, server_environment


def test_a_server_gets_no_options_from_the_environment() -> None:
    options = {"CHARONIA_LOG_URL": "redis://production", "CHARONIA_STATE_DIR": "/state", "CHARONIA_HTTP_PORT": "8000"}
    assert server_environment({**options, "PATH": "/bin", "OMP_NUM_THREADS": "2"}) == {
        "PATH": "/bin", "OMP_NUM_THREADS": "2",
    }  # fmt: skip


def test_variables_of_vertex_ai_that_are_options_do_not_reach_a_server() -> None:
    found = server_environment({"AIP_MODE": "PREDICTION", "AIP_HTTP_PORT": "80", "AIP_STORAGE_URI": "s3://x", "A": "b"})
    assert (found, vertex_ai_defaults(found)) == ({"A": "b"}, {})


def test_no_option_leads_a_server_to_another(tmp_path: Path) -> None:
    copies = ModelCopies((), (), tmp_path)
    others = {
        "log-url": "redis://production", "config": "/etc/charonia.toml", "model-store": "/models",
        "state-dir": "/state", "shm-dir": "/shm", "http-socket": "/run/http", "grpc-socket": "/run/grpc",
        "http-port": "1",
    }  # fmt: skip
    given = [f"--{name}={value}" for name, value in others.items()]
    given += ["--allow-openai=true", "--allow-sagemaker=true", "--executors=2", "--http-address=::1"]
    found = parse(SERVE, server_arguments(copies, ["m"], given, caches=True), {}, {})
    own = ("log_url", "config", "shm_dir", "http_socket", "grpc_socket")
    assert [found[key] for key in own] == [""] * len(own)
    assert [found[f"{front}_port"] for front in ("http", "grpc", "metrics", "openai", "sagemaker", "vertex_ai")] == [
        0
    ] * 6
    assert (found["state_dir"], found["model_repository"][-1]) == (str(copies.state), str(copies.path))
    assert (found["executors"], found["http_address"], found["load_model"]) == (2, "::1", ("m",))
    assert found["openai_address"] == "127.0.0.1"
