"""Pool, labels and room of an executor from option values."""

from __future__ import annotations

import re

import pytest

from charonia.errors import StartupError
from charonia.options.role_settings import executor_settings, placement_options, size_bytes
from charonia.options.values import parse


def test_what_is_given() -> None:
    flags = [
        "--pool=gpu",
        "--label=zone=a",
        "--label",
        "rack=4",
        "--model-memory-budget=1.5GiB",
        "--max-loaded-models=7",
    ]
    settings = executor_settings(parse("executor", flags, {}, {}))
    assert settings.pool == "gpu"
    assert settings.labels == {"zone": "a", "rack": "4"}
    assert settings.model_memory_budget_bytes == 3 * 1024**3 // 2
    assert settings.max_loaded_models == 7


@pytest.mark.parametrize(
    ("text", "size"), [("", 0), ("1", 1), ("5 KiB", 5120), ("2MiB", 2 * 1024**2), ("0.5GiB", 1024**3 // 2)]
)
def test_sizes(text: str, size: int) -> None:
    assert size_bytes("--x", text) == size


@pytest.mark.parametrize("text", ["0", "-1", "1GB", "GiB", "1 2", "nan", "1e3"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(StartupError, match=r"^--x must be a size like 4GiB or 536870912"):
        size_bytes("--x", text)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--pool=a b"], "--pool must be letters"),
        (["--label=zone"], "--label must be <key>=<value>"),
        (["--label=zone=a", "--label=zone=b"], "--label has the same key twice"),
        (["--max-loaded-models=1", "--model-control-mode=explicit"], "need --model-control-mode none"),
        (["--model-memory-budget=1GiB", "--model-control-mode=poll"], "need --model-control-mode none"),
    ],
)
def test_what_cannot_be_meant(flags: list[str], sentence: str) -> None:
    with pytest.raises(StartupError, match=re.escape(sentence)):
        placement_options(parse("executor", flags, {}, {}))
