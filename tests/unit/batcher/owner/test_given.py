"""The book of batches given out."""

from __future__ import annotations

from batcher.owner.given import GivenBatches
from batcher.scheduling.observations import RequestQueued

REQUEST = RequestQueued(b"1" * 16, 1, 0, 1, 7, 0, 0, 0)


def test_a_batch_is_unsent_then_given_then_over_once() -> None:
    over: list[str] = []
    given = GivenBatches(over.append)
    given.add("1", "a", [REQUEST])
    given.add("2", "b", [])
    assert given.unsent("a") == ["1"]
    given.sent("1", elsewhere=True)
    given.sent("2", elsewhere=False)
    assert given.unsent("a") == given.unsent("b") == []
    assert given.older_than(0) == {"a": ["1"]}
    assert given.older_than(10**18) == {}
    given.verified("1")
    assert given.older_than(0) == {"a": ["1"]}
    assert given.end("1") == [REQUEST]
    assert given.end("1") == []
    given.sent("1", elsewhere=True)
    assert given.older_than(0) == {}
    given.lose("b")
    assert over == ["1", "2"]
    assert len(given) == 0


def test_members_that_left_are_not_asked_for() -> None:
    given = GivenBatches(lambda _: None)
    given.replace("1", [REQUEST])
    assert given.requests("1") == []
    given.add("1", "a", [REQUEST, REQUEST])
    given.replace("1", [REQUEST])
    assert given.requests("1") == [REQUEST]
