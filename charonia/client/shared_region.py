"""Shared memory of a client that is on its server's machine: a region, and the arrays that lie in it.

Clients register regions; `http_form` and `grpc_form` write references to them in place of bytes. What the server does
with them: `docs/howto/shared-memory.md`.
"""

from __future__ import annotations

import mmap
import os
import secrets
from contextlib import suppress
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from charonia.datatypes import DataType
from charonia.errors import InvalidArgument, ResourceExhausted

from .results import SharedArray

_DIRECTORY = Path("/dev/shm")
_ALIGNMENT_BYTES = 64


class SharedRegion:
    """A shared memory object, which is deleted by `unlink`; its memory lasts as long as an array lies in it.

    Raises `InvalidArgument` where there is no such memory.
    """

    def __init__(self, size_bytes: int) -> None:
        self.name = f"client-{secrets.token_hex(16)}"
        self.key = f"/{self.name}"
        self.size_bytes = size_bytes
        self._used_bytes = 0
        try:
            descriptor = os.open(_DIRECTORY / self.name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        except OSError as error:
            raise InvalidArgument(f"no shared memory can be made in {_DIRECTORY}: {error.strerror}") from None
        try:
            os.ftruncate(descriptor, size_bytes)
            self._memory = mmap.mmap(descriptor, size_bytes)
        except (OSError, ValueError) as error:
            self.unlink()
            raise InvalidArgument(f"no shared memory of {size_bytes} bytes can be made: {error}") from None
        finally:
            os.close(descriptor)

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> SharedArray:
        """An array behind those made before, zeros at first.

        Raises `ResourceExhausted` where the region is full, `InvalidArgument` for types without a fixed size.
        """
        kind = np.dtype(dtype)
        if DataType.of_numpy(kind) is DataType.BYTES:
            raise InvalidArgument(f"arrays of '{kind}' cannot lie in shared memory")
        begin = -(-self._used_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if begin + prod(shape) * kind.itemsize > self.size_bytes:
            left = max(0, self.size_bytes - begin)
            raise ResourceExhausted(
                f"an array of {list(shape)} '{kind}' does not fit in the region's last {left} bytes"
            )
        made = np.frombuffer(self._memory, dtype=kind, count=prod(shape), offset=begin).reshape(shape)
        self._used_bytes = begin + made.nbytes
        return SharedArray(self.name, begin, made)

    def unlink(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(_DIRECTORY / self.name)
