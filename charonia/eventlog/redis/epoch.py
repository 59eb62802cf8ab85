"""Whether the log still holds what this process has seen of it: flushed, exchanged and rewound logs are noticed here.

The key `epoch` names the contents: who finds none makes one. A log that was rewound (a replica that lagged took over,
an older file was read back) keeps its epoch but lacks the control facts this process wrote last.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from charonia import keys

from .packing import Argument


class Epoch:
    """Of one process and one log."""

    def __init__(self) -> None:
        self._rewinds = 0
        self._own = b""

    def wrote(self, entry_id: bytes) -> None:
        """This process has appended a control fact."""
        self._own = entry_id

    def questions(self) -> list[Sequence[Argument]]:
        """To be asked on every connect."""
        return [("XRANGE", keys.CONTROL, self._own or b"-", self._own or b"-")]

    def answered(self, answers: Sequence[Any]) -> None:
        """Takes the answers. Control facts are never deleted from a log that is in use."""
        if self._own and answers[0] == []:
            self._own = b""
            self._rewinds += 1

    def name(self, value: bytes) -> str:
        """The epoch as this process knows it: another one after a rewind, too."""
        return f"{value.decode()}+{self._rewinds}" if self._rewinds else value.decode()


def new_epoch() -> str:
    """A name that no other log has."""
    return secrets.token_hex(8)
