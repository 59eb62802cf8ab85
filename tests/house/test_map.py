"""`docs/architecture.md` is the map: every room and every fact is on it, and a room stands above what it imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
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


def _places(package: str) -> dict[str, tuple[int, int]]:
    """The line of the map where each room or module stands, and its place in an order of arrows, 0 without one."""
    names = {path.stem for path in (ROOT / package).iterdir() if path.suffix in ("", ".py") and path.name[0] != "_"}
    places: dict[str, tuple[int, int]] = {}
    for number, line in enumerate(_blocks()[package].splitlines()):
        if re.match(r"  \S", line):
            for column in re.split(r"  +", line.strip()):
                words = [word.strip().removesuffix("/") for word in column.split("→" if "→" in column else " ")]
                if names.issuperset(words):
                    arrows = "→" in column
                    places.update({word: (number, at if arrows else 0) for at, word in enumerate(words)})
    assert places.keys() == names
    return places


def _imports(package: str) -> Iterator[tuple[str, str]]:
    """What of a package imports what else of it."""
    for path in (ROOT / package).rglob("*.py"):
        inside = path.relative_to(ROOT).with_suffix("").parts
        for node in ast.walk(ast.parse(path.read_text())):
            found: list[str] = []
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = ".".join((*inside[: -node.level], node.module or "") if node.level else (node.module or "",))
                found = [f"{base.rstrip('.')}.{alias.name}" for alias in node.names]
            for parts in (name.split(".") for name in found):
                if parts[0] == package and len(parts) > 1 and len(inside) > 1 and parts[1] != inside[1]:
                    yield inside[1], parts[1]


@pytest.mark.parametrize("package", ["charonia", "gateway", "batcher", "executors"])
def test_rooms_import_what_stands_below_them(package: str) -> None:
    places = _places(package)
    edges = {(a, b) for a, b in _imports(package) if a in places and b in places}
    assert len(edges) > 10
    assert not [(a, b) for a, b in sorted(edges) if not places[a] < places[b]]


def test_every_fact_is_on_the_map() -> None:
    assert not [kind.__name__ for kind in Fact.__args__ if f"`{kind.__name__}`" not in PAGE]


def test_its_parts_are_numbered() -> None:
    numbers = [int(number) for number in re.findall(r"^## (\d+)\. ", PAGE, re.MULTILINE)]
    assert numbers == list(range(1, len(re.findall(r"^## ", PAGE, re.MULTILINE)) + 1))
