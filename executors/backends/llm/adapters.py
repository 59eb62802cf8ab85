"""Reads adapters (LoRA) as PEFT writes them: `adapter_config.json` and `adapter_model.safetensors` in a directory.

The format of the weights is read here, without the library: a length, a JSON table of tensors, and their bytes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from charonia.errors import InvalidArgument

from .adapter_sites import Place, Site

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MOST_HEADER_BYTES = 16 << 20
_NAME = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:\w+\.)?(\w+)\.lora_([AB])(?:\.\w+)?\.weight$")
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True)
class SiteWeights:
    """One adapter's part at a site: `a` [rank, inputs], `b` [outputs, rank], with its scale."""

    a: npt.NDArray[np.float32]
    b: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class AdapterNeeds:
    """What adapters need of a decoder: how many there are, the products they change, and the largest rank."""

    count: int = 0
    places: frozenset[Place] = frozenset()
    rank: int = 0


def adapter_needs(directories: Collection[str]) -> AdapterNeeds:
    """Reads the tables of these adapters' weights. One that cannot be read needs nothing: `read_adapter` refuses it
    when a request asks for it.
    """
    places, rank = set[Place](), 0
    for directory in directories:
        try:
            shapes = _shapes(Path(directory) / WEIGHTS)
        except InvalidArgument:
            continue
        for name, shape in shapes.items():
            found = _NAME.search(name)
            if found is not None and len(shape) == 2:
                places.add((int(found[1]), found[2]))
                rank = max(rank, shape[0] if found[3] == "A" else shape[1])
    return AdapterNeeds(len(directories), frozenset(places), rank)


def read_adapter(directory: str, sites: Sequence[Site], rank: int) -> dict[Site, SiteWeights]:
    """The weights of an adapter by site. `rank` is the most that a slot holds.

    Raises `InvalidArgument` for files that are missing, malformed, of another kind of adapter or another model.
    """
    where = Path(directory)
    config = _config(where)
    alpha = _number(config, "lora_alpha", where)
    tensors = _tensors(where / WEIGHTS)
    by_place = {(site.layer, site.module): site for site in sites}
    halves: dict[Site, dict[str, npt.NDArray[np.float32]]] = {}
    for name, array in tensors.items():
        found = _NAME.search(name)
        site = by_place.get((int(found[1]), found[2])) if found is not None else None
        if found is None or site is None:
            raise InvalidArgument(
                f"adapter '{where.name}': the model has no place for its tensor '{name}', or was loaded when none of "
                "its adapters had one there"
            )
        halves.setdefault(site, {})[found[3]] = array
    weights = {}
    for site, parts in halves.items():
        what = f"adapter '{where.name}', layer {site.layer}, {site.module}"
        if set(parts) != {"A", "B"}:
            raise InvalidArgument(f"{what}: lora_A or lora_B is missing")
        a, b = parts["A"], parts["B"]
        own = len(a)
        if a.shape != (own, site.inputs) or b.shape != (site.outputs, own):
            raise InvalidArgument(
                f"{what}: lora_A is {list(a.shape)} and lora_B {list(b.shape)}, the model needs [r, {site.inputs}] and "
                f"[{site.outputs}, r]"
            )
        if own > rank:
            raise InvalidArgument(f"{what}: its rank is {own}, slots hold {rank} (parameter 'charonia.adapter_rank')")
        scale = alpha / (math.sqrt(own) if config.get("use_rslora") else own)
        weights[site] = SiteWeights(a, b * np.float32(scale))
    if not weights:
        raise InvalidArgument(f"adapter '{where.name}' has no weights")
    return weights


def _config(where: Path) -> Mapping[str, Any]:
    try:
        config = json.loads((where / CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"adapter '{where.name}': cannot read {CONFIG}: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise InvalidArgument(f"adapter '{where.name}': {CONFIG} is not that of a LoRA adapter")
    for key in ("use_dora", "alpha_pattern", "modules_to_save", "layer_replication"):
        if config.get(key):
            raise InvalidArgument(f"adapter '{where.name}': '{key}' in {CONFIG} is not supported")
    if config.get("bias", "none") != "none":
        raise InvalidArgument(f"adapter '{where.name}': 'bias' in {CONFIG} must be \"none\"")
    return config


def _number(config: Mapping[str, Any], key: str, where: Path) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InvalidArgument(f"adapter '{where.name}': '{key}' in {CONFIG} must be a number above 0")
    return float(value)


def _tensors(path: Path) -> dict[str, npt.NDArray[np.float32]]:
    """All tensors of a safetensors file, as float32. Raises `InvalidArgument` for a malformed one."""
    with _opened(path) as file:
        table, begin = _table(file)
        file.seek(0)
        data = file.read()
        return {name: _array(data, begin, described) for name, described in table.items()}


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors of a file, without reading their bytes. Raises `InvalidArgument` as `_tensors`."""
    with _opened(path) as file:
        table, _ = _table(file)
        return {name: tuple(int(size) for size in described["shape"]) for name, described in table.items()}


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise InvalidArgument(f"adapter '{path.parent.name}': cannot read {path.name}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise InvalidArgument(f"adapter '{path.parent.name}': {path.name} is malformed: {error}") from None


def _table(file: BinaryIO) -> tuple[dict[str, Mapping[str, Any]], int]:
    """The table of tensors at the file's beginning, and where their bytes begin."""
    (size,) = struct.unpack("<Q", file.read(8))
    if size > min(_MOST_HEADER_BYTES, os.fstat(file.fileno()).st_size - 8):
        raise ValueError("its header is larger than the file")
    table = json.loads(file.read(size))
    return {name: described for name, described in table.items() if name != "__metadata__"}, 8 + size


def _array(data: bytes, begin: int, described: Mapping[str, Any]) -> npt.NDArray[np.float32]:
    kind, shape = described["dtype"], tuple(described["shape"])
    first, last = described["data_offsets"]
    if kind not in _DTYPES:
        raise ValueError(f"a tensor has the type {kind}, known are {', '.join(_DTYPES)}")
    dtype = np.dtype(_DTYPES[kind])
    if len(shape) != 2 or not 0 <= first <= last <= len(data) - begin:
        raise ValueError("a tensor is no matrix, or outside the file")
    if math.prod(shape) * dtype.itemsize != last - first:
        raise ValueError("a tensor's size does not fit its shape")
    raw = np.frombuffer(data, dtype, math.prod(shape), begin + first).reshape(shape)
    if kind == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32)
