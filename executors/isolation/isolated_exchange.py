"""The messages between an executor and the process of an isolated model: a head in msgpack, then all tensor bytes.

    head   [kind, detail, [[name, datatype, shape, size in bytes], ...]]

Head and data are one message each on a `multiprocessing.connection.Connection`. Only its framing is used: nothing is
pickled.
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
    """A message. `detail` depends on the kind: output names, [code, text] of an error, or whether it is stateless."""

    kind: int
    detail: Any
    arrays: dict[str, Array]


def pack_message(kind: int, detail: Any, arrays: Mapping[str, Array]) -> tuple[bytes, bytes]:
    """Return head and data of a message."""
    tensors = [Tensor.of(name, array) for name, array in arrays.items()]
    layouts = [[t.name, t.datatype.value, t.shape, len(t.data)] for t in tensors]
    return bytes(msgpack.packb([kind, detail, layouts])), b"".join([t.data for t in tensors])


def receive(connection: Connection) -> Message:
    """Wait for the next message and return it. Raises `EOFError` when the other process has ended."""
    kind, detail, layouts = msgpack.unpackb(connection.recv_bytes(), use_list=True)
    data = memoryview(connection.recv_bytes())
    arrays: dict[str, Array] = {}
    at = 0
    for name, datatype, shape, size in layouts:
        arrays[name] = Tensor(name, DataType(datatype), tuple(shape), data[at : at + size]).array()
        at += size
    return Message(kind, detail, arrays)


def pack_spec(spec: InstanceSpec) -> tuple[bytes, bytes]:
    """Return the message that makes an instance."""
    source = spec.source
    detail = {
        "backend": source.config.backend,
        "model": source.name,
        "version": source.version,
        "directory": str(source.directory),
        "config": source.config.SerializeToString(),
        "backend_config": dict(source.backend_config),
        "instance": [spec.name, spec.kind, spec.device_id, sorted(spec.cores)],
    }
    return pack_message(LOAD, detail, {})


def spec_of(message: Message) -> tuple[str, InstanceSpec]:
    """Return the backend's name and the instance from such a message."""
    detail = message.detail
    config = ModelConfig.FromString(detail["config"])
    source = ModelSource(
        detail["model"], detail["version"], Path(detail["directory"]), config, detail["backend_config"]
    )
    name, kind, device_id, cores = detail["instance"]
    return detail["backend"], InstanceSpec(name, kind, device_id, source, ModelInterface.of(config), frozenset(cores))
