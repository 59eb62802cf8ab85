"""Names of parameters that begin as ours do: which are known, and what is said of the others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from executors.configuration.known_parameters import KNOWN, OURS, STEP_CONDITION, unknown_parameters
from protos.model_config_pb2 import ModelConfig

ROOT = Path(__file__).resolve().parents[4]
PAGE = ROOT / "docs" / "howto" / "model-settings.md"
NOT_OF_MODELS = {
    *("attempt", "batch_id", "batch_size", "executor", "priority", "processor_use", "rows", "tenant", "timeout_us"),
    *("steps_begun_after_us", "raw_headers", "client_left", "exchange", "backends", "formats", "batch_strategies"),
    *("cli", "stalls", "metrics", "journalled"),
}
"""Attributes of spans, keys within the HTTP front, entry points, and modules."""


def config(*keys: str) -> ModelConfig:
    found = ModelConfig(name="m")
    for key in keys:
        found.parameters[key].string_value = "1"
    return found


def names_in_code() -> Iterator[str]:
    """What follows `charonia.` in string constants of the product that are nothing but such a name."""
    for folder in ("charonia", "gateway", "batcher", "executors", "plugins"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            if OURS not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found = re.fullmatch(r"charonia\.([a-z_0-9]+)", node.value)
                    if found is not None:
                        yield found[1]


def test_every_name_that_code_reads_is_known() -> None:
    assert set(names_in_code()) - NOT_OF_MODELS == {name.removeprefix(OURS) for name in KNOWN}


def test_the_page_lists_them() -> None:
    section = PAGE.read_text().partition("## Parameters of ours")[2].partition("\n## ")[0]
    listed = {name for line in section.splitlines() if line.startswith("| `") for name in re.findall(
        r"`([a-z_0-9]+)(?:\.STEP)?`", line.split("|")[1])}  # fmt: skip
    written_by_the_server = {"text_assets"}
    step = STEP_CONDITION.removeprefix(OURS).rstrip(".")
    assert listed == {name.removeprefix(OURS) for name in KNOWN} - written_by_the_server | {step}


def test_what_is_known_is_not_spoken_of() -> None:
    assert unknown_parameters(config(*KNOWN, "charonia.step_condition.part", "enable_mem_arena", "charonial")) == []


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        (
            "charonia.max_exection_s",
            "parameter 'charonia.max_exection_s' is not known and has no effect; 'charonia.max_execution_s' is",
        ),
        (
            "charonia.max_execution",
            "parameter 'charonia.max_execution' is not known and has no effect; 'charonia.max_execution_s' is",
        ),
        ("charonia.colour", "parameter 'charonia.colour' is not known and has no effect"),
        ("charonia.", "parameter 'charonia.' is not known and has no effect"),
    ],
)
def test_others_are_named_with_what_is_like_them(key: str, sentence: str) -> None:
    assert unknown_parameters(config(key, "charonia.pool")) == [sentence]
