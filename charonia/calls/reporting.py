"""Groups answers by endpoint, and extracts reports of traced requests. Pure.

A report travels with the answer if a caller waits for it; a report of a job without a waiting caller goes separately to
the gateway that traces it.
"""

from __future__ import annotations

from collections.abc import Iterable

from charonia import keys
from charonia.eventlog.port import Reply
from charonia.tensors import Buffer, Tensor
from charonia.wire import RequestRecord, pack_response, record_fields, report_response, unpack_response


def replies_of(answers: Iterable[tuple[str, Buffer]]) -> list[Reply]:
    """(endpoint, record) pairs in their order, one entry per endpoint; pairs without an endpoint are left out."""
    by_endpoint: dict[str, list[Buffer]] = {}
    for endpoint, record in answers:
        if endpoint:
            by_endpoint.setdefault(endpoint, []).append(record)
    return [Reply(keys.replies(endpoint), record_fields(records)) for endpoint, records in by_endpoint.items()]


def reports_to_gateways(answered: Iterable[tuple[RequestRecord, bytes]]) -> list[Reply]:
    """The reports in these answers (none by reference) whose requests are jobs without a waiting caller."""
    reports: list[tuple[str, Buffer]] = []
    for record, answer in answered:
        if record.trace is not None and record.trace.context.report_to and not record.endpoint:
            report = unpack_response(answer).report
            if report is not None:
                alone = report_response(pack_response(record.id, report.model, report.version, [], {}), report)
                reports.append((record.trace.context.report_to, alone))
    return replies_of(reports)


def inputs_of(record: RequestRecord) -> list[Tensor]:
    """The inputs of a request; none when its tensors lie out of band and were not fetched."""
    if record.reference is not None and len(record.data) != record.reference.size_bytes:
        return []
    return record.inputs()
