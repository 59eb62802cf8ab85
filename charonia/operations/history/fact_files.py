"""Writes rows of facts (`fact_rows`) to JSON Lines or Parquet files.

A file appears under its name once it is whole. What is not finished is deleted. Parquet is written with pyarrow, which
only an export into such a file needs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import orjson

from charonia.errors import InvalidArgument, StartupError
from charonia.operations.text.rendering import moment

from .fact_rows import Row

JSON_LINES, PARQUET = ".jsonl", ".parquet"
ROWS_OF_GROUP = 32_768
"""Rows of a row group, which is held in memory: about 10 MB."""
INSTALL = "Parquet files need pyarrow: pip install 'charonia[parquet]'"


class _Format(Protocol):
    def write(self, rows: Sequence[Row]) -> None: ...

    def close(self) -> None: ...


class FactFile:
    """A file of facts; a context manager, whose regular end puts it in place.

    Raises `InvalidArgument` for another ending than .jsonl and .parquet, a file that exists and is not to be
    overwritten, or one that cannot be written; `StartupError` without pyarrow.
    """

    def __init__(self, path: Path, *, overwrite: bool) -> None:
        if path.suffix not in (JSON_LINES, PARQUET):
            raise InvalidArgument(f"'{path}': the name of an export ends with {JSON_LINES} or {PARQUET}")
        if os.path.lexists(path) and not overwrite:
            raise InvalidArgument(f"'{path}' exists; --overwrite replaces it")
        self.path = path
        self.size_bytes = 0
        """How large it is, once it is whole."""
        self._partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
        self._format: _Format
        try:
            self._format = _JsonLines(self._partial) if path.suffix == JSON_LINES else _Parquet(self._partial)
        except OSError as error:
            raise InvalidArgument(f"'{path}' cannot be written: {error.strerror or error}") from None

    def write(self, rows: Sequence[Row]) -> None:
        try:
            self._format.write(rows)
        except OSError as error:
            raise InvalidArgument(f"'{self.path}' cannot be written: {error.strerror or error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._format.close()
            if kind is None:
                self.size_bytes = self._partial.stat().st_size
                self._partial.replace(self.path)
        except OSError as failure:
            raise InvalidArgument(f"'{self.path}' cannot be written: {failure.strerror or failure}") from None
        finally:
            with suppress(OSError):
                self._partial.unlink(missing_ok=True)


class _JsonLines:
    def __init__(self, path: Path) -> None:
        self._out = path.open("wb")

    def write(self, rows: Sequence[Row]) -> None:
        self._out.write(
            b"".join([orjson.dumps({**row._asdict(), "time": moment(row.time * 1000)}) + b"\n" for row in rows])
        )

    def close(self) -> None:
        self._out.close()


class _Parquet:
    def __init__(self, path: Path) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise StartupError(INSTALL) from None
        text, name = pyarrow.string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
        kinds = {
            "time": pyarrow.timestamp("ms", tz="UTC"),
            "model": name,
            "entry": text,
            "kind": name,
            "request": text,
            "attempt": pyarrow.int32(),
            "outcome": name,
            "executor": name,
            "batch": text,
        }
        self._arrow: Any = pyarrow
        self._schema = pyarrow.schema([pyarrow.field(column, kinds[column]) for column in Row._fields])
        self._writer = pyarrow.parquet.ParquetWriter(path, self._schema)
        self._rows: list[Row] = []

    def write(self, rows: Sequence[Row]) -> None:
        self._rows += rows
        while len(self._rows) >= ROWS_OF_GROUP:
            self._flush(self._rows[:ROWS_OF_GROUP])
            del self._rows[:ROWS_OF_GROUP]

    def close(self) -> None:
        if self._rows:
            self._flush(self._rows)
            self._rows = []
        self._writer.close()

    def _flush(self, rows: Sequence[Row]) -> None:
        columns = zip(*rows, strict=True)
        arrays = [self._arrow.array(column, kind.type) for column, kind in zip(columns, self._schema, strict=True)]
        self._writer.write_batch(self._arrow.record_batch(arrays, schema=self._schema))
