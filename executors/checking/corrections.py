"""Proposes corrections that are safe and unambiguous: there is one way to mend the fault, and it changes nothing else.

A name that is not the directory's, a misspelt field or enum value with one close match, dims and data types that
contradict the model's file, and a model file that lies beside its version directories.
"""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from pathlib import Path

from google.protobuf.descriptor import Descriptor, EnumDescriptor

from charonia.backend import GraphSignature
from executors.configuration.declarations import every_format
from executors.repository.files import is_hidden
from protos import model_config_pb2 as pb

from .faults import Move, TextEdit
from .field_positions import FieldNode, Step, find, offset_of, read_fields

_CLOSE = 0.75
"""Names less alike than this are no misspellings of one another."""
_LEAD = 0.05
"""The best match has to be closer than the second by so much."""

_TYPE_WORDS = {"FLOAT": "FP32", "FLOAT32": "FP32", "FLOAT16": "FP16", "HALF": "FP16", "FLOAT64": "FP64",
               "DOUBLE": "FP64", "BFLOAT16": "BF16", "INT": "INT32", "LONG": "INT64", "BYTES": "STRING",
               "BOOLEAN": "BOOL"}  # fmt: skip
"""Other libraries' names of data types, and those of the protocol."""

_UNKNOWN_FIELD = re.compile(
    r':(\d+):(\d+) : .*Message type "inference\.([\w.]+)" has no field named "([^"]+)"', re.DOTALL
)
_UNKNOWN_VALUE = re.compile(r':(\d+):(\d+) : .*Enum type "inference\.([\w.]+)" has no value named "?(\w+)', re.DOTALL)
_NAME = re.compile(r"unexpected directory name '([^']*)' for model '([^']*)'")
_TYPE = re.compile(r"expects datatype \w+ for (input|output) '([^']*)', model provides (\w+)")
_DIMS = re.compile(r"tensor '([^']*)': the model expects \d+ dimensions")


def in_text(problem: str, text: str, graph: GraphSignature | None) -> TextEdit | None:
    """The correction of a configuration's text for an error at load, None when there is no safe one."""
    if (match := _UNKNOWN_FIELD.search(problem)) is not None:
        return _respelt(text, int(match[1]), int(match[2]), match[4], closest(match[4], words_of(match[3])))
    if (match := _UNKNOWN_VALUE.search(problem)) is not None:
        names = words_of(match[3])
        word = match[4].upper()
        same = _TYPE_WORDS.get(word.removeprefix("TYPE_"), word.removeprefix("TYPE_")) if match[3] == "DataType" else ""
        choice = f"TYPE_{same}" if f"TYPE_{same}" in names else closest(word, names)
        return _respelt(text, int(match[1]), int(match[2]), match[4], choice)
    root = read_fields(text)
    if (match := _NAME.search(problem)) is not None:
        return _value(root, ["name"], f'"{match[1]}"') if re.fullmatch(r"[^\"\\\n]+", match[1]) else None
    if (match := _TYPE.search(problem)) is not None:
        return _value(root, [match[1], ("name", match[2]), "data_type"], match[3])
    if (match := _DIMS.search(problem)) is not None and graph is not None:
        return _dims(root, text, match[1], graph)
    return None


def closest(word: str, names: list[str]) -> str:
    """The one name that a word is a misspelling of, "" when there is none or more than one."""
    plain = [name for name in names if name.replace("_", "").lower() == word.replace("_", "").lower()]
    if len(plain) == 1:
        return plain[0]
    ranked = sorted(((SequenceMatcher(None, word, name).ratio(), name) for name in names), reverse=True)
    if not ranked or ranked[0][0] < _CLOSE or (len(ranked) > 1 and ranked[0][0] - ranked[1][0] < _LEAD):
        return ""
    return ranked[0][1]


def _message(name: str) -> Descriptor | None:
    first, *rest = name.split(".")
    found = pb.DESCRIPTOR.message_types_by_name.get(first)
    for part in rest:
        found = found.nested_types_by_name.get(part) if found is not None else None
    return found


def _enum(name: str) -> EnumDescriptor | None:
    outer, _, last = name.rpartition(".")
    if not outer:
        return pb.DESCRIPTOR.enum_types_by_name.get(last)
    message = _message(outer)
    return message.enum_types_by_name.get(last) if message is not None else None


def words_of(name: str) -> list[str]:
    """The fields of a message, or the values of an enum that may be written, by its name in the package."""
    if (message := _message(name)) is not None:
        return [field.name for field in message.fields]
    enum = _enum(name)
    return [value.name for value in enum.values if value.name != "TYPE_INVALID"] if enum is not None else []


def _respelt(text: str, line: int, column: int, word: str, choice: str) -> TextEdit | None:
    start = offset_of(text, line, column)
    for written in (word, f'"{word}"', f"'{word}'"):
        if choice and text.startswith(written, start):
            return TextEdit(start, start + len(written), choice)
    return None


def _value(root: FieldNode, path: list[Step], replacement: str) -> TextEdit | None:
    node, _ = find(root, path)
    if node.name != path[-1] or not node.values:
        return None
    return TextEdit(node.value_start, node.value_end, replacement)


def _dims(root: FieldNode, text: str, name: str, graph: GraphSignature) -> TextEdit | None:
    """The file's dims, where the configuration has dims once and no reshape."""
    for what, signatures in (("input", graph.inputs), ("output", graph.outputs)):
        tensor, _ = find(root, [what, ("name", name)])
        signature = next((signature for signature in signatures if signature.name == name), None)
        if tensor.name != what or signature is None:
            continue
        written = tensor.named("dims")
        batching = root.value("max_batch_size") not in ("", "0")
        dims = list(signature.dims[1:] if batching else signature.dims)
        if len(written) != 1 or tensor.named("reshape") or not dims or (batching and signature.dims[0] != -1):
            return None
        node = written[0]
        # lines stay where they are, so that the places of later faults do
        breaks = "\n" * text.count("\n", node.value_start, node.value_end)
        return TextEdit(node.value_start, node.value_end, f"[ {', '.join(map(str, dims))} {breaks}]")
    return None


def version_directory(directory: Path) -> Move | None:
    """Move a model's only file into the version directory 1, when no directory is there at all."""
    try:
        entries = [entry for entry in directory.iterdir() if not is_hidden(entry.name)]
    except OSError:
        return None
    files = {name for _, format in every_format() for name in format.files}
    found = [entry for entry in entries if entry.name in files]
    if len(found) != 1 or not found[0].is_file() or found[0].is_symlink():
        return None
    if any(entry.is_dir() for entry in entries):
        return None
    return Move(found[0], directory / "1" / found[0].name)
