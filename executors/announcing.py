"""Writes an executor's control facts, repeating until the log takes them."""

from __future__ import annotations

from typing import Protocol

from charonia import keys
from charonia.eventlog.port import Blobs, Streams
from charonia.facts.events import (
    FIELD_FACT,
    ExecutorDescribed,
    ExecutorDraining,
    Fact,
    ModelExcluded,
    RepositoryScanned,
    VersionAnnounced,
    VersionFailed,
    VersionHealthChanged,
    VersionHeld,
    VersionLoaded,
    VersionStateChanged,
    VersionUnloaded,
    pack_fact,
)
from charonia.tasks import insist

BLOB_TTL_S = 366 * 24 * 3600
"""How long the log keeps what facts name, once no executor does."""


class _Log(Streams, Blobs, Protocol):
    """The parts of the log that are written here."""


class Announcer:
    """Writes one process's control facts, in the order of the calls.

    It remembers the facts that still hold, so that they can be written again to a log that has lost them.
    """

    def __init__(self, log: _Log) -> None:
        self._log = log
        self._scan: RepositoryScanned | None = None
        self._described: ExecutorDescribed | None = None
        self._draining: ExecutorDraining | None = None
        self._excluded: dict[str, ModelExcluded] = {}
        self._versions: dict[tuple[str, int], dict[str, Fact]] = {}
        self._blobs: dict[str, bytes] = {}

    async def announce(self, fact: Fact) -> None:
        """Write a fact, repeating until the log takes it: all other processes depend on it."""
        await insist(lambda: self.announce_once(fact), f"{fact.kind} cannot be written to the log")

    async def keep_blob(self, name: str, data: bytes) -> None:
        """Write what facts name, repeating until the log takes it; `announce_again` writes it again."""
        self._blobs[name] = data
        await insist(lambda: self._log.put_blob(name, data, BLOB_TTL_S), f"blob {name} cannot be written to the log")

    async def announce_once(self, fact: Fact) -> None:
        """Write a fact once. Raises `LogUnavailable`."""
        self._remember(fact)
        await self._write(fact)

    async def announce_again(self) -> None:
        """Write all facts that still hold, in an order that folds correctly. Raises `LogUnavailable`."""
        for name, data in list(self._blobs.items()):
            await self._log.put_blob(name, data, BLOB_TTL_S)
        for excluded in list(self._excluded.values()):
            await self._write(excluded)
        for facts in list(self._versions.values()):
            for fact in list(facts.values()):
                await self._write(fact)
        if self._described is not None:
            await self._write(self._described)
        if self._scan is not None:
            await self._write(self._scan)
        if self._draining is not None:
            await self._write(self._draining)

    def _remember(self, fact: Fact) -> None:
        if isinstance(fact, RepositoryScanned):
            self._scan = fact
        elif isinstance(fact, ExecutorDescribed):
            self._described = fact
        elif isinstance(fact, ExecutorDraining):
            self._draining = fact
        elif isinstance(fact, ModelExcluded):
            self._excluded[fact.model] = fact
        elif isinstance(fact, VersionLoaded | VersionUnloaded | VersionAnnounced):
            if not isinstance(fact, VersionUnloaded):
                self._excluded.pop(fact.model, None)
            self._versions[(fact.model, fact.version)] = {fact.kind: fact}
        elif isinstance(fact, VersionStateChanged | VersionFailed | VersionHeld | VersionHealthChanged):
            facts = self._versions.setdefault((fact.model, fact.version), {})
            # the latest fact of each kind: after a failed reload the version is still served as before (R21)
            facts.pop(fact.kind, None)
            facts[fact.kind] = fact

    async def _write(self, fact: Fact) -> None:
        await self._log.append(keys.CONTROL, [FIELD_FACT, pack_fact(fact)])
