"""`charonia trace summary`: reads trace files for `charonia.traces.summary`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from charonia.errors import CharoniaError, InvalidArgument
from charonia.traces.summary import summary


def summarise(files: Sequence[str], models: Sequence[str]) -> dict[str, Any]:
    """The document over all files together. Raises `InvalidArgument` for one that cannot be read."""
    return summary(_contents(files), models)


def read_trace_file(name: str) -> list[Any]:
    """The objects of a trace file. Raises `InvalidArgument` for one that cannot be read, or is no JSON array."""
    try:
        content = orjson.loads(Path(name).read_bytes())
    except OSError as error:
        raise InvalidArgument(f"'{name}' cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InvalidArgument(f"'{name}' is not JSON: {error}") from None
    if not isinstance(content, list):
        raise InvalidArgument(f"'{name}' is no trace file: it must be a JSON array")
    return content


def _contents(files: Sequence[str]) -> Iterator[list[Any]]:
    for name in files:
        content = read_trace_file(name)
        try:
            summary([content])
        except CharoniaError as error:
            raise InvalidArgument(f"'{name}' is {error.message}") from None
        yield content
