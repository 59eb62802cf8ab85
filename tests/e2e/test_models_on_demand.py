"""Many models on two executors that hold few: every request is answered, and no executor ever holds more than it may.

One model cannot be loaded, one is placed where nobody is. The server is started once.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from e2e_asking import index, infer, statistics, until
from e2e_models import WIDTH, put, scaling
from e2e_server import serving
from tritonclient.utils import InferenceServerException

from charonia import keys
from charonia.eventlog.redis import open_log
from charonia.facts.events import VersionHeld, facts_of

MODELS = 24
HOLDS = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    models = tmp_path_factory.mktemp("many")
    for number in range(MODELS):
        scaling(models, f"times{number}", number, config="instance_group { count: 1 kind: KIND_CPU }")
    broken = scaling(models, "broken", 1, config="instance_group { count: 1 kind: KIND_CPU }")
    put(
        broken / "config.pbtxt",
        (broken / "config.pbtxt")
        .read_text()
        .replace(
            "instance_group",
            'parameters { key: "charonia.max_execution_s" value { string_value: "never" } } instance_group',
        ),
    )
    scaling(
        models,
        "elsewhere",
        1,
        config='parameters { key: "charonia.pool" value { string_value: "gpu" } }',
    )
    flags = ("--executors=2", f"--max-loaded-models={HOLDS}", "--strict-readiness=false", "--label=zone=a")
    with serving(models, tmp_path_factory.mktemp("state"), *flags) as running:
        yield running


def told(server: Any) -> list[Any]:
    """The control facts as they are in the log."""

    async def read() -> list[Any]:
        log = open_log(server.log_url)
        await log.open()
        found, after = [], b"0-0"
        while entries := await log.range(keys.CONTROL, after):
            found += [fact for entry in entries for fact in facts_of(entry)]
            after = entries[-1].id
        await log.close()
        return found

    return asyncio.run(read())


def rows_of(server: Any) -> dict[str, dict[str, str]]:
    return {name: row for (name, _), row in index(server).items()}


def test_models_that_nobody_holds_are_ready_and_described(server: Any) -> None:
    rows = rows_of(server)
    assert (rows["times3"]["state"], rows["times3"]["reason"]) == ("READY", "on demand")
    assert server.get("/v2/models/times3/ready")[0] == 200
    assert json.loads(server.get("/v2/models/times3")[1])["inputs"][0]["shape"] == [-1, WIDTH]
    assert json.loads(server.get("/v2/models/times3/config")[1])["instance_group"][0]["count"] == 1
    assert rows["elsewhere"] == {
        "name": "elsewhere",
        "state": "UNAVAILABLE",
        "reason": "'charonia.pool' is 'gpu', and this executor is in the pool 'default'",
    }


def test_every_model_answers_and_few_are_held(server: Any) -> None:
    order = random.Random(5)
    asked = [order.randrange(MODELS) for _ in range(160)]

    def ask(number: int) -> None:
        x = np.full((1, WIDTH), number + 1, np.float32)
        answer = infer(server, f"times{number}", INPUT0=x)
        np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), x * number)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, asked))
    held = [fact for fact in told(server) if isinstance(fact, VersionHeld)]
    last = {(fact.executor, fact.model): fact.slots for fact in held}
    assert sum(slots > 0 for slots in last.values()) <= 2 * HOLDS
    assert any(slots == 0 for slots in last.values()), "some made room"
    rows = rows_of(server)
    assert {rows[f"times{number}"]["state"] for number in range(MODELS)} == {"READY"}
    for number in range(MODELS):
        times = asked.count(number)
        until(  # they outlive the model's stay in memory; the last settlement may follow its answer by a moment
            f"times{number} counts {times} requests",
            lambda m=f"times{number}", n=times: statistics(server, m)["inference_stats"]["success"]["count"] == n,
        )


@pytest.mark.long
def test_a_killed_executor_costs_no_answer(server: Any) -> None:
    """What it held is loaded by the other one, or by its successor."""
    order = random.Random(6)
    numbers = iter([order.randrange(MODELS) for _ in range(120)])
    answered = 0

    def ask(_: int) -> int:
        done = 0
        while (number := next(numbers, -1)) >= 0:
            x = np.full((1, WIDTH), number + 2, np.float32)
            np.testing.assert_array_equal(infer(server, f"times{number}", INPUT0=x).as_numpy("OUTPUT0"), x * number)
            done += 1
            if done == 5:
                asked.set()
        return done

    asked = threading.Event()
    with ThreadPoolExecutor(6) as threads:
        asking = [threads.submit(ask, number) for number in range(6)]
        assert asked.wait(60)
        os.kill(server.pids("executor")[0], signal.SIGKILL)
        answered = sum(future.result() for future in asking)
    assert answered == 120


def test_a_model_that_cannot_be_loaded_answers_with_the_reason(server: Any) -> None:
    x = np.ones((1, WIDTH), np.float32)
    with pytest.raises(InferenceServerException) as caught:
        infer(server, "broken", INPUT0=x)
    assert "load failed for model 'broken': version 1 is at UNAVAILABLE state: Invalid argument: " in str(caught.value)
    assert "'charonia.max_execution_s' must be a number of at least 0, got 'never'" in str(caught.value)
    row = until("the index says it too", lambda: (r := rows_of(server)["broken"])["state"] == "UNAVAILABLE" and r)
    assert "charonia.max_execution_s" in row["reason"]
    assert server.get("/v2/models/broken/ready")[0] == 400
    answer = infer(server, "times7", INPUT0=x)
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), x * 7)
