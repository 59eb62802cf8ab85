"""`charonia route` against a log in memory."""

from __future__ import annotations

from typing import Any

import catalog_facts as facts
import pytest
from memory_log.log import MemoryLog

from charonia import keys
from charonia.errors import CharoniaError, NotFound
from charonia.facts.events import FIELD_FACT, pack_fact
from charonia.operations import arguments
from charonia.operations.command_line import perform
from charonia.operations.text.command_reports import text


async def told(log: MemoryLog, *words: str) -> tuple[Any, str]:
    options = arguments.parser().parse_args(["route", *words])
    document, _ = await perform(log, options)
    return document["routes"], text(options, document)


async def served() -> MemoryLog:
    log = MemoryLog()
    for fact in (facts.joined(), facts.loaded(version=1), facts.loaded(version=2), facts.scanned()):
        await log.append(keys.CONTROL, [FIELD_FACT, pack_fact(fact)])
    return log


async def test_a_rule_is_set_shown_and_taken_away() -> None:
    log = await served()
    assert (await told(log))[1] == "no model has a routing rule\n"
    assert (await told(log, "m", "show"))[1] == "m: no rule, the highest version gets the requests (served: 1, 2)\n"
    words = ["--canary=2:10%", "--match=X-New=yes", "--advance=50%,100%", "--window=5s", "--tolerance=y=0.5"]
    ((route,), said) = await told(log, "m", *words)
    rule = route["rule"]
    assert (rule["present"], rule["candidate"], rule["share"], rule["headers"]) == (1, 2, 10, {"x-new": "yes"})
    assert (rule["gate"]["steps"], rule["gate"]["window_s"], rule["tolerances"]) == ([50, 100], 5, {"y": 0.5})
    assert said.startswith("m: canary; version 1 gets requests that name no version; version 2 gets 10%, x-new=yes")
    await told(log, "m", "--shadow=2", "--sticky=none")
    await log.add_statistics(keys.shadow_counts("m", 2), {"same": 3})
    assert "  shadow 2: 3 same\n" in (await told(log))[1]
    ((route,), _) = await told(log, "m", "--clear")
    assert route["rule"] is None


async def test_a_version_that_is_not_served_is_named() -> None:
    _, said = await told(await served(), "m", "--canary=7:10%", "--shadow=8")
    assert "  version 7 is not served: the present version gets its requests until it is\n" in said
    assert "  version 8 is not served: it gets no copies until it is\n" in said


@pytest.mark.parametrize(
    "words",
    [["m", "--canary=x:1"], ["m", "--canary=2:200%"], ["m", "--canary=2", "--match=odd"], ["m", "--tolerance=x"]],
)
async def test_words_that_cannot_be(words: list[str]) -> None:
    with pytest.raises(CharoniaError):
        await told(await served(), *words)


async def test_an_unknown_model_has_no_rule() -> None:
    with pytest.raises(NotFound, match="'odd' is not found"):
        await told(await served(), "odd", "--present=1")
