"""What Triton and Charonia are both asked: tables of HTTP and gRPC calls. `likeness` sends them and compares.

A sequence is consecutive calls of a table. Calls that crash or hang Triton 2.51 are left out: a stream of an ensemble
whose step fails, a string as the id of a numeric control, a failing response read with `exec(decoupled=True)`.
"""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tritonclient.grpc import service_pb2  # type: ignore[import-untyped]

LENGTH = "Inference-Header-Content-Length"
_NUMBERS = struct.pack("<6f", *range(6))


@dataclass(frozen=True)
class HttpCall:
    """One HTTP request, as its bytes."""

    name: str
    path: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = "POST"


@dataclass(frozen=True)
class GrpcCall:
    """One `ModelInfer`, or one `ModelStreamInfer` with these requests."""

    name: str
    requests: tuple[Any, ...]
    streamed: bool


Call = HttpCall | GrpcCall

_GENERATED: dict[str, Any] = {
    "text": {"TEXT": "hi"}, "id": {"TEXT": "hi", "id": "7"}, "id of another type": {"TEXT": "hi", "id": 7},
    "list": {"TEXT": ["hi"]}, "batch": {"TEXT": ["a", "b"]}, "number for text": {"TEXT": 5}, "null": {"TEXT": None},
    "numbers": {"TEXT": "x", "N": 3000000000, "F": [1, 2.5], "M": [1, 2, 3, 4], "B": True},
    "fraction": {"TEXT": "x", "N": 1.5}, "shape": {"TEXT": "x", "M": [1, 2, 3]}, "half": {"TEXT": "x", "H": 1.5},
    "parameters": {"TEXT": "x", "foo": "bar", "parameters": {"a": 1, "N": 2}},
    "twice": {"TEXT": "x", "N": 2, "parameters": {"N": 1}}, "nested": {"TEXT": "x", "foo": {"a": 1}},
    "parameters in a list": {"TEXT": "x", "parameters": [1]}, "array": [1], "empty": {},
}  # fmt: skip
_COMMANDS: dict[str, list[str]] = {
    "one": ["out:a"], "many": ["out:a,b"], "two": ["out:a", "out:b"], "none": ["none"], "zero": [],
    "request": ["request:"], "error": ["error:INVALID_ARG:bad"], "late error": ["out:a", "error:UNAVAILABLE:bad"],
    "raise error": ["raise:oops"],
}  # fmt: skip
_PARAMETERS: dict[str, dict[str, Any]] = {
    "int": {"a": -1}, "text": {"a": "b"}, "bool": {"a": True}, "float": {"a": 1.5}, "time-out": {"timeout": 5},
    "priority": {"priority": 2}, "reserved": {"triton_x": 1}, "headers": {"headers": 1}, "quotes": {'a"b': 'c"\\'},
    "sequence": {"sequence_id": 3, "sequence_start": True}, "wrong start": {"sequence_start": "x"},
    "wrong time-out": {"timeout": "5"}, "wrong priority": {"priority": "x"}, "negative priority": {"priority": -1},
}  # fmt: skip
_SEQUENCES: dict[str, list[dict[str, Any]]] = {
    "whole": [{"sequence_start": True}, {}, {"sequence_end": True}, {}],
    "one": [{"sequence_start": True, "sequence_end": True}],
    "restarted": [{"sequence_start": True}, {"sequence_start": True}, {"sequence_end": True}],
    "without a start": [{}],
}
_CALLED: dict[str, tuple[str, list[str], dict[str, list[str]]]] = {
    "model": ("scripted", ["OUT"], {"CMD": ["out:a"]}), "unknown": ("nope", ["OUT"], {"CMD": ["out:a"]}),
    "failing": ("scripted", ["OUT"], {"CMD": ["error:INTERNAL:x"]}), "ensemble": ("chain", ["OUT"], {"IN": ["out:a"]}),
    "unknown output": ("scripted", ["NOPE"], {"CMD": ["out:a"]}),
    "decoupled": ("decoupled", ["OUT"], {"CMD": ["out:a"]}),
}  # fmt: skip
_ACCEPTED_ENCODINGS = ("gzip", "deflate", "identity", "br", "gzip;q=0.5, deflate;q=0.8", "gzip;q=0", "identity;q=0")


def _strings(words: list[str]) -> bytes:
    return b"".join(struct.pack("<I", len(word.encode())) + word.encode() for word in words)


def _json(tensors: list[dict[str, Any]], **more: Any) -> bytes:
    return json.dumps({"inputs": tensors, **more}).encode()


def infer_request(model: str, name: str, words: list[str] | int, parameters: Mapping[str, Any], request_id: str) -> Any:
    """A `ModelInferRequest` with one input: strings, or one int32."""
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    is_number = isinstance(words, int)
    shape = [1] if isinstance(words, int) else [len(words)]
    request.inputs.add(name=name, datatype="INT32" if is_number else "BYTES", shape=shape)
    request.raw_input_contents.append(struct.pack("<i", words) if isinstance(words, int) else _strings(words))
    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    for key, value in parameters.items():
        setattr(request.parameters[key], kinds[type(value)], value)
    return request


def _both(what: str, model: str, name: str, words: list[str] | int, parameters: Mapping[str, Any]) -> Iterator[Call]:
    """One inference as JSON over HTTP, by `ModelInfer` and by a stream."""
    data, kind = ([words], "INT32") if isinstance(words, int) else (words, "BYTES")
    tensor = {"name": name, "datatype": kind, "shape": [len(data)], "data": data}
    path = f"/v2/models/{model}/infer"
    yield HttpCall(f"http {what}", path, _json([tensor], id="r", parameters=dict(parameters)))
    request = infer_request(model, name, words, parameters, "r")
    yield GrpcCall(f"grpc {what}", (request,), streamed=False)
    yield GrpcCall(f"stream {what}", (request,), streamed=True)


def _generate_calls() -> Iterator[Call]:
    for kind in ("generate", "generate_stream"):
        for model in ("mixed", "plain"):
            for what, document in _GENERATED.items():
                path = f"/v2/models/{model}/{kind}"
                yield HttpCall(f"{kind} {model}: {what}", path, json.dumps(document).encode())
        for model in ("scripted", "decoupled", "chain", "stream_chain"):
            key = "IN" if "chain" in model else "CMD"
            for what, commands in _COMMANDS.items():
                path = f"/v2/models/{model}/{kind}"
                yield HttpCall(f"{kind} {model}: {what}", path, json.dumps({key: commands, "id": "k"}).encode())
        for encoding in ("gzip", "br", "identity"):
            headers = {"Content-Encoding": encoding}
            yield HttpCall(f"{kind} in {encoding}", f"/v2/models/plain/{kind}", b'{"TEXT":"a"}', headers)
        yield HttpCall(f"{kind} by GET", f"/v2/models/plain/{kind}", b"", {}, "GET")
        yield HttpCall(f"{kind} of no model", f"/v2/models/nope/{kind}", b'{"TEXT":"a"}')


def _inference_calls() -> Iterator[Call]:
    for what, commands in _COMMANDS.items():
        yield from _both(f"scripted: {what}", "scripted", "CMD", commands, {})
        yield from _both(f"decoupled: {what}", "decoupled", "CMD", commands, {})
        chain = _both(f"chain: {what}", "chain", "IN", commands, {})
        yield from (call for call in chain if not (isinstance(call, GrpcCall) and call.streamed))
    for what, parameters in _PARAMETERS.items():
        yield from _both(f"parameters: {what}", "scripted", "CMD", ["request:"], parameters)
    for what, (model, outputs, inputs) in _CALLED.items():
        asked = json.dumps({"model": model, "outputs": outputs, "inputs": inputs})
        yield from _both(f"calls: {what}", "caller", "CMD", [f"call:{asked}"], {})


def _sequence_calls() -> Iterator[Call]:
    number = 100
    for model in ("direct", "oldest"):
        for what, steps in _SEQUENCES.items():
            for transport in range(3):
                number += 1
                for at, step in enumerate(steps):
                    named = {"sequence_id": number, **step}
                    yield list(_both(f"{model} {what} {at}", model, "V", at, named))[transport]
        yield from _both(f"{model} without an id", model, "V", 1, {})
        yield from _both(f"{model} with the id 0", model, "V", 1, {"sequence_id": 0, "sequence_start": True})


def _encoding_calls() -> Iterator[Call]:
    path = "/v2/models/matrix/infer"
    tensor = {"name": "X", "datatype": "FP32", "shape": [2, 3], "data": [0, 1, 2, 3, 4, 5]}
    for binary in (False, True):
        plain = _json([tensor], parameters={"binary_data_output": binary})
        for accepted in _ACCEPTED_ENCODINGS:
            yield HttpCall(f"answers in {accepted}, binary {binary}", path, plain, {"Accept-Encoding": accepted})
        for encoding, body in (("gzip", gzip.compress(plain)), ("deflate", zlib.compress(plain)), ("br", plain)):
            yield HttpCall(f"request in {encoding}, binary {binary}", path, body, {"Content-Encoding": encoding})
    del tensor["data"]
    for size in (24, 20, 28, 0, -1, "24", None):
        head = _json([{**tensor, "parameters": {"binary_data_size": size}}])
        yield HttpCall(f"binary size {size!r}", path, head + _NUMBERS, {LENGTH: str(len(head))})
    head = _json([{**tensor, "parameters": {"binary_data_size": 24}}])
    for length in (-1, 0, 1, len(head) - 1, len(head) + 24, len(head) + 25):
        yield HttpCall(f"header length {length - len(head)}", path, head + _NUMBERS, {LENGTH: str(length)})
    yield HttpCall("binary in gzip", path, gzip.compress(head + _NUMBERS),
                   {LENGTH: str(len(head)), "Content-Encoding": "gzip"})  # fmt: skip
    raw = {"matrix": [_NUMBERS], "rows": [_NUMBERS[:16]], "word": [b"hello", b""], "words": [b"a"], "mixed": [b"a"]}
    for model, bodies in raw.items():
        for body in bodies:
            yield HttpCall(f"raw {model} of {len(body)}", f"/v2/models/{model}/infer", body, {LENGTH: "0"})


def calls() -> list[Call]:
    """All calls, in the order in which they are sent."""
    return [*_generate_calls(), *_inference_calls(), *_sequence_calls(), *_encoding_calls()]
