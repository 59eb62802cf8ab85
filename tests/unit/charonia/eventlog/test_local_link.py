"""A batcher and an executor of one process receive what the other hands over, whichever starts first."""

from __future__ import annotations

import asyncio

from charonia.eventlog.local_link import LocalLink
from charonia.facts.events import VersionWanted
from charonia.wire import BatchHeader

HEADER = BatchHeader("b-1", "m", 1, "", 1, (), b"")


async def test_a_taker_has_what_is_handed_over_at_once_and_as_it_is() -> None:
    link = LocalLink("executor-1")
    taken: list[object] = []
    link.batches.follow(lambda *batch: taken.append(batch))
    link.batches.hand(HEADER, [])
    assert taken == [(HEADER, [])]


async def test_what_nobody_takes_yet_is_kept_in_order() -> None:
    link = LocalLink("executor-1")
    wanted = [VersionWanted("m", version) for version in range(3)]
    for fact in wanted:
        link.facts.hand(fact)
    taken: list[object] = []
    link.facts.follow(taken.append)
    assert taken == []  # a taker may still be about to start
    await asyncio.sleep(0)
    assert taken == wanted


async def test_after_one_owner_the_next_takes_the_reports_of_its_model() -> None:
    link = LocalLink("executor-1")
    former: list[object] = []
    link.reports["m"].follow(former.append)
    link.reports["m"].follow(None)
    link.reports["m"].hand([b"e", b"late"])
    link.reports["other"].hand([b"e", b"of another model"])
    taken: list[object] = []
    link.reports["m"].follow(taken.append)
    await asyncio.sleep(0)
    assert (former, taken) == ([], [[b"e", b"late"]])
