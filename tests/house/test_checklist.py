"""The checklist of the interface: every item has a row, every test that a row names is there, nothing else is open."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from prose import ROOT
from prose import items as spread

ITEMS = (
    "T1-T8 E1-E10 H1-H7 H10-H26 H30-H57 G1-G37 I1-I13 C1-C26 C30-C32 C40-C45 C50-C53 C60-C63 C70-C73 S1-S8 S20-S25 "
    "S30-S43 S50-S56 R1-R11 R20-R30 R40-R43 P1-P22 X1-X8 M1-M11 N1-N7 L1-L3 K1-K5 Q1-Q4 V1-V7 W1-W7 U1-U7"
)
OPEN: set[str] = set()
"""Items that are not built or not tried. There may be none."""
PAGES = ("interface.md", "compatibility.md")
CITED = re.compile(r"`((?:e2e|fuzz|house|integration|property|unit)/[\w/]+\.py)`((?:(?:: |, )`test_\w+`)*)")


@cache
def _rows() -> list[tuple[set[str], str, str, str]]:
    """(items, tests, what differs, the line) of each row of the tables of items."""
    found = []
    for name in PAGES:
        for line in (ROOT / "docs" / name).read_text().splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if line.startswith("| ") and len(cells) == 4 and spread(cells[0]):
                found.append((spread(cells[0]), cells[2], cells[3], line))
    return found


@cache
def _tests_of(path: Path) -> set[str]:
    return set(re.findall(r"^ *(?:async )?def (test_\w+)\(", path.read_text(), re.MULTILINE))


def test_every_item_has_a_row() -> None:
    missing = spread(ITEMS) - set().union(*(items for items, *_ in _rows()))
    assert not missing, sorted(missing)


def test_every_item_has_a_test_or_is_open() -> None:
    """An open item says so; one that is built has a test or a verb of `make` in one of its rows."""
    held, unbuilt = set(), set()
    for items, tests, differs, _ in _rows():
        if differs.startswith(("not built", "not tried")):
            unbuilt |= items
        elif CITED.search(tests) or re.search(r"`make [\w-]+`", tests):
            held |= items
    assert spread(ITEMS) - held - unbuilt == set()
    assert unbuilt == OPEN


def test_every_test_that_a_row_names_is_in_that_file() -> None:
    missing, count = [], 0
    for _, tests, _, line in _rows():
        for file, names in CITED.findall(tests):
            path = ROOT / "tests" / file
            known = _tests_of(path) if path.is_file() else set()
            cited = set(re.findall(r"test_\w+", names))
            count += len(cited) or 1
            missing += [f"{file}: {name}" for name in sorted(cited - known)] if known else [f"{file} ({line[:40]})"]
        # nothing may stand in the cell that the pattern passes over
        rest = CITED.sub("", re.sub(r"`make [\w-]+`", "", tests)).replace("<br>", "").strip()
        assert not rest, line
    assert count > 400
    assert not missing, "\n".join(missing)


def test_verbs_of_make_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    verbs = {verb for _, tests, *_ in _rows() for verb in re.findall(r"`make ([\w-]+)`", tests)}
    assert verbs
    assert not {verb for verb in verbs if not re.search(rf"^{verb}:", makefile, re.MULTILINE)}
