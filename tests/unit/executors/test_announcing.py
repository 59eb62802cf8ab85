"""What an executor says again in another log: everything that still holds, foldable in that order."""

from __future__ import annotations

from memory_log.log import MemoryLog

from charonia import keys
from charonia.facts.events import (
    ExecutorDraining,
    ModelRequestFinished,
    RepositoryScanned,
    VersionFailed,
    VersionHealthChanged,
    VersionLoaded,
    VersionStateChanged,
    VersionUnloaded,
    facts_of,
)
from executors.announcing import Announcer


async def test_what_still_holds_is_said_again_and_nothing_else() -> None:
    log = MemoryLog()
    announcer = Announcer(log)
    loaded = VersionLoaded("e", "m", 1, "h", 1, b"config")
    reloading = VersionStateChanged("e", "m", 1, "LOADING")
    refused = VersionFailed("e", "m", 1, 3, "worse files")
    sick_again = VersionHealthChanged("e", "m", 1, well=False)
    gone = VersionUnloaded("e", "n", 2)
    scan = RepositoryScanned("e", ("m", "n"), "explicit", ready=True)
    for fact in (
        RepositoryScanned("e", ("m", "n"), "explicit", ready=False),
        VersionStateChanged("e", "m", 1, "LOADING"),
        loaded,
        VersionLoaded("e", "n", 2, "h", 1, b"config"),
        scan,
        ModelRequestFinished("e", "r1"),
        VersionHealthChanged("e", "m", 1, well=False),
        reloading,
        refused,
        sick_again,
        VersionStateChanged("e", "n", 2, "UNLOADING"),
        gone,
        ExecutorDraining("e"),
    ):
        await announcer.announce(fact)
    await announcer.keep_blob("b", b"named in a fact")
    await log.delete_stream(keys.CONTROL)
    await log.delete_keys([keys.blob("b")])

    await announcer.announce_again()

    said = [fact for entry in await log.range(keys.CONTROL) for fact in facts_of(entry)]
    assert said == [loaded, reloading, refused, sick_again, gone, scan, ExecutorDraining("e")]
    assert await log.blob("b") == b"named in a fact"
