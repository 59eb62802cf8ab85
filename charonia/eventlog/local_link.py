"""Passes batches and facts between a batcher and the executor in its process, without the log, a copy or a turn of the
event loop.

The composition root makes one link and gives it to both. Its content is lost if the process ends, which is harmless:
accepted requests are in the log, where a successor finds them.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Generic, ParamSpec

from charonia.facts.events import Fact
from charonia.wire import BatchHeader, RequestRecord, Wave

from .port import Fields

P = ParamSpec("P")


class HandOver(Generic[P]):
    """One direction of a link."""

    def __init__(self) -> None:
        self._kept: list[Callable[[Callable[P, object]], object]] = []
        self.hand: Callable[P, object] = self._keep
        """Passes an item to the taker, which must not raise. Items are kept while there is no taker."""

    def follow(self, take: Callable[P, object] | None) -> None:
        """Set the taker of items, which soon gets the kept ones too; None removes it."""
        self.hand = self._keep if take is None else take
        if take is not None:
            kept, self._kept = self._kept, []
            for give in kept:
                asyncio.get_running_loop().call_soon(give, take)

    def _keep(self, *what: P.args, **named: P.kwargs) -> None:
        self._kept.append(lambda take: take(*what, **named))


class LocalLink:
    """Between the owners of models and the executor with this incarnation, in one event loop."""

    def __init__(self, executor: str) -> None:
        self.executor = executor
        self.batches = HandOver[[BatchHeader, Sequence[RequestRecord | Wave]]]()
        """To the executor. A header without a `report_to` means that its owner listens here."""
        self.facts = HandOver[[Fact]]()
        """To the executor: the other items of its batch stream."""
        self.reports: defaultdict[str, HandOver[[Fields]]] = defaultdict(HandOver)
        """To the owner of each model: facts as the fields of an entry, `BatchFinished` as an object."""
