"""Ask a running server about one of the example inputs with tritonclient, and say what the answer means.

``python examples/client.py --model magika [--protocol grpc] [--url localhost:8001] [--file FILE]``

Besides the models of the repository there are four pipelines: ``file`` (magika_features, then magika), ``page``
(ocr_det, then ocr_rec for all the lines that were found, as batches), ``voice`` (silero_vad on a recording that is
sent piece by piece, as it would come from a microphone) and ``voice_torch`` (the same with silero_vad_stream).
"""

from __future__ import annotations

import argparse
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType

import decode
import inputs
import numpy as np
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

MODELS = Path(__file__).resolve().parent / "models"
PORTS = {"http": 8000, "grpc": 8001}
VOICES = {"voice": "silero_vad", "voice_torch": "silero_vad_stream"}
LINES_PER_REQUEST = 8
WINDOWS_PER_REQUEST = 10

Outputs = dict[str, NDArray[np.generic]]


def transport(protocol: str) -> ModuleType:
    """tritonclient's module for ``http`` or ``grpc``; both have the same names."""
    if protocol == "http":
        import tritonclient.http as module
    else:
        import tritonclient.grpc as module
    return module


class Server:
    """One tritonclient connection that takes and gives numpy arrays by tensor name."""

    def __init__(self, protocol: str, url: str) -> None:
        self._module = transport(protocol)
        self._client = self._module.InferenceServerClient(url)

    def infer(
        self,
        model: str,
        tensors: inputs.Tensors,
        classes: int = 0,
        sequence: Mapping[str, str | bool] = MappingProxyType({}),
    ) -> Outputs:
        """Every output of `model`; with `classes`, its `classes` best labels as "score:index:label" instead of scores.

        `sequence` has the parameters of one request of a sequence.
        Raises InferenceServerException with the server's text when it refuses.
        """
        sent = []
        for name, array in tensors.items():
            tensor = self._module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
            tensor.set_data_from_numpy(array)
            sent.append(tensor)
        wanted = [self._module.InferRequestedOutput("target_label", class_count=classes)] if classes else None
        result = self._client.infer(model, sent, outputs=wanted, **sequence)
        response = result.get_response()
        described = response["outputs"] if isinstance(response, dict) else response.outputs
        names = [item["name"] if isinstance(item, dict) else item.name for item in described]
        return {name: result.as_numpy(name) for name in names}

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def ask(server: Server, model: str, file: Path | None) -> str:
    """The answer of `model` to `file` (or to its own example input) in words."""
    if model == "file":
        content = inputs.magika_features(file or inputs.SAMPLE)
        features = server.infer("magika_features", content)
        return decode.describe("magika", server.infer("magika", features, classes=3), MODELS)
    if model == "page":
        return read_page(server, file or inputs.PAGE)
    if model in VOICES:
        return decode.describe("silero_vad", hear(server, file or inputs.VOICE, VOICES[model]), MODELS)
    tensors = inputs.FROM_FILE[model](file) if file else inputs.REQUESTS[model]()
    classes = 3 if model == "magika" else 0
    return decode.describe(model, server.infer(model, tensors, classes, inputs.sequence(model)), MODELS)


def hear(server: Server, recording: Path, model: str = "silero_vad") -> Outputs:
    """The speech probabilities of a recording that is sent as a sequence, some windows at a time."""
    windows = inputs.silero_vad(recording)["input"]
    number = uuid.uuid4().hex
    heard = []
    for at in range(0, len(windows), WINDOWS_PER_REQUEST):
        piece = windows[at : at + WINDOWS_PER_REQUEST]
        last = at + len(piece) == len(windows)
        sequence = {"sequence_id": number, "sequence_start": at == 0, "sequence_end": last}
        heard.append(server.infer(model, {"input": piece}, sequence=sequence)["speech_probs"])
    return {"speech_probs": np.concatenate(heard)}


def read_page(server: Server, page: Path) -> str:
    """The text of each line that ``ocr_det`` finds on the page, as ``ocr_rec`` reads it."""
    image = inputs.read_png(page)
    found = server.infer("ocr_det", {"x": inputs.page_tensor(image)[np.newaxis]})
    boxes = decode.text_boxes(found["fetch_name_0"][0, 0])
    lines = [inputs.line_tensor(image[top:bottom, left:right]) for left, top, right, bottom in boxes]
    width = max((line.shape[2] for line in lines), default=0)
    padded = [np.pad(line, ((0, 0), (0, 0), (0, width - line.shape[2]))) for line in lines]
    said = []
    for at in range(0, len(padded), LINES_PER_REQUEST):
        scores = server.infer("ocr_rec", {"x": np.stack(padded[at : at + LINES_PER_REQUEST])})["fetch_name_0"]
        said += [decode.describe("ocr_rec", {"fetch_name_0": row[np.newaxis]}, MODELS) for row in scores]
    return "\n".join(said) or "no text"


def main(arguments: list[str] | None = None) -> int:
    """Print one answer; a refusal or an unreachable server is one line on stderr and exit status 1."""
    parser = argparse.ArgumentParser(description="Ask a running server about one of the example inputs.")
    parser.add_argument("--model", required=True, choices=[*inputs.REQUESTS, "file", "page", *VOICES])
    parser.add_argument("--protocol", choices=sorted(PORTS), default="http")
    parser.add_argument("--url", help="HOST:PORT of the server (default: localhost and the protocol's usual port)")
    parser.add_argument("--file", type=Path, help="a file of your own instead of the example input")
    options = parser.parse_args(arguments)
    if options.model == "identity" and options.file:
        parser.error("identity takes no file")
    server = Server(options.protocol, options.url or f"localhost:{PORTS[options.protocol]}")
    try:
        print(ask(server, options.model, options.file))
    except (InferenceServerException, OSError, ValueError) as error:
        print(f"client: {error}", file=sys.stderr)
        return 1
    finally:
        server.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
