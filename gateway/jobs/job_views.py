"""Job records as callers see them: views, outcomes, reasons for waiting, and the cursors of lists. Pure."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import Any

from charonia.catalog.catalog import ServedVersion
from charonia.errors import (
    CANCELLED,
    DEADLINE_EXCEEDED,
    Cancelled,
    CharoniaError,
    DeadlineExceeded,
    ErrorCode,
    InternalError,
    InvalidArgument,
    InvalidRecord,
    NotFound,
)
from charonia.eventlog.port import Jobs
from charonia.facts.jobs import Ahead, JobRecord, JobState
from charonia.inference import InferenceRequest
from charonia.wire import ResponseRecord, unpack_response
from gateway.requests.delivery import Caller, DeliveryOptions, JobFilter, JobTimings, JobView

_CURSOR = re.compile(r"([ae]):([0-9]{1,19}):([0-9a-f]{0,32}):(.*)", re.DOTALL)
_MAX_CURSOR = 2048


@dataclass(frozen=True, slots=True)
class Outlook:
    """The position of an active job, from 1 in `total` (0 once it runs), its expected end, and why it waits."""

    position: int = 0
    total: int = 0
    eta_s: float | None = None
    wait_reason: str = ""


def job_view(record: JobRecord, outlook: Outlook, now_us: int) -> JobView:
    """The view of a record. Without its events, the first batch and the error are unknown."""
    about = record.about
    failed = record.state.terminal and record.state is not JobState.SUCCEEDED
    return JobView(
        id=record.public_id,
        model=record.model,
        version=_number(about.get("version")),
        state=record.state,
        attempts=record.attempts,
        timings=_timings(record, now_us),
        position=outlook.position,
        total=outlook.total,
        eta_s=outlook.eta_s,
        wait_reason=outlook.wait_reason,
        error=end_error(record).message if failed and record.events else "",
        durability=record.durability,
        tenant=record.tenant,
        client_id=_text(about.get("client_id")),
        has_result=record.result_size_bytes > 0,
        expires_us=record.ended_us + record.retention_s * 1_000_000 if record.state.terminal else 0,
        form=about["form"] if isinstance(about.get("form"), dict) else {},
        decoupled=about.get("decoupled") is True,
    )


def _timings(record: JobRecord, now_us: int) -> JobTimings:
    batched_us = next((event.time_us for event in record.events if event.kind == "batched"), 0)
    until_us = record.ended_us or now_us
    queue_us = max(0, (batched_us or until_us) - record.accepted_us)
    execute_us = max(0, until_us - batched_us) if batched_us else 0
    return JobTimings(record.accepted_us, batched_us, record.ended_us, queue_us / 1e6, execute_us / 1e6)


def running_reason(record: JobRecord) -> str:
    """Why a running job has not ended yet."""
    return "it runs" if record.attempts <= 1 else f"it runs, attempt {record.attempts}"


def wait_reason(served: ServedVersion | None, record: JobRecord, ahead: Ahead, *, paused: bool, decided: bool) -> str:
    """Why a queued job has not begun yet. `decided`: a running batcher owns its model."""
    if served is None:
        return f"model '{record.model}' has no version {_number(record.about.get('version'))} loaded"
    if not served.slots:
        return f"no executor serves model '{record.model}' at the moment"
    if not decided:
        return f"no batcher decides about model '{record.model}' at the moment"
    if paused:
        return f"the queue of model '{record.model}' is paused"
    calls = f"up to {_counted(ahead.calls, 'call')}" if ahead.calls else ""
    if not ahead.jobs:
        return f"queued behind {calls}" if calls else "it is next"
    parts = [f"{ahead.higher} at a higher priority"] if ahead.higher else []
    if ahead.turns:
        parts.append(f"{ahead.turns} in the turns of other tenants")
    of_them = f", {' and '.join(parts)}" if parts else ""
    return f"queued behind {_counted(ahead.jobs, 'job')}{of_them}{f', and {calls}' if calls else ''}"


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def visible(record: JobRecord, caller: Caller) -> bool:
    return not caller.scoped or record.tenant == caller.tenant


def matches(record: JobRecord, which: JobFilter, caller: Caller) -> bool:
    return (
        visible(record, caller)
        and which.state in (None, record.state)
        and (not which.tenant or record.tenant == which.tenant)
    )


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a list continues: among the ended or active jobs of `model`, after (`time_us`, `job_id`) if set."""

    ended: bool = False
    model: str = ""
    time_us: int = 0
    job_id: bytes = b""

    @property
    def after(self) -> tuple[int, bytes] | None:
        return (self.time_us, self.job_id) if self.job_id else None

    def text(self) -> str:
        plain = f"{'e' if self.ended else 'a'}:{self.time_us}:{self.job_id.hex()}:{self.model}"
        return base64.urlsafe_b64encode(plain.encode()).decode().rstrip("=")

    @staticmethod
    def parse(text: str) -> Cursor:
        """The cursor of a text. Raises `InvalidArgument`."""
        try:
            if len(text) > _MAX_CURSOR or not text.isascii():
                raise ValueError(text)
            plain = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True).decode()
            match = _CURSOR.fullmatch(plain)
            if match is None or len(match[3]) not in (0, 32):
                raise ValueError(text)
        except (ValueError, binascii.Error):
            raise InvalidArgument("the cursor is none that a list of jobs gave") from None
        return Cursor(match[1] == "e", match[4], int(match[2]), bytes.fromhex(match[3]))


def about_of(
    request: InferenceRequest, served: ServedVersion, options: DeliveryOptions, endpoint: bytes
) -> dict[str, Any]:
    """The part of a call that its job's record keeps."""
    about: dict[str, Any] = {"version": served.version}
    if endpoint:
        about["endpoint"] = endpoint.decode()
    if request.id:
        about["client_id"] = request.id
    if request.outputs:
        about["outputs"] = list(request.outputs)
    if request.deadline_ns:
        about["deadline_us"] = request.deadline_ns // 1000
    if served.interface.decoupled:
        about["decoupled"] = True
    if options.on_disconnect:
        about["on_disconnect"] = options.on_disconnect
    if options.webhook is not None:
        about["webhook"] = {"url": options.webhook.url, "events": list(options.webhook.events)}
        if request.trace is not None and (carrier := request.trace.context.carrier()):
            about["webhook"]["trace"] = carrier
    if options.form:
        about["form"] = dict(options.form)
    return about


def _number(value: Any) -> int:
    return value if type(value) is int else 0


def _text(value: Any) -> str:
    return value if type(value) is str else ""


RESULT_NOT_KEPT = "the result of this job is not kept any more"


async def outcome_of(log: Jobs, record: JobRecord) -> ResponseRecord | None:
    """The answer of a job, by its record with events; a failed one's `error` is set. None while it has not ended.

    Raises `NotFound` if its result is not kept any more.
    """
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
                answer.error = end_error(
                    record
                )  # a waiting caller gets only the code (G26), a later one the message too
            return answer
    if record.state is JobState.SUCCEEDED:
        raise NotFound(RESULT_NOT_KEPT)
    return ResponseRecord(record.id, record.model, 0, [], {}, end_error(record))


def end_error(record: JobRecord) -> CharoniaError:
    """The error of a job that did not succeed, from its last event: `error` is the text, `code` the code's name."""
    detail = record.events[-1].detail if record.events else {}
    text = detail.get("error")
    message = text if isinstance(text, str) and text else ""
    if record.state is JobState.CANCELLED:
        return Cancelled(message or CANCELLED)
    if record.state is JobState.EXPIRED:
        return DeadlineExceeded(message or DEADLINE_EXCEEDED)
    code = ErrorCode.__members__.get(str(detail.get("code")), ErrorCode.INTERNAL)
    return CharoniaError.of(code, message or "the request failed, its error is not kept")
