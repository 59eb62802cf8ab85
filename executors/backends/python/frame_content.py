"""The content of frames, and the executor's side of it: converts requests and tensors to frames and back.

    AUTO_COMPLETE  {location, config}                 DONE  JSON text or nil
    INITIALIZE     {location, args, outputs}          DONE  whether the model has a health function
    EXECUTE        [[id, correlation id, outputs, parameters as JSON text or "", timeout us, flags, tensors], ...]; of
                   traced ones also span id and JSON text of the context or nil; of others with a window b"" and nil;
                   of those with a window then also how many responses it may be given for now, its progress and its
                   level, up to the last that is not 0 or empty
                                                      DONE  [[[code, message] or nil, parameters, tensors, again] or
                                                      nil, ...], nil for what RESPONSEs answer; nil of decoupled models;
                                                      after `again` may come its progress and its number of tokens
                                                      RESPONSE  [index, final, one of DONE's or nil for no response];
                                                      a final one with `again` reschedules the request
    EXECUTE_COLUMNS
                   [how many requests, outputs, parameters, timeout us, [id, ...] or nil, columns, input slot, output
                   slot], a slot as [index, generation] (`shared_slots`), nil for none
                                                      COLUMNS  [whether they lie in the output slot, [[name, type
                                                      number, shape of one request, size in bytes], ...]];
                                                      DONE  as of EXECUTE
    CANCEL         [index of a request, ...]          no reply
    WINDOW         [[index of a request, how many responses it may be given], ...]  no reply
    HEALTH         nil                                DONE  whether the model says that it is ready
    FINALIZE       nil                                DONE  nil
    FAILED         [code, message]                    LOG   [level, file, line, message]
    CALL           [call number of the last EXECUTE, whether it is surely made for that one, model, version, outputs,
                    id, correlation id, flags, timeout us, parameters, decoupled, tensors]; as part of a traced request
                    also its span id
                                                      ANSWER and LAST_ANSWER  as one of DONE, nil for no more
    CONTROL        ["load", model, configuration, [[path, size in bytes], ...]], ["unload", model, with dependents],
                   ["is_ready", model, version],
                   ["find", model, version]           LAST_ANSWER  [[code, message] or nil, value]
    GIVE_UP        nil                                no reply of its own

`location` is [model, version, model directory, path of the file]; `tensors` is [[name, type number, shape, size in
bytes], ...], whose bytes lie in the frame's data in this order; `columns` is [[name, type number, shape of one request,
size in bytes, [size of a request's part, ...] or nil for equal ones], ...]. The model's side is `model_host`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from charonia.backend import ColumnInput, ColumnOutput, ModelRequest, ModelResponse, RequestColumns
from charonia.datatypes import DataType
from charonia.errors import CharoniaError, error_of_model
from charonia.inference import InferenceRequest
from charonia.tensors import Buffer, Tensor
from charonia.traces.contexts import Context

from .protocol.frames import UNREADABLE, Frame, FrameError, tensor_offsets


def requests_content(requests: Sequence[ModelRequest]) -> tuple[list[Any], list[Buffer]]:
    """Return content and data of an EXECUTE."""
    content: list[Any] = []
    data = []
    for request in requests:
        tensors = []
        for tensor in request.inputs:
            tensors.append((tensor.name, tensor.datatype.number, tensor.shape, len(tensor.data)))
            data.append(tensor.data)
        parameters = json.dumps(request.parameters, separators=(",", ":")) if request.parameters else ""
        item: tuple[Any, ...] = (
            request.id,
            request.correlation_id,
            request.outputs,
            parameters,
            request.timeout_us,
            request.flags,
            tensors,
        )
        if request.trace is not None or request.window or request.progress or request.priority:
            item = (*item, *(_traced(request.trace.context) if request.trace is not None else (b"", None)))
        if request.priority:
            item = (*item, request.window, request.progress, request.priority)
        elif request.progress:
            item = (*item, request.window, request.progress)
        elif request.window:
            item = (*item, request.window)
        content.append(item)
    return content, data


def columns_content(columns: RequestColumns) -> tuple[list[Any], list[Buffer]]:
    """Return content, without the slots, and data of an EXECUTE_COLUMNS.

    Raises `ValueError` for columns with another number of requests.
    """
    if columns.client_ids is not None and len(columns.client_ids) != columns.count:
        raise ValueError(f"{len(columns.client_ids)} ids of {columns.count} requests")
    for column in columns.inputs:
        if not _is_of(columns.count, column):
            raise ValueError(f"column '{column.name}' is not of {columns.count} requests")
    described = [
        (column.name, column.datatype.number, column.shape, len(column.data), column.sizes) for column in columns.inputs
    ]
    parameters = json.dumps(columns.parameters, separators=(",", ":")) if columns.parameters else ""
    content = [columns.count, columns.outputs, parameters, columns.timeout_us, columns.client_ids, described]
    return content, [column.data for column in columns.inputs]


def _is_of(count: int, column: ColumnInput) -> bool:
    if column.sizes is None:
        return len(column.data) % count == 0
    return len(column.sizes) == count and sum(column.sizes) == len(column.data)


def outputs_of(
    frame: Frame, count: int, in_slot: Callable[[Sequence[int]], Sequence[memoryview]]
) -> list[ColumnOutput]:
    """Return the outputs of a COLUMNS for `count` requests, as views of the frame, or of `in_slot(sizes)`.

    Raises `FrameError`.
    """
    try:
        shared, described = frame.content()
        if not described:
            raise FrameError("a model process answers with no columns")
        sizes = [size for *_, size in described]
        parts = in_slot(sizes) if shared else _parts(frame, sizes)
        outputs = []
        for (name, number, shape, size), data in zip(described, parts, strict=True):
            if len(data) != size or size % count:
                raise FrameError("the columns of a model process are not of the size it describes")
            outputs.append(ColumnOutput(name, DataType.of_number(number), tuple(shape), data))
        return outputs
    except (*UNREADABLE, CharoniaError) as error:
        raise FrameError(f"the columns of a model process cannot be read: {error}") from None


def _parts(frame: Frame, sizes: Sequence[int]) -> list[memoryview]:
    return [frame.data[at : at + size] for at, size in zip(tensor_offsets(sizes), sizes, strict=True)]


def _traced(context: Context) -> tuple[bytes, str | None]:
    """The span id, and OpenTelemetry's propagation context as JSON text (P17)."""
    carrier = context.carrier()
    return context.span_id, json.dumps(carrier) if carrier else None


def responses_of(frame: Frame) -> list[ModelResponse | None]:
    """Return the responses of an EXECUTE's DONE; tensors are views of the frame. Raises `FrameError`.

    None stands for a response that is sent as a RESPONSE frame, before or after.
    """
    try:
        return _responses(frame, frame.content())
    except (*UNREADABLE, CharoniaError) as error:
        raise FrameError(f"the replies of a model process cannot be read: {error}") from None


def response_of(frame: Frame) -> tuple[int, bool, ModelResponse | None]:
    """Return (index, final, response) of a RESPONSE; tensors are views of the frame. Raises `FrameError`."""
    try:
        index, final, reply = frame.content()
        (response,) = _responses(frame, [reply])
        return int(index), bool(final), response
    except (*UNREADABLE, CharoniaError) as error:
        raise FrameError(f"the response of a model process cannot be read: {error}") from None


def responses_together(frame: Frame) -> list[tuple[int, int, bool, ModelResponse | None]]:
    """Return (call, index, final, response) of each response of a RESPONSES. Raises `FrameError`."""
    try:
        return [
            (int(call), int(index), bool(final), None if reply is None else _whole(reply))
            for call, index, final, reply in frame.content()
        ]
    except (*UNREADABLE, CharoniaError) as error:
        raise FrameError(f"the responses of a model process cannot be read: {error}") from None


def _whole(reply: Sequence[Any]) -> ModelResponse:
    """A response whose tensors have their bytes with them (`whole_content`)."""
    failure, parameters, tensors, again, progress, tokens = reply
    if not (isinstance(progress, bytes) and all(isinstance(data, bytes) for *_, data in tensors)):
        raise FrameError("the responses of a model process have no bytes where these belong")
    if failure is not None:
        error = CharoniaError.of(*failure)
        return ModelResponse(parameters=parameters, error=error, progress=progress, tokens=int(tokens))
    outputs = [Tensor(name, DataType.of_number(number), tuple(shape), data) for name, number, shape, data in tensors]
    return ModelResponse(outputs, parameters, None, bool(again), progress, int(tokens))


def answer_of(frame: Frame) -> ModelResponse | None:
    """Return what an ANSWER or LAST_ANSWER of a CALL holds; None for no more. Raises `FrameError`."""
    try:
        return _responses(frame, [frame.content()])[0]
    except (*UNREADABLE, CharoniaError) as error:
        raise FrameError(f"the answer to a call cannot be read: {error}") from None


def _responses(frame: Frame, replies: Sequence[Any]) -> list[ModelResponse | None]:
    offsets = iter(tensor_offsets([size for reply in replies if reply is not None for _, _, _, size in reply[2]]))
    responses: list[ModelResponse | None] = []
    for reply in replies:
        if reply is None:
            responses.append(None)
            continue
        failure, parameters, tensors, *again = reply
        if failure is not None:
            code, message = failure
            error = CharoniaError.of(code, message)
            responses.append(ModelResponse(parameters=parameters, error=error, progress=_progress_in(again)))
            continue
        outputs = []
        for name, number, shape, size in tensors:
            at = next(offsets)
            data = frame.data[at : at + size]
            if len(data) != size:
                raise FrameError("the replies of a model process describe more bytes than it sent")
            outputs.append(Tensor(name, DataType.of_number(number), tuple(shape), data))
        is_again = bool(again and again[0])
        response = ModelResponse(outputs, parameters, again=is_again, progress=_progress_in(again))
        if len(again) > 2:
            response.tokens = int(again[2])
        responses.append(response)
    return responses


def _progress_in(more: Sequence[Any]) -> bytes:
    """The progress of a reply, from what follows its tensors."""
    if len(more) < 2:
        return b""
    if not isinstance(more[1], bytes):
        raise FrameError("the progress that a model process describes is no bytes")
    return more[1]


def failure_of(frame: Frame) -> CharoniaError:
    """Return the error of a FAILED. Raises `FrameError`."""
    try:
        code, message = frame.content()
        return CharoniaError.of(code, message)
    except (*UNREADABLE, CharoniaError) as error:
        raise FrameError(f"the failure of a model process cannot be read: {error}") from None


_SEQUENCE_START, _SEQUENCE_END = 1, 2


@dataclass(frozen=True, slots=True)
class CallFrame:
    """A decoded CALL. `execute_call` is the number of the last EXECUTE; `surely`: the call belongs to it for certain.

    `blocks`: that EXECUTE cannot return before the call is answered, and has sent no response yet.
    """

    execute_call: int
    surely: bool
    blocks: bool
    request: InferenceRequest
    decoupled: bool
    span_id: bytes = b""
    """The span of the traced request that the call belongs to (P17)."""


def call_of(frame: Frame) -> CallFrame:
    """Decode a CALL; tensors are views of the frame. Raises `FrameError`."""
    try:
        execute_call, surely, blocks, model, version, outputs, request_id, *rest = frame.content()
        sequence, flags, timeout_us, parameters, decoupled, tensors, *span_ids = rest
        request = InferenceRequest(
            str(model),
            int(version),
            _tensors(frame, tensors),
            id=str(request_id),
            outputs=tuple(map(str, outputs)),
            parameters={str(key): value for key, value in parameters.items()},
            timeout_us=max(0, int(timeout_us)),
            sequence_id=sequence if isinstance(sequence, str) else int(sequence),
            sequence_start=bool(flags & _SEQUENCE_START),
            sequence_end=bool(flags & _SEQUENCE_END),
        )
        return CallFrame(int(execute_call), bool(surely), bool(blocks), request, bool(decoupled), b"".join(span_ids))
    except (*UNREADABLE, CharoniaError) as error:
        raise FrameError(f"the call of a model process cannot be read: {error}") from None


def answer_content(response: ModelResponse) -> tuple[list[Any], list[Buffer]]:
    """Return content and data of an ANSWER."""
    if response.error is not None:
        error = error_of_model(response.error)
        return [[int(error.code), error.message], response.parameters, []], []
    described = [(t.name, t.datatype.number, t.shape, len(t.data)) for t in response.outputs]
    return [None, response.parameters, described], [t.data for t in response.outputs]


def whole_content(response: ModelResponse) -> list[Any]:
    """Return what a RESPONSES has of a response: its tensors have their bytes with them."""
    error = None if response.error is None else error_of_model(response.error)
    failure = None if error is None else [int(error.code), error.message]
    tensors = () if error is not None else [(t.name, t.datatype.number, t.shape, t.data) for t in response.outputs]
    return [failure, response.parameters, tensors, response.again, response.progress, int(response.tokens)]


def files_of(frame: Frame, described: Sequence[Sequence[Any]]) -> dict[str, bytes]:
    """Return the files of a "load" by path. Raises `FrameError`."""
    try:
        offsets = tensor_offsets([size for _, size in described])
        return {path: bytes(frame.data[at : at + size]) for (path, size), at in zip(described, offsets, strict=True)}
    except (*UNREADABLE, CharoniaError) as error:
        raise FrameError(f"the files of a model process cannot be read: {error}") from None


def _tensors(frame: Frame, described: Sequence[Sequence[Any]]) -> list[Tensor]:
    tensors = []
    for (name, number, shape, size), at in zip(
        described, tensor_offsets([size for *_, size in described]), strict=True
    ):
        data = frame.data[at : at + size]
        if len(data) != size:
            raise FrameError("a model process describes more bytes than it sent")
        tensors.append(Tensor(name, DataType.of_number(number), tuple(shape), data))
    return tensors
