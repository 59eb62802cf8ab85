"""What an executor and the process of an isolated model say to each other: a head in msgpack, then all tensor bytes.

    head   [kind, about, [[name, datatype, shape, size in bytes], ...]]

The two travel as one message each on a `multiprocessing.connection.Connection`, of which only the framing is used:
nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgpack

from charonia.backend import Array, InstanceSpec, ModelSource
from charonia.datatypes import DataType
from charonia.models.interface import ModelInterface
from charonia.tensors import Tensor
from protos.model_config_pb2 import ModelConfig

LOAD = 1
EXECUTE = 2
CLOSE = 3
READY = 16
DONE = 17
FAILED = 18


@dataclass(frozen=True, slots=True)
class Message:
    """`about` depends on the kind: names of outputs, [code, text] of a failure, whether an instance is stateless."""

    kind: int
    about: Any
    arrays: dict[str, Array]


def pack_message(kind: int, about: Any, arrays: Mapping[str, Array]) -> tuple[bytes, bytes]:
    """Head and data of a message."""
    tensors = [Tensor.of(name, array) for name, array in arrays.items()]
    places = [[t.name, t.datatype.value, t.shape, len(t.data)] for t in tensors]
    return bytes(msgpack.packb([kind, about, places])), b"".join([t.data for t in tensors])


def received(connection: Connection) -> Message:
    """The next message; waits for it. Raises EOFError when the other end is gone."""
    kind, about, places = msgpack.unpackb(connection.recv_bytes(), use_list=True)
    data = memoryview(connection.recv_bytes())
    arrays: dict[str, Array] = {}
    at = 0
    for name, datatype, shape, size in places:
        arrays[name] = Tensor(name, DataType(datatype), tuple(shape), data[at : at + size]).array()
        at += size
    return Message(kind, about, arrays)


def pack_spec(spec: InstanceSpec) -> tuple[bytes, bytes]:
    """The message that has an instance made."""
    source = spec.source
    about = {
        "backend": source.config.backend,
        "model": source.name,
        "version": source.version,
        "directory": str(source.directory),
        "config": source.config.SerializeToString(),
        "backend_config": dict(source.backend_config),
        "instance": [spec.name, spec.kind, spec.device_id, sorted(spec.cores)],
    }
    return pack_message(LOAD, about, {})


def spec_of(message: Message) -> tuple[str, InstanceSpec]:
    """Backend and instance of such a message."""
    about = message.about
    config = ModelConfig.FromString(about["config"])
    source = ModelSource(about["model"], about["version"], Path(about["directory"]), config, about["backend_config"])
    name, kind, device_id, cores = about["instance"]
    return about["backend"], InstanceSpec(name, kind, device_id, source, ModelInterface.of(config), frozenset(cores))
