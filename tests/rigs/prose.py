"""What the repository says in prose: docstrings, comments and pages, with where each stands."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("charonia", "gateway", "batcher", "executors", "protos")
CODE = (*PRODUCT, "loadtest", "tests", "tools", "examples", "infra")
BUILT = "examples/models"
"""Made by `make models`."""
ITEM = re.compile(r"(?<![\w`/.%#:\\-])([A-Z])(\d{1,2})(?:(?:-|–)\1?(\d{1,2}))?(?![\w%]|\.\d)")
"""An id of the interface, or several in a row: H4, S20-S22."""


def items(text: str) -> set[str]:
    """Every id of the interface in a text, ranges spread out."""
    return {
        f"{letter}{number}"
        for letter, first, last in ITEM.findall(text)
        for number in range(int(first), int(last or first) + 1)
    }


@cache
def files() -> list[Path]:
    """The repository's files, without what is built or downloaded."""
    found = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in (*CODE, "docs", ".ci", ".github"):
        found += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    built = {"__pycache__", ".cache", ".mypy_cache", ".pytest_cache"}
    return [path for path in found if not built & set(path.parts) and (ROOT / BUILT) not in path.parents]


def _is_generated(path: Path) -> bool:
    return path.name.endswith(("_pb2.py", "_pb2_grpc.py"))


@cache
def read(path: Path) -> tuple[list[tuple[int, str]], set[str]]:
    """The docstrings, those of constants too, and comments, with the line where each begins; the names in the rest."""
    source = path.read_text()
    prose: dict[int, tuple[int, str]] = {}
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):  # a docstring comes before the constant in it
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose[id(node.value)] = node.lineno, node.value.value
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            names |= set(re.findall(r"\w+", node.value))
    comments = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.append((token.start[0], token.string))
        elif token.type == tokenize.NAME:
            names.add(token.string)
    return [*prose.values(), *comments], names


def _prose_of_lua(path: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if "--" in line:
            yield number, line.split("--", 1)[1]


def _prose_of_page(path: Path) -> Iterator[tuple[int, str]]:
    """Its paragraphs without fenced blocks, line by line."""
    fenced = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, line


@cache
def prose() -> list[tuple[Path, int, str]]:
    found: list[tuple[Path, int, str]] = []
    for path in files():
        top = path.relative_to(ROOT).parts[0]
        if path.suffix == ".py" and top in CODE and not _is_generated(path):
            found += [(path, line, text) for line, text in read(path)[0]]
        elif path.suffix == ".lua":
            found += [(path, line, text) for line, text in _prose_of_lua(path)]
        elif path.suffix == ".md":
            found += [(path, line, text) for line, text in _prose_of_page(path)]
    return found


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"
