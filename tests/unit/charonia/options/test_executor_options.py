"""The grammars of rate limits (Q1) and host policies (C11), the directory of repository agents (R43), pinned memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from charonia.errors import StartupError
from charonia.options.role_settings import (
    check_device_pools,
    executor_settings,
    host_policies,
    native_models,
    rate_limited,
    rate_limits,
    repository_agents,
)
from charonia.options.settings import EVERY_DEVICE
from charonia.options.values import parse


def test_limits_hold_for_a_device_or_for_each() -> None:
    assert rate_limits(["r:4", "r:2:1", "s:0:0", "r:5"]) == {
        (EVERY_DEVICE, "r"): 5,
        (1, "r"): 2,
        (0, "s"): 0,
    }
    assert rate_limits([]) == {}


@pytest.mark.parametrize("entry", ["r", "r:", ":1", "r:x", "r:1:", "r:1:x", "r:-1", "r:1:2:3", "r:1:-1", "r:²"])
def test_other_limits_are_refused(entry: str) -> None:
    with pytest.raises(StartupError) as raised:
        rate_limits([entry])
    assert str(raised.value) == (
        "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or "
        f"'<resource_name>:<count>'. Got {entry}"
    )


def test_the_limiter_is_on_or_off() -> None:
    assert rate_limited("execution_count")
    assert not rate_limited("off")
    with pytest.raises(StartupError, match="must be execution_count or off, got 'on'"):
        rate_limited("on")


def test_policies_gather_their_settings() -> None:
    assert host_policies(["p,numa-node=1", "q,cpu-cores=0-3,8", "p,cpu-cores=2", "p,numa-node=0"]) == {
        "p": {"numa-node": "0", "cpu-cores": "2"},
        "q": {"cpu-cores": "0-3,8"},
    }


@pytest.mark.parametrize("entry", ["p", "p,", ",numa-node=1", "p,numa-node", "p,numa-node=", "p,=1"])
def test_other_policies_are_refused(entry: str) -> None:
    with pytest.raises(StartupError, match=r"format is '<policy_name>,<setting>=<value>'\. Got "):
        host_policies([entry])


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(StartupError, match="setting 'cores' of policy 'p' is not known: it is one of numa-node"):
        host_policies(["p,cores=1"])


def test_pools_of_devices_are_checked() -> None:
    check_device_pools("cuda-memory-pool-byte-size", ["0:67108864", "1:0"])
    for entry in ("0", "0:", "x:1", "0:-1", ":1"):
        with pytest.raises(StartupError, match="option format is '<GPU device id>:<byte size>'"):
            check_device_pools("cuda-memory-pool-byte-size", [entry])


def test_a_directory_of_agents_must_be_one(tmp_path: Path) -> None:
    assert repository_agents(str(tmp_path)) == str(tmp_path)
    assert repository_agents("") == ""
    with pytest.raises(StartupError) as raised:
        repository_agents(str(tmp_path / "none"))
    assert str(raised.value) == f"--repoagent-directory '{tmp_path}/none' does not exist or is not a directory"


def test_machine_code_is_allowed_for_repositories_of_the_server() -> None:
    assert native_models(["/models/own"], ["/models/own", "/models/other"]) == ("/models/own",)
    assert native_models([], []) == ()
    with pytest.raises(StartupError, match=r"'/models/onw' is no model repository .* give one of .*, /models/own$"):
        native_models(["/models/onw"], ["/models/own"])


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], None),
        (["--pinned-memory-pool-byte-size=1000"], "1000"),
        (["--pinned-memory-pool-byte-size=1000", "--backend-config=,pinned-memory-pool-byte-size=5"], "5"),
    ],
)
def test_the_pinned_pool_is_a_setting_of_all_backends(flags: list[str], expected: str | None, tmp_path: Path) -> None:
    given = [f"--model-repository={tmp_path}", "--log-url=redis://localhost", *flags]
    settings = executor_settings(parse("executor", given, {}, {}))
    assert settings.backend_config.get("", {}).get("pinned-memory-pool-byte-size") == expected


def test_settings_of_one_backend_and_of_all(tmp_path: Path) -> None:
    entries = ["python,a=b=c", "python,d=1", "default-max-batch-size=5", ",e=2"]
    flags = [f"--backend-config={entry}" for entry in entries]
    config = executor_settings(parse("executor", [f"--model-repository={tmp_path}", *flags], {}, {})).backend_config
    assert config["python"] == {"a": "b=c", "d": "1"}
    assert {key: config[""][key] for key in ("default-max-batch-size", "e")} == {
        "default-max-batch-size": "5",
        "e": "2",
    }


@pytest.mark.parametrize("entry", ["python", "python,a", "python,a=", "python,=b", "=b", "a="])
def test_other_settings_of_backends_are_refused(entry: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError) as raised:
        executor_settings(parse("executor", [f"--model-repository={tmp_path}", f"--backend-config={entry}"], {}, {}))
    assert str(raised.value) == (
        f"--backend-config must be <backend>,<key>=<value>, or <key>=<value> for all backends, got '{entry}'"
    )


def test_modes_are_taken_in_any_case(tmp_path: Path) -> None:
    """As Triton's parser takes them."""
    flags = ["--model-control-mode=EXPLICIT", "--rate-limit=OFF"]
    settings = executor_settings(parse("executor", [f"--model-repository={tmp_path}", *flags], {}, {}))
    assert (settings.model_control_mode, settings.rate_limit) == ("explicit", False)
    assert parse("executor", ["--log-verbose=True"], {}, {})["log_verbose"] == 1
