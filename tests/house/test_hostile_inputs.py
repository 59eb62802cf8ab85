"""The table of hostile inputs: it has every number, and each test that it names is there."""

from __future__ import annotations

import re

from prose import ROOT

COUNT = 30
CITED = re.compile(r"`((?:backends|e2e|fuzz|house|integration|property|unit)/[\w/]+\.py)`((?:(?:, | )`test_\w+`)+)")


def _rows() -> dict[int, str]:
    """The tests of each row."""
    rows = {}
    for line in (ROOT / "docs" / "hostile-inputs.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[0].isdigit():
            assert len(cells) == 4, line
            rows[int(cells[0])] = cells[3]
    return rows


def test_every_input_has_tests_that_are_there() -> None:
    rows = _rows()
    assert sorted(rows) == list(range(1, COUNT + 1))
    missing = []
    for number, tests in rows.items():
        cited = CITED.findall(tests)
        assert cited, number
        assert not CITED.sub("", tests).replace("<br>", "").strip(), f"row {number} names something else"
        for file, names in cited:
            path = ROOT / "tests" / file
            text = path.read_text() if path.is_file() else ""
            for name in re.findall(r"test_\w+", names):
                if not re.search(rf"^ *(?:async )?def {name}\(", text, re.MULTILINE):
                    missing.append(f"{number}: {file} {name}")
    assert not missing, "\n".join(missing)
