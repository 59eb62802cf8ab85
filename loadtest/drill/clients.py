"""The drill's clients: each remembers what it sent and what it was told, and what must not have happened.

A client of the keyed kinds asks again with its Idempotency-Key until it has an answer, as a careful caller would. Every
request has values of its own and a model that gives them back, so that a wrong or exchanged answer is seen. Threads
and the standard library only: the drill judges the server, not an HTTP client.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

KINDS = ("keyless", "keyed", "job", "cancelled_job")
RETRY_S = 0.05
GIVE_UP_S = 60.0
TIMEOUT_S = 15.0


@dataclass
class Told:
    """What all clients together sent and were told. `problems` are sentences; there must be none."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    jobs: dict[str, str] = field(default_factory=dict)
    """Accepted jobs and the state each was last seen in."""
    hooked: list[str] = field(default_factory=list)
    """Those of them that have a webhook."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    excused: bool = False
    """A keyless call may fail now: its gateway or the log is being killed, and its outcome is unknown."""
    excused_until_s: float = 0.0
    calm_since_s: float = 0.0
    """When the last kill was recovered from; infinite while one is under way."""

    def count(self, name: str) -> None:
        with self.lock:
            self.counts[name] += 1

    def problem(self, text: str) -> None:
        with self.lock:
            self.problems.append(text)

    def is_excused(self, began_s: float) -> bool:
        return self.excused or began_s < self.excused_until_s


class Disconnected(Exception):
    """No answer: the connection failed."""


class Client:
    """One connection to one address (host:port), opened again when it fails."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._connection: http.client.HTTPConnection | None = None

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers and JSON body. Raises `Disconnected`."""
        try:
            if self._connection is None:
                self._connection = http.client.HTTPConnection(self._address, timeout=TIMEOUT_S)
            text = None if body is None else json.dumps(body)
            self._connection.request(method, path, text, headers or {})
            answer = self._connection.getresponse()
            data = answer.read()
            received = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, received, json.loads(data) if data else None
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise Disconnected(f"{type(error).__name__}: {error}") from None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def request_body(values: list[float]) -> dict[str, Any]:
    return {"inputs": [{"name": "INPUT0", "shape": [1, len(values)], "datatype": "FP32", "data": values}]}


def values_of(client: int, count: int) -> list[float]:
    """16 values no other request has; exact in FP32."""
    return [float((client * 65536 + count) % 8_388_608 + place) for place in range(16)]


class LoadClient(threading.Thread):
    """One of the drill's clients, of one kind, until `stop` is set."""

    kinds: tuple[str, ...] = KINDS

    def __init__(
        self, index: int, address: str, model: str, told: Told, stop: threading.Event, webhook: str = ""
    ) -> None:
        super().__init__(name=f"client {index}", daemon=True)
        self._kind = self.kinds[index % len(self.kinds)]
        self._index = index
        self._client = Client(address)
        self._path = f"/v2/models/{model}/infer"
        self._told = told
        self._stop_wanted = stop
        self._webhook = webhook

    def run(self) -> None:
        count = 0
        while not self._stop_wanted.is_set():
            count += 1
            values = values_of(self._index, count)
            try:
                getattr(self, "_" + self._kind)(values)
            except Exception as error:
                self._told.problem(f"{self._kind} client {self._index}: {type(error).__name__}: {error}")
                return
        self._client.close()

    def _keyless(self, values: list[float]) -> None:
        began_s = time.monotonic()
        self._told.count("keyless sent")
        try:
            status, _, answer = self._client.ask("POST", self._path, request_body(values))
        except Disconnected as error:
            if not self._told.is_excused(began_s):
                self._told.problem(f"keyless request lost its connection: {error}")
            self._told.count("keyless cut off")
            time.sleep(RETRY_S)
            return
        if status == 200:
            self._check(values, answer, "keyless")
            self._told.count("keyless answered")
        elif status == 503 and self._told.is_excused(began_s):
            self._told.count("keyless 503")
            time.sleep(RETRY_S)
        else:
            self._told.problem(f"keyless request got {status}: {answer}")

    def _keyed(self, values: list[float]) -> None:
        key = uuid.uuid4().hex
        self._told.count("keyed sent")
        answer = self._insist("POST", self._path, request_body(values), {"Idempotency-Key": key}, 200)
        self._check(values, answer, "keyed")
        self._told.count("keyed answered")

    def _submit(self, values: list[float]) -> str:
        headers = {"Idempotency-Key": uuid.uuid4().hex, "Prefer": "respond-async"}
        if self._webhook:
            headers["Charonia-Webhook"] = self._webhook
        self._told.count("jobs sent")
        receipt = self._insist("POST", self._path, request_body(values), headers, 202)
        job = str(receipt["id"])
        again = self._insist("POST", self._path, request_body(values), headers, 202)
        if again["id"] != job:
            self._told.problem(f"the same key gave job {job} and job {again['id']}")
        with self._told.lock:
            self._told.jobs[job] = "accepted"
            if self._webhook:
                self._told.hooked.append(job)
        return job

    def _job(self, values: list[float]) -> None:
        job = self._submit(values)
        give_up_s = time.monotonic() + GIVE_UP_S
        while time.monotonic() < give_up_s:
            try:
                status, _, answer = self._client.ask("GET", f"/v2/jobs/{job}/result?wait=5")
            except Disconnected:
                time.sleep(RETRY_S)
                continue
            if status == 200:
                self._check(values, answer, "job")
                self._told.jobs[job] = "succeeded"
                self._told.count("jobs answered")
                return
            if status not in (202, 503):
                self._told.problem(f"result of job {job} got {status}: {answer}")
                return
            time.sleep(RETRY_S)
        self._told.problem(f"job {job} has no result after {GIVE_UP_S:.0f} s")

    def _cancelled_job(self, values: list[float]) -> None:
        """Cancel at once, and hold the server to what it says the job has become."""
        job = self._submit(values)
        said = self._insist("DELETE", f"/v2/jobs/{job}", None, {}, 200)["state"]
        if said not in ("cancelled", "succeeded"):
            self._told.problem(f"a cancel left job {job} {said}")
        self._told.jobs[job] = said
        self._told.count(f"cancels that found the job {said}")

    def _insist(self, method: str, path: str, body: Any, headers: dict[str, str], wanted: int) -> Any:
        """Ask until the wanted status comes; 503 and lost connections are asked again, all else is a problem."""
        give_up_s = time.monotonic() + GIVE_UP_S
        first = True
        while time.monotonic() < give_up_s:
            if not first:
                self._told.count("retries")
                time.sleep(RETRY_S)
            first = False
            try:
                status, _, answer = self._client.ask(method, path, body, headers)
            except Disconnected:
                continue
            if status == wanted:
                return answer
            if status != 503:
                raise RuntimeError(f"{method} {path} got {status}: {answer}")
        raise RuntimeError(f"{method} {path} got no answer in {GIVE_UP_S:.0f} s")

    def _check(self, values: list[float], answer: Any, kind: str) -> None:
        got = answer["outputs"][0]["data"]
        if got != values:
            self._told.problem(f"{kind} request was given {got[:4]}, expected {values[:4]}")
