"""Jobs as a user submits, views and reads them, of a model that waits at a gate."""

from __future__ import annotations

import http.client
import json
import threading
import time
from pathlib import Path
from typing import Any

from e2e_asking import until

ASYNC = {"Prefer": "respond-async"}
GATED = "max_batch_size: 1 instance_group [ { count: 1 kind: KIND_CPU } ]"
WAIT_S = 30


def ask(
    server: Any, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one exchange."""
    connection = http.client.HTTPConnection(server.http, timeout=90)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def value_of(number: int, parameters: dict[str, Any] | None = None) -> bytes:
    """A request to a gated model; ECHO is `number`."""
    tensor = {"name": "VALUE", "shape": [1, 1], "datatype": "INT32", "data": [number]}
    return json.dumps({"inputs": [tensor], **({"parameters": parameters} if parameters else {})}).encode()


def submit(
    server: Any, number: int, parameters: dict[str, Any] | None = None, model: str = "gated", **headers: str
) -> str:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    status, answered, body = ask(
        server, "POST", f"/v2/models/{model}/infer", value_of(number, parameters), {**ASYNC, **named}
    )
    assert status == 202, body
    return answered["location"]


def view(server: Any, location: str) -> dict[str, Any]:
    status, _, body = ask(server, "GET", location)
    assert status == 200, body
    return dict(json.loads(body))


def result(server: Any, location: str) -> tuple[int, dict[str, Any]]:
    status, _, body = ask(server, "GET", f"{location}/result?wait={WAIT_S}")
    return status, json.loads(body)


def output(answer: dict[str, Any], name: str) -> int:
    return int(next(o["data"][0] for o in answer["outputs"] if o["name"] == name))


class Held:
    """A job that holds the one instance of the gated model until `open`."""

    def __init__(self, server: Any, directory: Path) -> None:
        gate = directory / f"gate-{time.monotonic_ns()}"
        entered = gate.with_suffix(".entered")
        self.gate = gate
        self.location = submit(server, 0, {"gate": str(gate), "entered": str(entered)})
        until("the job is executed", entered.exists)

    def open(self) -> None:
        self.gate.touch()


class EventReader(threading.Thread):
    """Follows a job's events; `kinds` are those seen by number."""

    def __init__(self, server: Any, location: str, last: int = 0) -> None:
        super().__init__(daemon=True)
        self.connection = http.client.HTTPConnection(server.http, timeout=60)
        self.connection.request("GET", location + "/events", headers={"Last-Event-ID": str(last)} if last else {})
        self.answer = self.connection.getresponse()
        self.status = self.answer.status
        self.kinds: dict[int, str] = {}
        self.start()

    def run(self) -> None:
        number = 0
        for line in self.answer:
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "id":
                number = int(value)
            elif name == "event":
                self.kinds[number] = value
        self.connection.close()
