"""Gives a converted graph the zero points that its GGUF file has, nearly.

A weight of type Q4_1 is `scale * q + minimum`. The converter makes it `scale * (q - zero)` with `zero` rounded to a
whole number of four bits: on SmolLM2 that moves logits by 16. Here such weights become ones of eight bits, which count
sixteenths of a step, so that zero points are rounded to a sixteenth. Fractional zero points would be exact, but the
CPU's kernels compute with whole ones only in eight bits, which is twice as fast with many rows (ADR 0042).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .gguf_metadata import GgufTensor, read_tensors

_Q4_1 = 3
_FINER = 16
"""Into how many parts a step of four bits is divided."""
_BLOCK, _BLOCK_BYTES = 32, 20
"""A block of 32 weights: scale and minimum as float16, then 16 bytes of weights."""

Half = npt.NDArray[np.float16]


def correct_zero_points(graph: Path, gguf: Path) -> int:
    """Rewrite a graph's file; returns how many of its tensors were corrected, 0 when there was nothing to do."""
    tensors = [_scales_and_minima(gguf, tensor) for tensor in read_tensors(gguf) if tensor.kind == _Q4_1]
    if not tensors:
        return 0
    import openvino

    model = openvino.Core().read_model(os.fspath(graph))
    corrected = 0
    for node in model.get_ordered_ops():
        scales = _scales_of(node)
        exact = None if scales is None else _zero_points(scales.reshape(scales.shape[0], -1), tensors)
        if scales is not None and exact is not None:
            _replace(node, scales, exact.reshape(scales.shape))
            corrected += 1
    if corrected:
        made = graph.with_name("corrected.xml")
        openvino.save_model(model, os.fspath(made), compress_to_fp16=False)
        del model  # it reads the file of weights that is replaced now
        made.with_suffix(".bin").replace(graph.with_suffix(".bin"))
        made.replace(graph)
    return corrected


def _scales_and_minima(gguf: Path, tensor: GgufTensor) -> tuple[Half, Half]:
    """[rows, blocks of a row] each."""
    rows, columns = tensor.shape
    blocks = np.memmap(gguf, np.uint8, "r", tensor.offset, (rows, columns // _BLOCK, _BLOCK_BYTES))
    halves = np.ascontiguousarray(blocks[..., :4]).view("<f2")
    return halves[..., 0], halves[..., 1]


def _scales_of(node: Any) -> Half | None:
    """The scales [rows, blocks, 1] of weights of four bits, if this subtracts their zero points."""
    if node.get_type_name() != "Subtract":
        return None
    zero = node.input(1).get_source_output().get_node()
    if zero.get_type_name() != "Convert":
        return None
    zero = zero.input(0).get_source_output().get_node()
    if zero.get_type_name() != "Constant" or zero.get_element_type().get_type_name() != "u4":
        return None
    (target,) = node.output(0).get_target_inputs()
    scale = target.get_node().input(1).get_source_output().get_node()
    if target.get_node().get_type_name() != "Multiply" or scale.get_type_name() != "Constant":
        return None
    found: Half = np.array(scale.get_data())
    return found if found.dtype == np.float16 and found.ndim == 3 else None


def _replace(node: Any, scales: Half, exact: npt.NDArray[np.float32]) -> None:
    """Make weights of four bits ones of eight: sixteenths of their steps, and zero points to the nearest of these."""
    from openvino import opset13 as ops

    packed = node.input(0).get_source_output().get_node().input(0).get_source_output().get_node()
    shape = list(packed.get_output_shape(0))
    halves = np.array(packed.get_data()).reshape(-1)
    weights = (np.stack([halves & 15, halves >> 4], axis=-1).reshape(shape) * _FINER).astype(np.uint8)
    zeros = np.clip(np.rint(exact * _FINER), 0, 255).astype(np.uint8)
    (target,) = node.output(0).get_target_inputs()
    for port, array in ((node.input(0), weights), (node.input(1), zeros)):
        converted = ops.convert(ops.constant(array), "f16")
        port.replace_source_output(converted.output(0))
    finer = ops.constant((scales.astype(np.float32) / _FINER).astype(np.float16))
    target.get_node().input(1).replace_source_output(finer.output(0))


def _zero_points(scales: Half, tensors: list[tuple[Half, Half]]) -> npt.NDArray[np.float32] | None:
    """The exact zero points of the tensor that has these scales; its rows may be in another order (attention heads)."""
    for known, minima in tensors:
        if known.shape != scales.shape:
            continue
        places = {row.tobytes(): at for at, row in enumerate(known)}
        order = [places.get(row.tobytes(), -1) for row in scales]
        if -1 not in order:
            with np.errstate(divide="ignore", invalid="ignore"):
                zero = -minima[order].astype(np.float32) / scales.astype(np.float32)
            return np.where(scales == 0, 0, zero).astype(np.float32)
    return None
