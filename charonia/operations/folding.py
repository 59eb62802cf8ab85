"""The control stream's word about the whole, for tools that look once."""

from __future__ import annotations

from charonia import keys
from charonia.catalog.catalog import Catalog
from charonia.eventlog.control import facts_of
from charonia.eventlog.port import START, Streams

_PAGE = 500


async def folded_control(log: Streams) -> Catalog:
    """What all control facts together say."""
    catalog = Catalog()
    after = START
    while entries := await log.range(keys.CONTROL, after, _PAGE):
        after = entries[-1].id
        for entry in entries:
            for fact in facts_of(entry):
                catalog.apply(fact)
    return catalog
