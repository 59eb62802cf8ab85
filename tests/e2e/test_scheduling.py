"""The default scheduler and dynamic batching (S1-S8, S20-S24) over a python model that waits for files.

A request holds the one instance until its gate is opened; what queues behind it meanwhile is decided at that moment.
Order and sizes are read from the answers and from statistics, never from the time something took.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from e2e_asking import Gate, batches, client, infer, infer_json, inputs, pending, statistics, until
from e2e_models import gated
from e2e_server import serving
from tritonclient.utils import InferenceServerException

from charonia.inference import LOWEST_PRIORITY

SECOND_US = 1_000_000

CONFIGS = {
    "plain": "max_batch_size: 8",
    "greedy": "max_batch_size: 4 dynamic_batching { }",
    "preferred": "max_batch_size: 8 dynamic_batching { preferred_batch_size: [ 2, 4 ] }",
    "patient": f"max_batch_size: 4 dynamic_batching {{ max_queue_delay_microseconds: {600 * SECOND_US} }}",
    "prompt": "max_batch_size: 4 dynamic_batching { max_queue_delay_microseconds: 1000 }",
    "bounded": (
        f"max_batch_size: 8 dynamic_batching {{ max_queue_delay_microseconds: {600 * SECOND_US} }} "
        'parameters { key: "charonia.batch_strategy" value { string_value: "volume" } } '
        'parameters { key: "MAX_BATCH_VOLUME_BYTES" value { string_value: "12" } }'
    ),
    "levels": "max_batch_size: 1 dynamic_batching { priority_levels: 3 default_priority_level: 2 }",
    "endless_levels": (
        "max_batch_size: 1 dynamic_batching { priority_levels: 18446744073709551615 default_priority_level: 5 }"
    ),
    "short": "max_batch_size: 1 dynamic_batching { default_queue_policy { max_queue_size: 2 } }",
    "rejecting": (
        "max_batch_size: 1 dynamic_batching { default_queue_policy { timeout_action: REJECT "
        f"default_timeout_microseconds: {600 * SECOND_US} allow_timeout_override: true }} }}"
    ),
    "stubborn": (
        "max_batch_size: 1 dynamic_batching { default_queue_policy { timeout_action: REJECT "
        f"default_timeout_microseconds: {600 * SECOND_US} }} }}"
    ),
    "delaying": (
        "max_batch_size: 1 dynamic_batching { default_queue_policy { timeout_action: DELAY "
        f"default_timeout_microseconds: {600 * SECOND_US} allow_timeout_override: true }} }}"
    ),
    "ordered": "max_batch_size: 1 instance_group [ { count: 2 } ] dynamic_batching { preserve_ordering: true }",
    "unordered": "max_batch_size: 1 instance_group [ { count: 2 } ] dynamic_batching { }",
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("scheduling")
    for name, config in CONFIGS.items():
        gated(directory / "models", name, config)
    with serving(directory / "models", directory / "state") as server:
        yield server


@pytest.fixture
def ask(running: Any, tmp_path: Path) -> Iterator[Any]:
    """`ask.queue(model, value, **options)` returns once that request waits in the queue; `ask.gate(model)`."""
    with ThreadPoolExecutor(32) as pool:

        def value(number: int, rows: int = 1, width: int = 1) -> np.ndarray:
            return np.full((rows, width), number, np.int32)

        def submit(model: str, number: int, rows: int = 1, width: int = 1, **options: Any) -> Future[Any]:
            return pool.submit(infer, running, model, options=options, VALUE=value(number, rows, width))

        def queue(model: str, number: int, rows: int = 1, width: int = 1, **options: Any) -> Future[Any]:
            before = pending(running, model)
            future = submit(model, number, rows, width, **options)
            until(f"{model} {number} waits", lambda: future.done() or pending(running, model) > before)
            return future

        def gate(model: str) -> Gate:
            return Gate(running, model, tmp_path, pool)

        yield SimpleNamespace(server=running, pool=pool, value=value, submit=submit, queue=queue, gate=gate)


def number(future: Future[Any], output: str) -> int:
    return int(future.result(60).as_numpy(output).flat[0])


def in_order(futures: dict[str, Future[Any]]) -> list[str]:
    """Names by the execution that answered them; one instance counts its executions."""
    return sorted(futures, key=lambda name: number(futures[name], "EXECUTION"))


# -- batches -----------------------------------------------------------------------------------------------------------


def test_without_a_batcher_each_request_runs_alone(ask: Any) -> None:
    with ask.gate("plain"):
        futures = {str(n): ask.queue("plain", n, rows=1 + n % 2) for n in range(4)}
    assert in_order(futures) == ["0", "1", "2", "3"]
    assert {number(future, "REQUESTS") for future in futures.values()} == {1}
    assert batches(ask.server, "plain") == {1: 3, 2: 2}
    stats = statistics(ask.server, "plain")
    assert (stats["execution_count"], stats["inference_count"]) == (5, 7)
    assert stats["inference_stats"]["success"]["count"] == 5
    assert stats["inference_stats"]["queue"]["ns"] > 0


def test_what_queues_behind_an_execution_shares_the_next(ask: Any) -> None:
    with ask.gate("greedy"):
        sizes = [1, 2, 1, 3, 1, 1]
        futures = [ask.queue("greedy", n, rows=rows) for n, rows in enumerate(sizes)]
    # sums of rows up to 4, in order, never split (S2): 1+2+1, 3+1, 1
    assert [number(f, "REQUESTS") for f in futures] == [3, 3, 3, 2, 2, 1]
    assert [number(f, "EXECUTION") for f in futures] == [2, 2, 2, 3, 3, 4]
    for n, (future, rows) in enumerate(zip(futures, sizes, strict=True)):
        assert (future.result().as_numpy("ECHO") == ask.value(n, rows)).all()
    assert batches(ask.server, "greedy") == {1: 2, 4: 2}


def test_another_shape_ends_the_batch(ask: Any) -> None:
    executions = statistics(ask.server, "greedy")["execution_count"]
    with ask.gate("greedy"):
        futures = [ask.queue("greedy", n, width=width) for n, width in enumerate([2, 2, 3, 2])]
    assert [number(f, "REQUESTS") for f in futures] == [2, 2, 1, 1]
    assert statistics(ask.server, "greedy")["execution_count"] == executions + 4
    assert [f.result().as_numpy("ECHO").shape for f in futures] == [(1, 2), (1, 2), (1, 3), (1, 2)]


def test_a_quick_model_that_stalls_lets_what_follows_queue(ask: Any) -> None:
    for _ in range(2):  # enough answers for the gateway to take the model for quick, and to gather requests
        with ask.gate("greedy"):
            pass
        infer(ask.server, "greedy", VALUE=ask.value(1, 1, 2))
        infer(ask.server, "greedy", VALUE=ask.value(1, 1, 2))
    with ask.gate("greedy"):
        futures = [ask.queue("greedy", n, width=width) for n, width in enumerate([2, 2, 3, 2, 2])]
    assert [number(f, "REQUESTS") for f in futures] == [2, 2, 1, 2, 2]


def test_preferred_sizes_show_in_the_batch_statistics(ask: Any) -> None:
    with ask.gate("preferred"):
        futures = [ask.queue("preferred", n) for n in range(11)]
    assert [number(f, "REQUESTS") for f in futures] == [4] * 8 + [2, 2, 1]
    assert batches(ask.server, "preferred") == {1: 2, 2: 1, 4: 2}


def test_a_strategy_of_batching_ends_a_batch_at_once(ask: Any) -> None:
    """P22: no more than 12 bytes in a batch. Who does not fit ends the wait of others, and one too large runs alone."""
    futures = [ask.queue("bounded", n) for n in range(3)]
    assert pending(ask.server, "bounded") == 3
    large = ask.submit("bounded", 3, rows=8)
    assert [number(f, "REQUESTS") for f in (*futures, large)] == [3, 3, 3, 1]
    assert batches(ask.server, "bounded") == {3: 1, 8: 1}


def test_a_batch_waits_to_be_filled_while_its_delay_lasts(ask: Any) -> None:
    futures = [ask.queue("patient", n) for n in range(3)]
    assert pending(ask.server, "patient") == 3
    assert not any(f.done() for f in futures)
    futures.append(ask.submit("patient", 3))
    assert [number(f, "EXECUTION") for f in futures] == [1, 1, 1, 1]
    assert batches(ask.server, "patient") == {4: 1}
    # a full request waits for nobody
    assert number(ask.submit("patient", 9, rows=4), "REQUESTS") == 1


def test_after_the_delay_a_batch_goes_as_it_is(ask: Any) -> None:
    assert number(ask.submit("prompt", 1), "REQUESTS") == 1
    with ask.gate("prompt"):
        futures = [ask.queue("prompt", n) for n in range(3)]
    assert [number(f, "REQUESTS") for f in futures] == [3, 3, 3]
    assert batches(ask.server, "prompt") == {1: 2, 3: 1}


# -- priorities and policies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["levels", "endless_levels"])
def test_lower_levels_go_first(model: str, ask: Any) -> None:
    last = 3 if model == "levels" else 2**63 - 1
    with ask.gate(model):
        futures = {
            "last": ask.queue(model, 0, priority=last),
            "default": ask.queue(model, 1),
            "zero is default": ask.queue(model, 2, priority=0),
            "first": ask.queue(model, 3, priority=1),
            "first again": ask.queue(model, 4, priority=1),
        }
        if model == "levels":
            futures["beyond is default"] = ask.queue(model, 5, priority=99)
            futures["lowest is last"] = ask.queue(model, 6, priority=LOWEST_PRIORITY)
    expected = ["first", "first again", "default", "zero is default", "last"]
    if model == "levels":
        expected = [*expected[:-1], "beyond is default", "last", "lowest is last"]
    assert in_order(futures) == expected


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_a_full_queue_refuses(kind: str, ask: Any) -> None:
    with ask.gate("short"):
        futures = [ask.queue("short", n) for n in range(2)]
        with pytest.raises(InferenceServerException) as caught:
            infer(ask.server, "short", kind, {"request_id": "7"}, VALUE=ask.value(3))
        assert caught.value.message() == "[request id: 7] Exceeds maximum queue size"
        assert ("UNAVAILABLE" if kind == "grpc" else "503") in caught.value.status()
    assert [number(f, "ECHO") for f in futures] == [0, 1]
    assert number(ask.submit("short", 4), "ECHO") == 4


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_an_expired_request_is_refused_while_the_instance_is_busy(kind: str, ask: Any) -> None:
    failed = statistics(ask.server, "rejecting")["inference_stats"]["fail"]["count"]
    with ask.gate("rejecting") as gate:
        with pytest.raises(InferenceServerException) as caught:
            infer(ask.server, "rejecting", kind, {"timeout": 1000}, VALUE=ask.value(1))
        assert caught.value.message() == "Request timeout expired"
        assert ("UNAVAILABLE" if kind == "grpc" else "503") in caught.value.status()
        assert not gate.request.done()
        patient = ask.queue("rejecting", 2, timeout=3_600 * SECOND_US)
    assert number(patient, "ECHO") == 2
    stats = statistics(ask.server, "rejecting")["inference_stats"]
    assert stats["fail"]["count"] == failed + 1

    def is_on_the_page() -> bool:
        lines = [line for line in ask.server.scrape().splitlines() if 'model="rejecting"' in line]
        rejected = [line for line in lines if 'reason="REJECTED"' in line]
        return bool(rejected) and all(float(line.rsplit(" ", 1)[1]) >= 1 for line in rejected)

    until("it is on the page", is_on_the_page)


def test_a_timeout_needs_the_models_leave(ask: Any) -> None:
    with ask.gate("stubborn"):
        future = ask.queue("stubborn", 1, timeout=1000)
        began = time.monotonic()
        until("its time would have passed", lambda: time.monotonic() - began > 0.05)
        assert not future.done()
    assert number(future, "ECHO") == 1


def test_a_delayed_request_goes_after_all_others(ask: Any) -> None:
    with ask.gate("delaying"):
        futures = {"late": ask.queue("delaying", 1, timeout=1000)}
        began = time.monotonic()
        until("its time has passed", lambda: time.monotonic() - began > 0.05)
        futures["in time"] = ask.queue("delaying", 2)
        futures["also in time"] = ask.queue("delaying", 3)
    assert in_order(futures) == ["in time", "also in time", "late"]


# -- order and cancelling ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["ordered", "unordered"])
def test_preserve_ordering_holds_answers_back(model: str, ask: Any, tmp_path: Path) -> None:
    answered: list[int] = []
    with ask.gate(model) as gate:
        gate.request.add_done_callback(lambda _: answered.append(0))
        futures = []
        for n in (1, 2):
            executed = tmp_path / f"executed-{n}"
            futures.append(ask.submit(model, n, parameters={"entered": str(executed)}))
            futures[-1].add_done_callback(lambda _, n=n: answered.append(n))
            until("the other instance executes it", executed.exists)
        if model == "unordered":
            assert {number(f, "ECHO") for f in futures} == {1, 2}
            assert not gate.request.done()
        else:
            # time enough for an answer that is not held back
            for _ in range(20):
                infer_json(ask.server, "plain", {"inputs": []})
            assert answered == []
    assert [number(f, "ECHO") for f in (gate.request, *futures)] == [0, 1, 2]


def test_a_cancelled_request_leaves_the_queue(ask: Any) -> None:
    executions = statistics(ask.server, "plain")["execution_count"]
    with client("grpc", ask.server) as asking, ask.gate("plain"):
        outcomes: list[Any] = []
        call = asking.async_infer(
            "plain", inputs("grpc", VALUE=ask.value(1)), lambda result, error: outcomes.append(error)
        )
        until("it waits", lambda: pending(ask.server, "plain") == 1)
        kept = ask.queue("plain", 2)
        call.cancel()
        until("it has left the queue", lambda: pending(ask.server, "plain") == 1)
    assert number(kept, "ECHO") == 2
    until("the client hears of it", lambda: outcomes)
    assert "cancelled" in str(outcomes[0]).lower()
    until("it was not executed", lambda: statistics(ask.server, "plain")["execution_count"] == executions + 2)


def test_a_client_that_leaves_takes_its_request_out_of_the_queue(ask: Any) -> None:
    import socket

    host, _, port = ask.server.http.partition(":")
    executions = statistics(ask.server, "plain")["execution_count"]
    with ask.gate("plain"):
        body = b'{"inputs":[{"name":"VALUE","shape":[1,1],"datatype":"INT32","data":[1]}]}'
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                b"POST /v2/models/plain/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
            )
            connection.sendall(body)
            until("it waits", lambda: pending(ask.server, "plain") == 1)
        until("it has left the queue", lambda: pending(ask.server, "plain") == 0)
    assert number(ask.submit("plain", 2), "ECHO") == 2
    assert statistics(ask.server, "plain")["execution_count"] == executions + 2
