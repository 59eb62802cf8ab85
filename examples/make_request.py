"""Write the body of an infer request about one of the example inputs, for curl.

``python examples/make_request.py magika > request.json`` writes plain JSON; ``--binary`` writes the binary tensor data
extension's form (a JSON header, then the tensors' bytes) and says on stderr how to send it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import inputs
import numpy as np
from numpy.typing import NDArray

DATATYPES = {"float32": "FP32", "int32": "INT32", "object": "BYTES"}


def raw_bytes(array: NDArray[np.generic]) -> bytes:
    """The array little-endian and row by row; each BYTES element is preceded by its length as UINT32."""
    if array.dtype != np.object_:
        return array.tobytes()
    return b"".join(len(item).to_bytes(4, "little") + item for item in array.reshape(-1))


def json_values(array: NDArray[np.generic]) -> list[Any]:
    """The values in one flat list; BYTES as text, so ValueError unless they are UTF-8."""
    if array.dtype != np.object_:
        return array.reshape(-1).tolist()
    return [item.decode() for item in array.reshape(-1)]


def header(tensors: inputs.Tensors, binary: bool, model: str = "") -> dict[str, Any]:
    """The JSON part of the request; `magika` answers with its three best labels, a recording is a whole sequence."""
    described: list[dict[str, Any]] = []
    for name, array in tensors.items():
        one: dict[str, Any] = {"name": name, "shape": list(array.shape), "datatype": DATATYPES[array.dtype.name]}
        if binary:
            one["parameters"] = {"binary_data_size": len(raw_bytes(array))}
        else:
            one["data"] = json_values(array)
        described.append(one)
    request: dict[str, Any] = {"inputs": described}
    if sequence := inputs.sequence(model):
        request["parameters"] = sequence
    if "bytes" in tensors:
        request["outputs"] = [{"name": "target_label", "parameters": {"classification": 3}}]
    return request


def main(arguments: list[str] | None = None) -> int:
    """Write the body to stdout or a file; an unreadable input is one line on stderr and exit status 1."""
    parser = argparse.ArgumentParser(description="Write the body of an infer request about an example input.")
    parser.add_argument("model", choices=list(inputs.REQUESTS))
    parser.add_argument("--file", type=Path, help="a file of your own instead of the example input")
    parser.add_argument("--binary", action="store_true", help="write the binary tensor data extension's form")
    parser.add_argument("--output", type=Path, help="where to write the body (default: stdout)")
    options = parser.parse_args(arguments)
    if options.file and options.model not in inputs.FROM_FILE:
        parser.error(f"{options.model} takes no file")
    try:
        tensors = inputs.FROM_FILE[options.model](options.file) if options.file else inputs.REQUESTS[options.model]()
        head = json.dumps(header(tensors, options.binary, options.model), separators=(",", ":")).encode()
        body = head + b"".join(raw_bytes(array) for array in tensors.values()) if options.binary else head + b"\n"
        if options.output:
            options.output.write_bytes(body)
        else:
            sys.stdout.buffer.write(body)
    except (OSError, ValueError) as error:
        print(f"make_request: {error}", file=sys.stderr)
        return 1
    if options.binary:
        print(f"send it with the header Inference-Header-Content-Length: {len(head)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
