"""What the steps of an ensemble answered: read from its reply stream, kept there until the request is settled.

So the stream says how far every request has come, and a new owner reads it before it begins any: a step with an answer
there is done. An unknown answer may be of a request that is still to be read; it is kept aside, and forgotten
once there can be no such request.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable

from batcher.entries.carriers import CarrierEntry, Deletions
from charonia import keys
from charonia.errors import InvalidRecord
from charonia.eventlog.payloads import PayloadDirectory
from charonia.eventlog.port import START, Entry, Streams
from charonia.tensors import Buffer
from charonia.wire import Reference, ResponseRecord, records_of, response_id, unpack_response

_log = logging.getLogger(__name__)

_PAGE = 500

Answer = tuple[ResponseRecord, Reference | None]


class Answers:
    """The reply stream of one ensemble. `find` gives the request a step's answer is for, None if not awaited."""

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
        self._aside: dict[bytes, list[tuple[Answer, CarrierEntry]]] = {}
        self._held: dict[bytes, list[CarrierEntry]] = {}
        self._files: dict[bytes, list[Reference]] = {}

    async def restore(self) -> None:
        """Read what a former owner's steps have answered. Raises what the log raises."""
        while entries := await self._log.range(self.stream, self.after, _PAGE):
            self.read(entries)

    def read(self, entries: Iterable[Entry]) -> list[Answer]:
        """The answers of these entries that are awaited; the others are kept aside."""
        found: list[Answer] = []
        for entry in entries:
            self.after = bytes(entry.id)
            answers = self._decoded(entry)
            carrier = CarrierEntry(self.stream, entry.id, 1)
            for answer in answers:
                request_id = self._find(answer[0].id)
                carrier.remaining += 1
                if request_id is None:
                    self._aside.setdefault(answer[0].id, []).append((answer, carrier))
                else:
                    self._hold(request_id, answer, carrier)
                    found.append(answer)
            self._let_go(carrier)
        return found

    def knows(self, step_id: bytes) -> bool:
        """Whether a step has answered before anybody asked."""
        return step_id in self._aside

    async def has(self, step_id: bytes) -> bool:
        """Whether the stream holds an answer of a step that was not read yet. Raises what the log raises."""
        after = self.after
        while entries := await self._log.range(self.stream, after, _PAGE):
            for entry in entries:
                with contextlib.suppress(InvalidRecord):
                    if any(response_id(record) == step_id for record in records_of(entry.fields)):
                        return True
            after = bytes(entries[-1].id)
        return False

    def take(self, step_id: bytes, request_id: bytes) -> list[Answer]:
        """What a step that is only awaited from now on has answered already, in the order of its answers."""
        found = self._aside.pop(step_id, [])
        for answer, carrier in found:
            self._hold(request_id, answer, carrier)
        return [answer for answer, _ in found]

    def forget_aside(self) -> None:
        """Forgets the answers that are kept aside."""
        aside, self._aside = self._aside, {}
        for kept in aside.values():
            for (_, reference), carrier in kept:
                if reference is not None:
                    self._directory.remove(reference)
                self._let_go(carrier)

    @property
    def any_aside(self) -> bool:
        return bool(self._aside)

    def own(self, request_id: bytes, reference: Reference) -> None:
        """A file that is needed as long as the request is."""
        self._files.setdefault(request_id, []).append(reference)

    def file_names(self) -> set[str]:
        """The files that are needed."""
        kept = {reference.name for files in self._files.values() for reference in files}
        for answers in self._aside.values():
            kept |= {reference.name for (_, reference), _ in answers if reference is not None}
        return kept

    def release(self, request_id: bytes) -> None:
        """A request is settled: what its steps answered is not needed any more."""
        for carrier in self._held.pop(request_id, ()):
            self._let_go(carrier)
        for reference in self._files.pop(request_id, ()):
            self._directory.remove(reference)

    def _hold(self, request_id: bytes, answer: Answer, carrier: CarrierEntry) -> None:
        self._held.setdefault(request_id, []).append(carrier)
        if answer[1] is not None:
            self.own(request_id, answer[1])

    def _let_go(self, carrier: CarrierEntry) -> None:
        carrier.remaining -= 1
        if carrier.remaining == 0:
            self._deletions.add(carrier.stream, carrier.entry_id)

    def _decoded(self, entry: Entry) -> list[Answer]:
        found: list[Answer] = []
        try:
            records = records_of(entry.fields)
        except InvalidRecord as error:
            _log.error("dropped unreadable answers in entry %s: %s", entry.id.decode(errors="replace"), error)
            return found
        for record in records:
            references: list[Reference] = []

            def fetch(reference: Reference, references: list[Reference] = references) -> Buffer:
                references.append(reference)
                return self._directory.read(reference)

            try:
                response = unpack_response(record, fetch)
            except InvalidRecord as error:
                # its neighbours are other requests' answers
                _log.error("dropped an unreadable answer in entry %s: %s", entry.id.decode(errors="replace"), error)
                continue
            found.append((response, references[0] if references else None))
        return found
