"""How many rows an exported program takes: it may have been compiled for more rows than one, or for too few.

A compiler that saw two rows makes a package that refuses one, whatever range its author wrote. So the largest batch and
a single row are tried when the model is loaded; batches that are too small for it are padded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from charonia.backend import InstanceSpec
from charonia.datatypes import DataType
from charonia.errors import InvalidArgument

from .torch_instance import reason
from .torch_programs import Program
from .torch_settings import TorchSettings

_GUESSES = (16, 2, 128)
"""Sizes to try for dimensions that the configuration leaves open."""
_log = logging.getLogger(__name__)


def rows_taken(program: Program, torch: Any, spec: InstanceSpec, settings: TorchSettings, device: Any) -> int:
    """The fewest rows that the program takes, 0 for any, also without batching.

    Raises `InvalidArgument` for a program that does not take `max_batch_size` rows.
    """
    largest = spec.interface.max_batch_size
    if not largest:
        return 0
    inputs = spec.interface.inputs.values()
    if any(item.datatype is DataType.BYTES or item.allow_ragged_batch for item in inputs):
        return 0
    torch.set_num_threads(settings.threads)
    open_dims = any(dim < 0 for item in inputs for dim in item.backend_dims)
    message = ""
    for guess in _GUESSES if open_dims else _GUESSES[:1]:
        message = _refusal(program, torch, spec, device, largest, guess)
        if not message:
            return _fewest(program, torch, spec, device, largest, guess)
    if open_dims:
        _log.warning(
            "model '%s': its largest batch could not be tried with sizes of our own: %s", spec.source.name, message
        )
        return 0
    raise InvalidArgument(
        f"model '{spec.source.name}': the file does not take a batch of max_batch_size, {largest} rows: {message}"
    )


def _fewest(program: Program, torch: Any, spec: InstanceSpec, device: Any, largest: int, guess: int) -> int:
    for rows in _row_counts(largest):
        if not _refusal(program, torch, spec, device, rows, guess):
            return rows if rows > 1 else 0
    return largest


def _row_counts(largest: int) -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... below the largest."""
    rows = 1
    while rows < largest:
        yield rows
        if rows > 1 and rows + rows // 2 < largest:
            yield rows + rows // 2
        rows *= 2


def _refusal(program: Program, torch: Any, spec: InstanceSpec, device: Any, rows: int, guess: int) -> str:
    """What the program says to a batch of zeros; "" when it takes it."""
    tensors = {}
    for name, item in spec.interface.inputs.items():
        shape = (rows, *(dim if dim >= 0 else guess for dim in item.backend_dims))
        dtype = torch.bfloat16 if item.datatype is DataType.BF16 else getattr(torch, item.datatype.numpy.name)
        tensors[name] = torch.zeros(shape, dtype=dtype, device=device)
    try:
        with torch.inference_mode():
            program.call(dict(zip(program.locate(list(tensors)), tensors.values(), strict=True)))
    except Exception as error:
        return reason(error)
    return ""
