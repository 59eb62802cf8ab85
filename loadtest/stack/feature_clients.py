"""Load beside the plain requests of `loadtest.drill`: sequences, ensembles, models that call models, streams, gRPC.

Each client works in a closed loop and pauses in between. The HTTP kinds ask with and without an Idempotency-Key by
turns: with one they insist on their answer, without one a call may fail only while a gateway or the log is killed. The
gRPC kinds have no key.
"""

from __future__ import annotations

import http.client
import json
import queue
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from loadtest.drill.clients import GIVE_UP_S, RETRY_S, TIMEOUT_S, Disconnected, LoadClient, Told

from .models import numbers

PAUSE_S = 0.05
STEPS = 6
COUNT = 8

_KINDS = ("sequence", "ensemble", "bls", "stream", "grpc", "grpc_stream")


class Refused(Exception):
    """A call failed in a way that a killed gateway or log excuses."""


class FeatureClient(LoadClient):
    """One client of each kind, until `stop` is set."""

    kinds = _KINDS

    def __init__(self, index: int, http_address: str, grpc_address: str, told: Told, stop: threading.Event) -> None:
        super().__init__(index, http_address, "", told, stop)
        self._address = http_address
        self._grpc_address = grpc_address
        self._round = 0

    def _sequence(self, _: list[float]) -> None:
        self._attempted("sequences", self._one_sequence)

    def _ensemble(self, values: list[float]) -> None:
        self._attempted("ensemble", lambda keyed: self._scaled("pipeline", 8, values, keyed))

    def _bls(self, values: list[float]) -> None:
        self._attempted("bls", lambda keyed: self._scaled("calls", 4, values, keyed))

    def _stream(self, _: list[float]) -> None:
        self._attempted("streams", self._one_stream)

    def _grpc(self, values: list[float]) -> None:
        self._attempted("grpc", lambda _: self._one_call(values))

    def _grpc_stream(self, _: list[float]) -> None:
        self._attempted("grpc streams", lambda _: self._one_grpc_stream())

    def _attempted(self, name: str, act: Callable[[bool], None]) -> None:
        """One round, keyed every second time, counted; what may be excused is, or else is a problem."""
        self._round += 1
        began_s = time.monotonic()
        self._told.count(f"{name} sent")
        try:
            act(self._round % 2 == 0)
            self._told.count(f"{name} answered")
        except (Refused, Disconnected) as error:
            self._told.count(f"{name} cut off")
            if not self._told.is_excused(began_s):
                self._told.problem(f"{name}: {type(error).__name__}: {error}")
        self._stop_wanted.wait(PAUSE_S)

    def _infer(self, model: str, body: Any, keyed: bool) -> Any:
        """The data of the first output."""
        path = f"/v2/models/{model}/infer"
        if keyed:
            answer = self._insist("POST", path, body, {"Idempotency-Key": uuid.uuid4().hex}, 200)
        else:
            status, _, answer = self._client.ask("POST", path, body)
            if status != 200:
                raise Refused(f"{status} {answer}")
        return answer["outputs"][0]["data"]

    def _scaled(self, model: str, factor: int, values: list[float], keyed: bool) -> None:
        found = self._infer(model, numbers("X", [len(values)], values), keyed)
        if found != [factor * value for value in values]:
            self._told.problem(f"{model} gave {found[:4]} for {values[:4]}")

    def _one_sequence(self, keyed: bool) -> None:
        name, total = uuid.uuid4().hex, 0.0
        for step in range(1, STEPS + 1):
            total += step
            marks = {"sequence_id": name, "sequence_start": step == 1, "sequence_end": step == STEPS}
            found = self._infer("sums", numbers("X", [1, 1], [float(step)]) | {"parameters": marks}, keyed)
            if found != [total]:
                raise RuntimeError(f"step {step} of a sequence gave {found}, expected {total}")

    def _one_stream(self, keyed: bool) -> None:
        headers = {"Idempotency-Key": uuid.uuid4().hex} if keyed else {}
        give_up_s = time.monotonic() + GIVE_UP_S
        while True:
            try:
                found = streamed(self._address, COUNT, headers)
            except Disconnected:
                if not keyed or time.monotonic() > give_up_s:
                    raise
                self._told.count("retries")
                time.sleep(RETRY_S)
                continue
            if found != list(range(COUNT)):
                raise RuntimeError(f"a stream gave {found}")
            return

    def _one_call(self, values: list[float]) -> None:
        tensor = triton.InferInput("INPUT0", [1, len(values)], "FP32")
        tensor.set_data_from_numpy(np.array([values], np.float32))
        try:
            found = self._channel().infer("identity", [tensor], client_timeout=TIMEOUT_S).as_numpy("OUTPUT0")
        except InferenceServerException as error:
            raise Refused(f"{error.status()} {error.message()}") from None
        if found.tolist() != [values]:
            self._told.problem(f"identity gave {found} over gRPC for {values}")

    def _one_grpc_stream(self) -> None:
        """A sequence sent without waiting and a model that answers more than once, over one ModelStreamInfer call."""
        answers: queue.Queue[Any] = queue.Queue()
        client = self._channel()
        client.start_stream(lambda result, error: answers.put((result, error)))
        try:
            try:
                _send_all(client)
            except InferenceServerException as error:  # it was cut off before everything was sent
                raise Refused(f"{error.status()} {error.message()}") from None
            found: dict[str, list[float]] = {"sums": [], "counts": []}
            for _ in range(STEPS + COUNT):
                try:
                    result, error = answers.get(timeout=TIMEOUT_S)
                except queue.Empty:
                    raise Refused(f"no response in {TIMEOUT_S:.0f} s after {found}") from None
                if error is not None:
                    raise Refused(f"{error.status()} {error.message()}")
                response = result.get_response()
                found[response.id].append(float(result.as_numpy(response.outputs[0].name).ravel()[0]))
        finally:
            client.stop_stream()
        sums = [step * (step + 1) / 2 for step in range(1, STEPS + 1)]
        if found != {"sums": sums, "counts": [float(n) for n in range(COUNT)]}:
            self._told.problem(f"a gRPC stream gave {found}")

    def _channel(self) -> triton.InferenceServerClient:
        if not hasattr(self, "_made"):
            self._made = triton.InferenceServerClient(self._grpc_address)
        return self._made


def _send_all(client: triton.InferenceServerClient) -> None:
    """A whole sequence, and one request that has many answers, on the stream that is open."""
    name = uuid.uuid4().int % 2**63 + 1
    for step in range(1, STEPS + 1):
        tensor = triton.InferInput("X", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.array([[step]], np.float32))
        marks = {"sequence_start": step == 1, "sequence_end": step == STEPS}
        client.async_stream_infer("sums", [tensor], request_id="sums", sequence_id=name, **marks)
    tensor = triton.InferInput("N", [1], "INT32")
    tensor.set_data_from_numpy(np.array([COUNT], np.int32))
    client.async_stream_infer("counts", [tensor], request_id="counts")


def streamed(address: str, count: int, headers: dict[str, str]) -> list[int]:
    """All that `counts` answers to one `generate_stream`. Raises `Disconnected` when it is cut off or refused."""
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    try:
        connection.request("POST", "/v2/models/counts/generate_stream", json.dumps({"N": count}), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise Disconnected(f"{answer.status} {answer.read().decode()[:300]}")
        events = [json.loads(line[5:]) for line in answer.read().splitlines() if line.startswith(b"data:")]
    except (OSError, http.client.HTTPException) as error:
        raise Disconnected(f"{type(error).__name__}: {error}") from None
    finally:
        connection.close()
    if failed := [event["error"] for event in events if "error" in event]:
        raise Disconnected(failed[0])
    return [event["OUT"] for event in events]


def one_of_each(http_address: str, grpc_address: str, told: Told, stop: threading.Event) -> list[FeatureClient]:
    """A client of each kind."""
    return [FeatureClient(index, http_address, grpc_address, told, stop) for index in range(len(_KINDS))]
