"""Text of a `config.pbtxt` to the message `ModelConfig`. Only syntax and field names are judged here.

What the values may be is `executors.configuration`'s business.
"""

from __future__ import annotations

from google.protobuf import text_format

from charonia.models.config_errors import StructureError
from protos.model_config_pb2 import ModelConfig


def parse(text: str) -> ModelConfig:
    """The configuration a text describes; an empty text is an empty configuration (interface item C73).

    Raises `StructureError` "<line>:<column> : <reason>" for bad syntax, an unknown field, a value of the wrong type, or
    two members of one choice.
    """
    try:
        return text_format.Parse(text, ModelConfig())
    except text_format.ParseError as error:
        raise StructureError(_located(error)) from error


def unparse(config: ModelConfig) -> str:
    """The text `parse` reads back to an equal configuration."""
    return text_format.MessageToString(config)


def _located(error: text_format.ParseError) -> str:
    text, line, column = str(error), error.GetLine(), error.GetColumn()
    if line is None:
        return text
    place = f"{line}:{column}" if column is not None else str(line)
    return text if text.startswith(place) else f"{place} : {text}"
