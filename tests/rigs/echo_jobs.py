"""Jobs of the handler for the fronts' tests: tasks that run its `infer`, numbered in the order of their coming."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from charonia.errors import Cancelled, CharoniaError, InvalidArgument, KeyReused, NotFound
from charonia.facts.jobs import JobEvent, JobState, public_id
from charonia.inference import InferenceRequest, InferenceResponse
from gateway.requests.delivery import (
    ANYONE,
    JOB_NOT_FOUND,
    Caller,
    DeliveryOptions,
    JobFilter,
    JobPage,
    JobReceipt,
    JobTimings,
    JobView,
)


class _Job:
    def __init__(
        self,
        job_id: str,
        request: InferenceRequest,
        options: DeliveryOptions,
        task: asyncio.Future[InferenceResponse | CharoniaError],
    ) -> None:
        self.id = job_id
        self.request = request
        self.options = options
        self.task = task
        self.state = JobState.QUEUED
        self.events = [JobEvent(1, "accepted", 1000, {})]
        self.changed = asyncio.Event()

    def happened(self, kind: str, state: JobState, detail: dict[str, object]) -> None:
        self.state = state
        self.events.append(JobEvent(len(self.events) + 1, kind, 1000 * (len(self.events) + 1), detail))
        self.changed.set()

    def view(self) -> JobView:
        ended = self.state.terminal
        error = str(self.events[-1].detail.get("error", ""))
        return JobView(
            self.id, self.request.model, 1, self.state, 1, JobTimings(1000, 2000, 3000 if ended else 0, 0.001, 0.001),
            0 if ended else 1, 0 if ended else 1, None, "" if ended else "it runs", error, "memory",
            self.options.caller.tenant, self.request.id, self.state is JobState.SUCCEEDED, 9000 if ended else 0,
            self.options.form, decoupled=self.request.model == "stream",
        )  # fmt: skip


class EchoJobs:
    """The part of a `Handler` that is about jobs, and its `JobCalls`. `refusal` is raised by submissions."""

    def __init__(self) -> None:
        self.refusal: CharoniaError | None = None
        self.waits_s: list[float] = []
        self.filters: list[JobFilter] = []
        self.followers_closed = 0
        self._jobs: dict[str, _Job] = {}
        self._keys: dict[str, str] = {}
        self.jobs = self.queries = self

    async def infer(self, request: InferenceRequest, *, options: DeliveryOptions | None = None) -> InferenceResponse:
        raise NotImplementedError

    async def submit_job(self, request: InferenceRequest, options: DeliveryOptions) -> JobReceipt:
        if self.refusal is not None:
            raise self.refusal
        known = self._keys.get(options.idempotency_key) if options.idempotency_key else None
        if known is None:
            number = len(self._jobs) + 1
            known = public_id(request.model, number.to_bytes(16, "big"))
            self._jobs[known] = _Job(known, request, options, asyncio.ensure_future(self._run(known, request, options)))
            self._keys[options.idempotency_key] = known
            created = True
        else:
            created = False
            if [t.data for t in self._jobs[known].request.inputs] != [t.data for t in request.inputs]:
                raise KeyReused("the key was used for another request")
        job = self._jobs[known]
        active = [j for j in self._jobs.values() if not j.state.terminal]
        position = active.index(job) + 1 if job in active else 0
        return JobReceipt(
            known, request.model, created, 1000, options.durability or "memory", position, len(active), 0.5
        )

    async def _run(
        self, job_id: str, request: InferenceRequest, options: DeliveryOptions
    ) -> InferenceResponse | CharoniaError:
        await asyncio.sleep(0)
        job = self._jobs[job_id]
        job.happened("batched", JobState.RUNNING, {"executor": "e1", "raw": b"\xff"})
        try:
            response = await self.infer(request, options=options)
        except CharoniaError as error:
            job.happened("failed", JobState.FAILED, {"error": error.message})
            return error
        except asyncio.CancelledError:
            job.happened("cancelled", JobState.CANCELLED, {})
            return Cancelled("the job was cancelled")
        job.happened("succeeded", JobState.SUCCEEDED, {})
        return response

    def _job(self, job_id: str, caller: Caller) -> _Job:
        job = self._jobs.get(job_id)
        if job is None or (caller.scoped and job.options.caller.tenant != caller.tenant):
            raise NotFound(JOB_NOT_FOUND)
        return job

    async def view(self, job_id: str, caller: Caller = ANYONE) -> JobView:
        return self._job(job_id, caller).view()

    async def wait(self, job_id: str, caller: Caller, wait_s: float) -> None:
        self.waits_s.append(wait_s)
        await asyncio.wait({self._job(job_id, caller).task}, timeout=wait_s)

    async def result(
        self, job_id: str, caller: Caller = ANYONE, wait_s: float = 0.0
    ) -> tuple[JobView, list[InferenceResponse] | None]:
        job = self._job(job_id, caller)
        if wait_s:
            self.waits_s.append(wait_s)
        done, _ = await asyncio.wait({job.task}, timeout=wait_s)
        if not done:
            return job.view(), None
        outcome = job.task.result()
        if isinstance(outcome, CharoniaError):
            raise outcome
        return job.view(), [outcome]

    async def single(
        self, job_id: str, caller: Caller = ANYONE, wait_s: float = 0.0
    ) -> tuple[JobView, InferenceResponse | None]:
        view, responses = await self.result(job_id, caller, wait_s)
        return view, responses[0] if responses else None

    async def responses(
        self, job_id: str, caller: Caller = ANYONE, after_index: int = -1
    ) -> AsyncGenerator[InferenceResponse]:
        outcome = await asyncio.shield(self._job(job_id, caller).task)
        if isinstance(outcome, CharoniaError):
            raise outcome
        if after_index < 0:
            yield outcome

    async def events(
        self, job_id: str, caller: Caller = ANYONE, after_number: int = 0, after_index: int = -1
    ) -> AsyncGenerator[JobEvent]:
        job = self._job(job_id, caller)

        async def follow() -> AsyncGenerator[JobEvent]:
            at = after_number
            try:
                while True:
                    for event in job.events[at:]:
                        at = event.number
                        yield event
                    if at < len(job.events):
                        continue
                    if job.state.terminal:
                        return
                    job.changed.clear()
                    await job.changed.wait()
            finally:
                self.followers_closed += 1

        return follow()

    async def timeline(self, job_id: str, caller: Caller = ANYONE) -> tuple[JobView, tuple[JobEvent, ...]]:
        job = self._job(job_id, caller)
        return job.view(), tuple(job.events)

    async def cancel(self, job_id: str, caller: Caller = ANYONE) -> JobView:
        job = self._job(job_id, caller)
        await asyncio.sleep(0)  # a task that has not begun would end without a word
        job.task.cancel()
        await asyncio.wait({job.task})
        return job.view()

    async def cancel_all(self, which: JobFilter, caller: Caller = ANYONE) -> int:
        self.filters.append(which)
        wanted = [job for job in self._matching(which, caller) if not job.state.terminal]
        for job in wanted:
            await self.cancel(job.id, caller)
        return len(wanted)

    async def page(self, which: JobFilter, caller: Caller = ANYONE, *, cursor: str = "", limit: int = 100) -> JobPage:
        self.filters.append(which)
        if not 1 <= limit <= 1000:
            raise InvalidArgument("limit must be 1 to 1000")
        jobs = self._matching(which, caller)
        at = int(cursor or 0)
        more = str(at + limit) if at + limit < len(jobs) else ""
        return JobPage(tuple(job.view() for job in jobs[at : at + limit]), more)

    def _matching(self, which: JobFilter, caller: Caller) -> list[_Job]:
        return [
            job
            for job in self._jobs.values()
            if which.model in ("", job.request.model)
            and which.state in (None, job.state)
            and (not caller.scoped or job.options.caller.tenant == caller.tenant)
        ]
