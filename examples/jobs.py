"""Submit an example input as a job, follow what happens to it, and read its result.

``python examples/jobs.py --model magika [--url localhost:8000] [--key KEY]``

The inference itself is the one `client.py` makes; only the ``Prefer`` header differs. tritonclient writes the request
and reads the result, the standard library does the rest. Run it twice with the same ``--key``: the second run finds the
first one's job.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import decode
import inputs
import tritonclient.http as triton
from tritonclient.utils import np_to_triton_dtype

MODELS = Path(__file__).resolve().parent / "models"
WAIT_S = 60


class Refused(Exception):
    """The server said no; the text is its own."""


class Jobs:
    """The job endpoints of one server. Every call has a connection of its own and raises `Refused` or `OSError`."""

    def __init__(self, url: str) -> None:
        self._url = url

    def submit(self, model: str, tensors: inputs.Tensors, key: str) -> dict[str, object]:
        """The receipt of a new job, or of the one that `key` already stands for."""
        sent = []
        for name, array in tensors.items():
            tensor = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
            tensor.set_data_from_numpy(array)
            sent.append(tensor)
        sequence = inputs.sequence(model)
        if sequence:  # the same key must stand for the same request
            sequence["sequence_id"] = key[:128]
        body, json_size = triton.InferenceServerClient.generate_request_body(sent, **sequence)
        headers = {"Prefer": "respond-async", "Idempotency-Key": key}
        if json_size is not None:
            headers["Inference-Header-Content-Length"] = str(json_size)
        answer = self._ask("POST", f"/v2/models/{model}/infer", body, headers)
        return dict(json.loads(answer.read()))

    def events(self, location: str) -> Iterator[tuple[str, dict[str, object]]]:
        """(kind, data) of each event, as it happens, up to the job's end."""
        kind = ""
        for line in self._ask("GET", f"{location}/events"):
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "event":
                kind = value
            elif name == "data":
                yield kind, json.loads(value)

    def result(self, location: str) -> triton.InferResult:
        """The result, waiting for it when it is not there yet."""
        while True:
            answer = self._ask("GET", f"{location}/result?wait={WAIT_S}&binary=true")
            body = answer.read()
            if answer.status == 200:
                json_size = int(answer.headers["Inference-Header-Content-Length"])
                return triton.InferenceServerClient.parse_response_body(body, header_length=json_size)

    def _ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self._url, timeout=2 * WAIT_S)
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        if answer.status >= 400:
            raise Refused(json.loads(answer.read())["error"])
        return answer


def main(arguments: list[str] | None = None) -> int:
    """Print what happens; a refusal or an unreachable server is one line on stderr and exit status 1."""
    parser = argparse.ArgumentParser(description="Submit an example input as a job and wait for its result.")
    parser.add_argument("--model", required=True, choices=list(inputs.REQUESTS))
    parser.add_argument("--url", default="localhost:8000", help="HOST:PORT of the server (default: %(default)s)")
    parser.add_argument("--key", default=str(uuid.uuid4()), help="the idempotency key (default: a new one)")
    options = parser.parse_args(arguments)
    jobs = Jobs(options.url)
    try:
        receipt = jobs.submit(options.model, inputs.REQUESTS[options.model](), options.key)
        location = str(receipt["location"])
        print(f"{receipt['id']}: {receipt['state']}, kept at level {receipt['durability']}")
        for kind, data in jobs.events(location):
            print(f"  {kind} {data['detail'] or ''}")
        result = jobs.result(location)
        outputs = {item["name"]: result.as_numpy(item["name"]) for item in result.get_response()["outputs"]}
        print(decode.describe(options.model, outputs, MODELS))
    except (Refused, OSError) as error:
        print(f"jobs: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
