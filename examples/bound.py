"""Serve functions of this program as models: no repository, no configuration files.

``python examples/bound.py`` and, from another shell or any Triton client:

    curl -s localhost:8000/v2/models/normalise/infer -d '{"inputs":
      [{"name": "VECTORS", "shape": [2, 2], "datatype": "FP32", "data": [3, 4, 0, 5]}]}'

Ctrl-C stops it.
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray

import charonia
from charonia import TensorSpec
from charonia.errors import InvalidArgument

Floats = NDArray[np.float32]

# A function gets the joined arrays of several requests, [rows, ...], and returns as many rows.


@charonia.bind(
    inputs=[TensorSpec("VECTORS", np.float32, [-1])],
    outputs=[TensorSpec("UNIT", np.float32, [-1]), TensorSpec("LENGTH", np.float32, [1])],
    max_batch_size=64,
    dynamic_batching={"max_queue_delay_microseconds": 500},
)
def normalise(VECTORS: Floats) -> dict[str, Floats]:  # noqa: N803 - named as the input is
    length = np.linalg.norm(VECTORS, axis=1, keepdims=True)
    if not length.all():
        raise InvalidArgument("a vector of length 0 has no direction")
    return {"UNIT": VECTORS / length, "LENGTH": length}


# It keeps what its program keeps: here a dictionary that grows while it is served.


class Counter:
    def __init__(self) -> None:
        self.seen: dict[bytes, int] = {}

    def count(self, inputs: dict[str, NDArray[np.object_]]) -> dict[str, NDArray[np.int64]]:
        for word in inputs["WORDS"]:
            self.seen[word] = self.seen.get(word, 0) + 1
        return {"SEEN": np.array([self.seen[word] for word in inputs["WORDS"]])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--metrics-port", type=int, default=8002)
    ports = parser.parse_args()
    server = charonia.Server(normalise, **vars(ports))
    server.bind(
        "count",
        Counter().count,
        inputs=[TensorSpec("WORDS", bytes, [-1])],
        outputs=[TensorSpec("SEEN", np.int64, [-1])],
    )
    with server:
        print(f"HTTP on {server.http}, gRPC on {server.grpc}, metrics on {server.metrics}", flush=True)
        server.wait()


if __name__ == "__main__":
    main()
