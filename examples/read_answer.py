"""Say what the answer of an example model means: ``curl … | python examples/read_answer.py ocr_rec``.

The answer is JSON, or the binary tensor data extension's form: a JSON header, then the tensors' bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import decode
import inputs
import numpy as np
from numpy.typing import NDArray

MODELS = Path(__file__).resolve().parent / "models"
DTYPES = {"FP32": np.float32, "INT32": np.int32}


def arrays(body: bytes) -> dict[str, NDArray[np.generic]]:
    """The outputs of an infer response by name; ValueError with the server's text when it is an error."""
    # one character for each byte: so the header's end is known in bytes
    _, end = json.JSONDecoder().raw_decode(body.decode("latin-1"))
    answer: dict[str, Any] = json.loads(body[:end])
    data = body[end:]
    if "error" in answer:
        raise ValueError(answer["error"])
    outputs: dict[str, NDArray[np.generic]] = {}
    for output in answer["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size")
        if size is not None:
            raw, data = data[:size], data[size:]
            values = _bytes(raw) if output["datatype"] == "BYTES" else np.frombuffer(raw, DTYPES[output["datatype"]])
        elif output["datatype"] == "BYTES":
            values = np.array([text.encode() for text in output["data"]], dtype=np.object_)
        else:
            values = np.array(output["data"], dtype=DTYPES[output["datatype"]])
        outputs[output["name"]] = values.reshape(output["shape"])
    return outputs


def _bytes(raw: bytes) -> NDArray[np.generic]:
    """BYTES elements, each preceded by its length as UINT32."""
    found = []
    while raw:
        size = int.from_bytes(raw[:4], "little")
        found.append(raw[4 : 4 + size])
        raw = raw[4 + size :]
    return np.array(found, dtype=np.object_)


def main(arguments: list[str] | None = None) -> int:
    """Read stdin, print the meaning; an error response is one line on stderr and exit status 1."""
    parser = argparse.ArgumentParser(description="Say what the JSON answer of an example model means.")
    parser.add_argument("model", choices=list(inputs.REQUESTS))
    options = parser.parse_args(arguments)
    try:
        print(decode.describe(options.model, arrays(sys.stdin.buffer.read()), MODELS))
    except (OSError, ValueError, KeyError) as error:
        print(f"read_answer: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
