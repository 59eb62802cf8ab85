"""Detects that the log has lost what this process has seen of it: flushed, replaced or rewound logs.

The key `epoch` names the contents; a process that finds none creates it. A log that was rewound (a lagging replica took
over, an older file was loaded) keeps its epoch but lacks the control facts that this process wrote last.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from charonia import keys

from .server.transport import Argument


class Epoch:
    """The epoch of one log, for one process."""

    def __init__(self) -> None:
        self._rewinds = 0
        self._own = b""

    def wrote(self, entry_id: bytes) -> None:
        """This process has appended a control fact."""
        self._own = entry_id

    def questions(self) -> list[Sequence[Argument]]:
        """The questions to ask at every connect."""
        own = self._own or b"-"
        return [("XRANGE", keys.CONTROL, own, own, "COUNT", 1), ("XINFO", "STREAM", keys.CONTROL)]

    def answered(self, answers: Sequence[Any]) -> None:
        """Check the answers. Compaction deletes facts roughly in the order of their ids: a fact of this process that
        is absent counts as lost if no fact as young as it has been deleted.
        """
        found, about = answers
        if self._own and found == []:
            deleted = _deleted_up_to(about)
            if stream_order(self._own) > stream_order(deleted):
                self._rewinds += 1
            self._own = b""

    def name(self, value: bytes) -> str:
        """The epoch as this process knows it: it changes after a rewind, too."""
        return f"{value.decode()}{keys.EPOCH_REWINDS}{self._rewinds}" if self._rewinds else value.decode()


def _deleted_up_to(about: Any) -> bytes:
    """The youngest id ever deleted from a stream, by the answer to XINFO STREAM; an error means: no stream."""
    if not isinstance(about, list):
        return b"0-0"
    deleted: bytes = dict(zip(about[::2], about[1::2], strict=True)).get(b"max-deleted-entry-id", b"0-0")
    return deleted


def stream_order(entry_id: bytes) -> tuple[int, int]:
    """The key that orders ids."""
    time_ms, _, number = entry_id.partition(b"-")
    return int(time_ms), int(number or 0)


def new_epoch() -> str:
    """A name that no other log has."""
    return secrets.token_hex(8)
