"""What docstrings, comments and pages may not say (`docs/style.md`), and what their references have to lead to.

References are items of the interface, records of decisions, sections, pages, modules and names. One file, because to
read all prose takes seconds, and another file may be run by another process.
"""

from __future__ import annotations

import builtins
import keyword
import re
import sys
from functools import cache
from pathlib import Path

import pytest
from page_commands import files_of
from prose import BUILT, CODE, ITEM, PRODUCT, ROOT, files, items, prose, read, where

NO_ITEM = re.compile(r"gRPC proposals? A\d(?:(?:, | and )A\d)*|Amazon S3")
ELSEWHERE = {
    "_total",  # the suffix that the Prometheus client writes
    "metadata_props",  # a field of an ONNX model
    "shared_memory",  # of multiprocessing
}
"""Names of others' code that docstrings speak of."""
PAGES_ABOUT_CODE = ("architecture.md", "glossary.md", "CONTRIBUTING.md")
NAME = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")

BANNED = re.compile(
    r"\b(whoever|whomever|nobody|somebody|anew|lent|stumbled|hereby|thereof|aboard|(?:is|are|was|were|be|been) told of"
    r"|held for lost|(?:gave|handed) out|look(?:s|ed) after|newest word)\b",
    re.IGNORECASE,
)
QUOTED = re.compile(r"`[^`]*`|\"[^\"]*\"")
"""Names, and what others say in their words."""
EXAMPLES = ("docs/style.md",)
"""Pages that show what not to write."""


@cache
def _items() -> set[str]:
    """The ids in the first columns of the pages that define them."""
    found: set[str] = set()
    for name in ("interface", "compatibility"):
        for line in (ROOT / "docs" / f"{name}.md").read_text().splitlines():
            if line.startswith("| "):
                found |= items(line.split(" | ")[0][2:])
    return found


@cache
def _modules() -> dict[str, Path]:
    """The modules and packages there are, by dotted name."""
    found = {}
    for path in files():
        parts = path.relative_to(ROOT).with_suffix("").parts
        if path.suffix == ".py":
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def _names() -> set[str]:
    """Every name that code has: of anything in Python, of what scripts, messages and texts are made of."""
    found = set(keyword.kwlist) | set(dir(builtins)) | set(sys.stdlib_module_names) | ELSEWHERE
    for name, path in _modules().items():
        found |= set(name.split("."))
        if path.relative_to(ROOT).parts[0] not in CODE:
            continue
        found |= read(path)[1]
    for path in files():
        found |= set(path.name.split("."))
        if path.suffix in (".lua", ".proto", ".toml", ".yml", ".pbtxt") or path.name == "Makefile":
            found |= set(re.findall(r"\w+", path.read_text()))
    return found


@cache
def _is_there(name: str) -> bool:
    """Whether a dotted name that begins with a package is a module, a name in one, or a parameter of models."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = _modules().get(".".join(parts[:length]))
        if path is not None:
            rest = parts[length:]
            if not rest or (path.parent / f"{rest[0]}.lua").exists():
                return True
            return rest[0] in re.findall(r"\w+", path.read_text()) or (length == 1 and _is_text(name))
    return False


def _is_text(name: str) -> bool:
    return any(
        f'"{name}' in path.read_text() for path in _modules().values() if path.relative_to(ROOT).parts[0] in PRODUCT
    )


def test_items_of_the_interface_are_defined() -> None:
    missing = []
    for path, line, text in prose():
        for letter, first, last in ITEM.findall(NO_ITEM.sub("", text)):
            missing += [
                f"{where(path, line)} {letter}{n}" for n in (first, last) if n and f"{letter}{n}" not in _items()
            ]
    assert len(_items()) > 250
    assert not missing, "\n".join(missing)


def test_records_of_decisions_are_there() -> None:
    known = {path.name[:4] for path in (ROOT / "docs" / "adr").glob("*.md")}
    missing = [
        f"{where(path, line)} {number}"
        for path, line, text in prose()
        for number in re.findall(r"(?:\bADRs? |docs/adr/|\((?:see )?(?=00))(\d{4})\b", text)
        if number not in known
    ]
    assert not missing, "\n".join(missing)


def test_sections_are_of_a_page_that_has_them_numbered() -> None:
    """A section stands with what it is of: an RFC, or a page of ours."""
    missing = []
    for path, line, text in prose():
        for found in re.finditer(r"\b[Ss]ections? (\d+)", text):
            before = text[: found.start()]
            pages = re.findall(r"RFC \d{4}|docs/[\w/-]+\.md", before) or re.findall(r"docs/[\w/-]+\.md", text)
            heading = rf"^## {found[1]}\. "
            page = ROOT / pages[-1] if pages else ROOT
            numbered = page.is_file() and re.search(heading, page.read_text(), re.MULTILINE)
            if not numbered and not (pages and pages[-1].startswith("RFC")):
                missing.append(f"{where(path, line)} {found[0]}")
    assert not missing, "\n".join(missing)


def _anchor(heading: str) -> str:
    """The anchor a page's reader gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_links_between_pages_lead_somewhere() -> None:
    missing = []
    for path, line, text in prose():
        if path.suffix != ".md":
            continue
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            name, _, anchor = target.partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            page = (path.parent / name).resolve() if name else path
            headings = (
                re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
                if page.suffix == ".md" and page.is_file()
                else []
            )
            if not page.exists() or (anchor and anchor not in map(_anchor, headings)):
                missing.append(f"{where(path, line)} {target}")
    assert not missing, "\n".join(missing)


def test_files_that_are_named_are_there() -> None:
    """Named by the end of their path, or from the root."""
    known = {str(path.relative_to(ROOT)) for path in files()}
    known |= {name for path in files() if path.suffix == ".md" for name in files_of(path.read_text())}
    known |= {str(parent) for name in known for parent in Path(name).parents}
    known |= {name[:13] for name in known if name.startswith("docs/adr/0")}
    folders = {name.split("/")[0] for name in known if "/" in name}
    missing = []
    for path, line, text in prose():
        named = re.findall(r"`([\w.-]+(?:/[\w.-]+)+/?)`", text) + re.findall(r"(?<![\w/`.])docs/[\w/-]+\.md", text)
        for name in named:
            whole = name.rstrip("/")
            from_root = whole.split("/")[0] in folders and not whole.startswith((BUILT, "examples/.cache"))
            is_file = whole.endswith((".py", ".md", ".lua", ".toml", ".yml"))
            if (from_root or is_file) and not any(one == whole or one.endswith(f"/{whole}") for one in known):
                missing.append(f"{where(path, line)} {name}")
    assert not missing, "\n".join(missing)


def test_modules_that_are_named_are_there() -> None:
    missing = []
    for path, line, text in prose():
        for name in re.findall(r"`((?:charonia|gateway|batcher|executors|loadtest)(?:\.[A-Za-z_]\w*)+)`", text):
            if not _is_there(name):
                missing.append(f"{where(path, line)} {name}")
    assert not missing, "\n".join(missing)


def test_where_a_folder_says_to_begin_reading_is_there() -> None:
    missing = []
    for path, line, text in prose():
        found = re.search(r"Begin reading at `([\w./]+)`", " ".join(text.split()))
        if path.name == "__init__.py" and found:
            place = path.parent / found[1].replace(".", "/")
            is_page = found[1].endswith(".md") and (ROOT / found[1]).exists()
            if not is_page and not place.is_dir() and not place.with_suffix(".py").exists():
                missing.append(f"{where(path, line)} {found[1]}")
    assert not missing, "\n".join(missing)


def test_names_in_docstrings_are_names_of_the_code() -> None:
    missing = []
    for path, line, text in prose():
        if path.suffix == ".md" and path.name not in PAGES_ABOUT_CODE:
            continue
        for name in re.findall(r"`([^`\n]+)`", text):
            if NAME.match(name) and not set(name.split(".")) <= _names():
                missing.append(f"{where(path, line)} {name}")
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("place", [*PRODUCT, "loadtest", "docs", ""])
def test_words_that_are_not_used(place: str) -> None:
    """`place` "" stands for the pages beside the folders."""
    found = []
    for path, line, text in prose():
        relative = path.relative_to(ROOT)
        top = relative.parts[0] if len(relative.parts) > 1 else ""
        if top == place and str(relative) not in EXAMPLES:
            found += [f"{where(path, line)} {word}" for word in BANNED.findall(QUOTED.sub("", text))]
    assert not found, "\n".join(found)
