"""Calls of a model of the `vllm` backend over Triton's endpoints, and the processes of its engine."""

from __future__ import annotations

import http.client
import json
import queue
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from e2e_server import Server
from tritonclient import grpc


def generate(server: Server, text: str, model: str = "smol", **given: Any) -> tuple[int, dict[str, Any]]:
    """`generate`: the status and the answer. `given` are inputs and request parameters alike."""
    # an engine takes a minute to be made again
    connection = http.client.HTTPConnection(server.http, timeout=300)
    try:
        connection.request("POST", f"/v2/models/{model}/generate", json.dumps({"text_input": text, **given}))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def text_of(server: Server, text: str, **given: Any) -> str:
    """The text that follows a prompt."""
    code, answer = generate(server, text, exclude_input_in_output=True, **given)
    assert code == 200, answer
    return str(answer["text_output"])


def open_stream(server: Server, text: str, **given: Any) -> tuple[http.client.HTTPConnection, Any]:
    """A connection of `generate_stream`, and its response, of which nothing was read."""
    connection = http.client.HTTPConnection(server.http, timeout=300)
    body = json.dumps({"text_input": text, "stream": True, **given})
    connection.request("POST", "/v2/models/smol/generate_stream", body)
    return connection, connection.getresponse()


def next_event(response: Any) -> dict[str, Any] | None:
    """The next event of a stream; None at its end."""
    while line := response.readline():
        if line.startswith(b"data: "):
            return dict(json.loads(line[len(b"data: ") :]))
    return None


def events(server: Server, text: str, **given: Any) -> list[dict[str, Any]]:
    """All events of `generate_stream`."""
    connection, response = open_stream(server, text, **given)
    try:
        return list(iter(lambda: next_event(response), None))
    finally:
        connection.close()


def grpc_responses(
    server: Server, inputs: Mapping[str, Any], outputs: Sequence[str] = (), model: str = "smol"
) -> list[Any]:
    """The responses and errors of one request over `ModelStreamInfer`. str are BYTES, bool BOOL."""
    tensors = []
    for name, value in inputs.items():
        if isinstance(value, str):
            array, kind = np.array([value.encode()], np.object_), "BYTES"
        elif isinstance(value, bool):
            array, kind = np.array([value]), "BOOL"
        else:
            array, kind = np.array(value, np.int32), "INT32"
        tensor = grpc.InferInput(name, list(array.shape), kind)
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    found: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: found.put((result, error)))
        client.async_stream_infer(
            model,
            tensors,
            outputs=[grpc.InferRequestedOutput(name) for name in outputs] or None,
            enable_empty_final_response=True,
        )
        answers: list[Any] = []
        while True:
            result, error = found.get(timeout=300)
            if error is not None:
                return [*answers, error]
            response = result.get_response()
            if response.outputs:
                answers.append(result)
            if response.parameters["triton_final_response"].bool_param:
                return answers


def engine_pids(server: Server) -> list[int]:
    """The engine processes below a server: those that vLLM calls EngineCore."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                status = (entry / "status").read_text()
                names[int(entry.name)] = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            parents[int(entry.name)] = int(status.partition("PPid:")[2].split()[0])

    def is_below(pid: int) -> bool:
        while pid in parents and pid != server.process.pid:
            pid = parents[pid]
        return pid == server.process.pid

    return [pid for pid, name in names.items() if "EngineCore" in name and is_below(pid)]


def is_ready(server: Server) -> bool:
    return server.get("/v2/models/smol/ready")[0] == 200


def wait_until(condition: Any, what: str, timeout_s: float = 300.0) -> None:
    """Poll a condition, as a probe does."""
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


def gauge(server: Server, name: str) -> float:
    """A value of the metrics page; 0 without one."""
    for line in server.scrape().splitlines():
        if line.startswith(f"vllm:{name}{{"):
            return float(line.rpartition(" ")[2])
    return 0.0
