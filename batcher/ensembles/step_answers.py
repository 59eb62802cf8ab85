"""Answers of an ensemble's steps: read from its reply stream, and kept there until the request is settled.

The stream thus records the progress of every request. A new owner reads it before it begins any: a step with an answer
is done. An unknown answer may belong to a request that was not read, or not begun, yet; it is kept until no such
request can exist.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from batcher.entries.carriers import CarrierEntry, Deletions
from charonia import keys
from charonia.calls.requester import answers_in
from charonia.errors import InvalidRecord
from charonia.eventlog.payloads import PayloadDirectory
from charonia.eventlog.port import START, Entry, Streams
from charonia.wire import Reference, ResponseRecord, records_of, response_id

_PAGE = 500


class Answers:
    """The reply stream of one ensemble. `find` returns the request that a step's answer is for, None if not awaited."""

    def __init__(
        self,
        log: Streams,
        model: str,
        directory: PayloadDirectory,
        deletions: Deletions,
        find: Callable[[bytes], bytes | None],
    ) -> None:
        self.stream = keys.replies(keys.ensemble_endpoint(model))
        self.after = START
        """The id of the last entry read."""
        self._log = log
        self._directory = directory
        self._deletions = deletions
        self._find = find
        self._aside: dict[bytes, list[tuple[ResponseRecord, CarrierEntry]]] = {}
        self._held: dict[bytes, list[CarrierEntry]] = {}
        self._files: dict[bytes, list[Reference]] = {}

    async def restore(self) -> None:
        """Read the answers to a former owner's steps. Raises what the log raises."""
        while entries := await self._log.range(self.stream, self.after, _PAGE):
            self.read(entries)

    def read(self, entries: Iterable[Entry]) -> list[ResponseRecord]:
        """The awaited answers among these entries; the others are kept."""
        found: list[ResponseRecord] = []
        for entry in entries:
            self.after = bytes(entry.id)
            carrier = CarrierEntry(self.stream, entry.id, 1)
            for answer in answers_in([entry], self._directory.read):
                request_id = self._find(answer.id)
                carrier.remaining += 1
                if request_id is None:
                    self._aside.setdefault(answer.id, []).append((answer, carrier))
                else:
                    self._hold(request_id, answer, carrier)
                    found.append(answer)
            self._let_go(carrier)
        return found

    def knows(self, step_id: bytes) -> bool:
        """Whether a step has an answer before it is awaited."""
        return step_id in self._aside

    async def has(self, step_id: bytes) -> bool:
        """Whether the stream holds an unread answer of a step. Raises what the log raises."""
        after = self.after
        while entries := await self._log.range(self.stream, after, _PAGE):
            for entry in entries:
                with contextlib.suppress(InvalidRecord):
                    if any(response_id(record) == step_id for record in records_of(entry.fields)):
                        return True
            after = bytes(entries[-1].id)
        return False

    def take(self, step_id: bytes, request_id: bytes) -> list[ResponseRecord]:
        """Existing answers of a step that is awaited from now on, in order."""
        found = self._aside.pop(step_id, [])
        for answer, carrier in found:
            self._hold(request_id, answer, carrier)
        return [answer for answer, _ in found]

    def forget_aside(self) -> None:
        """Forgets the kept answers that no step awaits."""
        aside, self._aside = self._aside, {}
        for kept in aside.values():
            for answer, carrier in kept:
                if answer.reference is not None:
                    self._directory.remove(answer.reference)
                self._let_go(carrier)

    @property
    def any_aside(self) -> bool:
        return bool(self._aside)

    @property
    def aside(self) -> int:
        """The number of kept answers that no step awaits."""
        return sum(map(len, self._aside.values()))

    def own(self, request_id: bytes, reference: Reference) -> None:
        """Keeps a file as long as the request."""
        self._files.setdefault(request_id, []).append(reference)

    def file_names(self) -> set[str]:
        """The files in use."""
        kept = {reference.name for files in self._files.values() for reference in files}
        for answers in self._aside.values():
            kept |= {answer.reference.name for answer, _ in answers if answer.reference is not None}
        return kept

    def release(self, request_id: bytes) -> None:
        """A request is settled: the answers of its steps can be deleted."""
        for carrier in self._held.pop(request_id, ()):
            self._let_go(carrier)
        for reference in self._files.pop(request_id, ()):
            self._directory.remove(reference)

    def _hold(self, request_id: bytes, answer: ResponseRecord, carrier: CarrierEntry) -> None:
        self._held.setdefault(request_id, []).append(carrier)
        if answer.reference is not None:
            self.own(request_id, answer.reference)

    def _let_go(self, carrier: CarrierEntry) -> None:
        carrier.remaining -= 1
        if carrier.remaining == 0:
            self._deletions.add(carrier.stream, carrier.entry_id)
