"""Checks a built site: every link and anchor leads somewhere, and nothing is loaded from another place.

Sphinx checks what it knows of; this reads the HTML that readers get, whoever wrote it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}
_NOT_LOADED = {"canonical", "next", "prev", "search", "index", "genindex", "author"}
"""Relations of `link` that a browser does not follow by itself."""


@dataclass
class _Page(HTMLParser):
    """The anchors and references of one page."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        elif tag in _LOADED and values.get(_LOADED[tag]) and values.get("rel") not in _NOT_LOADED:
            self.loaded.append(values[_LOADED[tag]])


def faults(site: Path) -> list[str]:
    """What is wrong with the pages below `site`, one line each; empty when all is well."""
    pages: dict[Path, _Page] = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = _Page()
        pages[path].feed(path.read_text())
    found = []
    for path, page in pages.items():
        name = path.relative_to(site)
        for target in page.loaded:
            if urlsplit(target).netloc:
                found.append(f"{name}: loads {target} from elsewhere")
        for target in (*page.links, *page.loaded):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            place = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
            place = place / "index.html" if place.is_dir() else place
            if not place.is_file():
                found.append(f"{name}: {target} is not there")
            elif parts.fragment and place in pages and unquote(parts.fragment) not in pages[place].anchors:
                found.append(f"{name}: {target} has no such anchor")
    return sorted(set(found))
