"""Builds the site: `python -m docs_site [--out FOLDER] [--keep-going]`, from `tools`.

The pages are copied and the references written into `FOLDER/source`, Sphinx makes `FOLDER/html` of them, and the
links of what came out are checked. Any warning is an error. Exit code 0 when the site is complete, 1 otherwise.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from sphinx.cmd.build import build_main

from docs_site import built_links, client_page, http_pages, navigation, option_pages
from docs_site.pages import Pages, tree

ROOT = Path(__file__).resolve().parents[2]


def stage(target: Path) -> None:
    """Writes the whole source of the site into the empty folder `target`."""
    pages = Pages(ROOT)
    pages.write(target)
    for writer in (http_pages, option_pages, client_page):
        writer.write(target)
    (target / "reference" / "decisions.md").write_text(pages.record_list())
    trees = []
    for section, names in navigation.SECTIONS.items():
        more = navigation.GENERATED if section == "Reference" else ()
        records = ("reference/decisions.md",) if section == "Understand and change" else ()
        trees.append(tree(section, [*more, *names, *records], "index.md"))
    with (target / "index.md").open("a") as front:
        front.write("\n" + "\n".join(trees))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="docs_site", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "docs", help="where to build (%(default)s)")
    options = parser.parse_args(arguments)
    source, html = options.out / "source", options.out / "html"
    shutil.rmtree(options.out, ignore_errors=True)
    source.mkdir(parents=True)
    stage(source)
    code = build_main(
        [
            "-q",
            "-W",
            "--keep-going",
            "-j",
            "auto",
            "-b",
            "html",
            "-c",
            str(Path(__file__).parent),
            str(source),
            str(html),
        ]
    )
    found = built_links.faults(html)
    for fault in found:
        print(fault, file=sys.stderr)
    if code or found:
        return 1
    print(f"{len(list(html.rglob('*.html')))} pages: {html / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
