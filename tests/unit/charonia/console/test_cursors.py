"""Words in the place of ids that a viewer may not know."""

from __future__ import annotations

import pytest

from charonia.console.cursors import Cursors
from charonia.errors import NotFound


def test_a_word_leads_its_tenant_to_its_place_alone() -> None:
    cursors = Cursors[tuple[str, int]]()
    word = cursors.word("acme", ("m", 1))
    assert cursors.word("acme", ("m", 1)) == word != cursors.word("other", ("m", 1))
    assert cursors.place("acme", word) == ("m", 1)
    for tenant, text in (("other", word), ("acme", "nonsense"), ("acme", "")):
        with pytest.raises(NotFound, match="begin again"):
            cursors.place(tenant, text)
    assert Cursors[tuple[str, int]]().word("acme", ("m", 1)) != word  # nobody can make one


def test_the_words_that_were_used_last_are_kept() -> None:
    cursors = Cursors[tuple[int]](2)
    words = [cursors.word("", (number,)) for number in (1, 2)]
    assert cursors.place("", words[0]) == (1,)
    cursors.word("", (3,))
    assert cursors.place("", words[0]) == (1,)
    with pytest.raises(NotFound):
        cursors.place("", words[1])
