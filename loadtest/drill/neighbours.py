"""`python -m loadtest.drill.neighbours`: what small calls wait beside one client that sends large or hostile messages.

Serves this checkout on two models of its own, and times small HTTP calls, one at a time, in turns: alone, then beside
each kind of neighbour, then alone again. A neighbour is a process of its own that has made its messages before. Printed
are p50, p99 and the longest of the small calls, p99 as a multiple of p99 alone (mean of before and after), what the
neighbour had answered, and the largest memory of each process meanwhile.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from charonia.offload.time_slices import LOOP_SLICE_NS, set_time_slice
from loadtest.bench.processes import load_roles, parse_pss, read_parents
from loadtest.bench.servers import Charonia
from loadtest.model import LoadTestError

JSON_BYTES = 64 << 20
STRINGS = 10_000_000
BOMB_BYTES = 512 << 20
STALLED = 1500
TENSOR_BYTES = 600 << 10
PAUSE_S = 0.005
"""Between small calls: they show what one of many callers waits, and leave the processors to the server."""
TIMEOUT_S = 300.0
NEIGHBOUR_POLICIES = {"idle": os.SCHED_IDLE, "other": os.SCHED_OTHER}
"""How the neighbour's program gets processors: it stands for one on another machine, and has what the server leaves.
With "other" it competes with the server as a program on the same machine does."""
_POLICY = "LOADTEST_NEIGHBOUR_POLICY"
_WIDTH = 16
_PIECE_BYTES = 1 << 16
"""What a neighbour sends and reads with one system call: a kernel without preemption does not take the processor from a
call that copies some MB, whatever the policy is."""


# -- models and messages -----------------------------------------------------------------------------------------------


def write_models(repository: Path) -> None:
    """`numbers` and `strings` give back rows of any length."""
    import onnx
    from onnx import TensorProto, helper

    for name, element, kind in (("numbers", TensorProto.FLOAT, "FP32"), ("strings", TensorProto.STRING, "STRING")):
        ends = [helper.make_tensor_value_info(end, element, ["N", "M"]) for end in ("INPUT0", "OUTPUT0")]
        node = helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"])
        graph = helper.make_graph([node], name, ends[:1], ends[1:])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        (repository / name / "1").mkdir(parents=True)
        onnx.save(model, str(repository / name / "1" / "model.onnx"))
        tensors = "".join(
            f'{way} [ {{ name: "{end}" data_type: TYPE_{kind} dims: [ -1 ] }} ]\n'
            for way, end in (("input", "INPUT0"), ("output", "OUTPUT0"))
        )
        text = f'name: "{name}"\nbackend: "onnxruntime"\nmax_batch_size: 8\n{tensors}'
        (repository / name / "config.pbtxt").write_text(text)


def binary(count: int, values: bytes, **more: Any) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a request with a binary FP32 tensor."""
    tensor = {"name": "INPUT0", "shape": [1, count], "datatype": "FP32"}
    tensor["parameters"] = {"binary_data_size": len(values)}
    head = json.dumps({"inputs": [tensor], **more}).encode()
    return head + values, {"Inference-Header-Content-Length": str(len(head))}


def posts(address: str, model: str, body: bytes, headers: dict[str, str]) -> Callable[[], bool]:
    """Sends this body again and again on one connection; a call of it is one request, True when it was answered 200."""
    view = memoryview(body)
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)

    def post() -> bool:
        try:
            pieces = (view[at : at + _PIECE_BYTES] for at in range(0, len(view), _PIECE_BYTES))
            lengths = {"Content-Length": str(len(body))}
            connection.request("POST", f"/v2/models/{model}/infer", pieces, {**headers, **lengths})
            answer = connection.getresponse()
            while answer.read(_PIECE_BYTES):
                pass
            return answer.status == 200
        except (OSError, http.client.HTTPException):
            connection.close()
            return False

    return post


def json_bodies(http_address: str, _grpc: str) -> Callable[[], bool]:
    """64 MB of JSON numbers."""
    number = b"0.1234,"
    count = JSON_BYTES // len(number)
    rest = b'}],"parameters":{"binary_data_output":true}}'
    head = b'{"inputs":[{"name":"INPUT0","shape":[1,%d],"datatype":"FP32","data":[' % count
    size = JSON_BYTES - len(head) - len(rest) - 8
    count = size // len(number)
    head = b'{"inputs":[{"name":"INPUT0","shape":[1,%d],"datatype":"FP32","data":[' % count
    return posts(http_address, "numbers", head + (number * count)[:-1] + b"]" + rest, {})


def json_answers(http_address: str, _grpc: str) -> Callable[[], bool]:
    """A binary tensor whose answer is 64 MB of JSON."""
    count = 3_400_000
    return posts(http_address, "numbers", *binary(count, np.random.default_rng(1).random(count, np.float32).tobytes()))


def many_strings(_http: str, grpc_address: str) -> Callable[[], bool]:
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

    def send() -> bool:
        try:
            return bool(call(data, timeout=TIMEOUT_S))
        except grpc.RpcError:
            return False

    return send


def bombs(http_address: str, _grpc: str) -> Callable[[], bool]:
    """Half a gigabyte of zeros, compressed to half a megabyte; they are refused."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    zeros = bytes(1 << 20)
    body = b"".join([*(packer.compress(zeros) for _ in range(BOMB_BYTES >> 20)), packer.flush()])
    return posts(http_address, "numbers", body, {"Content-Encoding": "gzip"})


def stalled(http_address: str, _grpc: str) -> Callable[[], bool]:
    """1,500 connections that each have sent half of a body and send nothing more."""
    host, _, port = http_address.rpartition(":")
    head = b"POST /v2/models/numbers/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 65536\r\n\r\n" + bytes(32 << 10)
    held = []

    def hold() -> bool:
        if len(held) >= STALLED:
            time.sleep(0.1)
            return False
        with suppress(OSError):
            connection = socket.create_connection((host, int(port)))
            connection.sendall(head)
            held.append(connection)
            return True
        return False

    return hold


def tensors(http_address: str, _grpc: str) -> Callable[[], bool]:
    """600 KB of binary tensor, one request after the other."""
    body, headers = binary(TENSOR_BYTES // 4, bytes(TENSOR_BYTES), parameters={"binary_data_output": True})
    return posts(http_address, "numbers", body, headers)


KINDS: dict[str, Callable[[str, str], Callable[[], bool]]] = {
    "json-bodies": json_bodies,
    "json-answers": json_answers,
    "strings": many_strings,
    "bombs": bombs,
    "stalled": stalled,
    "tensors": tensors,
}


def be(kind: str, http_address: str, grpc_address: str) -> None:
    """Be this neighbour until standard input ends; prints a line for each message that was answered 200, or sent."""
    send = KINDS[kind](http_address, grpc_address)
    # made at the ordinary priority: nothing is measured yet
    os.sched_setscheduler(0, NEIGHBOUR_POLICIES[os.environ.get(_POLICY, "idle")], os.sched_param(0))
    print("made", flush=True)
    ending = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ending.set()), daemon=True).start()
    while not ending.is_set():
        print("answered" if send() else "refused", flush=True)
    os._exit(0)


# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass
class Beside:
    """Small calls beside one kind of neighbour: their times in ms, and what the neighbour had."""

    kind: str
    times_ms: list[float] = field(default_factory=list)
    failed: int = 0
    answered: int = 0
    refused: int = 0
    memory_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def quantile(self, share: float) -> float:
        ordered = sorted(self.times_ms)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def small_calls(address: str, seconds: float, found: Beside) -> None:
    """One call at a time for so long.

    The calling thread stands for a client on another machine: it does not wait for the processors of this one.
    """
    set_time_slice(LOOP_SLICE_NS, inherited=False)
    body, headers = binary(_WIDTH, bytes(4 * _WIDTH), parameters={"binary_data_output": True})
    post = posts(address, "numbers", body, headers)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        began_s = time.monotonic()
        found.failed += not post()
        found.times_ms.append((time.monotonic() - began_s) * 1000)
        time.sleep(PAUSE_S)


def watch_memory(processes_file: Path, found: Beside, ending: threading.Event) -> None:
    """Note the largest proportional set size of every process: listed ones by role, those they started as workers."""
    while not ending.wait(0.25):
        with suppress(OSError, ValueError):
            roles, parents = load_roles(processes_file), read_parents()
            workers = {pid: f"{roles[parent]}'s worker" for pid, parent in parents.items() if parent in roles}
            for pid, role in {**workers, **roles}.items():
                with suppress(OSError, ValueError):
                    size = parse_pss(Path(f"/proc/{pid}/smaps_rollup").read_text())
                    found.memory_bytes[role] = max(found.memory_bytes[role], size)


def measured(server: Charonia, kind: str, seconds: float) -> Beside:
    """Small calls beside this kind of neighbour; "alone" for none. Raises LoadTestError."""
    found = Beside(kind)
    where = server.endpoints
    assert where.http is not None
    assert where.grpc is not None
    assert where.processes_file is not None
    ending = threading.Event()
    with ExitStack() as stack:
        neighbour: subprocess.Popen[str] | None = None
        reading: threading.Thread | None = None
        if kind != "alone":
            command = [sys.executable, "-m", "loadtest.drill.neighbours", "--as", kind, where.http, where.grpc]
            neighbour = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(neighbour.wait)
            stack.callback(neighbour.kill)
            assert neighbour.stdout is not None
            if neighbour.stdout.readline() != "made\n":
                raise LoadTestError(f"the neighbour {kind} could not make its messages")
            lines = neighbour.stdout

            def read() -> None:
                for line in lines:
                    if line == "answered\n":
                        found.answered += 1
                    else:
                        found.refused += 1

            reading = threading.Thread(target=read, daemon=True)
            reading.start()
        small_calls(where.http, seconds, found)
        # not meanwhile: to read a process's memory map holds it up, the longer the more it has
        watching = threading.Thread(target=watch_memory, args=(where.processes_file, found, ending), daemon=True)
        watching.start()
        ending.wait(seconds / 2)
        ending.set()
        watching.join()
    if reading is not None:
        reading.join(5)
    return found


def table(results: Sequence[Beside]) -> str:
    """The results as a Markdown table."""
    alone = [one.quantile(0.99) for one in results if one.kind == "alone"]
    base = sum(alone) / len(alone)
    lines = [
        "| beside | calls | failed | p50 ms | p99 ms | longest ms | p99 of alone | neighbour's | memory MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        memory = ", ".join(f"{role} {size >> 20}" for role, size in sorted(one.memory_bytes.items()))
        p99 = one.quantile(0.99)
        lines.append(
            f"| {one.kind} | {len(one.times_ms)} | {one.failed} | {one.quantile(0.5):.1f} | {p99:.1f} | "
            f"{max(one.times_ms):.0f} | {p99 / base:.1f} | {one.answered} answered, {one.refused} refused | {memory} |"
        )
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.drill.neighbours",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kinds", default=",".join(KINDS), metavar="A,B,…", help="neighbours (default all)")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="per kind (default 10)")
    parser.add_argument(
        "--neighbour-policy",
        choices=sorted(NEIGHBOUR_POLICIES),
        default="idle",
        help="processors of the neighbour: what the server leaves, as if it were on another machine (default), "
        "or its share",
    )
    parser.add_argument("--checkout", type=Path, metavar="DIR", help="source tree to serve (default this one)")
    parser.add_argument("--serve-option", action="append", default=[], metavar="OPTION", help="for charonia serve")
    parser.add_argument("--as", dest="kind", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.kind:
        be(*options.kind)
    os.environ[_POLICY] = options.neighbour_policy
    kinds = options.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--kinds must be of {', '.join(KINDS)}, got {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="loadtest-neighbours-") as home:
        write_models(Path(home))
        with Charonia(Path(home), options.serve_option, options.checkout) as server:
            measured(server, "alone", 1.0)  # what is loaded by the first calls
            results = []
            for kind in ("alone", *kinds, "alone"):
                results.append(measured(server, kind, options.seconds))
                print(f"{kind}: p99 {results[-1].quantile(0.99):.1f} ms", file=sys.stderr, flush=True)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
