"""Reports of traced requests on their way to the gateway that traces them. Pure.

They go with the answer where a caller waits for it; those of jobs that no caller waits for go by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable

from charonia import keys
from charonia.eventlog.port import Reply
from charonia.tensors import Buffer, Tensor
from charonia.wire import RequestRecord, pack_response, record_fields, report_response, unpack_response


def reports_to_gateways(answered: Iterable[tuple[RequestRecord, bytes]]) -> list[Reply]:
    """The reports in these answers (none by reference) whose requests are jobs that no caller waits for."""
    by_gateway: dict[str, list[Buffer]] = {}
    for record, answer in answered:
        if record.trace is not None and record.trace.context.report_to and not record.endpoint:
            report = unpack_response(answer).report
            if report is not None:
                alone = report_response(pack_response(record.id, report.model, report.version, [], {}), report)
                by_gateway.setdefault(record.trace.context.report_to, []).append(alone)
    return [Reply(keys.replies(gateway), record_fields(found)) for gateway, found in by_gateway.items()]


def inputs_of(record: RequestRecord) -> list[Tensor]:
    """The inputs of a request; none when its tensors lie elsewhere and are not here."""
    if record.reference is not None and len(record.data) != record.reference.size_bytes:
        return []
    return record.inputs()
