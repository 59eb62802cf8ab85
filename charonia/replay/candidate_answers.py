"""Asks a candidate version recorded requests: lines side by side, those of a line in order, at a bounded rate."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from charonia.errors import CharoniaError, ErrorCode, InvalidRecord
from charonia.inference import wanted_outputs
from charonia.releases.answer_differences import Answer, Comparison, Tolerance, compared
from charonia.wire import ResponseRecord
from charonia.wire.recorded_calls import REPLAY_PRIORITY, RecordedCall, unpack_recorded_call

from .difference_report import DifferenceReport
from .replay_lines import EXPIRED, Line, Recorded
from .replay_options import Target

if TYPE_CHECKING:
    from charonia.client import AsyncClient

_LARGE_BYTES = 65_536
"""Larger answers are compared in a thread."""
_GIVE_UP_AFTER = 10
"""So many requests in a row without an answer: there is no candidate to ask."""
NO_ANSWERS = "not asked: the candidate did not answer the requests before"
INTERRUPTED = "not answered: the replay was interrupted"

NOT_THE_MODELS = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.RESOURCE_EXHAUSTED, ErrorCode.DEADLINE_EXCEEDED})
"""Errors of servers that cannot be reached or have too much to do, which say nothing about a model."""
_NOT_ALLOWED = frozenset({ErrorCode.UNAUTHENTICATED, ErrorCode.PERMISSION_DENIED})

Fetch = Callable[[Recorded], Awaitable[bytes | None]]
"""The bytes of a recording; None if it has expired."""
OfJob = Callable[[bytes], Awaitable[Sequence[ResponseRecord] | str]]
"""The responses of the job with an id; or why there are none to compare with, in words."""


@dataclass(frozen=True, slots=True)
class Pace:
    """`concurrency` lines at a time; `rate` requests a second at most, 0 for no bound."""

    concurrency: int
    rate: float = 0.0


class CandidateAnswers:
    """The answers of one candidate."""

    def __init__(self, client: AsyncClient, target: Target, timeout_s: float, *, decoupled: bool) -> None:
        self._client = client
        self._target = target
        self._timeout_s = timeout_s
        self._decoupled = decoupled

    async def ask(self, call: RecordedCall) -> list[Answer]:
        """The responses to a request, an error among them. Raises the error that says nothing about the candidate."""
        inputs = {tensor.name: tensor.array() for tensor in call.inputs}
        options: Any = {
            "version": self._target.version,
            "outputs": call.outputs,
            "request_id": call.client_id,
            "priority": REPLAY_PRIORITY,
            "timeout_s": self._timeout_s,
            "parameters": _parameters(call),
        }
        answers: list[Answer] = []
        try:
            if not self._decoupled:
                result = await self._client.infer(self._target.model, inputs, **options)
                return [Answer(list(result.tensors.values()))]
            # over HTTP responses come from a job; gRPC has streams of its own
            resume = False if self._client.is_grpc else None
            stream = self._client.stream(self._target.model, inputs, resume=resume, **options)
            async with contextlib.aclosing(stream) as results:
                async for result in results:
                    answers.append(Answer(list(result.tensors.values())))
        except CharoniaError as error:
            if error.code in NOT_THE_MODELS or error.code in _NOT_ALLOWED:
                raise
            answers.append(Answer(error=error))
        return answers


def _parameters(call: RecordedCall) -> Mapping[str, str | int | bool | float]:
    parameters = dict(call.parameters or {})
    if call.sequence is not None:
        parameters["sequence_id"] = call.sequence.id
        parameters["sequence_start"] = call.sequence.start
        parameters["sequence_end"] = call.sequence.end
    return parameters


class _Turns:
    """When the next request may be sent."""

    def __init__(self, rate: float) -> None:
        self._interval_s = 1.0 / rate if rate else 0.0
        self._next_s = 0.0

    async def turn(self) -> None:
        if not self._interval_s:
            return
        now_s = asyncio.get_running_loop().time()
        at_s = max(now_s, self._next_s)
        self._next_s = at_s + self._interval_s
        await asyncio.sleep(at_s - now_s)


class Replay:
    """One run over lines; its outcomes are in `report`."""

    def __init__(
        self,
        ask: Callable[[RecordedCall], Awaitable[Sequence[Answer]]],
        fetch: Fetch,
        report: DifferenceReport,
        tolerances: Mapping[str, Tolerance],
        on_done: Callable[[], None] = lambda: None,
        *,
        of_job: OfJob,
    ) -> None:
        """`ask` is `CandidateAnswers.ask`; `on_done` is called after each request."""
        self._of_job = of_job
        self._ask = ask
        self._fetch = fetch
        self._report = report
        self._tolerances = tolerances
        self._on_done = on_done
        self._unanswered = 0
        """In a row."""
        self._done: set[bytes] = set()

    async def run(self, lines: Sequence[Line], pace: Pace) -> None:
        """Ask all requests. Raises what the log raises, and the error of a caller that the server does not let in."""
        turns = _Turns(pace.rate)
        waiting = iter(lines)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(pace.concurrency, len(lines))):
                    group.create_task(self._work(waiting, turns))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _work(self, waiting: Iterator[Line], turns: _Turns) -> None:
        for line in waiting:
            gap = ""
            for one in line:
                if one.sequence is not None and one.sequence.start:
                    gap = ""
                if self._unanswered >= _GIVE_UP_AFTER:
                    self._report.unanswered(one, NO_ANSWERS)
                elif gap:
                    self._report.unanswered(one, gap)
                else:
                    await turns.turn()
                    gap = await self._replay(one)
                self._done.add(one.id)
                self._on_done()

    def interrupted(self, lines: Sequence[Line]) -> None:
        """Count the requests that had no outcome when `run` was cancelled."""
        for line in lines:
            for one in line:
                if one.id not in self._done:
                    self._report.unanswered(one, INTERRUPTED)

    async def _replay(self, one: Recorded) -> str:
        """Ask one request; returns why those behind it in its sequence cannot be asked, "" if they can."""
        record = await self._fetch(one)
        if record is None:
            self._report.unreplayable(one, EXPIRED)
            return f"behind a request whose recording has expired ({one.name})"
        try:
            call = unpack_recorded_call(record)
        except InvalidRecord as error:
            self._report.unreplayable(one, f"its recording cannot be read: {error}")
            return f"behind a request whose recording cannot be read ({one.name})"
        responses = call.responses
        if call.job:
            of_job = await self._of_job(call.job)
            if isinstance(of_job, str):
                self._report.unreplayable(one, of_job)
                return f"behind a request without a recorded answer ({one.name})"
            responses = [replace(of, outputs=wanted_outputs(of.outputs, call.outputs)) for of in of_job]
        try:
            given = await self._ask(call)
        except CharoniaError as error:
            if error.code in _NOT_ALLOWED:
                raise
            self._unanswered += 1
            self._report.unanswered(one, error.message)
            return f"behind a request without an answer ({one.name})"
        self._unanswered = 0
        self._report.add(one, await self._compared(responses, len(record), given))
        return ""

    async def _compared(
        self, responses: Sequence[ResponseRecord], size_bytes: int, given: Sequence[Answer]
    ) -> list[Comparison]:
        recorded: list[Answer] = []
        for response in responses:
            recorded.append(Answer(response.outputs, response.error))
            if response.error is not None:
                break  # the client reads no further
        if size_bytes > _LARGE_BYTES:
            return await asyncio.to_thread(compared, recorded, given, self._tolerances)
        return compared(recorded, given, self._tolerances)
