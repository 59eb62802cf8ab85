"""Where lists go on: what a link has in the place of a record that its viewer may not know of.

A list of a tenant may end behind a record of another tenant, whose id is not to be seen, nor whether there is one.
The words are made with a secret that is drawn at the start.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from secrets import token_bytes
from typing import Generic, TypeVar

from charonia.errors import NotFound

_P = TypeVar("_P", bound=tuple[object, ...])
_KEPT = 10_000
"""About 2 MiB."""


class Cursors(Generic[_P]):
    """Places in lists, by words that tell nothing and are known to this process alone; the last 10,000."""

    def __init__(self, most: int = _KEPT) -> None:
        self._most = most
        self._secret = token_bytes(32)
        self._places: OrderedDict[str, _P] = OrderedDict()

    def word(self, tenant: str, place: _P) -> str:
        """The word for a place, of this tenant alone; the same each time."""
        word = blake2b(repr((tenant, place)).encode(), key=self._secret, digest_size=16).hexdigest()
        self._places[word] = place
        self._places.move_to_end(word)
        if len(self._places) > self._most:
            self._places.popitem(last=False)
        return word

    def place(self, tenant: str, word: str) -> _P:
        """The place of a word. Raises `NotFound`, with the same sentence whatever else the word may be."""
        found = self._places.get(word)
        if found is None or self.word(tenant, found) != word:
            raise NotFound("this link no longer leads on: begin again with the first page of the list")
        return found
