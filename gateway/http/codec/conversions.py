"""Large JSON bodies and replies as tasks of a worker process (`charonia.offload`), and the workers' functions. Pure.

Workers use the same codecs as the event loop; this module packs their arguments and results into plain values and
buffers. `http_application` and `generate` decide which bodies are large.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from charonia.catalog.served import ServedVersion
from charonia.datatypes import DataType
from charonia.errors import InvalidArgument
from charonia.inference import InferenceRequest, InferenceResponse, RegionPart, RegionUse, check_rest
from charonia.models.interface import ModelInterface
from charonia.offload.pool import Task
from charonia.tensors import Buffer, Tensor
from gateway.requests.classification import classified

from .control_json import read_load_request
from .generate_codec import decode_generate, encode_generate
from .jsontext import parse_json
from .request_codec import assemble
from .request_json import InputSlot, Template, parse_template
from .response_codec import LargeReply, ReplyForm, ResponseEncoder

_MAX_MEMBERS = 10_000
"""Inputs, outputs and parameters of a request in total: the event loop iterates over them."""

Result = tuple[Any, list[memoryview]]


# -- requests ----------------------------------------------------------------------------------------------------------


def template_task(text: Buffer, *, max_input_size_bytes: int) -> Task:
    """Have the JSON part of an infer request parsed; `read_template` takes the result."""
    return Task(f"{__name__}:parse", max_input_size_bytes, (text,))


def parse(note: Any, buffers: list[memoryview]) -> tuple[Any, Sequence[Buffer]]:
    return _packed(parse_template(parse_json(buffers[0]), max_input_size_bytes=note))


def generate_task(body: Buffer, interface: ModelInterface, max_input_size_bytes: int) -> Task:
    """Have a generate body parsed; `read_template` and `request_of` take the result."""
    inputs = {
        name: [spec.datatype.value, list(interface.client_shape(spec))] for name, spec in interface.inputs.items()
    }
    return Task(f"{__name__}:parse_generate", [inputs, max_input_size_bytes], (body,))


@dataclass(frozen=True, slots=True)
class _SentSpec:
    datatype: DataType
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _SentInputs:
    """The part of a `ModelInterface` that `generate_codec` uses."""

    inputs: Mapping[str, _SentSpec]

    def client_shape(self, spec: _SentSpec) -> tuple[int, ...]:
        return spec.shape


def parse_generate(note: Any, buffers: list[memoryview]) -> tuple[Any, Sequence[Buffer]]:
    inputs, max_input_size_bytes = note
    interface: Any = _SentInputs({n: _SentSpec(DataType(kind), tuple(shape)) for n, (kind, shape) in inputs.items()})
    request, template = decode_generate("", 0, bytes(buffers[0]), interface, max_input_size_bytes)
    template.inputs = [
        InputSlot(t.name, t.datatype, t.shape, len(t.data), bytes(t.data), counted=t.datatype is DataType.BYTES)
        for t in request.inputs
    ]
    return _packed(template)


def _packed(template: Template) -> tuple[Any, Sequence[Buffer]]:
    """A template as plain values, and the tensors whose elements were in the JSON."""
    reply = template.reply
    if sum(map(len, (template.inputs, template.outputs, template.parameters, reply.listed))) > _MAX_MEMBERS:
        raise InvalidArgument(f"request has more than {_MAX_MEMBERS} inputs, outputs and parameters")
    words = (*template.parameters, *template.parameters.values(), *template.outputs, *reply.delivery.values())
    check_rest(sum(len(word) for word in (*words, *(s.name for s in template.inputs)) if isinstance(word, str)))
    slots = [[s.name, s.datatype.value, s.shape, s.size_bytes, s.data is not None, s.counted] for s in template.inputs]
    scalars = [
        *(template.binary_bytes, template.id, template.priority, template.timeout_us, template.deadline_ns),
        *(template.sequence_id, template.sequence_start, template.sequence_end),
    ]
    note = [
        *(slots, scalars, template.outputs, template.parameters),
        [reply.binary_by_default, reply.listed, reply.classes, list(reply.in_regions), reply.delivery],
        _region_note(template.regions),
    ]
    return note, [slot.data for slot in template.inputs if slot.data is not None]


def _region_note(regions: RegionUse | None) -> list[list[Any]] | None:
    """Region parts of inputs, by position, and of outputs, by name."""
    if regions is None:
        return None
    uses: tuple[Mapping[Any, RegionPart], ...] = (regions.inputs, regions.outputs)
    return [[(of, part.region, part.offset, part.size_bytes) for of, part in parts.items()] for parts in uses]


def _regions(note: list[list[Any]] | None) -> RegionUse | None:
    if note is None:
        return None
    read, written = ({of: RegionPart(*part) for of, *part in parts} for parts in note)
    return RegionUse(read, written)


def read_template(result: Result) -> Template:
    """The template that a worker read; tensors from the JSON are views of the worker's result."""
    (slots, scalars, outputs, parameters, reply, noted), buffers = result
    data = iter(buffers)
    regions = _regions(noted)
    parts = regions.inputs if regions is not None else {}
    inputs = [
        InputSlot(
            *(name, DataType(datatype), tuple(shape), size, next(data) if written else None),
            *(parts.get(position), counted),
        )
        for position, (name, datatype, shape, size, written, counted) in enumerate(slots)
    ]
    by_default, listed, classes, in_regions, delivery = reply
    form = ReplyForm(by_default, listed, classes, set(in_regions), False, delivery)
    form.settle()
    size, request_id, priority, timeout_us, deadline_ns, sequence_id, start, end = scalars
    return Template(
        *(inputs, size, request_id, tuple(outputs), parameters, priority, timeout_us, deadline_ns),
        *(sequence_id, start, end, form, regions),
    )


def request_of(
    template: Template, model: str, version: int, body: bytes | memoryview = b"", at: int = 0
) -> InferenceRequest:
    """The request of a template that a worker read and of the binary tensors in `body` from `at` on.

    Marks the BYTES tensors that the worker counted, so that no check counts them again.
    """
    request = assemble(template, template.id, model, version, body, at)
    request.elements = {slot.name: "" for slot in template.inputs if slot.counted}
    return request


def load_task(body: Buffer) -> Task:
    """Have a load request parsed, with its base64 files; `read_load` takes the result."""
    return Task(f"{__name__}:parse_load", None, (body,))


def parse_load(_note: Any, buffers: list[memoryview]) -> tuple[Any, Sequence[Buffer]]:
    config, files = read_load_request(bytes(buffers[0]))
    return [config, list(files)], list(files.values())


def read_load(result: Result) -> tuple[str | None, Mapping[str, Buffer]]:
    """As `control_json.read_load_request`."""
    (config, names), buffers = result
    return config, dict(zip(names, buffers, strict=True))


# -- replies -----------------------------------------------------------------------------------------------------------


def reply_task(response: InferenceResponse, form: ReplyForm, served: ServedVersion) -> Task:
    """Have a reply with JSON outputs written; `read_reply` takes the result."""
    labels = {name: served.labels.get(name, []) for name in form.classes}
    note = [
        *(response.model, response.version, response.id, response.parameters, _described(response.outputs)),
        [form.binary_by_default, form.listed, form.classes, list(form.in_regions)],
        *(served.interface.batching, labels),
    ]
    return Task(f"{__name__}:write", note, [tensor.data for tensor in response.outputs])


def write(note: Any, buffers: list[memoryview]) -> tuple[Any, Sequence[Buffer]]:
    model, version, request_id, parameters, outputs, wanted, batching, labels = note
    tensors = classified(_tensors(outputs, buffers), wanted[2], batching, labels)
    form = ReplyForm(wanted[0], wanted[1], in_regions=set(wanted[3]))
    headers, body = ResponseEncoder().encode(InferenceResponse(model, version, tensors, request_id, parameters), form)
    return headers, (body,)


def read_reply(result: Result) -> tuple[list[tuple[bytes, bytes]], LargeReply]:
    headers, buffers = result
    return [(name, value) for name, value in headers], LargeReply(tuple(buffers))


def generated_task(response: InferenceResponse) -> Task:
    """Have a generate response written; it is the result's only buffer."""
    note = [response.model, response.version, response.id, response.parameters, _described(response.outputs)]
    return Task(f"{__name__}:write_generated", note, [tensor.data for tensor in response.outputs])


def write_generated(note: Any, buffers: list[memoryview]) -> tuple[Any, Sequence[Buffer]]:
    model, version, request_id, parameters, outputs = note
    response = InferenceResponse(model, version, _tensors(outputs, buffers), request_id, parameters)
    return None, (encode_generate(response),)


def _described(tensors: Iterable[Tensor]) -> list[Any]:
    return [[tensor.name, tensor.datatype.value, tensor.shape] for tensor in tensors]


def _tensors(described: list[Any], buffers: list[memoryview]) -> list[Tensor]:
    return [
        Tensor(name, DataType(datatype), tuple(shape), data)
        for (name, datatype, shape), data in zip(described, buffers, strict=True)
    ]
