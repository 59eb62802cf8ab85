"""What the repository says in prose: docstrings, comments and pages, with where each stands."""

from __future__ import annotations

import ast
import re
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

TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*)
    |(?i:[rbuf]{0,2})(?P<string>
        \"{3}(?:[^\\]|\\.)*?\"{3} | '{3}(?:[^\\]|\\.)*?'{3} | "(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*'
    )
    |(?P<name>[^\W\d]\w*)""",
    re.VERBOSE | re.DOTALL,
)
"""Comments, strings and names of Python. A name is tried last: a string may begin with a letter."""
ESCAPE = re.compile(r"\\.", re.DOTALL)
WORD = re.compile(r"\w+")


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


def _bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements in a module or statement."""
    for name in ("body", "orelse", "finalbody"):
        part = getattr(node, name, None)
        if isinstance(part, list):
            yield part
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield part.body


def _docstrings(tree: ast.Module) -> list[ast.Constant]:
    """Strings that are statements. Only statements are visited: an `ast.walk` over all takes five times as long."""
    found = []
    waiting: list[ast.AST] = [tree]
    for node in waiting:
        for body in _bodies(node):
            for statement in body:
                if not isinstance(statement, ast.Expr):
                    waiting.append(statement)
                elif isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str):
                    found.append(statement.value)
    return found


@cache
def read(path: Path) -> tuple[list[tuple[int, str]], set[str]]:
    """The docstrings, those of constants too, and comments, with the line where each begins; the names in the rest.

    Tokens come from one regular expression: `tokenize` takes ten times as long.
    """
    source = path.read_text()
    prose = []
    lines: set[int] = set()
    for node in _docstrings(ast.parse(source)):
        prose.append((node.lineno, str(node.value)))
        lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    names: set[str] = set()
    line, counted = 1, 0
    for token in TOKEN.finditer(source):
        if token.lastgroup == "name":
            names.add(token[0])
            continue
        line += source.count("\n", counted, token.start())
        counted = token.start()
        if token.lastgroup == "comment":
            prose.append((line, token[0]))
        elif line not in lines:
            names.update(WORD.findall(ESCAPE.sub(" ", token[0])))
    return prose, names


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
