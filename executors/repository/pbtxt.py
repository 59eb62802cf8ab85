"""Parses the text of a `config.pbtxt` into a `ModelConfig`. Checks syntax and field names only.

`executors.configuration.config` checks the values.
"""

from __future__ import annotations

from google.protobuf import text_format

from charonia.models.config_errors import StructureError
from protos.model_config_pb2 import ModelConfig


def parse(text: str) -> ModelConfig:
    """Parse a configuration; an empty text is an empty configuration (C73).

    Raises `StructureError` "<line>:<column> : <reason>" for bad syntax, an unknown field, a value of the wrong type, or
    two members of one choice.
    """
    try:
        return text_format.Parse(text, ModelConfig())
    except text_format.ParseError as error:
        raise StructureError(_located(error)) from error
    except ValueError as error:  # a number beyond those of an enum is not told by a ParseError
        raise StructureError(str(error)) from error


def _located(error: text_format.ParseError) -> str:
    text, line, column = str(error), error.GetLine(), error.GetColumn()
    if line is None:
        return text
    place = f"{line}:{column}" if column is not None else str(line)
    return text if text.startswith(place) else f"{place} : {text}"
