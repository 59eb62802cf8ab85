"""The short form of `make fuzz`: the whole corpus, findings of earlier campaigns included, and some mutations of it."""

from __future__ import annotations

from itertools import islice

import pytest
from fuzzing import campaign
from fuzzing.__main__ import NAMES
from fuzzing.mutation import mutations
from fuzzing.targets import TARGETS

MUTATIONS = {"http": 250, "http2": 250, "config": 250}
"""Of the slow targets; of others four times as many."""


def test_the_command_knows_all_targets() -> None:
    assert tuple(TARGETS) == NAMES


@pytest.mark.parametrize("target", NAMES)
def test_corpus(target: str) -> None:
    corpus = campaign.corpus_of(target)
    assert corpus
    finding = campaign.replay(target, corpus)
    assert finding is None, finding.report


@pytest.mark.parametrize("target", NAMES)
def test_mutations(target: str) -> None:
    """The same ones in every run; `make fuzz` tries others."""
    made = mutations(campaign.corpus_of(target), campaign.words_of(target), seed=1)
    finding = campaign.replay(target, islice(made, MUTATIONS.get(target, 1000)))
    assert finding is None, (finding.data, finding.report)


def test_a_finding_is_made_small() -> None:
    def check(data: bytes) -> None:
        assert b"ab" not in data
        if b"c" in data:
            raise KeyError("c")

    data = b"0123456789" * 20 + b"ab" + b"c" + b"0123456789" * 20
    finding = campaign.finding_in(check, data)
    assert finding is not None
    assert campaign.minimised(check, finding).data == b"ab"
    assert campaign.finding_in(check, b"a") is None
