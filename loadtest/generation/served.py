"""Clients of a server's streams of text: one connection and one thread each, over HTTP or gRPC."""

from __future__ import annotations

import http.client
import json
import queue
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from loadtest.model import LoadTestError

from .loops import Prompts, Run

_TIMEOUT_S = 300

Stream = Callable[[Sequence[int], int], Iterator[object]]
"""Reads one stream, of a prompt and so many tokens: an item for each of its messages that has tokens."""


def run(stream: Stream, prompts: Prompts, tokens: int) -> Run:
    """All prompts at once, so many tokens each, greedily. Raises `LoadTestError` for a stream that fails."""
    firsts: list[float] = []
    gaps: list[float] = []
    failures: list[str] = []

    def read(prompt: Sequence[int]) -> None:
        began, last = time.perf_counter(), 0.0
        try:
            for _ in stream(prompt, tokens):
                now = time.perf_counter()
                if last:
                    gaps.append(now - last)
                else:
                    firsts.append(now - began)
                last = now
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=read, args=(prompt,)) for prompt in prompts]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures or len(firsts) != len(prompts):
        raise LoadTestError(f"{len(prompts) - len(firsts)} of {len(prompts)} streams failed: {failures[:1]}")
    return Run(len(prompts) * tokens / (time.perf_counter() - began), firsts, gaps)


def generate(address: str, model: str) -> Stream:
    """`generate_stream`."""

    def stream(prompt: Sequence[int], tokens: int) -> Iterator[object]:
        body = {"prompt_token_ids": list(prompt), "stream": True, "sampling_parameters": json.dumps(_sampling(tokens))}
        return _events(address, f"/v2/models/{model}/generate_stream", body)

    return stream


def openai(address: str, model: str) -> Stream:
    """`/v1/completions` of the OpenAI API."""

    def stream(prompt: Sequence[int], tokens: int) -> Iterator[object]:
        body = {"model": model, "prompt": list(prompt), "stream": True, **_sampling(tokens)}
        return _events(address, "/v1/completions", body)

    return stream


def grpc(address: str, model: str) -> Stream:
    """`ModelStreamInfer`."""
    from grpc import insecure_channel

    from protos import grpc_service_pb2 as pb
    from protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

    stub: Any = GRPCInferenceServiceStub

    def stream(prompt: Sequence[int], tokens: int) -> Iterator[object]:
        request: Any = pb.ModelInferRequest(model_name=model)
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        for name, datatype, count, data in (
            ("prompt_token_ids", "INT32", len(prompt), struct.pack(f"<{len(prompt)}i", *prompt)),
            ("stream", "BOOL", 1, b"\1"),
            ("sampling_parameters", "BYTES", 1, _element(json.dumps(_sampling(tokens)).encode())),
        ):
            request.inputs.add(name=name, datatype=datatype, shape=[count])
            request.raw_input_contents.append(data)
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        requests.put(request)
        with insecure_channel(address) as channel:
            call = stub(channel).ModelStreamInfer(iter(requests.get, None), timeout=_TIMEOUT_S)
            for message in call:
                if message.error_message:
                    raise LoadTestError(message.error_message)
                if message.infer_response.outputs:
                    yield message
                if message.infer_response.parameters["triton_final_response"].bool_param:
                    break
            requests.put(None)

    return stream


def _sampling(tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}


def _events(address: str, path: str, body: dict[str, Any]) -> Iterator[object]:
    connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise LoadTestError(f"{path}: {response.status} {response.read(500)!r}")
        for line in response:
            if not line.startswith(b"data:") or line.startswith(b"data: [DONE]"):
                continue
            if b'"error"' in line:
                raise LoadTestError(line.decode(errors="replace"))
            yield line
    finally:
        connection.close()


def _element(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data
