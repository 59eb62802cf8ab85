"""The pages of the site: each is in the navigation, and their links lead somewhere. `make docs` builds it."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

import pytest
from docs_site import client_page, http_pages, navigation
from docs_site.built_links import faults
from docs_site.pages import Pages

ROOT = Path(__file__).resolve().parents[2]


def test_every_page_is_in_the_navigation_once() -> None:
    named = navigation.pages()
    assert len(named) == len(set(named))
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if not page.startswith(navigation.RECORDS)} == {
        name for name in named if name.startswith("docs/")
    }


def test_links_of_the_site_lead_to_pages(tmp_path: Path) -> None:
    """Those that are made, too."""
    pages = Pages(ROOT)
    pages.write(tmp_path)
    missing = []
    for path in tmp_path.rglob("*.md"):
        text = re.sub(r"^( *```).*?^\1$|`[^`\n]*`", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)\s#:]+)(?:#[^)\s]*)?\)", text):
            place = path.parent / target
            if not place.is_file() and "reference/" not in target:
                missing.append(f"{path.relative_to(tmp_path)}: {target}")
    assert not missing, "\n".join(missing)


def test_the_front_page_leads_to_the_pages_that_it_names() -> None:
    pages = Pages(ROOT)
    front = pages.linked(navigation.FRONT, pages.texts[navigation.FRONT])
    assert "[Jobs](docs/jobs.md)" in front
    prose = re.sub(r"^```.*?^```$", "", front, flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"`docs/[\w/-]+\.md`", prose)


def test_code_of_a_page_stays_as_it_is() -> None:
    pages = Pages(ROOT)
    text = "See `docs/jobs.md` (ADR 0048).\n\n```\ncat `docs/jobs.md`\n```\n\n    cat `docs/jobs.md`\n"
    linked = pages.linked("docs/tenants.md", text)
    record = next(name for name in pages.records if PurePosixPath(name).name.startswith("0048"))
    assert linked.startswith(f"See [Jobs](jobs.md) ([ADR 0048]({record.removeprefix('docs/')})).\n")
    assert linked.endswith("\n\n```\ncat `docs/jobs.md`\n```\n\n    cat `docs/jobs.md`\n")


def test_the_reference_has_every_operation_and_schema() -> None:
    document = http_pages.whole_document()
    pages = http_pages.http_pages(document)
    whole = "\n".join(pages.values())
    for path, methods in document["paths"].items():
        for method in methods:
            assert f"**{method.upper()}** `{path}`" in whole
    for name in document["components"]["schemas"]:
        assert f"\n## {name}\n" in pages["schemas.md"]
    anchors = set(re.findall(r"^\((\S+)\)=$", whole, re.MULTILINE))
    assert set(re.findall(r"\]\((?:[\w-]+\.md)?#([\w-]+)\)", whole)) <= anchors


def test_the_page_of_the_client_names_all_that_is_public(tmp_path: Path) -> None:
    client_page.write(tmp_path)
    assert "autoclass:: charonia.client.Client" in (tmp_path / client_page.PAGE).read_text()


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ('<a href="b.html#there">b</a>', ""),
        ('<a href="b.html#gone">b</a>', "a.html: b.html#gone has no such anchor"),
        ('<a href="c.html">c</a>', "a.html: c.html is not there"),
        ('<script src="https://cdn.example/x.js"></script>', "a.html: loads https://cdn.example/x.js from elsewhere"),
        ('<a href="https://example.org/">elsewhere</a>', ""),
    ],
)
def test_a_broken_link_of_a_built_site_is_found(body: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(body)
    (tmp_path / "b.html").write_text('<h1 id="there">b</h1>')
    assert faults(tmp_path) == ([fault] if fault else [])
