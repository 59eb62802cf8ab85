"""Backends of others import `charonia` alone: the plug-ins do, and so does what the page for their authors shows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import charonia.backend

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = (ROOT / "examples" / "backend-plugin", *sorted(ROOT.glob("plugins/*/")))
PAGE = ROOT / "docs" / "howto" / "write-a-backend.md"
INTERNAL = {"protos", "executors", "gateway", "batcher", "loadtest", "tests"}


def texts() -> list[str]:
    shown = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert shown
    return [*(path.read_text() for plugin in PLUGINS for path in plugin.glob("*.py")), *shown]


def imported(text: str) -> set[str]:
    """The modules that a text imports."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def test_plug_ins_import_nothing_of_the_services() -> None:
    modules = set().union(*(imported(text) for text in texts()))
    assert "charonia.backend" in modules
    assert not [module for module in modules if module.split(".")[0] in INTERNAL]


def test_all_that_the_contract_names_can_be_imported_from_it() -> None:
    for name in charonia.backend.__all__:
        assert getattr(charonia.backend, name) is not None
