"""Copies the pages into the source folder of a build, and makes links of the names of pages in them.

In the repository a page is often named by its path in backticks, which no reader of a site can follow. References
that are made from code are written by `http_pages`, `option_pages` and `client_page`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from docs_site import navigation

_FENCE = re.compile(r"^ *(```|~~~)")
_INDENTED = re.compile(r"^(?: {4}|\t)")
_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
_NAMED = re.compile(r"(?<![\[`\w])`([\w.-]+(?:/[\w.-]+)*\.md)`(?!`)")
_RECORD = re.compile(r"(?<![\w/`\[])(?:docs/adr/|ADR )(\d{4})\b(?![\w.-])")
_LINK = re.compile(r"\]\(([^)\s:#]+)(#[^)\s]*)?\)")


def title_of(text: str) -> str:
    """The first heading of a page, without marks of code. Raises ValueError for a page that has none."""
    found = _TITLE.search(text)
    if found is None:
        raise ValueError("the page has no title")
    return found[1].replace("`", "").strip()


def staged_name(page: str) -> str:
    """Where a page of the repository lies in the build: as in the repository, the front page as `index.md`."""
    return "index.md" if page == navigation.FRONT else page


class Pages:
    """The pages of one build, by their path in the repository."""

    def __init__(self, root: Path) -> None:
        """Reads the front page, all pages of the navigation and the records of decisions below `root`."""
        records = sorted(path.relative_to(root).as_posix() for path in (root / navigation.RECORDS).glob("*.md"))
        self.root = root
        self.records = records
        self.texts = {name: (root / name).read_text() for name in (navigation.FRONT, *navigation.pages(), *records)}
        self.titles = {name: title_of(text) for name, text in self.texts.items()}
        self._by_basename: dict[str, list[str]] = {}
        for name in self.texts:
            self._by_basename.setdefault(PurePosixPath(name).name, []).append(name)

    def write(self, target: Path) -> None:
        """Writes every page, with links, and the files of the repository that pages link to, below `target`."""
        for name, text in self.texts.items():
            path = target / staged_name(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.linked(name, text))
        for name, text in self.texts.items():
            for linked in _LINK.findall(text):
                self._copy_linked(target, (self.root / name).parent / linked[0])

    def _copy_linked(self, target: Path, file: Path) -> None:
        """A file that is no page can be downloaded from the site."""
        place = Path(os.path.normpath(file))
        if place.is_file() and place.suffix != ".md":
            copy = target / place.relative_to(self.root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(place, copy)

    def linked(self, page: str, text: str) -> str:
        """The text of `page` with links for the names of pages and of records; code is left as it is."""
        made = [line if is_code else self._linked_line(page, line) for line, is_code in _with_code(text.splitlines())]
        return "\n".join(made) + "\n"

    def _linked_line(self, page: str, line: str) -> str:
        line = _LINK.sub(lambda found: self._front_renamed(page, found), line)
        line = _NAMED.sub(lambda found: self._link(page, found[1]) or found[0], line)
        return _RECORD.sub(lambda found: self._record_link(page, found[1], found[0]), line)

    def _front_renamed(self, page: str, found: re.Match[str]) -> str:
        target = self._resolved(page, found[1])
        if target == navigation.FRONT:
            return f"]({_relative(page, 'index.md')}{found[2] or ''})"
        if target == navigation.RECORDS:
            return f"]({_relative(page, 'reference/decisions.md')})"
        return found[0]

    def _resolved(self, page: str, name: str) -> str:
        return os.path.normpath(PurePosixPath(page).parent / name)

    def _link(self, page: str, name: str) -> str:
        """A link with the title of the page that `name` means there, or nothing."""
        found = [one for one in (name, self._resolved(page, name)) if one in self.texts]
        found = found or (self._by_basename.get(name, []) if "/" not in name else [])
        if len(set(found)) != 1 or found[0] == page:
            return ""
        return f"[{self.titles[found[0]]}]({_relative(page, staged_name(found[0]))})"

    def _record_link(self, page: str, number: str, written: str) -> str:
        found = [name for name in self.records if PurePosixPath(name).name.startswith(number)]
        if not found or found[0] == page:
            return written
        return f"[ADR {number}]({_relative(page, found[0])})"

    def record_list(self) -> str:
        """The page that lists the records of decisions."""
        lines = ["# Decisions", "", "Records of decisions, each with what was measured.", ""]
        lines += [f"- [{self.titles[name]}]({_relative('reference/decisions.md', name)})" for name in self.records]
        return "\n".join([*lines, "", tree("", self.records, "reference/decisions.md", hidden=True)])


def _relative(page: str, target: str) -> str:
    return os.path.relpath(target, PurePosixPath(staged_name(page)).parent)


def _with_code(lines: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Each line, and whether it is part of a block of code."""
    fence = ""
    after_text = False
    for line in lines:
        found = _FENCE.match(line)
        if fence:
            yield line, True
            fence = "" if found and found[1] == fence else fence
        elif found:
            fence = found[1]
            yield line, True
        else:
            yield line, bool(_INDENTED.match(line)) and not after_text
            # an indented line goes on a paragraph or a list entry unless an empty line, outside a list, came before it
            after_text = bool(line.strip()) and (after_text or not _INDENTED.match(line))


def tree(caption: str, pages: Iterable[str], of: str, *, hidden: bool = True) -> str:
    """A part of the navigation, as the directive that Sphinx reads, to stand on page `of`."""
    lines = ["```{toctree}", *([":hidden:"] if hidden else []), *([f":caption: {caption}"] if caption else []), ""]
    return "\n".join([*lines, *(_relative(of, staged_name(page)) for page in pages), "```", ""])
