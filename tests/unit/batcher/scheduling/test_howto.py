"""The example of `docs/howto/scheduler.md` runs and prints what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[4] / "docs" / "howto" / "scheduler.md"


def test_the_example_prints_what_the_page_says() -> None:
    found = re.search(r"```python\n(.*?)```.*?```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    code, printed = found.groups()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, str(PAGE), "exec"), {})
    assert output.getvalue() == printed
