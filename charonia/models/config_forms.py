"""`ModelConfig` from and to its two written forms: the text of a `config.pbtxt`, and the JSON of the configuration
endpoints and of load overrides (items H6, C60, C61).

Protobuf's own JSON printer writes 64-bit integers as strings; clients of this interface expect numbers, so the printing
is done here. Reading takes both. Rules about values are `executors.configuration`'s.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
from google.protobuf import json_format, text_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from protos.model_config_pb2 import ModelConfig

from .config_errors import StructureError


def parse(text: str) -> ModelConfig:
    """The configuration of the text of a `config.pbtxt`; an empty text is an empty configuration (C73).

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


def to_json(config: ModelConfig) -> dict[str, Any]:
    """A JSON-ready dict: snake_case keys, enums by name, integers as numbers, every field with a default printed.

    Messages and members of a oneof appear only if set, as in the published form.
    """
    return _message(config)


def from_json(source: str | bytes | dict[str, Any]) -> ModelConfig:
    """The configuration of JSON text or of a decoded object; integers may be strings (item C61).

    As protobuf's own parser, it accepts keys without quotes, single quotes, and a comma after the last element.

    Raises `StructureError` for text that is not JSON, anything but an object, unknown fields and ill-typed values.
    """
    if not isinstance(source, dict):
        try:
            source = _loads(source)
        except (ValueError, RecursionError) as error:
            raise StructureError(f"the model configuration is not valid JSON: {error}") from error
        if not isinstance(source, dict):
            raise StructureError("the model configuration must be a JSON object")
    try:
        return json_format.ParseDict(source, ModelConfig())
    except (json_format.Error, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise StructureError(f"the model configuration cannot be read: {error}") from error
    except SystemError as error:  # how protobuf's C code looks up a name that has half of a surrogate pair
        raise StructureError("the model configuration cannot be read: a name in it is not valid Unicode") from error


_WHOLE = 1e5
"""Whole floats below this are printed without a point, as protobuf prints them."""

_LEGACY = re.compile(
    r"""(?P<double>"(?:[^"\\]|\\.)*(?:"|\\?\Z)) | (?P<single>'(?:[^'\\]|\\.)*(?:'|\\?\Z))
      | (?P<key>[A-Za-z_$][\w$]*(?=\s*:)) | (?P<comma>,(?=\s*[\]}])) | [^"'A-Za-z_$,]+ | [A-Za-z_$][\w$]* | ,""",
    re.VERBOSE | re.DOTALL,
)
"""The tokens of JSON text in the form that protobuf's parser accepts; each character is consumed once."""
_ESCAPED = re.compile(r"\\'|\\.|\"", re.DOTALL)


def _loads(text: str | bytes) -> Any:
    """Decode JSON text, or what protobuf's parser accepts for it. Raises `ValueError`."""
    try:
        return json.loads(text)
    except ValueError:
        plain = text if isinstance(text, str) else text.decode()
        rewritten = _LEGACY.sub(_rewrite, plain)
        if rewritten == plain:
            raise
    return json.loads(rewritten)


def _rewrite(part: re.Match[str]) -> str:
    """A token in standard JSON."""
    match part.lastgroup:
        case "key":
            return f'"{part[0]}"'
        case "single":
            return '"' + _ESCAPED.sub(_requote, part[0][1:].removesuffix("'")) + '"'
        case "comma":
            return ""
    return part[0]


def _requote(found: re.Match[str]) -> str:
    return {"\\'": "'", '"': '\\"'}.get(found[0], found[0])


def _message(message: Message) -> dict[str, Any]:
    written: dict[str, Any] = {}
    field: Any  # either of protobuf's two implementations of a field descriptor
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if _is_map(field):
            entry = field.message_type.fields_by_name["value"]
            written[field.name] = {str(key): _value(entry, value[key]) for key in sorted(value)}
        elif field.is_repeated:
            written[field.name] = [_value(field, item) for item in value]
        elif not field.has_presence or message.HasField(field.name):
            written[field.name] = _value(field, value)
    return written


def _is_map(field: Any) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _value(field: Any, value: Any) -> Any:
    if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        return _message(value)
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        found = field.enum_type.values_by_number.get(value)
        return value if found is None else found.name
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        if value.is_integer() and abs(value) < _WHOLE:
            return int(value)
        # a 32-bit 0.1 reads back as 0.10000000149...; print the shortest number with the same 32 bits
        return float(str(np.float32(value))) if field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT else value
    return value
