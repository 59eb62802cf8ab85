"""One owner per model: the same choice everywhere, few moves, and no owner pushed out while it lives."""

from __future__ import annotations

from memory_log.log import MemoryLog

from batcher.takeover.ownership import live_batchers, preferred_owner, take
from charonia.catalog.catalog import Catalog
from charonia.facts.events import ProcessJoined, ProcessLeft

MODELS = [f"model-{n}" for n in range(200)]


def test_a_model_has_one_preferred_owner_whoever_asks() -> None:
    assert preferred_owner("m", []) == ""
    assert preferred_owner("m", ["a", "b", "c"]) == preferred_owner("m", {"c", "b", "a"})


def test_models_are_spread_and_stay_when_another_batcher_leaves() -> None:
    before = {model: preferred_owner(model, ["a", "b", "c"]) for model in MODELS}
    after = {model: preferred_owner(model, ["a", "b"]) for model in MODELS}
    assert all(40 < list(before.values()).count(name) < 95 for name in "abc")
    assert all(after[model] == owner for model, owner in before.items() if owner != "c")


async def test_only_a_dead_owner_is_replaced_and_tokens_grow() -> None:
    log, catalog = MemoryLog(), Catalog()
    for name in ("a", "b"):
        catalog.apply(ProcessJoined("batcher", name))
    catalog.apply(ProcessJoined("executor", "e"))
    assert live_batchers(catalog) == {"a", "b"}

    first = await take(log, catalog, "m", "a")
    assert await take(log, catalog, "m", "b") == 0
    again = await take(log, catalog, "m", "a")
    catalog.apply(ProcessLeft("batcher", "a", "lost"))
    second = await take(log, catalog, "m", "b")

    assert 0 < first < again < second
    assert await log.owner("m") == ("b", second)


async def test_one_that_was_faster_and_is_gone_is_replaced() -> None:
    log, catalog = MemoryLog(), Catalog()
    catalog.apply(ProcessJoined("batcher", "a"))
    asked = log.owner

    async def overtaken(model: str) -> tuple[str, int]:
        log.owner = asked  # type: ignore[method-assign]
        found = await asked(model)
        await log.take_ownership(model, "gone", found[0])
        return found

    log.owner = overtaken  # type: ignore[method-assign]
    token = await take(log, catalog, "m", "a")
    assert token > 0
    assert await log.owner("m") == ("a", token)
