"""One line of a batch: what is tried again, what is its answer, and when it stops."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import text_handler

from charonia.datatypes import DataType
from charonia.errors import (
    Cancelled,
    InternalError,
    InvalidArgument,
    KeyReused,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from charonia.facts.jobs import JobState
from charonia.inference import LOWEST_PRIORITY, InferenceRequest, InferenceResponse
from charonia.models.interface import ModelInterface, TensorSpec
from charonia.options.settings import GatewaySettings, OpenAiSettings
from charonia.tensors import Tensor
from gateway.openai.openai_application import OpenAiInterface
from gateway.openai.shapes.api_errors import ApiError
from gateway.openai.stored import line_calls
from gateway.openai.stored.batch_facts import BatchState, Counts
from gateway.openai.stored.batch_lines import BatchLine
from gateway.openai.stored.batch_runs import BatchRun
from gateway.openai.stored.line_calls import ModelLines
from gateway.requests.delivery import ANYONE, Caller, DeliveryOptions
from gateway.requests.idempotency import request_digest

EXPIRES_S = 2_000_000_000
DEADLINE_NS = (EXPIRES_S + 60) * 1_000_000_000
LINE = BatchLine(3, "id", {"model": "m", "messages": []})


class Handler:
    """Jobs that end as `ends` says, one after the other: responses, or an error and the state of the job."""

    def __init__(self, *ends: Any) -> None:
        self.jobs = self.queries = self
        self.ends = list(ends)
        self.keys: list[str] = []
        self.levels: list[int] = []
        self.deadlines: list[int] = []
        self.refusals: list[Exception] = []
        self.state = JobState.RUNNING

    async def submit_job(self, request: InferenceRequest, options: DeliveryOptions) -> Any:
        if self.refusals:
            raise self.refusals.pop(0)
        self.keys.append(options.idempotency_key)
        self.levels.append(request.priority)
        self.deadlines.append(request.deadline_ns)
        return SimpleNamespace(id=f"job-{len(self.keys)}", created=True)

    async def result(self, job_id: str, caller: Any, wait_s: float) -> Any:
        end = self.ends.pop(0)
        if isinstance(end, tuple):
            self.state = end[1]
            raise end[0]
        return None, end

    async def view(self, job_id: str, caller: Any) -> Any:
        return SimpleNamespace(state=self.state)


class Texts:
    """Reads a body as two requests, and answers with the number of their responses."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.missing = 0
        self.added: list[int] = []

    async def prepare_chat(self, body: dict[str, Any], caller: Caller = ANYONE) -> Any:
        self.bodies.append(body)
        if self.missing:
            self.missing -= 1
            raise ApiError("no such model", status=404, code="model_not_found")
        if body.get("wrong"):
            raise ApiError("wrong", param="wrong")
        self.added.clear()
        usage = {"usage": {"prompt_tokens": 2, "completion_tokens": 3}}
        answer = SimpleNamespace(add=lambda index, _: self.added.append(index), document=lambda: usage)
        return SimpleNamespace(requests=[InferenceRequest("m", 1, []) for _ in range(2)]), answer


def response() -> InferenceResponse:
    return InferenceResponse("m", 1, [], parameters={"a": 1})


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_calls, "_FIRST_PAUSE_S", 0.001)


def run_of() -> BatchRun:
    return BatchRun(BatchState("batch_1", endpoint="/v1/chat/completions", expires_s=EXPIRES_S), 1, ANYONE, Counts())


def lines_of(handler: Handler, texts: Texts) -> ModelLines:
    nothing: Any = None
    made: Any = handler
    read: Any = texts
    return ModelLines(made, read, nothing, nothing)


async def test_each_choice_is_a_job_at_the_lowest_level() -> None:
    handler, texts = Handler([response()], [response()]), Texts()
    result = await lines_of(handler, texts).run(run_of(), LINE)
    assert (result.status, result.usage, result.job_id) == (200, (2, 3), "job-1")
    assert sorted(handler.keys) == ["batch_1:3:0:line", "batch_1:3:1:line"]
    assert set(handler.levels) == {LOWEST_PRIORITY}
    assert set(handler.deadlines) == {DEADLINE_NS}
    assert texts.added == [0, 1]


@pytest.mark.parametrize("given", [{}, {"seed": None}, {"seed": -1}])
async def test_a_line_without_a_seed_has_the_same_one_each_time(given: dict[str, Any]) -> None:
    texts = Texts()
    for _ in range(2):
        line = BatchLine(3, "id", {**LINE.body, **given})
        await lines_of(Handler([response()], [response()]), texts).run(run_of(), line)
    first, second = texts.bodies
    assert first["seed"] == second["seed"] >= 0


async def test_what_the_server_has_no_room_for_is_asked_again() -> None:
    handler = Handler(*[[response()]] * 8)
    handler.refusals = [ResourceExhausted("full"), Unavailable("the log is away")]
    result = await lines_of(handler, Texts()).run(run_of(), LINE)
    assert result.status == 200


async def test_a_model_that_is_not_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = Texts()
    texts.missing = 3
    assert (await lines_of(Handler([response()], [response()]), texts).run(run_of(), LINE)).status == 200
    monkeypatch.setattr(line_calls, "_PATIENCE_S", 0.0)
    texts.missing = 3
    result = await lines_of(Handler(), texts).run(run_of(), LINE)
    assert (result.status, result.body and result.body["error"]["code"]) == (404, "model_not_found")


async def test_a_wrong_body_is_its_line_s_error() -> None:
    result = await lines_of(Handler(), Texts()).run(run_of(), BatchLine(1, "id", {"model": "m", "wrong": True}))
    assert (result.status, result.body and result.body["error"]["param"]) == (400, "wrong")


async def test_a_job_that_failed_is_the_answer() -> None:
    handler = Handler((InternalError("broken"), JobState.FAILED), (InternalError("broken"), JobState.FAILED))
    result = await lines_of(handler, Texts()).run(run_of(), LINE)
    assert (result.status, result.body and result.body["error"]["message"]) == (500, "broken")


async def test_a_job_that_cannot_be_read_is_waited_for_again() -> None:
    away = (Unavailable("the log is away"), JobState.RUNNING)
    handler = Handler(away, away, None, [response()], [response()])
    assert (await lines_of(handler, Texts()).run(run_of(), LINE)).status == 200


async def test_a_job_that_was_forgotten_is_asked_for_again() -> None:
    forgotten = (NotFound("job not found"), JobState.QUEUED)
    handler = Handler(forgotten, forgotten, [response()], [response()])
    assert (await lines_of(handler, Texts()).run(run_of(), LINE)).status == 200


async def test_a_run_that_stops() -> None:
    run = run_of()
    run.stop = "cancelled"
    with pytest.raises(Cancelled):
        await lines_of(Handler(), Texts()).run(run, LINE)
    run = run_of()
    cancelled = (Cancelled("cancelled"), JobState.CANCELLED)
    handler = Handler(cancelled, cancelled)
    lines = lines_of(handler, Texts())
    result = await lines.run(run, LINE)  # another caller cancelled the job: that is an answer
    assert (result.ok, result.status) == (False, 400)


async def test_choices_that_wait_do_not_outlive_a_try() -> None:
    class Waiting(Handler):
        """Accepts one choice, whose result does not come; refuses the other; then answers all."""

        left = 0

        async def submit_job(self, request: InferenceRequest, options: DeliveryOptions) -> Any:
            made = await super().submit_job(request, options)
            if len(self.keys) == 2:
                raise ResourceExhausted("full")
            return made

        async def result(self, job_id: str, caller: Any, wait_s: float) -> Any:
            if job_id != "job-1":
                return None, [response()]
            try:
                await asyncio.Event().wait()
            finally:
                self.left += 1

    handler = Waiting()
    assert (await lines_of(handler, Texts()).run(run_of(), LINE)).status == 200
    assert handler.left == 1


async def test_a_model_that_says_cancelled_has_answered() -> None:
    class Embeddings:
        async def document(self, body: dict[str, Any], caller: Any, adjust: Any) -> Any:
            raise Cancelled("the model gave up")

    nothing: Any = None
    embeddings: Any = Embeddings()
    run = BatchRun(BatchState("batch_1", endpoint="/v1/embeddings"), 1, ANYONE, Counts())
    result = await ModelLines(nothing, nothing, embeddings, nothing).run(run, LINE)
    assert (result.ok, result.body and result.body["error"]["message"]) == (False, "the model gave up")
    run.stop = "expired"
    with pytest.raises(Cancelled):
        await ModelLines(nothing, nothing, embeddings, nothing).run(run, LINE)


async def test_a_line_that_nobody_foresaw_has_an_error() -> None:
    class Broken(Texts):
        async def prepare_chat(self, body: dict[str, Any], caller: Caller = ANYONE) -> Any:
            raise KeyError("unforeseen")

    result = await lines_of(Handler(), Broken()).run(run_of(), LINE)
    assert (result.status, result.body and result.body["error"]["message"]) == (500, "internal server error")


class _Keeping(Handler):
    """Keeps the tensors of each request."""

    def __init__(self, *ends: Any) -> None:
        super().__init__(*ends)
        self.inputs: list[dict[str, Any]] = []

    async def submit_job(self, request: InferenceRequest, options: DeliveryOptions) -> Any:
        self.inputs.append({tensor.name: tensor.array().tolist() for tensor in request.inputs})
        return await super().submit_job(request, options)


class _Resumable(Texts):
    """Its one request is for a model that goes on with texts."""

    def __init__(self, *names: str, resumable: str = "true") -> None:
        super().__init__()
        inputs = {name: TensorSpec(name, DataType.INT32, (1,)) for name in names}
        parameters = {"charonia.resumable": resumable}
        self.interface = ModelInterface("m", "llm", "", 0, inputs, {}, decoupled=True, parameters=parameters)

    async def prepare_chat(self, body: dict[str, Any], caller: Caller = ANYONE) -> Any:
        _, answer = await super().prepare_chat(body, caller)
        request = InferenceRequest("m", 1, [Tensor("stream", DataType.BOOL, (1,), b"\0")])
        request.served = SimpleNamespace(interface=self.interface)
        return SimpleNamespace(requests=[request]), answer


async def test_a_text_that_can_go_on_is_asked_for_in_parts() -> None:
    handler = _Keeping([response(), response()])
    texts = _Resumable("stream", "stream_interval")
    assert (await lines_of(handler, texts).run(run_of(), LINE)).status == 200
    assert handler.inputs == [{"stream": [True], "stream_interval": [32]}]
    assert texts.added == [0, 0]
    for other in (_Resumable("stream"), _Resumable("stream", "stream_interval", resumable="false")):
        handler = _Keeping([response()])
        await lines_of(handler, other).run(run_of(), LINE)
        assert handler.inputs == [{"stream": [False]}]


async def test_a_text_that_cannot_be_continued_is_asked_for_whole() -> None:
    interrupted = (Unavailable("STREAM_INTERRUPTED: other tokens"), JobState.FAILED)
    handler = _Keeping(interrupted, [response()])
    result = await lines_of(handler, _Resumable("stream", "stream_interval")).run(run_of(), LINE)
    assert result.status == 200
    assert handler.keys == ["batch_1:3:0:parts:line", "batch_1:3:0:line"]
    assert [inputs["stream"] for inputs in handler.inputs] == [[True], [False]]


class _Keyed(Handler):
    """Gives the earlier job of a key, as the log does, and refuses another request under it."""

    def __init__(self, *ends: Any) -> None:
        super().__init__(*ends)
        self.known: dict[str, tuple[bytes, Any]] = {}

    async def submit_job(self, request: InferenceRequest, options: DeliveryOptions) -> Any:
        digest, key = options.digest or request_digest(request), options.idempotency_key
        if key not in self.known:
            self.known[key] = digest, await super().submit_job(request, options)
        asked, receipt = self.known[key]
        if asked != digest:
            raise KeyReused("this Idempotency-Key has been used for another request")
        return receipt


async def test_a_line_finds_its_jobs_though_its_requests_are_others_the_next_time() -> None:
    """As with a chat template that writes the date; the second choice meets a full queue on the first day."""

    class Dated(Texts):
        day = 0

        async def prepare_chat(self, body: dict[str, Any], caller: Caller = ANYONE) -> Any:
            prepared, answer = await super().prepare_chat(body, caller)
            self.day += 1
            for request in prepared.requests:
                request.parameters["prompt"] = f"today is day {self.day}"
            return prepared, answer

    class Full(_Keyed):
        async def submit_job(self, request: InferenceRequest, options: DeliveryOptions) -> Any:
            if ":1:" in options.idempotency_key and texts.day == 1:
                raise ResourceExhausted("full")
            return await super().submit_job(request, options)

    texts = Dated()
    handler = Full(*[[response()]] * 6)
    for _ in range(2):  # the second time by the next owner
        assert (await lines_of(handler, texts).run(run_of(), LINE)).status == 200
    assert texts.day == 3
    assert sorted(handler.keys) == ["batch_1:3:0:line", "batch_1:3:1:line"]


@pytest.mark.parametrize("gains", [True, False])
async def test_a_line_whose_model_has_another_interface_meanwhile(gains: bool) -> None:
    """As when a gateway of another release takes a batch over, which asks in the other form."""
    interfaces = [_Resumable("stream"), _Resumable("stream", "stream_interval")]
    handler = _Keyed(*[[response()]] * 4)
    for texts in (*(interfaces if gains else reversed(interfaces)), *interfaces):
        assert (await lines_of(handler, texts).run(run_of(), LINE)).status == 200
    assert sorted(handler.keys) == ["batch_1:3:0:line", "batch_1:3:0:parts:line"]  # each form has run once


async def test_a_whole_text_that_was_interrupted_is_its_line_s_error() -> None:
    handler = _Keyed((Unavailable("STREAM_INTERRUPTED: other tokens"), JobState.FAILED))
    result = await lines_of(handler, _Resumable("stream")).run(run_of(), LINE)
    assert (result.status, handler.keys) == (503, ["batch_1:3:0:line"])


class _Responses:
    """Responses whose jobs are those of a handler, and which may be deleted."""

    def __init__(self, handler: Handler, texts: _Resumable) -> None:
        self.handler = handler
        self.texts = texts
        self.deleted: list[str] = []

    async def prepare(self, request: Any, caller: Any) -> Any:
        return (await self.texts.prepare_chat({}))[0]

    async def submit(self, request: Any, prepared: Any, options: DeliveryOptions) -> Any:
        return (await self.handler.submit_job(prepared.requests[0], options)).id, True

    async def find(self, response_id: str, caller: Any) -> str:
        if response_id in self.deleted:
            raise ApiError("not found", status=404)
        return response_id

    async def ended(self, stored: str, caller: Any) -> dict[str, Any]:
        return {"usage": {"input_tokens": 2, "output_tokens": 3}}

    async def delete(self, stored: str, caller: Any) -> None:
        self.deleted.append(stored)


RESPONSE = BatchLine(3, "id", {"model": "m", "input": "hello", "store": False})


def responses_of(handler: Handler, *names: str) -> tuple[ModelLines, _Responses, BatchRun]:
    made: Any = handler
    nothing: Any = None
    responses = _Responses(handler, _Resumable(*names))
    asked: Any = responses
    run = BatchRun(BatchState("batch_1", endpoint="/v1/responses", expires_s=EXPIRES_S), 1, ANYONE, Counts())
    return ModelLines(made, nothing, nothing, asked), responses, run


@pytest.mark.parametrize(("store", "unstored"), [(False, ("job-1", "job-2")), (True, ())])
async def test_a_response_that_is_not_stored_names_its_jobs_and_keeps_them_until_its_result_is_kept(
    store: bool, unstored: tuple[str, ...]
) -> None:
    handler = _Keyed((Unavailable("STREAM_INTERRUPTED: other tokens"), JobState.FAILED), [response()])
    lines, responses, run = responses_of(handler, "stream", "stream_interval")
    result = await lines.run(run, BatchLine(3, "id", {**RESPONSE.body, "store": store}))
    assert (result.status, result.job_id, result.usage) == (200, "job-2", (2, 3))
    assert handler.keys == ["batch_1:3:0:parts:line", "batch_1:3:0:line"]
    assert (set(handler.levels), set(handler.deadlines)) == ({LOWEST_PRIORITY}, {DEADLINE_NS})
    assert (result.unstored, responses.deleted) == (unstored, [])
    for _ in range(2):  # also by the next owner of the batch
        await lines.delete(run, result.unstored)
    assert responses.deleted == [f"resp_{job_id}" for job_id in unstored]


@pytest.mark.parametrize(("store", "unstored"), [(False, ("job-1",)), (True, ())])
async def test_a_response_that_failed_is_kept_only_if_it_is_to_be_stored(
    store: bool, unstored: tuple[str, ...]
) -> None:
    handler = _Keyed((InvalidArgument("the prompt is too long"), JobState.FAILED))
    lines, responses, run = responses_of(handler, "stream")
    result = await lines.run(run, BatchLine(3, "id", {**RESPONSE.body, "store": store}))
    assert (result.status, result.job_id, result.unstored, responses.deleted) == (400, "job-1", unstored, [])


async def test_a_response_of_a_batch_that_stops_is_deleted_too() -> None:
    class Stopping(_Keyed):
        async def submit_job(self, request: InferenceRequest, options: DeliveryOptions) -> Any:
            run.stop = "cancelled"
            return await super().submit_job(request, options)

    lines, responses, run = responses_of(Stopping((Cancelled("cancelled"), JobState.CANCELLED)), "stream")
    with pytest.raises(Cancelled):
        await lines.run(run, RESPONSE)
    assert responses.deleted == ["resp_job-1"]


async def test_an_interrupted_response_that_was_forgotten_meanwhile() -> None:
    handler = _Keyed((Unavailable("STREAM_INTERRUPTED: other tokens"), JobState.FAILED), [response()])
    lines, responses, run = responses_of(handler, "stream", "stream_interval")
    responses.deleted.append("resp_job-1")
    assert (await lines.run(run, RESPONSE)).status == 200


async def test_a_response_is_one_job_however_often_it_is_asked_for() -> None:
    forgotten = (NotFound("job not found"), JobState.QUEUED)
    handler = _Keyed(forgotten, forgotten, [response()])
    lines, _, run = responses_of(handler, "stream")
    assert (await lines.run(run, RESPONSE)).status == 200
    assert run.jobs == {3: ["job-1"]}


@pytest.mark.parametrize("gains", [True, False])
async def test_a_response_whose_model_has_another_interface_meanwhile(gains: bool) -> None:
    handler = _Keyed(*[[response()]] * 2)
    interfaces: list[tuple[str, ...]] = [("stream",), ("stream", "stream_interval")]
    for names in interfaces if gains else reversed(interfaces):
        lines, _, run = responses_of(handler, *names)
        assert (await lines.run(run, RESPONSE)).status == 200
    assert sorted(handler.keys) == ["batch_1:3:0:line", "batch_1:3:0:parts:line"]


# -- what another gateway has left -------------------------------------------------------------------------------------


class _Left:
    """Jobs of models, by key, of which some were forgotten a moment ago."""

    def __init__(self, jobs: dict[str, dict[str, str]], *forgotten: str) -> None:
        self.jobs = self.queries = self
        self._jobs = jobs
        self._forgotten = forgotten
        self.cancelled: list[str] = []
        self.searched: list[str] = []

    async def models(self) -> list[str]:
        return list(self._jobs)

    async def of_keys(self, model: str, keys: list[str], caller: Caller) -> list[str]:
        self.searched.append(model)
        return [self._jobs[model][key] for key in keys if key in self._jobs[model]]

    async def cancel(self, job_id: str, caller: Caller) -> None:
        if job_id in self._forgotten:
            raise NotFound("job not found")
        self.cancelled.append(job_id)


class _Models:
    """Serves the model `m` alone."""

    def find(self, name: str) -> Any:
        if name != "m":
            raise ApiError("no such model", status=404, code="model_not_found")
        return SimpleNamespace(served=SimpleNamespace(model="m"))


def left(jobs: dict[str, dict[str, str]], *forgotten: str) -> tuple[ModelLines, _Left]:
    handler: Any = _Left(jobs, *forgotten)
    texts: Any = SimpleNamespace(models=_Models())
    nothing: Any = None
    return ModelLines(handler, texts, nothing, nothing), handler


CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}], "n": 2}


async def test_jobs_are_found_by_their_keys_and_cancelled() -> None:
    jobs = {"batch_1:3:0:parts:line": "a", "batch_1:3:0:line": "b", "batch_1:3:1:line": "c", "batch_1:4:0:line": "d"}
    lines, handler = left({"m": jobs, "other": {"batch_1:4:0:line": "e"}}, "b")
    await lines.cancel(run_of(), BatchLine(3, "id", CHAT))
    assert sorted(handler.cancelled) == ["a", "c"]


async def test_a_batch_of_an_older_release_may_have_asked_another_model_than_its_name_leads_to_now() -> None:
    """An adapter was loaded for another model meanwhile, and no fact names the former one."""
    lines, handler = left({"m": {"batch_1:3:0:line": "a"}, "former": {"batch_1:3:1:line": "b"}})
    await lines.cancel(run_of(), BatchLine(3, "id", CHAT))
    assert sorted(handler.cancelled) == ["a", "b"]


async def test_jobs_of_a_model_that_is_not_served_are_found_too() -> None:
    lines, handler = left({"other": {"batch_1:3:0:line": "e"}, "another": {"batch_1:3:1:line": "f"}})
    await lines.cancel(run_of(), BatchLine(3, "id", {**CHAT, "model": "gone"}))
    assert sorted(handler.cancelled) == ["e", "f"]


async def test_only_the_models_that_were_asked_are_searched() -> None:
    """Whether they are served or not."""
    jobs = {"batch_1:3:0:line": "e"}
    lines, handler = left({"gone": dict(jobs), "m": dict(jobs), "large": {"batch_1:3:0:line": "f"}})
    run = run_of()
    run.state.asked = {"large"}
    await lines.cancel(run, BatchLine(3, "id", {**CHAT, "model": "gone"}))
    assert (handler.cancelled, handler.searched) == (["f"], ["large"])


async def test_a_gateway_of_an_older_release_that_took_the_batch_over_named_no_model() -> None:
    """During an upgrade: what it asked for has the keys of its release."""
    lines, handler = left({"m": {"batch_1:3:0": "a", "batch_1:3:1:line": "b"}, "large": {"batch_1:3:0:line": "c"}})
    run = run_of()
    run.state.asked = {"large"}
    await lines.cancel(run, BatchLine(3, "id", CHAT))
    assert sorted(handler.cancelled) == ["a", "b", "c"]


async def test_jobs_of_an_older_release_are_found_too() -> None:
    lines, handler = left({"m": {"batch_1:3:0:parts": "a", "batch_1:3:1": "b"}})
    await lines.cancel(run_of(), BatchLine(3, "id", CHAT))
    assert handler.cancelled == ["a", "b"]


@pytest.mark.parametrize(("store", "deleted"), [(False, ["resp_a", "resp_b"]), (True, [])])
async def test_only_jobs_that_are_not_to_be_stored_are_forgotten(store: bool, deleted: list[str]) -> None:
    handler: Any = _Left({"m": {"batch_1:3:0:parts:line": "a", "batch_1:3:0:line": "b", "batch_1:4:0:line": "c"}})
    texts: Any = SimpleNamespace(models=_Models())
    responses: Any = _Responses(handler, _Resumable())
    run = BatchRun(BatchState("batch_1", endpoint="/v1/responses", expires_s=EXPIRES_S), 1, ANYONE, Counts())
    nothing: Any = None
    lines = ModelLines(handler, texts, nothing, responses)
    await lines.forget(run, BatchLine(3, "id", {**RESPONSE.body, "store": store}))
    assert (sorted(responses.deleted), handler.cancelled) == (deleted, [])


@pytest.mark.parametrize("is_response", [True, False])
async def test_the_model_of_a_job_is_named_before_the_job_is_there(is_response: bool) -> None:
    happened: list[str] = []

    class Noting(_Keyed):
        async def submit_job(self, request: InferenceRequest, options: DeliveryOptions) -> Any:
            happened.append("submitted")
            return await super().submit_job(request, options)

    async def will_ask(model: str) -> None:
        happened.append(model)

    handler = Noting([response()])
    if is_response:
        lines, _, run = responses_of(handler, "stream")
    else:
        lines, run = lines_of(handler, _Resumable("stream")), run_of()
    run.will_ask = will_ask
    assert (await lines.run(run, RESPONSE if is_response else LINE)).status == 200
    assert happened == ["m", "submitted"]


@pytest.mark.parametrize(
    ("endpoint", "body"), [("/v1/chat/completions", {**CHAT, "n": -1}), ("/v1/embeddings", {"model": "m"})]
)
async def test_a_line_that_is_no_job_has_none_to_cancel(endpoint: str, body: dict[str, Any]) -> None:
    lines, handler = left({"m": {"batch_1:3:0:line": "a"}})
    run = run_of()
    run.state.endpoint = endpoint
    await lines.cancel(run, BatchLine(3, "id", body))
    assert handler.cancelled == []


async def test_each_text_of_a_completion_is_a_job() -> None:
    lines, handler = left({"m": {f"batch_1:3:{index}:line": str(index) for index in range(6)}})
    run = run_of()
    run.state.endpoint = "/v1/completions"
    await lines.cancel(run, BatchLine(3, "id", {"model": "m", "prompt": ["x", "y"], "n": 2}))
    assert handler.cancelled == ["0", "1", "2", "3"]


# -- embeddings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["embeds", "vectors"])
async def test_requests_of_embeddings_have_the_level_and_the_deadline_of_a_line(model: str) -> None:
    handler = text_handler.TextHandler()
    serving: Any = OpenAiInterface(GatewaySettings(incarnation="test", openai=OpenAiSettings()), handler).embeddings
    nothing: Any = None
    lines = ModelLines(nothing, nothing, serving, nothing)
    run = run_of()
    run.state.endpoint = "/v1/embeddings"
    result = await lines.run(run, BatchLine(3, "id", {"model": model, "input": ["one", "two"]}))
    assert result.status == 200
    found = {(request.priority, request.deadline_ns) for request in handler.requests}
    assert (len(handler.requests), found) == (2, {(LOWEST_PRIORITY, DEADLINE_NS)})
