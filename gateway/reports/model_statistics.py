"""Converts the counters of `s:{m}` to the statistics that clients read (X1-X5). Pure.

Executors and the owning batcher write the counters, and gateways those of cached answers. Fields: `<what>_count`,
`<what>_ns`, `b<rows>_…` per executed batch size, `r<index>_…` per response, `fail_<REASON>`, `last_inference_ms`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from charonia.calls.unsent_counts import FAILURE_REASONS
from gateway.handler import BatchStatistics, Duration, MemoryUsage, ModelStatistics, ResponseStatistics

_BATCH_FIELD = re.compile(r"b(\d+)_count")
_RESPONSE_FIELD = re.compile(r"r(\d+)_(?:infer|cancel)_count")


def model_statistics(
    name: str, version: int, fields: Mapping[str, int], memory: Mapping[str, int] | None = None
) -> ModelStatistics:
    """The statistics of one model version from its counters; absent counters are 0.

    `memory` is the version's memory as its executors report it in `VersionLoaded`.
    """
    get = fields.get

    def duration(what: str) -> Duration:
        return Duration(get(f"{what}_count", 0), get(f"{what}_ns", 0))

    sizes = sorted(int(match[1]) for match in map(_BATCH_FIELD.fullmatch, fields) if match)
    batches = []
    for size in sizes:
        count = get(f"b{size}_count", 0)
        batches.append(
            BatchStatistics(
                size,
                Duration(count, get(f"b{size}_input_ns", 0)),
                Duration(count, get(f"b{size}_infer_ns", 0)),
                Duration(count, get(f"b{size}_output_ns", 0)),
            )
        )
    return ModelStatistics(
        name=name,
        version=str(version),
        last_inference_ms=get("last_inference_ms", 0),
        inference_count=get("inference_count", 0),
        execution_count=get("execution_count", 0),
        success=duration("success"),
        fail=duration("fail"),
        queue=duration("queue"),
        compute_input=duration("compute_input"),
        compute_infer=duration("compute_infer"),
        compute_output=duration("compute_output"),
        cache_hit=duration("cache_hit"),
        cache_miss=duration("cache_miss"),
        batches=tuple(batches),
        failures={reason: get(f"fail_{reason}", 0) for reason in FAILURE_REASONS},
        responses=_responses(fields),
        memory=tuple(_memory_usage(place, size_bytes) for place, size_bytes in sorted((memory or {}).items())),
    )


def _memory_usage(place: str, size_bytes: int) -> MemoryUsage:
    kind, _, number = place.rpartition(" ")
    return MemoryUsage(kind, int(number), size_bytes)


def _responses(fields: Mapping[str, int]) -> dict[str, ResponseStatistics]:
    """Statistics per response (X5), only for models whose backend reports them."""
    places = sorted({int(match[1]) for match in map(_RESPONSE_FIELD.fullmatch, fields) if match})

    def duration(place: int, what: str) -> Duration:
        return Duration(fields.get(f"r{place}_{what}_count", 0), fields.get(f"r{place}_{what}_ns", 0))

    return {
        str(place): ResponseStatistics(
            compute_infer=duration(place, "infer"),
            compute_output=duration(place, "output"),
            success=duration(place, "success"),
            fail=duration(place, "fail"),
            empty_response=duration(place, "empty"),
            cancel=duration(place, "cancel"),
        )
        for place in places
    }
