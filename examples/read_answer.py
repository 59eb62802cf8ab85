"""Say what the JSON answer of an example model means: ``curl … | python examples/read_answer.py ocr_rec``."""

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


def arrays(answer: dict[str, Any]) -> dict[str, NDArray[np.generic]]:
    """The outputs of a JSON infer response by name; ValueError with the server's text when it is an error."""
    if "error" in answer:
        raise ValueError(answer["error"])
    outputs: dict[str, NDArray[np.generic]] = {}
    for output in answer["outputs"]:
        if output["datatype"] == "BYTES":
            values = np.array([text.encode() for text in output["data"]], dtype=np.object_)
        else:
            values = np.array(output["data"], dtype=DTYPES[output["datatype"]])
        outputs[output["name"]] = values.reshape(output["shape"])
    return outputs


def main(arguments: list[str] | None = None) -> int:
    """Read stdin, print the meaning; an error response is one line on stderr and exit status 1."""
    parser = argparse.ArgumentParser(description="Say what the JSON answer of an example model means.")
    parser.add_argument("model", choices=list(inputs.REQUESTS))
    options = parser.parse_args(arguments)
    try:
        print(decode.describe(options.model, arrays(json.load(sys.stdin)), MODELS))
    except (OSError, ValueError, KeyError) as error:
        print(f"read_answer: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
