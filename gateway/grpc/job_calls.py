"""Jobs over `ModelInfer` (ADR 0004), without a new message or method, so that stock clients can submit and fetch them.

A request with delivery preferences (`gateway.requests.preferences`, as metadata or parameters) may be answered by a
response without outputs whose parameters describe the job. A request with the parameter `charonia_job_id` and no inputs
fetches the job: the answer is its result, its error or, while there is none, such a description.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any

from charonia.catalog.served import ServedVersion
from charonia.errors import InvalidArgument
from charonia.inference import InferenceRequest, InferenceResponse, Parameters
from gateway.deferral import Accepted, Deferral, served_of
from gateway.handler import Handler
from gateway.requests.delivery import Caller, JobReceipt, JobView
from gateway.requests.large_tensors import classify_large
from gateway.requests.preferences import HEADERS, MAX_WAIT_S, PARAMETERS, add_word
from protos import grpc_service_pb2 as pb

from .calling import Reply
from .convert import EMPTY_FINAL, Classes, ResponseEncoder, stream_answer, stream_error, write_parameters

JOB_ID = "charonia_job_id"
WAIT = "charonia_wait_s"
CANCEL = "charonia_cancel"
AFTER_INDEX = "charonia_after_index"

_METADATA: Mapping[str, str] = {name.decode(): parameter for name, parameter in HEADERS.items()}
_FETCHING = frozenset((JOB_ID, WAIT, CANCEL, AFTER_INDEX, EMPTY_FINAL))


def asks_for_job(message: pb.ModelInferRequest) -> bool:
    """Whether the request fetches a job."""
    return JOB_ID in message.parameters


def words_of_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> Parameters:
    """The delivery preferences in metadata; a repeated `prefer` is one list. Raises as `words_of_headers`."""
    words: Parameters = {}
    for name, value in metadata:
        key = _METADATA.get(name)
        if key is not None and isinstance(value, str):
            add_word(words, key, name, value)
    return words


def words_of_parameters(message: pb.ModelInferRequest) -> Parameters:
    """The delivery preferences in parameters. Raises `InvalidArgument` for one without a value."""
    return {key: _value(message, key) for key in message.parameters if key in PARAMETERS}


class JobCalls:
    """The inferences of one front that are jobs."""

    def __init__(self, handler: Handler, encoder: ResponseEncoder, flush_interval_s: float) -> None:
        self._handler = handler
        self._encoder = encoder
        self._flush_interval_s = flush_interval_s
        self._deferral = Deferral(handler)

    async def answer(
        self,
        request: InferenceRequest,
        classes: Classes,
        served: ServedVersion,
        words: Parameters,
        caller: Caller,
        call_deadline_ns: int,
        only_later: str = "",
    ) -> Reply:
        """The serialised answer, or the description of the job that will have it."""
        answer = await self._deferral.answer(
            request,
            words,
            caller,
            _form(classes, served),
            flush_interval_s=self._flush_interval_s,
            call_deadline_ns=call_deadline_ns,
            only_later=only_later,
        )
        if isinstance(answer, Accepted):
            return _accepted(answer.receipt, answer.state, request.id, request.served.version)
        return await self.encode(answer.response, classes, request.served)

    def stream(
        self,
        request: InferenceRequest,
        classes: Classes,
        served: ServedVersion,
        words: Parameters,
        caller: Caller,
        call_deadline_ns: int,
    ) -> AsyncGenerator[InferenceResponse | Accepted]:
        """The responses of a decoupled model, or the job that will have them. Responses of a job are placed."""
        return self._deferral.stream(
            request,
            words,
            caller,
            _form(classes, served),
            flush_interval_s=self._flush_interval_s,
            call_deadline_ns=call_deadline_ns,
        )

    async def encode(self, response: InferenceResponse, classes: Classes, served: ServedVersion) -> Reply:
        """The serialised response; large outputs are classified in a worker process."""
        if classes:
            response, left = await classify_large(self._handler.offload, response, classes, served)
            classes = dict(left)
        return self._encoder.reply(response, classes, served)

    def describe(self, accepted: Accepted, request_id: str, version: int) -> bytes:
        return _accepted(accepted.receipt, accepted.state, request_id, version)

    async def follow(self, message: pb.ModelInferRequest, caller: Caller) -> AsyncGenerator[Reply]:
        """The answers of a stream to a request that fetches a job: of a decoupled model all responses, as they arrive.

        They begin after `charonia_after_index` if that is set. Any other job is fetched as by a unary call.
        """
        job_id, _, cancel = _read_fetch(message)
        view = await self._handler.jobs.queries.view(job_id, caller)
        if cancel or not view.decoupled:
            yield stream_answer(await self.fetch(message, caller))
            return
        if message.model_name not in ("", view.model):
            raise InvalidArgument(f"job '{job_id}' is one of model '{view.model}', not of '{message.model_name}'")
        classes: Classes = dict(view.form.get("classes", {}))
        served = served_of(self._handler, view)
        empty_final = EMPTY_FINAL in message.parameters and message.parameters[EMPTY_FINAL].bool_param
        responses = self._handler.jobs.queries.responses(job_id, caller, _after_index(message))
        async with contextlib.aclosing(responses):
            async for response in responses:
                if response.error is not None:
                    yield stream_error(response.error, message, final=response.final)
                elif empty_final or not response.is_flag:
                    response.parameters |= placed(response)
                    yield stream_answer(await self.encode(response, classes, served), final=response.final)

    async def fetch(self, message: pb.ModelInferRequest, caller: Caller) -> Reply:
        """The serialised result of the job, or its description while it has none.

        Raises the job's error, `NotFound`, and `InvalidArgument` for a request with further contents.
        """
        job_id, wait_s, cancel = _read_fetch(message)
        handler = self._handler
        if message.model_name:  # checked before waiting for the result
            view = await handler.jobs.queries.view(job_id, caller)
            if message.model_name != view.model:
                raise InvalidArgument(f"job '{job_id}' is one of model '{view.model}', not of '{message.model_name}'")
        if cancel:
            return _described(await handler.jobs.cancel(job_id, caller))
        view, response = await handler.jobs.queries.single(job_id, caller, wait_s)
        if response is None:
            return _described(view)
        classes: Classes = dict(view.form.get("classes", {}))
        return await self.encode(response, classes, served_of(self._handler, view))


def placed(response: InferenceResponse) -> Parameters:
    """The attempt and index of a job's response as parameters, with which a reader can continue.

    `charonia_empty_response` tells a last response without outputs from the flag alone, which has a place, too.
    """
    if response.place is None:
        return {}
    attempt, index = response.place
    places: Parameters = {"charonia_attempt": attempt, "charonia_index": index}
    return {**places, "charonia_empty_response": True} if response.bare else places


def _form(classes: Classes, served: ServedVersion) -> dict[str, Any]:
    return {"classes": dict(classes), "batching": served.interface.batching} if classes else {}


def _after_index(message: pb.ModelInferRequest) -> int:
    if AFTER_INDEX not in message.parameters:
        return -1
    value = _value(message, AFTER_INDEX)
    if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value < 2**31:
        raise InvalidArgument(f"parameter '{AFTER_INDEX}' must be the index of a response, or -1")
    return value


def _accepted(receipt: JobReceipt, state: str, request_id: str, version: int) -> bytes:
    parameters: Parameters = {
        JOB_ID: receipt.id,
        "charonia_job_state": state,
        "charonia_durability": receipt.durability,
        "charonia_position": receipt.position,
        "charonia_queue_length": receipt.total,
    }
    if receipt.eta_s is not None:
        parameters["charonia_eta_s"] = float(receipt.eta_s)
    return _message(receipt.model, version, request_id, parameters)


def _described(view: JobView) -> bytes:
    parameters: Parameters = {
        JOB_ID: view.id,
        "charonia_job_state": view.state.value,
        "charonia_durability": view.durability,
        "charonia_position": view.position,
        "charonia_queue_length": view.total,
        "charonia_attempts": view.attempts,
    }
    if view.eta_s is not None:
        parameters["charonia_eta_s"] = float(view.eta_s)
    if view.wait_reason:
        parameters["charonia_wait_reason"] = view.wait_reason
    return _message(view.model, view.version, view.client_id, parameters)


def _message(model: str, version: int, request_id: str, parameters: Parameters) -> bytes:
    message = pb.ModelInferResponse(model_name=model, model_version=str(version) if version > 0 else "", id=request_id)
    write_parameters(message.parameters, parameters)
    return message.SerializeToString()


def _read_fetch(message: pb.ModelInferRequest) -> tuple[str, float, bool]:
    """Job id, seconds to wait, whether to cancel. Raises `InvalidArgument`."""
    if message.inputs or message.raw_input_contents or message.outputs:
        raise InvalidArgument(f"a request with parameter '{JOB_ID}' asks for a job and has no inputs and no outputs")
    for key in message.parameters:
        if key not in _FETCHING:
            raise InvalidArgument(f"parameter '{key[:64]}' has no meaning beside '{JOB_ID}'")
    job_id = _value(message, JOB_ID)
    if not isinstance(job_id, str):
        raise InvalidArgument(f"invalid value type for '{JOB_ID}' parameter, expected string_param.")
    wait_s: Any = _value(message, WAIT) if WAIT in message.parameters else 0
    if isinstance(wait_s, str):
        try:
            wait_s = float(wait_s)
        except ValueError:
            wait_s = -1
    if isinstance(wait_s, bool) or not wait_s >= 0:
        raise InvalidArgument(f"parameter '{WAIT}' must be a number of seconds")
    cancel = _value(message, CANCEL) if CANCEL in message.parameters else False
    if not isinstance(cancel, bool):
        raise InvalidArgument(f"invalid value type for '{CANCEL}' parameter, expected bool_param.")
    return job_id, min(float(wait_s), MAX_WAIT_S), cancel


def _value(message: pb.ModelInferRequest, key: str) -> str | int | bool | float:
    parameter = message.parameters[key]
    kind = parameter.WhichOneof("parameter_choice")
    value: Any = getattr(parameter, kind) if kind else None
    if not isinstance(value, (str, int, bool, float)):
        raise InvalidArgument(f"parameter '{key}' must be a string or a number")
    return value
