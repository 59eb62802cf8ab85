"""What several tests ask a server: one inference by either client, statistics, and waiting for what is visible."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import np_to_triton_dtype

from charonia.eventlog.control import folded_control
from charonia.eventlog.redis import open_log
from charonia.facts.events import ProcessLeft

T = TypeVar("T")


def until(what: str, look: Callable[[], T], timeout_s: float = 120.0) -> T:
    """Look until something true is seen, and return it. What takes long to look at, as a scrape, is seen less often."""
    began_at = time.monotonic()
    give_up_at = began_at + timeout_s
    while not (seen := look()):
        looked_at = time.monotonic()
        if looked_at > give_up_at:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(min(0.1, max(0.01, looked_at - began_at)))
        began_at = time.monotonic()
    return seen


def until_equal(what: str, look: Callable[[], T], expected: T, timeout_s: float = 120.0) -> None:
    """As `until`, and a failure tells what was seen last."""
    seen: list[T] = []

    def same() -> bool:
        seen[:] = [look()]
        return seen[0] == expected

    try:
        until(what, same, timeout_s)
    except AssertionError as error:
        raise AssertionError(f"{error}\nexpected {expected}\nseen last {seen[0]}") from None


def until_requests_wait_without(log_url: str, executor: str, model: str) -> None:
    """Until the requests for a model would wait if this executor were lost. One that is lost before it has written
    anything since a younger one joined counts as succeeded by that one, and so does one that is lost before that one is
    up: wait for this first.
    """

    async def waits() -> bool:
        log = open_log(log_url)
        await log.open()
        try:
            catalog = await folded_control(log)
        finally:
            await log.close()
        catalog.apply(ProcessLeft("executor", executor, "lost"))
        return bool(catalog.held(model))

    until(f"requests for '{model}' would wait without {executor}", lambda: asyncio.run(waits()))


@contextmanager
def client(kind: str, server: Any) -> Any:
    """A stock client: `http` or `grpc`."""
    module = httpclient if kind == "http" else grpcclient
    with module.InferenceServerClient(getattr(server, kind)) as made:
        yield made


def inputs(kind: str, **tensors: np.ndarray) -> list[Any]:
    module = httpclient if kind == "http" else grpcclient
    made = []
    for name, array in tensors.items():
        tensor = module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


def infer(server: Any, model: str, /, kind: str = "http", options: dict[str, Any] | None = None, **tensors: Any) -> Any:
    """One inference with a client of its own; tritonclient's result, or its InferenceServerException."""
    with client(kind, server) as asking:
        return asking.infer(model, inputs(kind, **tensors), **(options or {}))


def post(server: Any, path: str, body: object = None) -> tuple[int, Any]:
    """Status and decoded JSON body of a raw POST."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    status, answer = server.request("POST", path, data)
    return status, json.loads(answer) if answer else None


def infer_json(server: Any, model: str, body: dict[str, Any]) -> tuple[int, Any]:
    return post(server, f"/v2/models/{model}/infer", body)


def index(server: Any) -> dict[tuple[str, str], dict[str, str]]:
    """The repository index by (name, version)."""
    status, rows = post(server, "/v2/repository/index")
    assert status == 200
    return {(row["name"], row.get("version", "")): row for row in rows}


def statistics(server: Any, model: str, version: str = "1") -> dict[str, Any]:
    status, body = server.get(f"/v2/models/{model}/versions/{version}/stats")
    assert status == 200, body
    return dict(json.loads(body)["model_stats"][0])


def batches(server: Any, model: str) -> dict[int, int]:
    """Executed batch size to how often."""
    return {row["batch_size"]: row["compute_infer"]["count"] for row in statistics(server, model)["batch_stats"]}


def on_the_page(server: Any, *texts: str) -> str:
    """A page of metrics with all these texts: it leaves out a part that does not answer within two seconds, and an
    answer may come before it is counted.
    """
    return until(
        f"{texts} on the page", lambda: (page := server.scrape()) and all(text in page for text in texts) and page
    )


def pending(server: Any, model: str) -> int:
    """Requests that wait in the model's queue (M2)."""
    page = on_the_page(server, "# TYPE nv_inference_pending_request_count ")
    found = re.findall(rf'^nv_inference_pending_request_count{{[^}}]*model="{model}"[^}}]*}} (\S+)', page, re.M)
    return int(sum(float(number) for number in found))


def settle(server: Any, *models: str) -> None:
    """Until the log has settled all requests of models: only then all of them are counted.

    In a cluster of several servers an answer may arrive before its settlement.
    """

    async def look() -> None:
        log = open_log(server.log_url)
        await log.open()
        try:
            async with asyncio.timeout(60):
                while any([(await log.pending(model))[0] for model in models]):
                    await asyncio.sleep(0.005)
        finally:
            await log.close()

    asyncio.run(look())


class Gate:
    """Holds an instance of a gated model: `with Gate(...)` returns once a request is inside, `open` lets it go on."""

    def __init__(self, server: Any, model: str, directory: Path, pool: ThreadPoolExecutor) -> None:
        self.path = directory / f"gate-{time.monotonic_ns()}"
        self._entered = self.path.with_suffix(".entered")
        parameters = {"gate": str(self.path), "entered": str(self._entered)}
        value = np.zeros((1, 1), np.int32)
        self.request: Future[Any] = pool.submit(infer, server, model, options={"parameters": parameters}, VALUE=value)

    def __enter__(self) -> Gate:
        def inside() -> bool:
            if self.request.done():
                self.request.result()
            return self._entered.exists()

        until("a request holds the instance", inside)
        return self

    def __exit__(self, *_: object) -> None:
        self.open()

    def open(self) -> None:
        self.path.touch()
