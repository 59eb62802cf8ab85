"""Reads the tensors of requests that are stored out of band, and stores large answers there.

Files of the shared payload directory are mapped; blobs are fetched before their batch is submitted. When a payload
cannot be read, its record keeps no bytes: that request fails, the rest of the batch does not.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from charonia.errors import CharoniaError, InvalidRecord
from charonia.eventlog.payloads import BY_REFERENCE_BYTES, PayloadDirectory, total_size
from charonia.eventlog.port import Blobs
from charonia.tensors import Buffer
from charonia.wire import (
    BLOB,
    FLAG_JOB,
    FLAG_REFERENCE,
    FLAG_REPLY_BY_REFERENCE,
    FLAG_TRACED,
    Reference,
    RequestRecord,
    Wave,
    refer_response,
    response_data,
)

_log = logging.getLogger(__name__)

_DIRECT = FLAG_REPLY_BY_REFERENCE | FLAG_JOB | FLAG_TRACED


class BatchPayloads:
    """Reads and writes the out-of-band payloads of one executor."""

    def __init__(self, log: Blobs, directory: PayloadDirectory) -> None:
        self._log = log
        self._directory = directory

    def map(self, records: Sequence[RequestRecord]) -> list[RequestRecord]:
        """Map the payloads in files; return the records whose payloads are blobs, for `fetch`."""
        blobs: list[RequestRecord] = []
        for record in records:
            if not record.flags & FLAG_REFERENCE or record.reference is None or record.data:
                continue
            if record.reference.kind == BLOB:
                blobs.append(record)
                continue
            record.data = self._read(record.reference)
        return blobs

    def map_wave(self, wave: Wave) -> None:
        """Map the tensors of a wave, which are in files."""
        if wave.column_at is not None:
            column = self._read(wave.column_at)
            wave.columns = (column,) if column else ()
            return
        wave.payloads = tuple([self._read(reference) for reference in wave.references])

    def _read(self, reference: Reference) -> Buffer:
        """A payload; b"" when it is gone."""
        try:
            return self._directory.read(reference)
        except InvalidRecord as error:
            _log.warning("a request's payload is gone: %s", error)
            return b""

    async def fetch(self, records: Sequence[RequestRecord]) -> None:
        """Fetch the blobs of these records."""
        for record in records:
            if record.reference is None:
                continue
            try:
                data = await self._log.blob(record.reference.name)
            except CharoniaError as error:
                _log.warning("a request's payload cannot be fetched: %s", error)
                continue
            if data is not None and len(data) == record.reference.size_bytes:
                record.data = memoryview(data)

    def put(self, record: RequestRecord, answer: bytes, tensors: Sequence[Buffer]) -> bytes | None:
        """Store an answer's large tensors for its reader, in one copy (`answers.Put`). May be called in any thread.

        Returns None for traced requests, whose tensors the trace reads, and for jobs, whose results stay in the log.
        """
        if record.flags & _DIRECT != FLAG_REPLY_BY_REFERENCE or total_size(tensors) < BY_REFERENCE_BYTES:
            return None
        reference = self._directory.give(tensors, record.endpoint)
        return None if reference is None else refer_response(answer, reference)

    def put_columns(self, wave: Wave, columns: Sequence[Buffer]) -> Reference | None:
        """Store a wave's large answers for its gateway, in one copy. Any thread (`wave_execution.PutColumns`)."""
        if not wave.reply_by_reference:
            return None
        reference = self._directory.give(columns, wave.endpoint)
        return self._directory.write(columns, owner=wave.endpoint) if reference is None else reference

    def take_back(self, reference: Reference) -> None:
        """End what `put_columns` stored, when no reply will refer to it. Any thread."""
        self._directory.take_back(reference)

    def refer(self, record: RequestRecord, answer: bytes) -> bytes:
        """Return an answer, replaced by a reference where it is large and the reader shares the payload directory."""
        if len(answer) < BY_REFERENCE_BYTES or not record.flags & FLAG_REPLY_BY_REFERENCE:
            return answer
        data = response_data(answer)
        if len(data) < BY_REFERENCE_BYTES:  # a long error text
            return answer
        reference = self._directory.give([data], record.endpoint)
        if reference is None:
            reference = self._directory.write([data], owner=record.endpoint)
        return answer if reference is None else refer_response(answer, reference)
