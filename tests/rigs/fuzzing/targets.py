"""What reads bytes of strangers, as functions that take any bytes and raise where a promise is broken.

The promises: only a typed refusal comes out, the same answer however the stream is cut, and what is let through is
what it says. Time and memory are bounded by `checked`. The first byte of an input chooses where a target has several
readers; how a stream is cut follows from its checksum, so that an input is all that a finding needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import resource
import signal
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import http2_wire
import http_wire
import inference_doubles
import openai_doubles
import virtual_time
from google.protobuf.text_format import MessageToString

from charonia.errors import CharoniaError, InvalidRecord
from charonia.eventlog.redis.stored_records import record_of
from charonia.facts.events import pack_fact, unpack_fact
from charonia.facts.jobs import DeliveryNote, parse_public_id, public_id
from charonia.facts.journal import FIELD, read_facts
from charonia.facts.resource_waits import TurnsNote
from charonia.facts.seals import FIELD_SEAL, read_seal
from charonia.facts.sequence_states import SequenceAbout, SequenceState
from charonia.facts.stream_notes import StreamsNote
from charonia.generation.detokenizer import Detokenizer
from charonia.generation.grammar import check as check_structure
from charonia.generation.parameters import SamplingParameters, check_vocabulary, parse_sampling
from charonia.generation.templates import render_chat
from charonia.generation.text_assets import TextAssets
from charonia.generation.tool_calls import FORMATS, call_reader
from charonia.inference import parse_version
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from charonia.models.names import check_model_name
from charonia.traces.contexts import read_parent
from charonia.wire import BatchHeader, Reference, records_of, requests_in, unpack_request, unpack_response
from charonia.wire.recorded_calls import unpack_recorded_call
from charonia.wire.waves import unpack_wave, unpack_wave_reply, work_in
from executors.backends.python.frame_content import (
    answer_of,
    call_of,
    failure_of,
    outputs_of,
    response_of,
    responses_of,
)
from executors.backends.python.protocol.frames import Frame, FrameError, FrameReader
from executors.configuration.autofill import prepare
from executors.configuration.config import from_json, normalise, to_json, validate, validate_structure
from executors.isolation.forms import outcome_of
from gateway.grpc.convert import infer_request
from gateway.http.codec.control_json import (
    read_index_request,
    read_load_request,
    read_log_settings,
    read_system_region,
    read_trace_settings,
    read_unload_request,
)
from gateway.http.codec.paths import group_of, resolve
from gateway.jobs.job_views import Cursor
from gateway.openai.api_calls import read_object
from gateway.openai.shapes.api_errors import ApiError
from gateway.openai.shapes.chat_shapes import read_chat
from gateway.openai.stored.batch_lines import LineReader, validated
from gateway.openai.stored.multipart_forms import UploadForm
from gateway.openai.stored.response_requests import ResponseRequest, chat_body, read_response_request
from gateway.requests.idempotency import check_key, key_digest
from gateway.requests.preferences import read_wish, words_of_headers
from gateway.webhooks.addresses import check_url
from protos import grpc_service_pb2 as pb

MOST_SECONDS = 5.0
"""Of processor time for one input of at most `mutation.MAX_BYTES`; under coverage Python is some ten times slower."""

_MOST_WAIT_S = 20

MOST_MEMORY_BYTES = 256 << 20
"""By which one input may raise the peak of the process; what unfolds is bounded by 16 MiB, and copied."""

Check = Callable[[bytes], None]


def cuts(data: bytes) -> list[bytes]:
    """The input in pieces: one to a few hundred bytes each, as its checksum says."""
    state = zlib.crc32(data) | 1
    pieces, at = [], 0
    while at < len(data):
        state = state * 48271 % 0x7FFFFFFF
        size = 1 + (state >> 8) % (3, 17, 200, 2000)[state & 3]
        pieces.append(data[at : at + size])
        at += size
    return pieces


def _tells_no_address(data: bytes, answer: bytes) -> None:
    """Where things lie in memory helps an attacker; texts of libraries name it now and then."""
    assert b" at 0x" not in answer or b" at 0x" in data, answer


def http(data: bytes) -> None:
    """Heads, lengths, chunks and pipelining of HTTP/1.1. No time passes, so that no deadline does."""
    has_room = bool(zlib.crc32(data) & 1)
    whole, at_once, slowly = (
        virtual_time.run(_http_answers(pieces, _APPS[has_room], slowly=slowly))
        for pieces, slowly in (([data], False), (cuts(data), False), (cuts(data), True))
    )
    assert whole == at_once, ("cut", whole, at_once)
    # an application that does not read is quicker than a body that breaks only where that comes late
    assert whole == slowly or b"deaf" in data, ("cut and slow", whole, slowly)
    _tells_no_address(data, whole[0])


_MOST_RESTS = 6


async def _http_answers(pieces: list[bytes], app: http_wire.App, *, slowly: bool) -> tuple[bytes, bool]:
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    wire = http_wire.Wire(app)
    for number, piece in enumerate(pieces):
        await wire.send(piece)
        if slowly and number < _MOST_RESTS:
            await wire.rest()
    await wire.rest()
    closed = wire.transport.closing
    await wire.leave()
    assert not problems, problems
    return bytes(wire.transport.written), closed


async def _echo(scope: Any, receive: Any, send: Any) -> None:
    """As an application does, it ends when the client has left."""
    with contextlib.suppress(asyncio.CancelledError):
        await http_wire.echo(scope, receive, send)


_APPS = tuple(http_wire.App(_echo, has_room=has_room) for has_room in (False, True))


def infer(data: bytes) -> None:
    """The line before the first newline is Inference-Header-Content-Length, what follows is the body."""
    header, _, body = data.partition(b"\n")
    headers = {b"inference-header-content-length": header} if header else {}
    whole = inference_doubles.post([body], headers)
    status, reply_headers, reply = whole
    assert int(reply_headers[b"content-length"]) == len(reply)
    if status != 200:
        assert 400 <= status < 600, whole
        assert json.loads(reply)["error"] not in ("", "internal server error"), whole  # the catch-all's text
    _tells_no_address(data, reply)
    cut = inference_doubles.post(cuts(body), headers)
    assert whole == cut, (whole, cut)


def protobuf(data: bytes) -> None:
    """A ModelInferRequest: what protobuf's own classes read decides about the answer."""
    try:
        oracle = infer_request(pb.ModelInferRequest.FromString(data))[0]
    except Exception as error:
        oracle = None
        assert isinstance(error, CharoniaError) or type(error).__name__ == "DecodeError", error
    reply, refusal = inference_doubles.infer(data)
    if refusal is not None:
        code, details, _ = refusal
        assert code.name != "UNKNOWN", refusal
        assert details not in ("", "internal server error"), refusal
        _tells_no_address(data, details.encode())
        return
    answer = pb.ModelInferResponse.FromString(reply)
    assert oracle is not None, "answered, though protobuf cannot read it"
    assert answer.id == oracle.id
    given = [(tensor.name, tensor.datatype.value, tensor.shape, bytes(tensor.data)) for tensor in oracle.inputs]
    if not answer.parameters:  # a job's receipt has some
        got = [(item.name, item.datatype, tuple(item.shape)) for item in answer.outputs]
        assert len(got) <= len(given)


def http2(data: bytes) -> None:
    """What follows the preface of HTTP/2 and the first SETTINGS, on the port of gRPC and on that of HTTP.

    No time passes, or a deadline of nanoseconds would end one call and not the other.
    """

    def answers(pieces: list[bytes], *, of_http: bool, slowly: bool = False) -> bytes:
        return virtual_time.run(http2_wire.answers(pieces, slowly=slowly, of_http=of_http))

    for of_http in (False, True):
        whole = answers([data], of_http=of_http)
        _tells_no_address(data, whole)
        cut = answers(cuts(data), of_http=of_http)
        assert whole == cut, (whole, cut)
        answers(cuts(data), slowly=True, of_http=of_http)


def config(data: bytes) -> None:
    """A model's configuration: JSON as of the load call where it begins with a brace, else text."""
    try:
        if data[:1] == b"{":
            written = from_json(data)
            assert from_json(to_json(written)) == written or b"nan" in data.lower()
        else:
            try:
                text = data.decode()
            except UnicodeDecodeError:
                return
            written = parse(text)
            assert parse(MessageToString(written)) == written or "nan" in text.lower()
        directory = written.name or "m"
        for step in (
            lambda: prepare(written, directory, ["model.onnx"]),
            lambda: validate_structure(written, directory),
            lambda: _complete(written, directory),
        ):
            _refusing(step)
    except CharoniaError as error:
        assert error.message


def _complete(written: Any, directory: str) -> None:
    done = normalise(written)
    validate(done, directory)
    assert normalise(done) == done
    ModelInterface.of(done)
    to_json(done)


def _refusing(step: Callable[[], Any]) -> None:
    try:
        step()
    except CharoniaError as error:
        assert error.message


def _a_request(data: bytes) -> None:
    record = unpack_request(data)
    inputs = record.inputs()
    assert sum(len(tensor.data) for tensor in inputs) == len(record.data)
    assert all(dim >= 0 for tensor in inputs for dim in tensor.shape)
    assert unpack_request(memoryview(bytearray(data))).inputs() == inputs


def _a_response(data: bytes) -> None:
    record = unpack_response(data)
    assert isinstance(record.model, str)
    assert all(type(tensor.size_bytes) is int for tensor in record.outputs)


def _a_recorded_call(data: bytes) -> None:
    call = unpack_recorded_call(data)
    sizes = [tensor.size_bytes for tensor in (*call.inputs, *(t for one in call.responses for t in one.outputs))]
    assert sum(sizes) <= len(data)
    assert unpack_recorded_call(memoryview(bytearray(data))).inputs == call.inputs


def _a_wave(data: bytes) -> None:
    wave = unpack_wave(data)
    requests = wave.requests()
    assert [request.id for request in requests] == wave.ids()
    for request in requests:
        assert all(dim >= 0 for tensor in request.inputs() for dim in tensor.shape)


def _an_entry(data: bytes) -> None:
    fields = [b"m", data]
    records = records_of(fields)
    assert sum(map(len, records)) <= len(data)
    requests_in(fields)


def _a_fact(data: bytes) -> None:
    fact = unpack_fact(data)
    if fact is not None:
        again = unpack_fact(pack_fact(fact))
        assert again == fact or "nan" in repr(fact)


def _a_job(data: bytes) -> None:
    values = data.split(b"\n")
    record_of("m", bytes(16), [value or None for value in (values + [b""] * 16)[:16]], [data])


_READERS: tuple[Callable[[bytes], Any], ...] = (
    _a_request,
    _a_response,
    _a_wave,
    unpack_wave_reply,
    _an_entry,
    lambda data: work_in([b"w", data]),
    BatchHeader.unpack,
    _a_fact,
    lambda data: read_facts([FIELD, data]),
    TurnsNote.unpack,
    SequenceState.unpack,
    lambda data: SequenceAbout.unpack(data[:24], data[24:]),
    Reference.unpack,
    _a_job,
    lambda data: read_seal("m", b"1-0", [FIELD_SEAL, data]),
    _a_recorded_call,
    StreamsNote.unpack,
    DeliveryNote.unpack,
)


def wire(data: bytes) -> None:
    """Records of the log as somebody who may write to it could have written them."""
    if not data:
        return
    try:
        _READERS[data[0] % len(_READERS)](data[1:])
    except InvalidRecord as error:
        assert str(error)
    except CharoniaError as error:  # a job's record, which a caller asks for
        assert error.message


def frames(data: bytes) -> None:
    """What a model's process says to its executor."""
    whole = _frames([data])
    assert [_told(frame) for frame in whole] == [_told(frame) for frame in _frames(cuts(data))]
    for frame in whole:
        if isinstance(frame, Frame):
            for read in _OF_FRAMES:
                with contextlib.suppress(FrameError):
                    read(frame)


_OF_FRAMES: tuple[Callable[[Frame], Any], ...] = (
    responses_of,
    response_of,
    failure_of,
    call_of,
    lambda frame: outputs_of(frame, 2, _no_slot),
    answer_of,
    lambda frame: outcome_of(frame, _no_slot),
)


def _no_slot(_sizes: Any) -> Any:
    raise ValueError("there is no slot")


def _told(frame: Frame | str) -> Any:
    return frame if isinstance(frame, str) else (frame.kind, frame.call, frame.meta, bytes(frame.data))


def _frames(pieces: list[bytes]) -> list[Frame | str]:
    reader = FrameReader()
    found: list[Frame | str] = []
    try:
        for piece in pieces:
            rest = piece
            while rest:
                buffer = reader.get_buffer()
                size = min(len(buffer), len(rest))
                buffer[:size] = rest[:size]
                rest = rest[size:]
                found += reader.received(size)
    except FrameError as error:  # frames before it in the same piece go with it: the process is ended
        return [str(error)]
    return found


def _a_job_id(data: bytes) -> None:
    found = parse_public_id(data.decode("latin-1"))
    if found is not None:
        model, job_id = found
        assert len(job_id) == 16
        assert parse_public_id(public_id(model, job_id)) == found


def _a_cursor(data: bytes) -> None:
    cursor = Cursor.parse(data.decode("latin-1"))
    assert Cursor.parse(cursor.text()) == cursor


def _a_path(data: bytes) -> None:
    path = data.decode("utf-8", "surrogateescape")
    route = resolve(path)
    group_of(path)
    if route is not None:
        assert "/" not in route.model
        assert parse_version(route.version) >= -1
        check_model_name(route.model)


def _some_headers(data: bytes) -> None:
    headers = [(name, value) for name, _, value in (line.partition(b":") for line in data.split(b"\n"))]
    wish = read_wish(words_of_headers(headers), 0, form={})
    assert 0 <= wish.wait_s <= 60
    assert 0 <= wish.deadline_ns < 2**63
    if wish.options.idempotency_key:
        check_key(wish.options.idempotency_key)
        assert len(key_digest("t", "m", wish.options.idempotency_key)) == 16
    if wish.options.webhook is not None:
        check_url(wish.options.webhook.url)


def _a_trace_context(data: bytes) -> None:
    parent, _, state = data.decode("latin-1").partition("\n")
    read_parent(parent, state)


_WORDS: tuple[Callable[[bytes], Any], ...] = (
    _a_job_id,
    _a_cursor,
    _a_path,
    _some_headers,
    lambda data: check_url(data.decode("utf-8", "surrogateescape")),
    _a_trace_context,
    read_load_request,
    read_unload_request,
    read_index_request,
    read_log_settings,
    read_trace_settings,
    read_system_region,
)


def jobs(data: bytes) -> None:
    """Job ids, cursors, paths, delivery headers, webhook addresses, trace contexts, and bodies of control calls."""
    if data:
        _refusing(lambda: _WORDS[data[0] % len(_WORDS)](data[1:]))


def openai(data: bytes) -> None:
    """The first byte chooses a path of the OpenAI API, the rest is the body."""
    if not data:
        return
    path = openai_doubles.PATHS[data[0] % len(openai_doubles.PATHS)]
    status, reply = openai_doubles.post(path, data[1:])
    if status != 200:
        assert 400 <= status < 500, (status, reply)
        assert json.loads(reply)["error"]["message"], reply
    elif not reply.startswith((b"data: ", b"event: ", b"Success: ")):
        json.loads(reply)
    _tells_no_address(data, reply)


def stored(data: bytes) -> None:
    """The first byte chooses among an upload, a batch's file and a response of the OpenAI API; then comes its body."""
    if data:
        (_upload, _batch, _response)[data[0] % 3](data[1:])


def _upload(body: bytes) -> None:
    found = []
    for size in (max(1, len(body)), 1, 5):
        form = UploadForm(b"x")
        try:
            content = b"".join([form.feed(body[at : at + size]) for at in range(0, len(body), size)])
            form.end()
            found.append((content, form.fields, form.filename))
        except ApiError as refused:
            found.append((refused.message.encode(), {}, None))
    assert found[0] == found[1] == found[2], found


def _batch(body: bytes) -> None:
    found = []
    for size in (max(1, len(body)), 3):
        reader = LineReader()
        lines = [line for at in range(0, len(body), size) for line in reader.feed(body[at : at + size])]
        checked = validated([*lines, *reader.end()], "/v1/responses")
        found.append((checked.lines, checked.model, checked.errors))
    assert found[0] == found[1], found


def _response(body: bytes) -> None:
    with contextlib.suppress(ApiError):
        request = read_response_request(read_object(body))
        assert ResponseRequest.of_note(request.note()) == request
        read_chat(chat_body(request, ()))


def _a_sampling(data: bytes) -> None:
    parameters = parse_sampling(data, context=100, prompt_tokens=10, seed=lambda: 1)
    check_vocabulary(parameters, 1000)
    assert 1 <= parameters.max_tokens <= 90, parameters
    if parameters.structured is not None and importlib.util.find_spec("llguidance"):
        check_structure(parameters.structured)


def _some_assets(data: bytes) -> None:
    with contextlib.suppress(InvalidRecord):
        assets = TextAssets.unpack(data)
        assert TextAssets.unpack(assets.pack()) == assets


def _some_calls(data: bytes) -> None:
    """Content and calls are the same however the text is cut, and no text is lost that is no call."""
    pieces = [piece.decode("latin-1") for piece in cuts(data)]
    for name in FORMATS:
        together, apart = _divided(name, ["".join(pieces)]), _divided(name, pieces)
        assert together == apart, (name, together, apart)


def _divided(name: str, pieces: list[str]) -> tuple[str, list[list[str]]]:
    reader = call_reader(name)
    assert reader is not None
    content, calls = "", []
    for found in [each for piece in pieces for each in reader.push(piece)] + reader.flush():
        if isinstance(found, str):
            content += found
        elif found.name:
            assert found.index == len(calls), found
            calls.append([found.name, found.arguments])
        else:
            calls[found.index][1] += found.arguments
    return content, calls


class _ByteTokens:
    """A tokenizer whose tokens are bytes."""

    end_tokens = frozenset({256})
    special_tokens = frozenset({256})

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


def _a_text(data: bytes) -> None:
    """The part before the first NUL is stop strings, one a line: no text goes on behind one."""
    stops, _, text = data.partition(b"\0")
    stop = tuple(dict.fromkeys(line for line in stops.decode(errors="replace").split("\n") if line))[:64]
    detokenizer = Detokenizer(_ByteTokens(), SamplingParameters(seed=0, stop=stop))
    found = "".join([*map(detokenizer.push, text), detokenizer.flush()])
    whole = text.decode(errors="replace")
    assert whole.startswith(found)
    assert not any(each in found for each in stop)
    assert detokenizer.finished or found == whole


def _a_chat(data: bytes) -> None:
    if importlib.util.find_spec("jinja2"):
        with contextlib.suppress(ValueError):
            chat = json.loads(data)
            if isinstance(chat, list):
                render_chat(TextAssets(b"", context=1), chat)


_TEXTS: tuple[Check, ...] = (_a_sampling, _some_assets, _some_calls, _a_text, _a_chat)


def text(data: bytes) -> None:
    """Sampling parameters with their grammars, text assets, texts with calls of tools or stop strings, and chats."""
    if data:
        _refusing(lambda: _TEXTS[data[0] % len(_TEXTS)](data[1:]))


TARGETS: dict[str, Check] = {
    "http": http,
    "infer": infer,
    "protobuf": protobuf,
    "http2": http2,
    "config": config,
    "wire": wire,
    "frames": frames,
    "jobs": jobs,
    "text": text,
    "openai": openai,
    "stored": stored,
}


class Overdue(BaseException):
    """An input does not end. Not an `Exception`: readers turn those into refusals."""


@contextlib.contextmanager
def _alarm() -> Iterator[None]:
    def end(*_: Any) -> None:
        raise Overdue(f"not done after {_MOST_WAIT_S} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, _MOST_WAIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _errors_logged() -> Iterator[list[str]]:
    """What is logged as an error meanwhile; nothing of it is printed."""
    records: list[str] = []
    listener = logging.Handler(logging.ERROR)
    listener.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("gateway", "charonia", "executors", "asyncio", "uvicorn")]
    before = [(logger.propagate, logger.handlers) for logger in loggers]
    for logger in loggers:
        logger.propagate, logger.handlers = False, [listener]
    try:
        yield records
    finally:
        for logger, (propagate, handlers) in zip(loggers, before, strict=True):
            logger.propagate, logger.handlers = propagate, handlers


def checked(target: str, *, with_alarm: bool = True) -> Check:
    """The target's function with the bounds of time and memory, and nothing logged as an error.

    `with_alarm`: raise `Overdue` for an input that does not end; libFuzzer has an alarm of its own.
    """
    check = TARGETS[target]

    def run(data: bytes) -> None:
        began, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        alarm = _alarm() if with_alarm else contextlib.nullcontext()
        with _errors_logged() as records, warnings.catch_warnings(), alarm:
            warnings.simplefilter("ignore")  # libraries warn of what they read
            check(data)
        assert not records, records
        seconds = time.process_time() - began
        assert seconds < MOST_SECONDS, f"took {seconds:.1f} s"
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
        assert grown < MOST_MEMORY_BYTES, f"took {grown >> 20} MiB"

    return run
