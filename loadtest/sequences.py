"""`python -m loadtest.sequences`: many sequences at once over streams, executors killed meanwhile, all answers checked.

Each sequence sends its values without waiting for answers; its model's state is `state = (31 * state + value) mod
65521`, so that a value lost, doubled or out of order shows in every answer after it. Starts a server of its own. Exit
status: 0 when no answer was wrong or out of order and none failed, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2  # type: ignore[import-untyped]

from .bench.servers import Charonia
from .model import LoadTestError

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
FACTOR, MODULUS = 31, 65521
"""Below 2^24 all of it is exact in FP32."""
PATIENCE_S = 300.0

CONFIG = """
backend: "onnxruntime"
max_batch_size: {batch}
input [ {{ name: "VALUE" data_type: TYPE_FP32 dims: [ 1 ] }} ]
output [ {{ name: "STATE" data_type: TYPE_FP32 dims: [ 1 ] }} ]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
parameters {{ key: "charonia.checkpoint_every" value {{ string_value: "{every}" }} }}
sequence_batching {{
  max_sequence_idle_microseconds: 120000000
  oldest {{ max_candidate_sequences: {candidates} }}
  state [ {{ input_name: "BEFORE" output_name: "AFTER" data_type: TYPE_FP32 dims: [ 1 ] }} ]
}}
"""


def build(repository: Path, *, batch: int, candidates: int, every: int = 1) -> None:
    """The model `digest` in a repository."""
    from onnx import TensorProto, helper

    def tensors(*names: str) -> list[Any]:
        return [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 1]) for name in names]

    def constant(name: str, value: float) -> Any:
        return helper.make_tensor(name, TensorProto.FLOAT, [1], [value])

    nodes = [
        helper.make_node("Mul", ["BEFORE", "factor"], ["multiplied"]),
        helper.make_node("Add", ["multiplied", "VALUE"], ["added"]),
        helper.make_node("Mod", ["added", "modulus"], ["STATE"], fmod=1),
        helper.make_node("Identity", ["STATE"], ["AFTER"]),
    ]
    constants = [constant("factor", FACTOR), constant("modulus", MODULUS)]
    graph = helper.make_graph(nodes, "digest", tensors("VALUE", "BEFORE"), tensors("STATE", "AFTER"), constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    version = repository / "digest" / "1"
    version.mkdir(parents=True)
    (version / "model.onnx").write_bytes(model.SerializeToString())
    (repository / "digest" / "config.pbtxt").write_text(CONFIG.format(batch=batch, candidates=candidates, every=every))


@dataclass
class Tally:
    """What came back. `out_of_order` are answers to another step than the one that was due."""

    answers: int = 0
    wrong: int = 0
    out_of_order: int = 0
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0
    killed: list[int] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.wrong or self.out_of_order or self.errors)


class Stream:
    """Some of the sequences, in one stream: step by step through all of them, sent as fast as they are taken."""

    def __init__(self, address: str, numbers: range, steps: int, seed: int) -> None:
        self._numbers = numbers
        self._steps = steps
        draw = random.Random(seed)
        self._values = {number: [draw.randrange(1, 1000) for _ in range(steps)] for number in numbers}
        self._channel = grpc.insecure_channel(address)
        self._call = self._channel.stream_stream(
            METHOD,
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )

    def run(self, tally: Tally, lock: threading.Lock) -> None:
        """Everything, until the last answer."""
        states = dict.fromkeys(self._numbers, 0)
        due = dict.fromkeys(self._numbers, 0)
        for response in self._call(self._requests(), timeout=PATIENCE_S):
            with lock:
                tally.answers += 1
                if response.error_message:
                    tally.errors.append(response.error_message)
                    continue
                number, step = map(int, response.infer_response.id.split("/"))
                if step != due[number]:
                    tally.out_of_order += 1
                due[number] = step + 1
                states[number] = (FACTOR * states[number] + self._values[number][step]) % MODULUS
                (told,) = struct.unpack("<f", response.infer_response.raw_output_contents[0])
                tally.wrong += told != states[number]
        self._channel.close()

    def _requests(self) -> Iterator[Any]:
        for step in range(self._steps):
            for number in self._numbers:
                request = service_pb2.ModelInferRequest(model_name="digest", id=f"{number}/{step}")
                request.inputs.add(name="VALUE", datatype="FP32", shape=[1, 1])
                request.raw_input_contents.append(struct.pack("<f", self._values[number][step]))
                request.parameters["sequence_id"].int64_param = number
                request.parameters["sequence_start"].bool_param = step == 0
                request.parameters["sequence_end"].bool_param = step == self._steps - 1
                yield request


def drive(
    address: str,
    processes_file: Path,
    *,
    sequences: int,
    steps: int,
    streams: int,
    kills: list[str],
    seed: int = 1,
) -> Tally:
    """Run all sequences; a process of each role in `kills` is killed, at even distances."""
    tally, lock = Tally(), threading.Lock()
    share = -(-sequences // streams)
    parts = [range(first, min(first + share, sequences + 1)) for first in range(1, sequences + 1, share)]
    failures: list[BaseException] = []

    def work(stream: Stream) -> None:
        try:
            stream.run(tally, lock)
        except grpc.RpcError as error:
            failures.append(error)

    began = time.monotonic()
    threads = [
        threading.Thread(target=work, args=(Stream(address, numbers, steps, seed + n),), daemon=True)
        for n, numbers in enumerate(parts)
    ]
    for thread in threads:
        thread.start()
    killed: set[int] = set()
    for number, role in enumerate(kills, 1):
        share_done = number / (len(kills) + 1)
        while tally.answers < share_done * sequences * steps and any(thread.is_alive() for thread in threads):
            time.sleep(0.005)
        pid = victim(processes_file, role, killed)
        killed.add(pid)
        os.kill(pid, signal.SIGKILL)
        tally.killed.append(tally.answers)
    for thread in threads:
        thread.join(PATIENCE_S)
    tally.seconds = time.monotonic() - began
    tally.errors += [str(failure) for failure in failures]
    missing = sequences * steps - tally.answers
    if missing:
        tally.errors.append(f"{missing} answers are missing")
    return tally


def victim(processes_file: Path, role: str, before: set[int]) -> int:
    """The pid of a process with this role that was not killed before; waits for one."""
    give_up_at = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up_at:
        for entry in json.loads(processes_file.read_text()):
            if role in entry["role"].split("+") and entry["pid"] not in before:
                return int(entry["pid"])
        time.sleep(0.01)
    raise LoadTestError(f"there is no {role} to kill")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.sequences",
        description="Interleaved sequences of a model with implicit state, executors killed meanwhile, all checked.",
    )
    parser.add_argument("--sequences", type=int, default=1000, metavar="N")
    parser.add_argument("--steps", type=int, default=25, metavar="N")
    parser.add_argument("--executors", type=int, default=3, metavar="N")
    parser.add_argument(
        "--kill", default="executor", metavar="ROLE,…", help="executor, batcher or gateway; one after the other"
    )
    parser.add_argument("--streams", type=int, default=16, metavar="N")
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="max_batch_size (default 64)")
    parser.add_argument("--checkpoint-every", type=int, default=1, metavar="K")
    parser.add_argument("--batcher", choices=("auto", "separate", "colocated"), default="auto")
    parser.add_argument("--json", action="store_true", help="report as one JSON document")
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="charonia-sequences-") as directory:
        repository = Path(directory)
        # any two executors have room for all of them
        candidates = -(-options.sequences // max(1, options.executors - 1))
        build(repository, batch=options.batch, candidates=candidates, every=options.checkpoint_every)
        flags = ["--executors", str(options.executors), "--batcher", options.batcher]
        with Charonia(repository, flags) as server:
            assert server.endpoints.grpc is not None
            assert server.endpoints.processes_file is not None
            tally = drive(
                server.endpoints.grpc,
                server.endpoints.processes_file,
                sequences=options.sequences,
                steps=options.steps,
                streams=options.streams,
                kills=[role for role in options.kill.split(",") if role],
            )
    report = {
        "sequences": options.sequences,
        "steps": options.steps,
        "answers": tally.answers,
        "wrong": tally.wrong,
        "out_of_order": tally.out_of_order,
        "errors": len(tally.errors),
        "killed_after_answers": tally.killed,
        "seconds": round(tally.seconds, 2),
        "steps_per_s": round(tally.answers / tally.seconds),
    }
    if options.json:
        print(json.dumps(report))
    else:
        for name, value in report.items():
            print(f"{name:22} {value}")
        for message in sorted(set(tally.errors))[:10]:
            print(f"error: {message} ({tally.errors.count(message)} times)")
    return 0 if tally.clean else 1


if __name__ == "__main__":
    sys.exit(main())
