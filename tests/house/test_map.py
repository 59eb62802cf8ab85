"""`docs/architecture.md` is the map: every room and every fact is on it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from charonia.facts.events import Fact

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def _blocks() -> dict[str, str]:
    """The part of the map that each package has."""
    (text,) = re.findall(r"```\n(charonia/ .*?)```", PAGE, re.DOTALL)
    return {part.split("/")[0]: part for part in text.split("\n\n")}


@pytest.mark.parametrize("package", ["charonia", "gateway", "batcher", "executors"])
def test_every_room_is_on_the_map(package: str) -> None:
    rooms = [path.parent for path in (ROOT / package).rglob("__init__.py") if path.parent != ROOT / package]
    assert len(rooms) > 5
    block = _blocks()[package]
    assert not [str(room.relative_to(ROOT)) for room in rooms if not re.search(rf"\b{room.name}\b", block)]


def test_every_module_outside_a_room_is_on_the_map() -> None:
    blocks = _blocks()
    modules = {package: sorted(path.stem for path in (ROOT / package).glob("*.py")) for package in blocks}
    missing = [
        f"{package}.{name}"
        for package, names in modules.items()
        for name in names
        if name != "__init__" and not re.search(rf"\b{name}\b", blocks[package])
    ]
    assert not missing


def test_every_fact_is_on_the_map() -> None:
    assert not [kind.__name__ for kind in Fact.__args__ if f"`{kind.__name__}`" not in PAGE]


def test_its_parts_are_numbered() -> None:
    numbers = [int(number) for number in re.findall(r"^## (\d+)\. ", PAGE, re.MULTILINE)]
    assert numbers == list(range(1, len(re.findall(r"^## ", PAGE, re.MULTILINE)) + 1))
