"""The neighbours of `neighbours`: clients that each send one kind of large or hostile message again and again.

Each is a process of its own, which makes its messages before it says that it is ready.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

JSON_BYTES = 64 << 20
STRINGS = 10_000_000
BOMB_BYTES = 512 << 20
STALLED = 1500
TENSOR_BYTES = 600 << 10
TIMEOUT_S = 300.0
POLICIES = {"idle": os.SCHED_IDLE, "other": os.SCHED_OTHER}
"""How the neighbour's program gets processors: it stands for one on another machine, and has what the server leaves.
With "other" it competes with the server as a program on the same machine does."""
_PIECE_BYTES = 1 << 16
"""What a neighbour sends and reads with one system call: a kernel without preemption does not take the processor from a
call that copies some MB, whatever the policy is."""

Outcome = tuple[bool, int]
"""Whether a request was answered 200, and the size of the answer's body."""
Send = Callable[[], Outcome]
"""Sends one message, and reads its answer."""


def binary(count: int, values: bytes, **more: Any) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a request with a binary FP32 tensor."""
    tensor = {"name": "INPUT0", "shape": [1, count], "datatype": "FP32"}
    tensor["parameters"] = {"binary_data_size": len(values)}
    head = json.dumps({"inputs": [tensor], **more}).encode()
    return head + values, {"Inference-Header-Content-Length": str(len(head))}


def posts(address: str, model: str, body: bytes, headers: dict[str, str]) -> Send:
    """Sends this body again and again on one connection."""
    view = memoryview(body)
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)

    def post() -> Outcome:
        try:
            pieces = (view[at : at + _PIECE_BYTES] for at in range(0, len(view), _PIECE_BYTES))
            lengths = {"Content-Length": str(len(body))}
            connection.request("POST", f"/v2/models/{model}/infer", pieces, {**headers, **lengths})
            answer = connection.getresponse()
            size = 0
            while piece := answer.read(_PIECE_BYTES):
                size += len(piece)
            return answer.status == 200, size
        except (OSError, http.client.HTTPException):
            connection.close()
            return False, 0

    return post


def json_bodies(http_address: str, _grpc: str) -> Send:
    """64 MB of JSON numbers."""
    number = b"0.1234,"
    count = JSON_BYTES // len(number)
    rest = b'}],"parameters":{"binary_data_output":true}}'
    head = b'{"inputs":[{"name":"INPUT0","shape":[1,%d],"datatype":"FP32","data":[' % count
    size = JSON_BYTES - len(head) - len(rest) - 8
    count = size // len(number)
    head = b'{"inputs":[{"name":"INPUT0","shape":[1,%d],"datatype":"FP32","data":[' % count
    return posts(http_address, "numbers", head + (number * count)[:-1] + b"]" + rest, {})


def json_answers(http_address: str, _grpc: str) -> Send:
    """A binary tensor whose answer is 64 MB of JSON."""
    count = 3_400_000
    return posts(http_address, "numbers", *binary(count, np.random.default_rng(1).random(count, np.float32).tobytes()))


def many_strings(_http: str, grpc_address: str) -> Send:
    """Ten million strings in one message."""
    import grpc
    from tritonclient.grpc import service_pb2  # type: ignore[import-untyped]

    message = service_pb2.ModelInferRequest(model_name="strings")
    tensor = message.inputs.add(name="INPUT0", datatype="BYTES", shape=[1, STRINGS])
    tensor.contents.bytes_contents.extend([b""] * STRINGS)
    data = message.SerializeToString()
    del message, tensor
    limits = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    channel = grpc.insecure_channel(grpc_address, options=limits)
    call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

    def send() -> Outcome:
        try:
            return True, len(call(data, timeout=TIMEOUT_S))
        except grpc.RpcError:
            return False, 0

    return send


def bombs(http_address: str, _grpc: str) -> Send:
    """Half a gigabyte of zeros, compressed to half a megabyte; they are refused."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    zeros = bytes(1 << 20)
    body = b"".join([*(packer.compress(zeros) for _ in range(BOMB_BYTES >> 20)), packer.flush()])
    return posts(http_address, "numbers", body, {"Content-Encoding": "gzip"})


def stalled(http_address: str, _grpc: str) -> Send:
    """1,500 connections that each have sent half of a body and send nothing more."""
    host, _, port = http_address.rpartition(":")
    head = b"POST /v2/models/numbers/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 65536\r\n\r\n" + bytes(32 << 10)
    held = []

    def hold() -> Outcome:
        if len(held) >= STALLED:
            time.sleep(0.1)
            return False, 0
        with suppress(OSError):
            connection = socket.create_connection((host, int(port)))
            connection.sendall(head)
            held.append(connection)
            return True, 0
        return False, 0

    return hold


def tensors(http_address: str, _grpc: str) -> Send:
    """600 KB of binary tensor, one request after the other."""
    body, headers = binary(TENSOR_BYTES // 4, bytes(TENSOR_BYTES), parameters={"binary_data_output": True})
    return posts(http_address, "numbers", body, headers)


KINDS: dict[str, Callable[[str, str], Send]] = {
    "json-bodies": json_bodies,
    "json-answers": json_answers,
    "strings": many_strings,
    "bombs": bombs,
    "stalled": stalled,
    "tensors": tensors,
}


def be(kind: str, policy: str, http_address: str, grpc_address: str) -> None:
    """Be this neighbour until standard input ends; prints a line for each message: what came of it, and the size of the
    answer's body.
    """
    send = KINDS[kind](http_address, grpc_address)
    # made at the ordinary priority: nothing is measured yet
    os.sched_setscheduler(0, POLICIES[policy], os.sched_param(0))
    print("made", flush=True)
    ending = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ending.set()), daemon=True).start()
    while not ending.is_set():
        answered, size = send()
        print("answered" if answered else "refused", size, flush=True)
    os._exit(0)


if __name__ == "__main__":
    be(*sys.argv[1:])
