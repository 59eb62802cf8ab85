"""What an ended job came to, as the answer its caller would have had. Reads the log, decides nothing."""

from __future__ import annotations

from charonia.errors import (
    Cancelled,
    CharoniaError,
    DeadlineExceeded,
    ErrorCode,
    InternalError,
    InvalidRecord,
    NotFound,
)
from charonia.eventlog.port import Jobs
from charonia.facts.jobs import JobRecord, JobState
from charonia.wire import ResponseRecord, unpack_response
from gateway.requests.delivery import JOB_NOT_FOUND

CANCELLED = "request was cancelled"
DEADLINE_EXCEEDED = "request deadline exceeded"
RESULT_NOT_KEPT = "the result of this job is not kept any more"


async def job_outcome(log: Jobs, model: str, job_id: bytes) -> ResponseRecord | None:
    """The answer of a job, a failed one's `error` set; None while it has not ended.

    Raises `NotFound` when the log does not know the job, or not its result any more.
    """
    record = await log.job(model, job_id)
    if record is None:
        raise NotFound(JOB_NOT_FOUND)
    return await outcome_of(log, record)


async def outcome_of(log: Jobs, record: JobRecord) -> ResponseRecord | None:
    """As `job_outcome`, of a record with its events."""
    if not record.state.terminal:
        return None
    if record.result_size_bytes:
        result = await log.job_result(record.model, record.id)
        if result:
            try:
                answer = unpack_response(result)
            except InvalidRecord as error:
                raise InternalError(f"the result of this job cannot be read: {error}") from None
            if answer.error is not None and not answer.error.message:
                answer.error = end_error(record)  # who waits is told the code alone (G26), who asks later, more
            return answer
    if record.state is JobState.SUCCEEDED:
        raise NotFound(RESULT_NOT_KEPT)
    return ResponseRecord(record.id, record.model, 0, [], {}, end_error(record))


def end_error(record: JobRecord) -> CharoniaError:
    """Why a job did not succeed, from its last event: `error` is the text, `code` the name of the code."""
    detail = record.events[-1].detail if record.events else {}
    text = detail.get("error")
    message = text if isinstance(text, str) and text else ""
    if record.state is JobState.CANCELLED:
        return Cancelled(message or CANCELLED)
    if record.state is JobState.EXPIRED:
        return DeadlineExceeded(message or DEADLINE_EXCEEDED)
    code = ErrorCode.__members__.get(str(detail.get("code")), ErrorCode.INTERNAL)
    return CharoniaError.of(code, message or "the request failed, its error is not kept")
