"""From what executors said of their processors to what is left for instances, by hand."""

from __future__ import annotations

import pytest

from charonia.facts.processor_use import BATCHER_APART, BATCHER_HERE, ProcessorUse
from charonia.simulation.processor_shares import ProcessorShares, Said, are_started_apart, is_batcher_apart, shares_of

S = 1_000_000_000
MS = 1_000_000


def said(
    executor: str = "e-1", host: str = "a", processors: float = 4.0, tree: int = 1, seconds: float = 10.0,
    busy: float = 0.0, server: float = 0.0, instances: float = 0.0, ran: float = 0.0, batches: int = 100,
    shared: int = 0, at: float = 7.0,
) -> list[Said]:  # fmt: skip
    """What an executor said twice, so many seconds apart; all amounts are seconds, those before the first are left."""
    first = ProcessorUse(host, processors, tree, round(at * S), 3 * S, 2 * S, 1 * S, 5 * S, 1000, shared)
    last = ProcessorUse(
        host, processors, tree, round((at + seconds) * S), round((3 + busy) * S), round((2 + server) * S),
        round((1 + instances) * S), round((5 + ran) * S), 1000 + batches, shared,
    )  # fmt: skip
    return [(executor, first), (executor, last)]


ALONE = said(busy=6.0, server=5.0, instances=4.0, ran=5.0)
TWO = [
    *said("e-1", busy=6.0, server=5.0, instances=2.0, ran=2.0),
    *said("e-2", busy=6.0, server=5.0, instances=1.0, ran=2.0, batches=50),
]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # 0.1 of 4 cores are others'; 4 s of the 5 that it ran; 1 s for 100 batches
        (ALONE, [ProcessorShares("a", 4.0, 0.1, 0.8, 10 * MS)]),
        # in any order, and what lies between does not count
        ([ALONE[1], ("e-1", ProcessorUse("a", 4.0, 1, 9 * S, 3 * S, 2 * S, 1 * S, 5 * S, 1001)), ALONE[0]],
         [ProcessorShares("a", 4.0, 0.1, 0.8, 10 * MS)]),
        # both say what the one server used: 3 s of 5 are instances', 2 s for 150 batches
        (TWO, [ProcessorShares("a", 4.0, 0.1, 0.75, 2 / 150 * S)]),
        # executors that were started apart are a server each
        ([*said("e-1", busy=6.0, server=2.5, instances=2.0, ran=2.0),
          *said("e-2", tree=2, busy=6.0, server=2.5, instances=1.0, ran=2.0, batches=50)],
         [ProcessorShares("a", 4.0, 0.1, 0.75, 2 / 150 * S)]),
        # by the second, whoever spoke for how long
        ([*said("e-1", busy=6.0, server=5.0, instances=2.0, ran=2.0),
          *said("e-2", seconds=5.0, busy=3.0, server=2.5, instances=0.5, ran=1.0, batches=25)],
         [ProcessorShares("a", 4.0, 0.1, 0.75, 2 / 150 * S)]),
        # two machines
        ([*said("e-2", "b", 2.0, server=1.0, instances=1.0, ran=0.5), *ALONE],
         [ProcessorShares("a", 4.0, 0.1, 0.8, 10 * MS), ProcessorShares("b", 2.0, 0.0, 2.0, 0.0)]),
        # two containers of one machine; in each the server's first process has the same number
        ([*said("e-1", "c-2", busy=6.0, server=2.5, instances=2.0, ran=2.0, shared=9),
          *said("e-2", "c-1", busy=6.0, server=2.5, instances=1.0, ran=2.0, batches=50, shared=9)],
         [ProcessorShares("c-1, c-2", 4.0, 0.1, 0.75, 2 / 150 * S)]),
        # two machines whose hosts have one name
        ([*said("e-1", server=1.0, instances=0.5, ran=1.0, shared=8),
          *said("e-2", server=2.0, instances=2.0, ran=1.0, shared=9)],
         [ProcessorShares("a", 4.0, 0.0, 0.5, 5 * MS), ProcessorShares("a", 4.0, 0.0, 2.0, 0.0)]),
        # one machine that was started again, which changed its number
        ([*said("e-1", busy=6.0, server=5.0, instances=4.0, ran=5.0, shared=8),
          *said("e-2", busy=6.0, server=5.0, instances=4.0, ran=5.0, shared=9, at=80.0)],
         [ProcessorShares("a", 4.0, 0.1, 0.8, 10 * MS)]),
        # twice, beside another one whose host has the same name all the time
        ([*said("e-1", busy=6.0, server=5.0, instances=4.0, ran=5.0, shared=8),
          *said("e-2", busy=6.0, server=5.0, instances=4.0, ran=5.0, shared=9, at=80.0),
          *said("e-3", busy=6.0, server=5.0, instances=4.0, ran=5.0, shared=6, at=180.0),
          *said("e-4", seconds=190.0, server=20.0, instances=19.0, ran=38.0, shared=7)],
         [ProcessorShares("a", 4.0, 0.1, 0.8, 10 * MS), ProcessorShares("a", 4.0, 0.0, 0.5, 10 * MS)]),
        # an executor of an earlier release beside one of this
        ([*said("e-1", busy=6.0, server=2.5, instances=2.0, ran=2.0, shared=9),
          *said("e-2", tree=2, busy=6.0, server=2.5, instances=1.0, ran=2.0, batches=50)],
         [ProcessorShares("a", 4.0, 0.1, 0.75, 2 / 150 * S)]),
        # of two machines of its name it may be either
        ([*said("e-1", server=1.0, instances=0.5, ran=1.0, shared=8), *said("e-2", server=1.0, instances=0.5, ran=1.0),
          *said("e-3", server=1.0, instances=0.5, ran=1.0, shared=9)],
         [ProcessorShares("a", 4.0, 0.0, 0.5, 5 * MS)] * 3),
        # an executor that was started again did not use the processors twice
        ([*ALONE, *said("e-2", tree=2, busy=6.0, server=5.0, instances=4.0, ran=5.0, at=20.0)],
         [ProcessorShares("a", 4.0, 0.1, 0.8, 10 * MS)]),
        # a device computes, the processors wait
        (said(busy=1.0, server=1.0), [ProcessorShares("a", 4.0, 0.0, 0.0, 10 * MS)]),
        # too short, too few batches, once, never
        (said(seconds=0.9), []), (said(batches=7), []), (ALONE[:1], []), ([], []),
    ],
)  # fmt: skip
def test_what_was_said_of_the_processors(given: list[Said], expected: list[ProcessorShares]) -> None:
    found = shares_of(given)
    assert [(one.host, one.processors) for one in found] == [(one.host, one.processors) for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert (one.others, one.share) == pytest.approx((other.others, other.share), abs=1e-6)
        assert one.batch_ns == pytest.approx(other.batch_ns, abs=1e-2)


@pytest.mark.parametrize(("others", "left"), [(0.0, 4.0), (1.5, 2.5), (3.5, 1.0), (40.0, 1.0)])
def test_however_busy_others_are_something_is_left(others: float, left: float) -> None:
    assert ProcessorShares("a", 4.0, others).left == left


@pytest.mark.parametrize(
    ("batchers", "expected"),
    [
        ((), None), ((0, 0), None), ((BATCHER_HERE,), False), ((BATCHER_APART,), True),
        ((BATCHER_HERE, BATCHER_APART), True), ((BATCHER_APART, BATCHER_HERE, 0), False),
    ],
)  # fmt: skip
def test_the_latest_that_is_known_says_where_the_batcher_is(batchers: tuple[int, ...], expected: bool | None) -> None:
    said = [("e", ProcessorUse("a", 1.0, 1, at, 0, 0, 0, 0, 0, 0, batcher)) for at, batcher in enumerate(batchers)]
    assert is_batcher_apart(said) is is_batcher_apart(said[::-1]) is expected


@pytest.mark.parametrize(
    ("servers", "batcher", "expected"),
    [
        ([("a", 7), ("a", 9)], BATCHER_APART, True), ([("a", 1), ("b", 1)], BATCHER_APART, True),
        ([("a", 7), ("a", 7)], BATCHER_APART, False), ([("a", 7)], BATCHER_APART, False),
        ([("a", 7), ("a", 9)], BATCHER_HERE, False), ([("a", 7), ("a", 9)], 0, False),
    ],
)  # fmt: skip
def test_executors_of_one_server_were_started_together(
    servers: list[tuple[str, int]], batcher: int, expected: bool
) -> None:
    said = [
        (f"e-{number}", ProcessorUse(host, 1.0, tree, at, 0, 0, 0, 0, 0, 0, batcher))
        for number, (host, tree) in enumerate(servers)
        for at in (1, 2)
    ]
    assert are_started_apart(said) is expected
