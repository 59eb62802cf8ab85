"""Reads recorded requests from the objects of trace files (`charonia.traces.triton_text`). Pure.

Each traced request of a model counts, also one that an ensemble or another model made. Requests of one batch are found
by their attribute `charonia.batch_id`; in files of Triton or of earlier releases, by equal times of execution.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from charonia.errors import InvalidArgument, InvalidRecord
from charonia.facts.processor_use import use_in
from charonia.traces.reports import COMPUTE_END, COMPUTE_START, QUEUE_START, REQUEST_END, REQUEST_START

from .processor_shares import Said
from .recorded_requests import Outcome, RecordedRequest, Recording, recording

SOURCE = "trace files"


@dataclass(slots=True)
class _Traced:
    """What a file says of one request."""

    model: str = ""
    version: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)
    stamps: dict[str, int] = field(default_factory=dict)


def trace_recordings(files: Iterable[Sequence[Any]], models: Sequence[str]) -> dict[str, Recording]:
    """The recording of each model that ran anything, or of `models`. Raises `InvalidArgument` for other objects."""
    found: dict[str, list[RecordedRequest]] = {}
    said: dict[str, list[Said]] = {}
    for number, objects in enumerate(files):
        for traced in _gathered(objects).values():
            if traced.model and (not models or traced.model in models):
                request = _request(traced, number)
                if request is not None:
                    found.setdefault(traced.model, []).append(request)
                    if "charonia.processor_use" in traced.about:
                        said.setdefault(traced.model, []).append(_said(traced, request.executor))
    return {
        model: recording(model, requests, SOURCE, 1000, said=said.get(model, ()))
        for model, requests in found.items()
        if models or any(one.ran for one in requests)  # an ensemble runs nothing itself
    }


def _gathered(objects: Sequence[Any]) -> dict[int, _Traced]:
    found: dict[int, _Traced] = {}
    try:
        for entry in objects:
            traced = found.setdefault(entry["id"], _Traced())
            if "model_name" in entry:
                traced.model, traced.version = str(entry["model_name"]), str(entry.get("model_version", ""))
                traced.about = dict(entry.get("attributes", {}))
            traced.stamps |= {str(stamp["name"]): int(stamp["ns"]) for stamp in entry.get("timestamps", ())}
    except (TypeError, KeyError, ValueError, AttributeError):
        raise InvalidArgument("no trace file: it must be a JSON array of objects with an 'id'") from None
    return found


def _request(traced: _Traced, file: int) -> RecordedRequest | None:
    stamps, about = traced.stamps, traced.about
    arrived_ns = stamps.get(QUEUE_START, stamps.get(REQUEST_START, 0))
    if not arrived_ns:
        return None
    executor = str(about.get("charonia.executor", ""))
    rest = RecordedRequest(
        arrived_ns,
        rows=max(1, _number(about.get("charonia.rows", 1))),
        version=_number(traced.version or 1),
        level=_number(about.get("charonia.priority", 0)),
        tenant=str(about.get("charonia.tenant", "")),
        timeout_us=_number(about.get("charonia.timeout_us", 0)),
        executor=executor,
        journalled=bool(_number(about.get("charonia.journalled", 0))),
        ended_ns=stamps.get(REQUEST_END, 0),
    )
    if COMPUTE_START not in stamps or COMPUTE_END not in stamps:
        return replace(rest, outcome=Outcome.REFUSED)
    started_ns, computed_ns = stamps[COMPUTE_START], stamps[COMPUTE_END]
    name = about.get("charonia.batch_id") or f"{file}:{started_ns}:{computed_ns}"
    return replace(
        rest,
        batch=f"{executor}/{name}",
        started_ns=started_ns,
        computed_ns=computed_ns,
        ended_ns=max(rest.ended_ns, computed_ns),
        outcome=Outcome.ANSWERED,
    )


def _said(traced: _Traced, executor: str) -> Said:
    try:
        return executor, use_in(str(traced.about["charonia.processor_use"]))
    except InvalidRecord as error:
        raise InvalidArgument(f"no trace file: {error}") from None


def _number(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise InvalidArgument(f"no trace file: '{value}' is no number") from None
