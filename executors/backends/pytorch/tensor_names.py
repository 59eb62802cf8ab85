"""Which tensor of a PyTorch model a name in the configuration means. Imports no torch.

A model takes and gives tensors by position, in tuples, lists and dicts. Their names are Triton's:

    INPUT__0, OUTPUT__0            by position; any word may stand before the two underscores
    x                              by the argument of `forward`; the key of a dict that it returns
    ARGS[0], ARGS[2][key],         by structure
    KWARGS[scale], RESULT,
    RESULT[BBB][1]

When the names of a side are none of these, its tensors are meant in the order of the configuration.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from charonia.errors import InvalidArgument

if TYPE_CHECKING:
    from protos.model_config_pb2 import ModelConfig

RESULT = "RESULT"

_SEQUENCES = ("builtins.tuple", "builtins.list")
_DICT = "builtins.dict"


def input_names(config: ModelConfig) -> list[str]:
    """The names of everything that a model takes: its requests' tensors, and what the server makes."""
    sequences = config.sequence_batching
    names = [item.name for item in config.input]
    names += [name for made in config.batch_input for name in made.target_name]
    names += [control.name for control in sequences.control_input]
    return names + [state.input_name for state in sequences.state]


def output_names(config: ModelConfig) -> list[str]:
    """The names of everything that a model gives."""
    return [item.name for item in config.output] + [state.output_name for state in config.sequence_batching.state]


def check_tensors(config: ModelConfig) -> None:
    """Raise `InvalidArgument` for a configuration without an input or an output, which Triton's backend refuses too."""
    for side, names in (("input", input_names(config)), ("output", output_names(config))):
        if not names:
            raise InvalidArgument(f"model configuration must contain at least one {side}, none were specified.")


def positions(names: Sequence[str], known: Sequence[Sequence[str]], model: str, side: str) -> list[int]:
    """The position of each name, given all names of each position. Raises `InvalidArgument` for names that fit none."""
    by_name = {name: index for index, group in enumerate(known) for name in group}
    if all(name in by_name for name in names):
        found = [by_name[name] for name in names]
    elif all(name.partition("__")[2].isdecimal() for name in names):
        found = [int(name.partition("__")[2]) for name in names]
    else:
        found = list(range(len(names)))
    if len(set(found)) < len(found) or any(index >= len(known) for index in found):
        raise InvalidArgument(
            f"model '{model}': the configuration has the {side}s {', '.join(names)}; the file has {len(known)}: "
            f"{', '.join('/'.join(group) for group in known)}"
        )
    return found


def leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """The tensors of what a model returned, each with its name by structure. A list of text is one tensor."""
    yield from _leaves(RESULT, value)


def names_of_leaf(structural: str) -> tuple[str, ...]:
    """All names of one returned tensor but the one by position."""
    inner = structural.removeprefix(RESULT)
    if inner.count("[") == 1 and not inner[1:-1].isdecimal():
        return structural, inner[1:-1]
    return (structural,)


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{prefix}[{key}]", item)
    elif isinstance(value, tuple | list) and not (value and all(isinstance(item, str) for item in value)):
        for index, item in enumerate(value):
            yield from _leaves(f"{prefix}[{index}]", item)
    else:
        yield prefix, value


class Structure:
    """How a program's arguments, or its result, are nested: a call specification as PyTorch writes it."""

    def __init__(self, text: str) -> None:
        """Raises `ValueError` for another protocol, and for types that are not tuple, list or dict."""
        protocol, self._root = json.loads(text)
        if protocol != 1:
            raise ValueError(f"version {protocol} of the call specification")
        self._check(self._root)

    def arguments(self) -> list[str]:
        """The structural names of the leaves of a pair of positional arguments and keyword arguments."""
        positional, keyword = self._root["children_spec"]
        return [*_names("ARGS", positional), *_names("KWARGS", keyword)]

    def results(self) -> list[str]:
        """The structural names of the leaves of a result."""
        return list(_names(RESULT, self._root))

    def build(self, values: Sequence[Any]) -> Any:
        """Nest values, which are in the order of the leaves."""
        remaining = iter(values)
        return _built(self._root, remaining)

    def _check(self, node: Any) -> None:
        if node["type"] is None:
            return
        if node["type"] not in (*_SEQUENCES, _DICT):
            raise ValueError(f"a value of the type {node['type']}")
        children = node["children_spec"]
        if node["type"] == _DICT and len(_keys(node)) != len(children):
            raise ValueError("a dict with other keys than values")
        for child in children:
            self._check(child)


def _keys(node: Any) -> list[str]:
    keys = json.loads(node["context"])
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ValueError("a dict whose keys are no text")
    return keys


def _names(prefix: str, node: Any) -> Iterator[str]:
    if node["type"] is None:
        yield prefix
        return
    children = node["children_spec"]
    keys: Sequence[str | int] = _keys(node) if node["type"] == _DICT else range(len(children))
    for key, child in zip(keys, children, strict=True):
        yield from _names(f"{prefix}[{key}]", child)


def _built(node: Any, remaining: Iterator[Any]) -> Any:
    if node["type"] is None:
        return next(remaining)
    children = [_built(child, remaining) for child in node["children_spec"]]
    if node["type"] == _DICT:
        return dict(zip(_keys(node), children, strict=True))
    return tuple(children) if node["type"] == "builtins.tuple" else children
