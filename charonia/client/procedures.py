"""What a client does, step by step, written once for blocking and asynchronous callers. Pure.

A procedure is a generator: it yields steps, which its driver carries out (`clients`), and gets their outcome back, or
their error raised. Which bytes a step sends is the form's, `http_form` or `grpc_form`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from charonia.errors import (
    DEADLINE_EXCEEDED,
    CharoniaError,
    DeadlineExceeded,
    NotFound,
    PermissionDenied,
    StreamInterrupted,
    Unauthenticated,
    Unavailable,
    UnknownError,
    Unsupported,
)

from .backoff import RetryPolicy
from .results import (
    EMPTY_FINAL,
    FINAL,
    OVER,
    ConnectionLost,
    Incomprehensible,
    Inference,
    JobEvent,
    JobNotEnded,
    JobStatus,
    OnlyCharonia,
    Result,
)

T = TypeVar("T")

MAX_WAIT_S = 30.0
"""How long one request waits for a job's end; the server holds it for up to 60 s."""
_WAIT_MARGIN_S = 10.0
_SILENCE_S = 60.0
"""After so long without a word a stream is opened again, behind what was seen."""
_CANCEL_WITHIN_S = 5.0
_NO_JOB = "charonia-client-asks-whether-there-are-jobs"
_JOB_NOT_FOUND = "job not found"
"""How Charonia answers for a job that is not there; other servers know no jobs and have other words."""

BINARY = "binary_tensor_data"


@dataclass(frozen=True, slots=True)
class Exchange(Generic[T]):
    """One request, in its transport's form, and how its answer is read. `read` raises the error an answer is."""

    call: Any
    read: Callable[[Any], T]


@dataclass(frozen=True, slots=True)
class Ask:
    """Step: send and get the answer."""

    exchange: Exchange[Any]
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class Open:
    """Step: begin to read a stream, instead of one that is open. `read` is called with each of its elements.

    `timeout_s` bounds each silence of it, `left_s` the whole.
    """

    exchange: Exchange[Any]
    timeout_s: float | None
    left_s: float | None


@dataclass(frozen=True, slots=True)
class Next:
    """Step: the next element of the open stream, None at its end."""


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


@dataclass(frozen=True, slots=True)
class Give:
    """Step: hand this to the caller."""

    value: Any


Step = Ask | Open | Next | Pause | Give
Procedure = Generator[Step, Any, T]


def next_given(reading: Procedure[None]) -> Procedure[Any]:
    """The next value that a procedure gives, its other steps passed on; None at its end."""
    outcome: Any = None
    error: CharoniaError | None = None
    while True:
        try:
            step = reading.send(outcome) if error is None else reading.throw(error)
        except StopIteration:
            return None
        if isinstance(step, Give):
            return step.value
        outcome, error = None, None
        try:
            outcome = yield step
        except CharoniaError as raised:
            error = raised


class Form(Protocol):
    """A protocol's requests and answers. `left_s` is what is left of the caller's time, None without a deadline."""

    binary: bool
    """Whether the server takes tensors in binary; set once its metadata is known, unless `always_binary`."""
    always_binary: bool
    beats: bool
    """Whether a stream that is silent for `_SILENCE_S` is broken: the server writes a comment every 15 s (HTTP)."""

    def live(self) -> Exchange[bool]: ...
    def ready(self, model: str, version: str) -> Exchange[bool]: ...
    def metadata(self, model: str, version: str) -> Exchange[dict[str, Any]]: ...
    def config(self, model: str, version: str) -> Exchange[dict[str, Any]]: ...
    def index(self) -> Exchange[list[dict[str, Any]]]: ...
    def statistics(self, model: str, version: str) -> Exchange[list[dict[str, Any]]]: ...
    def infer(self, inference: Inference, left_s: float | None) -> Exchange[Result]: ...
    def submit(self, inference: Inference, left_s: float | None) -> Exchange[JobStatus]: ...
    def stream(self, inference: Inference, left_s: float | None) -> Exchange[Result | None]: ...
    def job(self, job_id: str) -> Exchange[JobStatus]: ...
    def cancel(self, job_id: str) -> Exchange[JobStatus]: ...
    def results(self, job_id: str, wait_s: float) -> Exchange[JobStatus | list[Result]]: ...
    def events(self, job_id: str, place: str) -> Exchange[JobEvent | None]: ...
    def responses(self, job_id: str, place: str) -> Exchange[JobEvent | None]: ...
    def register(self, region: str, key: str, size_bytes: int) -> Exchange[object]: ...
    def unregister(self, region: str) -> Exchange[object]: ...
    def probe(self, job_id: str) -> Exchange[object]: ...


@dataclass(slots=True)
class Followed:
    """The job behind a stream, for the driver: to be cancelled when its caller leaves before its end."""

    job_id: str = ""
    ended: bool = False


class Procedures:
    """Those of one client. `clock` is monotonic, in seconds; `chance` uniform in [0, 1); `new_key` an unused key."""

    def __init__(
        self,
        form: Form,
        policy: RetryPolicy,
        clock: Callable[[], float],
        chance: Callable[[], float],
        new_key: Callable[[], str],
    ) -> None:
        self._form = form
        self._policy = policy
        self._clock = clock
        self._chance = chance
        self._new_key = new_key
        self._has_jobs: bool | None = None
        self._knows_form = form.always_binary

    # -- questions that change nothing ---------------------------------------------------------------------------------

    def question(self, exchange: Exchange[T], timeout_s: float | None) -> Procedure[T]:
        """Ask, again after a lost connection."""
        return (yield from self._ask(lambda _left_s: exchange, self._deadline(timeout_s), repeatable=True))

    def once(self, exchange: Exchange[T], timeout_s: float | None) -> Procedure[T]:
        """Ask for a change: again only where it cannot have been made."""
        return (yield from self._ask(lambda _left_s: exchange, self._deadline(timeout_s), repeatable=False))

    # -- inference -----------------------------------------------------------------------------------------------------

    def infer(self, inference: Inference, timeout_s: float | None) -> Procedure[Result]:
        """The answer. Raises `OnlyCharonia` for an idempotency key that the server would not honour."""
        deadline = self._deadline(timeout_s)
        yield from self._learn_form(deadline)
        if inference.key:
            yield from self._require_jobs("an idempotency key", deadline)
        return (yield from self._ask(lambda left: self._form.infer(inference, left), deadline, bool(inference.key)))

    def submit(self, inference: Inference, timeout_s: float | None) -> Procedure[JobStatus]:
        """The new job. It has a key in any case, so that a submission whose receipt was lost can be repeated."""
        deadline = self._deadline(timeout_s)
        yield from self._require_jobs("a job", deadline)
        keyed = inference if inference.key else replace(inference, key=self._new_key())
        return (yield from self._ask(lambda left: self._form.submit(keyed, left), deadline, repeatable=True))

    def stream(
        self, inference: Inference, timeout_s: float | None, followed: Followed, resume: bool | None
    ) -> Procedure[None]:
        """Give the responses of the model. They come from a job, which is resumed, unless `resume` is False, or it is
        None and the server has no jobs.

        The flag that ends them without a response is given where the inference asks for it, as a result of its own."""
        deadline = self._deadline(timeout_s)
        if resume or inference.key:
            yield from self._require_jobs("a stream that resumes", deadline)
        elif resume is False or not (yield from self._find_jobs(deadline)):
            yield from self._plain_stream(inference, deadline)
            return
        parameters = dict(inference.parameters)
        flag = None
        if parameters.pop(EMPTY_FINAL, False):  # not said of the job: over HTTP no request may have it
            flag = Result(inference.model, inference.version, inference.request_id, {}, {FINAL: True})
        job = yield from self.submit(replace(inference, parameters=parameters), self._left(deadline))
        if not inference.key:  # else its caller may come back for it, here or elsewhere
            followed.job_id = job.id
        yield from self._follow(job.id, deadline, followed, flag)

    def _plain_stream(self, inference: Inference, deadline: float | None) -> Procedure[None]:
        """Repeated only as long as there was no response, and nothing can have been executed."""
        failed, seen = 0, False
        while True:
            try:
                left = self._left(deadline)
                yield Open(self._form.stream(inference, left), left, left)
                while (result := (yield Next())) is not None:
                    seen = True
                    yield Give(result)
                return
            except CharoniaError as error:
                failed += 1
                if seen:
                    raise
                yield from self._pause(error, failed, deadline, repeatable=False)

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def job(self, job_id: str, timeout_s: float | None) -> Procedure[JobStatus]:
        return (yield from self._about_job(lambda _left: self._form.job(job_id), timeout_s))

    def cancel(self, job_id: str, timeout_s: float | None) -> Procedure[JobStatus]:
        return (yield from self._about_job(lambda _left: self._form.cancel(job_id), timeout_s))

    def abandon(self, job_id: str) -> Procedure[None]:
        """Cancel the job of a stream that its reader left; a failure is not reported, its deadline still holds."""
        try:
            yield Ask(self._form.cancel(job_id), _CANCEL_WITHIN_S)
        except CharoniaError:
            pass

    def results(self, job_id: str, timeout_s: float | None) -> Procedure[list[Result]]:
        """The responses of an ended job, one unless its model answers otherwise. Raises the job's error, and
        `JobNotEnded` when `timeout_s` are over: 0 asks once."""
        yield from self._require_jobs("a job", self._deadline(timeout_s) if timeout_s else None)
        deadline = self._deadline(timeout_s)
        while True:
            left = MAX_WAIT_S if deadline is None else max(0.0, deadline - self._clock())
            wait_s = min(left, MAX_WAIT_S)
            exchange = self._form.results(job_id, wait_s)
            answer = yield from self._ask(lambda _: exchange, None, repeatable=True, call_s=wait_s + _WAIT_MARGIN_S)  # noqa: B023
            if not isinstance(answer, JobStatus):
                return answer
            if deadline is not None and self._clock() >= deadline:
                raise JobNotEnded(f"job '{job_id}' has not ended: it is {answer.state}", answer)

    def result(self, job_id: str, timeout_s: float | None) -> Procedure[Result]:
        """The one response of an ended job. Raises also `Unsupported` where its model gave none, or several."""
        found = yield from self.results(job_id, timeout_s)
        if len(found) != 1:
            raise Unsupported(f"job '{job_id}' has {len(found)} responses: read them with results()")
        return found[0]

    def events(self, job_id: str, place: str, timeout_s: float | None) -> Procedure[None]:
        """Give the events behind `place`, up to the job's end."""
        deadline = self._deadline(timeout_s)
        yield from self._require_jobs("the events of a job", deadline)
        reading = self._resumed(lambda at: self._form.events(job_id, at), place, deadline)
        while (event := (yield from next_given(reading))) is not None:
            if event.kind == OVER:
                return
            yield Give(event)
            if event.ends:
                return

    def responses(self, job_id: str, timeout_s: float | None) -> Procedure[None]:
        """Give the responses of a job as they come."""
        deadline = self._deadline(timeout_s)
        yield from self._require_jobs("the responses of a job", deadline)
        yield from self._follow(job_id, deadline, Followed(job_id))

    def _follow(
        self, job_id: str, deadline: float | None, followed: Followed, flag: Result | None = None
    ) -> Procedure[None]:
        """Give the responses of a job; `flag` where they end without one."""
        reading = self._resumed(lambda at: self._form.responses(job_id, at), "", deadline)
        given = 0
        while (event := (yield from next_given(reading))) is not None:
            if event.error:
                raise UnknownError(event.error)
            if event.response is not None:
                given += 1
                yield Give(event.response)
            elif event.final and flag is not None:
                yield Give(flag)
            if event.final or (event.ends and event.kind == "succeeded" and given):
                followed.ended = True
                return
            if event.ends or event.kind == OVER:
                break
        # Without a response among its events the job is one of a model that answers once, or it has failed.
        followed.ended = True
        for result in (yield from self.results(job_id, self._left(deadline)))[given:]:
            yield Give(result)

    def _resumed(
        self, exchange: Callable[[str], Exchange[JobEvent | None]], place: str, deadline: float | None
    ) -> Procedure[None]:
        """Give what happens to a job behind `place`, over as many connections as it takes."""
        failed = 0
        while True:
            try:
                left = self._left(deadline)
                yield Open(exchange(place), _SILENCE_S if left is None else min(left, _SILENCE_S), left)
                while (event := (yield Next())) is not None:
                    failed, place = 0, event.place or place
                    yield Give(event)
                raise ConnectionLost("the stream ended before the job")
            except StreamInterrupted:
                raise
            except CharoniaError as error:
                if isinstance(error, DeadlineExceeded) and not self._is_over(deadline):
                    if not self._form.beats:
                        continue
                    error = ConnectionLost("the stream was silent for too long")
                failed += 1
                yield from self._pause(error, failed, deadline, repeatable=True)

    # -- what the server is --------------------------------------------------------------------------------------------

    def _about_job(self, exchange: Callable[[float | None], Exchange[T]], timeout_s: float | None) -> Procedure[T]:
        deadline = self._deadline(timeout_s)
        yield from self._require_jobs("a job", deadline)
        return (yield from self._ask(exchange, deadline, repeatable=True))

    def _require_jobs(self, what: str, deadline: float | None) -> Procedure[None]:
        if not (yield from self._find_jobs(deadline)):
            raise OnlyCharonia(f"only Charonia has jobs, and this is another server: it cannot serve {what}")

    def _find_jobs(self, deadline: float | None) -> Procedure[bool]:
        """Whether the server is Charonia. It says so by its words for a job that is not there."""
        if self._has_jobs is None:
            try:
                yield from self._ask(lambda _left: self._form.probe(_NO_JOB), deadline, repeatable=True)
            except NotFound as error:
                self._has_jobs = error.message == _JOB_NOT_FOUND
            except (Unavailable, DeadlineExceeded, Unauthenticated, PermissionDenied):
                raise
            except CharoniaError:
                self._has_jobs = False
            else:
                self._has_jobs = False
        return self._has_jobs

    def _learn_form(self, deadline: float | None) -> Procedure[None]:
        """Find out whether the server takes binary tensors; one whose metadata are not for us is taken to."""
        if self._knows_form:
            return
        try:
            metadata = yield from self._ask(lambda _left: self._form.metadata("", ""), deadline, repeatable=True)
            self._form.binary = BINARY in metadata.get("extensions", ())
        except (NotFound, Unsupported, Incomprehensible, UnknownError):
            self._form.binary = False
        except (Unauthenticated, PermissionDenied):
            self._form.binary = True
        self._knows_form = True

    # -- calls and pauses ----------------------------------------------------------------------------------------------

    def _ask(
        self,
        exchange: Callable[[float | None], Exchange[T]],
        deadline: float | None,
        repeatable: bool,
        call_s: float | None = None,
    ) -> Procedure[T]:
        failed = 0
        while True:
            left = self._left(deadline)
            try:
                answer: T = yield Ask(exchange(left), call_s or left)
                return answer
            except CharoniaError as error:
                failed += 1
                yield from self._pause(error, failed, deadline, repeatable)

    def _pause(self, error: CharoniaError, failed: int, deadline: float | None, repeatable: bool) -> Procedure[None]:
        """Wait for the next attempt. Raises `error` where there is none, or its time would be over."""
        pause_s = self._policy.pause_s(error, failed, repeatable=repeatable, chance=self._chance())
        if pause_s is None or (deadline is not None and self._clock() + pause_s >= deadline):
            raise error
        yield Pause(pause_s)

    def _deadline(self, timeout_s: float | None) -> float | None:
        return None if timeout_s is None else self._clock() + timeout_s

    def _left(self, deadline: float | None) -> float | None:
        """Seconds left. Raises `DeadlineExceeded` for none."""
        if deadline is None:
            return None
        left = deadline - self._clock()
        if left <= 0:
            raise DeadlineExceeded(DEADLINE_EXCEEDED)
        return left

    def _is_over(self, deadline: float | None) -> bool:
        return deadline is not None and self._clock() >= deadline
