"""Maps a model configuration's `parameters` to OpenVINO's device and properties.

Names follow Triton's openvino backend. A known parameter with a bad value fails the load (`InvalidArgument`); unknown
ones are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping

from charonia.backend import ModelSource
from charonia.errors import InvalidArgument

_HINTS = ("LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT")
_OWN_STREAMS = ("AUTO", "NUMA")
_VIRTUAL = ("AUTO", "MULTI", "HETERO")
"""Devices that choose among others: what is the CPU's is handed on to it."""

Properties = Mapping[str, "str | Mapping[str, Mapping[str, str]]"]


def target_device(source: ModelSource) -> str:
    """The device in capitals, as `CPU` or `AUTO:CPU`."""
    return (source.parameter("TARGET_DEVICE") or "CPU").upper()


def is_virtual(device: str) -> bool:
    """Whether a device chooses among others."""
    return device.partition(":")[0] in _VIRTUAL


def compile_properties(source: ModelSource, device: str, streams: int, cores: int) -> Properties:
    """The properties for `device`, of a model with so many CPU instances on so many cores.

    Streams are as many as instances, unless a parameter or a hint says otherwise.
    """
    hint = _one_of(source, "PERFORMANCE_HINT", _HINTS)
    threads = source.integer("INFERENCE_NUM_THREADS") or source.integer("TF_NUM_INTRA_THREADS")
    properties = {
        "INFERENCE_NUM_THREADS": str(threads or cores),
        # models of several processes share the cores
        "ENABLE_CPU_PINNING": "NO",
        # by itself the library computes in BF16 where the processor can
        "INFERENCE_PRECISION_HINT": "bf16" if source.flag("HINT_BF16") else "f32",
    }
    wanted = _streams(source) or (None if hint else str(streams))
    if wanted:
        properties["NUM_STREAMS"] = wanted
    compiling = source.integer("COMPILATION_NUM_THREADS")
    if compiling:
        properties["COMPILATION_NUM_THREADS"] = str(compiling)
    hints = {"PERFORMANCE_HINT": hint} if hint else {}
    if is_virtual(device):
        return {**hints, "DEVICE_PROPERTIES": {"CPU": properties | hints}}
    return properties | hints


def _streams(source: ModelSource) -> str | None:
    said = (source.parameter("NUM_STREAMS") or "").upper()
    if said in _OWN_STREAMS:
        return said
    try:
        return str(source.integer("NUM_STREAMS") or "") or None
    except InvalidArgument:
        raise InvalidArgument(
            f"parameter 'NUM_STREAMS' of '{source.name}' must be AUTO, NUMA or an integer of at least 0, got '{said}'"
        ) from None


def _one_of(source: ModelSource, key: str, words: tuple[str, ...]) -> str | None:
    said = source.parameter(key)
    if said is None:
        return None
    if said.upper() not in words:
        raise InvalidArgument(f"parameter '{key}' of '{source.name}' must be one of {', '.join(words)}, got '{said}'")
    return said.upper()
