"""The parts as processes of their own over one log: two gateways, two batchers, two executors."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from e2e_asking import client, index, infer, inputs, post, statistics, until, until_equal
from e2e_load import Load, ask_scaled
from e2e_models import WIDTH, scaling
from e2e_parts import GATEWAY_FLAGS, Part, parts_over_a_log

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from loadtest.sequences import FACTOR, MODULUS, build

CLIENTS = 16
MODELS = {"double", "triple", "digest"}
EXPLICIT = ("--model-control-mode=explicit", "--load-model=*")


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Any]:
    models = tmp_path / "models"
    for name, factor in (("double", 2), ("triple", 3)):
        scaling(models, name, factor, config="dynamic_batching { }")
    build(models, batch=16, candidates=64, every=5)
    with parts_over_a_log(tmp_path) as started:
        start = started.start
        gateways = [start("gateway", f"gateway{n}", *GATEWAY_FLAGS) for n in range(2)]
        batchers = [start("batcher", f"batcher{n}") for n in range(2)]
        repository = f"--model-repository={models}"
        executors = [start("executor", f"executor{n}", repository, *EXPLICIT) for n in range(2)]
        for gateway in gateways:
            gateway.learn_addresses()
            gateway.wait_ready()
        yield SimpleNamespace(gateways=gateways, batchers=batchers, executors=executors, models=models, start=start)


def load_on(gateways: list[Part]) -> Load:
    """Clients on all gateways, by both protocols."""

    @contextmanager
    def asking(number: int) -> Iterator[Callable[[int], None]]:
        kind = ["http", "grpc"][number // 2 % 2]
        model, factor = [("double", 2), ("triple", 3)][number // 4 % 2]
        with client(kind, gateways[number % len(gateways)]) as made:
            yield partial(ask_scaled, made, kind, model, factor)

    return Load(asking, CLIENTS)


def owned(batcher: Part) -> set[str]:
    return set(re.findall(r"owns model '(\w+)'", batcher.log()))


def counted(gateway: Part) -> dict[str, tuple[int, int, int]]:
    rows = {}
    for model in ("double", "triple"):
        stats = statistics(gateway, model)
        rows[model] = (
            stats["inference_count"],
            stats["inference_stats"]["success"]["count"],
            stats["inference_stats"]["fail"]["count"],
        )
    return rows


def test_both_gateways_know_and_count_everything(parts: Any) -> None:
    one, other = parts.gateways
    for gateway in parts.gateways:
        for kind in ("http", "grpc"):
            for model, factor in (("double", 2), ("triple", 3)):
                answer = infer(gateway, model, kind, INPUT0=np.ones((3, WIDTH), np.float32))
                assert (answer.as_numpy("OUTPUT0") == factor).all()
    until("both know the same", lambda: index(one) == index(other))
    expected = {"double": (12, 4, 0), "triple": (12, 4, 0)}
    until("all is counted", lambda: counted(one) == expected)
    until("the other knows it, too", lambda: counted(other) == expected)
    # a load through one is a load for both
    scaling(parts.models, "double", 20, config="dynamic_batching { }")
    assert post(one, "/v2/repository/models/double/load") == (200, None)
    for gateway in parts.gateways:

        def times(gateway: Part = gateway) -> float:
            ones = np.ones((1, WIDTH), np.float32)
            return float(infer(gateway, "double", INPUT0=ones).as_numpy("OUTPUT0")[0, 0])

        until("the new version answers", lambda times=times: times() == 20)
    assert post(other, "/v2/repository/models/double/unload") == (200, None)
    until("it is unloaded", lambda: index(one)["double", "1"].get("reason") == "unloaded")
    until("the other knows it, too", lambda: index(one) == index(other))
    assert json.loads(one.get("/v2/models/triple")[1]) == json.loads(other.get("/v2/models/triple")[1])


@pytest.mark.long
def test_every_request_is_answered_though_parts_die(parts: Any) -> None:
    gateways, batchers, executors = parts.gateways, parts.batchers, parts.executors
    until("each model has an owner", lambda: set().union(*map(owned, batchers)) == MODELS)
    victim, heir = sorted(batchers, key=lambda b: -len(owned(b)))
    lost = owned(victim)
    with load_on(gateways) as load:
        load.more(5)
        victim.process.send_signal(signal.SIGKILL)
        until("the other batcher owns all", lambda: owned(heir) == MODELS)
        load.more(5)
        # an executor as well, and another takes its place
        executors[0].process.send_signal(signal.SIGKILL)
        load.more(5)
        again = parts.start(
            "executor",
            "executor2",
            f"--model-repository={parts.models}",
            "--model-control-mode=explicit",
            "--load-model=*",
        )
        again.until_says("executor is up")
        executors[1].process.send_signal(signal.SIGKILL)
        load.more(5)
    victim.process.wait()
    assert lost
    per_model = {"double": 0, "triple": 0}
    for number, count in enumerate(load.answered):
        per_model[("double", "triple")[number // 4 % 2]] += count
    # each request has one outcome, however often it was tried
    for gateway in gateways:
        until_equal(
            "each answer is counted once",
            lambda gateway=gateway: {m: row[1] for m, row in counted(gateway).items()},
            per_model,
        )
        assert {row[2] for row in counted(gateway).values()} == {0}


def test_parts_that_stop_in_order_take_nothing_with_them(parts: Any) -> None:
    """Executors, instances and incarnations no sequences, although the log gets only every fifth state of `digest`;
    a gateway not the other.
    """
    rolled = threading.Event()
    server = parts.gateways[0]

    def drive(number: int) -> int:
        state, step = 0, 0
        with client("grpc", server) as asking:
            while True:
                last = rolled.is_set()
                options = {"sequence_id": 1 + number, "sequence_start": step == 0, "sequence_end": last}
                tensors = inputs("grpc", VALUE=np.array([[step % 7]], np.float32))
                state = (state * FACTOR + step % 7) % MODULUS
                answer = asking.infer("digest", tensors, **options)
                assert int(answer.as_numpy("STATE")[0, 0]) == state, (number, step)
                step += 1
                if last:
                    return step

    said: list[int] = []

    def go_on(**flags: bool) -> None:
        """A step of a sequence that rests until the next one."""
        answer = infer(server, "digest", "grpc", {"sequence_id": 99} | flags, VALUE=np.array([[1]], np.float32))
        said.append(int(answer.as_numpy("STATE")[0, 0]))

    with ThreadPoolExecutor(4) as pool, client("http", server) as asking:
        driving = [pool.submit(drive, number) for number in range(4)]
        try:
            go_on(sequence_start=True)
            repository = f"--model-repository={parts.models}"
            for number, executor in enumerate(parts.executors, 2):
                started = parts.start("executor", f"executor{number}", repository, *EXPLICIT)
                started.until_says("digest")
                assert executor.stop() == 0
                go_on()
            config = asking.get_model_config("digest")
            for count in (2, 1):
                config["instance_group"][0]["count"] = count
                asking.load_model("digest", config=json.dumps(config))
                go_on()
            config["sequence_batching"]["oldest"]["max_candidate_sequences"] = 40
            asking.load_model("digest", config=json.dumps(config))
            go_on()
        finally:
            rolled.set()
        assert all(one.result(60) > 5 for one in driving)
    expected = [1]
    while len(expected) < len(said):
        expected.append((expected[-1] * FACTOR + 1) % MODULUS)
    assert said == expected
    one, other = parts.gateways
    with load_on([other]) as load:
        load.more(2)
        assert one.stop() == 0, one.log()
        load.more(2)
    assert other.get("/v2/health/ready")[0] == 200
    _first_not_ready(parts)


def _first_not_ready(parts: Any) -> None:
    """A gateway that drains serves on for its delay, so that a proxy sends work elsewhere before anything is refused.

    The delay is longer than any test.
    """
    leaving = parts.start("gateway", "leaving", *GATEWAY_FLAGS, "--drain-delay-secs=600")
    leaving.learn_addresses()
    leaving.wait_ready()
    leaving.process.send_signal(signal.SIGTERM)
    until("it is not ready", lambda: leaving.get("/v2/health/ready")[0] == 400)
    assert leaving.get("/v2/health/live")[0] == 200
    value = np.full((1, WIDTH), 3, np.float32)
    for kind in ("http", "grpc"):
        assert (infer(leaving, "double", kind, INPUT0=value).as_numpy("OUTPUT0") == 2 * value).all()
    leaving.process.kill()
    leaving.process.wait(180)
