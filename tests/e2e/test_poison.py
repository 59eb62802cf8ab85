"""A request that kills its model's process, in a batch with innocents: they succeed, it alone is dead-lettered."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from e2e_asking import infer, until
from e2e_models import python
from e2e_server import Server, serving
from tritonclient.utils import InferenceServerException

from charonia import keys

SOURCE = """
import ctypes, os, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        deeds = {int(array[0, 0]) for array in arrays}
        if 666 in deeds:
            print("last words of a batch of", len(requests), flush=True)
            ctypes.string_at(0)
        if 667 in deeds:
            os._exit(7)
        while 668 in deeds:
            time.sleep(0.01)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", array * 2)]) for array in arrays]
"""

# eight requests make a batch at once, so that it is one of eight
CONFIG = """
max_batch_size: 8
input { name: "x" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_INT32 dims: [ 1 ] }
instance_group { kind: KIND_CPU count: 1 }
dynamic_batching { preferred_batch_size: 8 max_queue_delay_microseconds: 60000000 }
"""
LONE = """
import os, signal, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        (array,) = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        value = int(array[0])
        if value == 669:
            os.kill(os.getpid(), signal.SIGKILL)
        if value == 1:
            place = "PLACE"
            with open(f"{place}/{os.getpid()}.new", "w"):
                pass
            os.rename(f"{place}/{os.getpid()}.new", f"{place}/{os.getpid()}.runs")
            give_up_at = time.monotonic() + 60
            while not os.path.exists(f"{place}/gate") and time.monotonic() < give_up_at:
                time.sleep(0.005)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", array * 2)])]
"""
LONE_CONFIG = """
max_batch_size: 0
input { name: "x" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_INT32 dims: [ 1 ] }
instance_group { kind: KIND_CPU count: 1 }
"""
LIMITED = 'parameters { key: "charonia.max_execution_s" value { string_value: "2" } }'
"""For the model that loops: a limit would end the others' batches as well where a machine stands still."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `lone` says which process runs its request, and waits for a gate."""
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, place: Path) -> Iterator[Server]:

    models = tmp_path_factory.mktemp("models")
    python(models, "moody", SOURCE, CONFIG)
    python(models, "looping", SOURCE, CONFIG + LIMITED)
    python(models, "lone", LONE.replace("PLACE", str(place)), LONE_CONFIG)
    with serving(models, tmp_path_factory.mktemp("state")) as running:
        yield running


def ask(server: Server, model: str, value: int) -> int:
    return int(infer(server, model, x=np.full((1, 1), value, np.int32)).as_numpy("y")[0, 0])


@pytest.mark.parametrize(
    ("model", "deed"), [("moody", 666), ("moody", 667), ("looping", 668)], ids=["segfault", "exit", "endless loop"]
)
def test_innocents_succeed_and_the_culprit_is_dead_lettered(model: str, deed: int, server: Server) -> None:
    with server.log_client() as log:
        deaths = server.log().count(f"instance {model}_0_0 died")
        letters = log.xlen(keys.dead_letters(model))
        with ThreadPoolExecutor(8) as pool:
            innocents = {value: pool.submit(ask, server, model, value) for value in range(1, 8)}
            culprit = pool.submit(ask, server, model, deed)
            assert {value: future.result(60) for value, future in innocents.items()} == {v: 2 * v for v in innocents}
            error = culprit.exception(60)
        assert isinstance(error, InferenceServerException)
        assert error.message() == f"Stub process '{model}_0_0' is not healthy."
        # 8, 4, 2, 1
        assert 1 < server.log().count(f"instance {model}_0_0 died") - deaths <= 4
        until("it is a dead letter", lambda: log.xlen(keys.dead_letters(model)) == letters + 1)
        letter = b"".join(next(iter(log.xrevrange(keys.dead_letters(model), count=1)))[1].values())
        if deed == 666:
            assert b"last words of a batch of 1" in letter


def test_a_lone_request_outlives_a_kill_from_outside_once(server: Server, place: Path) -> None:
    """As of a kernel without memory: the process that it ends need not be the one that asked for too much."""
    with server.log_client() as log:
        letters = log.xlen(keys.dead_letters("lone"))

        def alone(value: int) -> int:
            return int(infer(server, "lone", x=np.array([value], np.int32)).as_numpy("y")[0])

        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(alone, 1)
            until("its request runs", lambda: list(place.glob("*.runs")))
            (running,) = place.glob("*.runs")
            running.unlink()
            os.kill(int(running.stem), signal.SIGKILL)
            until("it runs again", lambda: list(place.glob("*.runs")))
            (place / "gate").touch()
            assert answer.result(60) == 2
        deaths = server.log().count("instance lone_0_0 died")
        with pytest.raises(InferenceServerException, match=r"Stub process 'lone_0_0' is not healthy\."):
            alone(669)
        assert server.log().count("instance lone_0_0 died") - deaths == 2, "once to be sure"
        until("it is a dead letter", lambda: log.xlen(keys.dead_letters("lone")) == letters + 1)
        assert alone(3) == 6
