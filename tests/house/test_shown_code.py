"""What pages show as code is what the product reads: options of its commands, configurations, Python, JSON and TOML.

Blocks that are executed as well: `tests/e2e/test_tutorials.py`.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format

from charonia.cli import command_flags
from protos.model_config_pb2 import ModelConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", *(ROOT / "examples").glob("*.md"), *(ROOT / "docs").rglob("*.md"))
    if "adr" not in path.parts
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`]+)`|((?:^    \S.*\n)+)", re.MULTILINE)
"""In prose: spans, and indented blocks."""
COMMAND = re.compile(r"(?<![\w./'-])(?:\.venv/bin/)?charonia ([a-z]+)(?: ([a-z]+))?([^|;&\n]*)")
SHELL = ("", "sh", "console")
WRONG_ON_PURPOSE = {("docs/howto/check.md", "protobuf")}
"""What is shown there is what `charonia check` finds."""
READERS: dict[str, Callable[[str], Any]] = {
    "python": lambda text: compile(text, "page", "exec"),
    "json": json.loads,
    "toml": tomllib.loads,
    "protobuf": lambda text: text_format.Parse(text, ModelConfig()),
}


def _wrong_options(text: str) -> list[str]:
    """The commands in shown code that there are not, and their options that there are not."""
    flags, wrong = command_flags(), []
    shown = [block for kind, block in FENCE.findall(text) if kind in SHELL]
    shown += [span or block for span, block in CODE.findall(FENCE.sub("", text))]
    for code in shown:
        lines = re.sub(r"\n {4,}", " ", re.sub(r"\\\n\s*", " ", code))
        for command, action, rest in COMMAND.findall(lines):
            if command == "completion":
                continue
            actions = flags.get(command, {})
            if not actions or (action and "" not in actions and action not in actions):
                wrong.append(f"charonia {command} {action}")
                continue
            known = {"--help", *actions.get("", actions.get(action, ()))}
            used = re.findall(r"(?<![\w-])--[a-z][\w-]*", rest)
            wrong += [f"charonia {command} {action}: {name}" for name in used if name not in known]
    return wrong


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_the_options_that_a_page_shows(page: str) -> None:
    assert not _wrong_options((ROOT / page).read_text())


@pytest.mark.parametrize("page", PAGES)
def test_shown_files_can_be_read(page: str) -> None:
    for kind, text in FENCE.findall((ROOT / page).read_text()):
        if kind in READERS and (page, kind) not in WRONG_ON_PURPOSE:
            READERS[kind](text)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("```sh\ncharonia serve --model-repository m \\\n    --http-prt 1\n```\n", ["charonia serve : --http-prt"]),
        ("```console\n$ charonia queue ls --modell m | grep --count x\n```\n", ["charonia queue ls: --modell"]),
        ("Ask `charonia jobs list`.", ["charonia jobs list"]),
        ("Ask `charonia jobs ls --json`.\n\n    charonia serv --json\n", ["charonia serv "]),
        ("```python\ncharonia serv\n```\n", []),
    ],
)
def test_what_there_is_not_is_found(text: str, wrong: list[str]) -> None:
    assert _wrong_options(text) == wrong
