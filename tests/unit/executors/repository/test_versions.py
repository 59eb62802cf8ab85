"""Version directories and policies (C3, R1, R3), and model names (R11)."""

from __future__ import annotations

import pytest

from charonia.errors import InvalidArgument
from charonia.models.config_forms import parse
from charonia.models.names import check_model_name
from executors.configuration.config import InstanceError
from executors.repository.model_directory import select, version_of


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("1", 1),
        ("10", 10),
        ("9223372036854775807", 2**63 - 1),
        ("9223372036854775808", None),
        ("9" * 5000, None),
        ("0", None),
        ("01", None),
        ("-1", None),
        ("1a", None),
        ("", None),
        ("٣", None),
        ("1_0", None),
    ],
)
def test_version_directories(name: str, version: int | None) -> None:
    assert version_of(name) == version


@pytest.mark.parametrize(
    ("policy", "served"),
    [
        ("", [10]),
        ("latest { num_versions: 2 }", [3, 10]),
        ("latest { num_versions: 4294967295 }", [1, 2, 3, 10]),
        ("all { }", [1, 2, 3, 10]),
        ("specific { versions: [3, 1, 7] }", [1, 3]),
    ],
)
def test_policies(policy: str, served: list[int]) -> None:
    config = parse("version_policy { " + policy + " }")
    assert select(config.version_policy, [3, 10, 1, 2], "m") == served


@pytest.mark.parametrize(
    ("policy", "available"), [("", []), ("latest { }", [1]), ("all { }", []), ("specific { versions: 4 }", [1, 2])]
)
def test_no_version_left(policy: str, available: list[int]) -> None:
    with pytest.raises(InstanceError) as caught:
        select(parse("version_policy { " + policy + " }").version_policy, available, "m")
    assert caught.value.message == "at least one version must be available under the version policy of model 'm'"


@pytest.mark.parametrize("name", ["a", "a.b", "..a", "...", "a..1", ".", "a\\b", "with space", "é"])
def test_good_names(name: str) -> None:
    check_model_name(name)


@pytest.mark.parametrize("name", ["..", " .. ", "a/b", "/etc", "../a", "a\0"])
def test_names_with_path_parts(name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_model_name(name)
    assert caught.value.message == (
        f"invalid model name '{name}', model name must not contain path traversal characters"
    )


@pytest.mark.parametrize("name", ["", "  "])
def test_empty_names(name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_model_name(name)
    assert caught.value.message == "Model name cannot be empty. Please enter a valid name to deploy."
