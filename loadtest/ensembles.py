"""`python -m loadtest.ensembles`: what an ensemble of three steps costs beside one of its steps asked alone.

All steps are identities, so that what is measured is the way and not the work; both are asked in turns over one
connection, so that whatever else the machine does falls on both. Starts a server of its own. Exit status: 0 when the
ensemble adds less than three times what one step takes from client to client, else 1.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpcclient  # type: ignore[import-untyped]

from .bench.servers import Charonia

WIDTH = 16
_IO = """
input [ {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ {width} ] }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ {width} ] }} ]
"""
_STEP = """
  step {{
    model_name: "identity" model_version: -1
    input_map {{ key: "INPUT0" value: "{takes}" }} output_map {{ key: "OUTPUT0" value: "{gives}" }}
  }}"""


def build(repository: Path) -> None:
    """The models `identity` and `chain`, which is three of it in a row."""
    from onnx import TensorProto, helper

    tensors = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["rows", WIDTH]) for n in ("INPUT0", "OUTPUT0")]
    graph = helper.make_graph(
        [helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"])], "identity", tensors[:1], tensors[1:]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    for name in ("identity", "chain"):
        (repository / name / "1").mkdir(parents=True)
    (repository / "identity" / "1" / "model.onnx").write_bytes(model.SerializeToString())
    io = _IO.format(width=WIDTH)
    (repository / "identity" / "config.pbtxt").write_text(
        f'backend: "onnxruntime"\nmax_batch_size: 64\n{io}dynamic_batching {{ }}\n'
    )
    names = ["INPUT0", "first", "second", "OUTPUT0"]
    steps = "".join(_STEP.format(takes=t, gives=g) for t, g in itertools.pairwise(names))
    (repository / "chain" / "config.pbtxt").write_text(
        f'platform: "ensemble"\nmax_batch_size: 64\n{io}ensemble_scheduling {{{steps}\n}}\n'
    )


def latencies(url: str, seconds: float, callers: int) -> dict[str, list[float]]:
    """Milliseconds of each call, by model; each caller asks for one after the other, in turns."""
    found: dict[str, list[float]] = {"identity": [], "chain": []}
    value = np.arange(WIDTH, dtype=np.float32)[np.newaxis]
    end_at = time.monotonic() + seconds

    def ask() -> None:
        with grpcclient.InferenceServerClient(url) as client:
            tensor = grpcclient.InferInput("INPUT0", list(value.shape), "FP32")
            tensor.set_data_from_numpy(value)
            while time.monotonic() < end_at:
                for model, times in found.items():
                    began = time.perf_counter()
                    answer = client.infer(model, [tensor])
                    times.append(1000 * (time.perf_counter() - began))
                    if not np.array_equal(answer.as_numpy("OUTPUT0"), value):
                        raise SystemExit(f"a wrong answer of {model}")

    threads = [threading.Thread(target=ask) for _ in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="loadtest.ensembles", description="What the steps of an ensemble cost.")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args(arguments)
    verdict = 0
    with tempfile.TemporaryDirectory() as directory:
        build(Path(directory))
        with Charonia(Path(directory), []) as server:
            assert server.endpoints.grpc is not None
            latencies(server.endpoints.grpc, 1.0, 1)  # the first calls connect and import
            for callers in options.callers:
                found = latencies(server.endpoints.grpc, options.seconds, callers)
                one, chain = (statistics.median(found[model]) for model in ("identity", "chain"))
                added = (chain - one) / one
                sys.stdout.write(
                    f"{callers} callers: one step {one:.2f} ms, ensemble of three {chain:.2f} ms, "
                    f"which adds {added:.2f} times one step ({len(found['chain'])} calls each)\n"
                )
                verdict |= added >= 3
    return verdict


if __name__ == "__main__":
    raise SystemExit(main())
