"""Words that docstrings, comments and pages do without: a reader has to stop at them (`docs/style.md`)."""

from __future__ import annotations

import re

import pytest
from prose import PRODUCT, ROOT, prose, where

BANNED = re.compile(
    r"\b(whoever|whomever|nobody|somebody|anew|lent|stumbled|hereby|thereof|aboard|(?:is|are|was|were|be|been) told of"
    r"|held for lost|(?:gave|handed) out|look(?:s|ed) after|newest word)\b",
    re.IGNORECASE,
)
QUOTED = re.compile(r"`[^`]*`|\"[^\"]*\"")
"""Names, and what others say in their words."""
EXAMPLES = ("docs/style.md",)
"""Pages that show what not to write."""


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
