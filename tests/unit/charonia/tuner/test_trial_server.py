"""What the private servers of a run get from their surroundings."""

from __future__ import annotations

from charonia.tuner.trial_server import server_environment


def test_a_server_gets_no_options_from_the_environment() -> None:
    options = {"CHARONIA_LOG_URL": "redis://production", "CHARONIA_STATE_DIR": "/state", "CHARONIA_HTTP_PORT": "8000"}
    assert server_environment({**options, "PATH": "/bin", "OMP_NUM_THREADS": "2"}) == {
        "PATH": "/bin", "OMP_NUM_THREADS": "2",
    }  # fmt: skip
