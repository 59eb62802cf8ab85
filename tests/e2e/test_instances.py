"""Instance groups, their resources and cores, and ragged batches, over one server with limits and policies (C8-C11)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_asking import Gate, batches, infer, on_the_page, pending, post, settle, statistics, until
from e2e_models import GATED, GATED_IO, gated, put, python
from e2e_server import serving
from tritonclient.utils import InferenceServerException

CORE = max(os.sched_getaffinity(0))

SHARED = (
    'max_batch_size: 1 instance_group [ { rate_limiter { resources [ { name: "shared" count: 1 global: true } ] } } ]'
)

ASKING_IO = """
input [ { name: "VALUE" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "ECHO" data_type: TYPE_INT32 dims: [ -1 ] } ]
"""

ASKING = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.one(pb_utils.get_input_tensor_by_name(request, "VALUE")) for request in requests]

    def one(self, value):
        asked = pb_utils.InferenceRequest(model_name="one", requested_output_names=["ECHO"], inputs=[value]).exec()
        if asked.has_error():
            return pb_utils.InferenceResponse(error=asked.error())
        return pb_utils.InferenceResponse(asked.output_tensors())
"""

RAGGED = """
backend: "onnxruntime" max_batch_size: 3
dynamic_batching { max_queue_delay_microseconds: 600000000 }
input { name: "VALUES" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
output { name: "SCALED" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "WHERE" data_type: TYPE_INT32 dims: [ 1 ] reshape { } }
batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "ENDS" data_type: TYPE_INT32 source_input: "VALUES" }
batch_output { target_name: "SCALED" source_input: "VALUES" }
"""

PLACED = '''
import os
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """CORES: those its process may run on, when it began and now."""

    def initialize(self, args):
        self.first = sorted(os.sched_getaffinity(0))

    def execute(self, requests):
        cores = np.array([*self.first, -1, *sorted(os.sched_getaffinity(0))], np.int32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("CORES", cores)]) for _ in requests]
'''

PLACED_IO = """
input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "CORES" data_type: TYPE_INT32 dims: [ -1 ] } ]
"""


SLEEPING = """
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.004)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(r, "X").as_numpy())])
            for r in requests
        ]
"""

TARGET = """
max_batch_size: 8 dynamic_batching { }
input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] } ]
parameters { key: "charonia.target_p99_ms" value { string_value: "5000" } }
"""


def ragged_graph() -> bytes:
    """SCALED = 3 * VALUES, flat; WHERE = ENDS."""
    import onnx
    from onnx import TensorProto, helper

    def value(name: str, element: int, size: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, element, [size])

    three = helper.make_tensor("three", TensorProto.FLOAT, [1], [3.0])
    nodes = [
        helper.make_node("Mul", ["VALUES", "three"], ["SCALED"]),
        helper.make_node("Identity", ["ENDS"], ["WHERE"]),
    ]
    graph = helper.make_graph(
        nodes,
        "ragged",
        [value("VALUES", TensorProto.FLOAT, "n"), value("ENDS", TensorProto.INT32, "b")],
        [value("SCALED", TensorProto.FLOAT, "n"), value("WHERE", TensorProto.INT32, "b")],
        [three],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return bytes(model.SerializeToString())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("instances")
    models = directory / "models"
    put(models / "ragged" / "1" / "model.onnx", ragged_graph())
    put(models / "ragged" / "config.pbtxt", RAGGED)
    ragged_io = GATED_IO.replace("dims: [ -1 ] }", "dims: [ -1 ] allow_ragged_batch: true }", 1)
    python(models, "mixed", GATED, ragged_io + "max_batch_size: 8 dynamic_batching { } instance_group [ { count: 1 } ]")
    for name in ("one", "other"):
        gated(models, name, SHARED)
    gated(models, "greedy", SHARED.replace("count: 1", "count: 3"))
    for name, count in (("asking", 1), ("asking_with_all", 2)):
        python(models, name, ASKING, ASKING_IO + SHARED.replace("count: 1", f"count: {count}"))
    gated(
        models,
        "grouped",
        "max_batch_size: 1 instance_group "
        '[ { name: "first" kind: KIND_CPU }, { name: "second" count: 2 kind: KIND_CPU }, '
        '{ name: "idle" kind: KIND_CPU passive: true } ]',
    )
    python(models, "placed", PLACED, PLACED_IO + 'instance_group [ { kind: KIND_CPU host_policy: "last" } ]')
    python(models, "anywhere", PLACED, PLACED_IO + "instance_group [ { kind: KIND_CPU } ]")
    python(models, "targeted", SLEEPING, TARGET)
    python(models, "hurried", SLEEPING, TARGET.replace("dynamic_batching { }", ""))
    asking, placed = ("asking", "asking_with_all"), ("grouped", "placed", "anywhere")
    names = ("ragged", "mixed", "one", "other", *asking, *placed, "targeted")
    loaded = [f"--load-model={name}" for name in names]
    flags = ["--rate-limit=execution_count", "--rate-limit-resource=shared:2", f"--host-policy=last,cpu-cores={CORE}"]
    with serving(models, directory / "state", "--model-control-mode=explicit", *loaded, *flags) as running:
        yield running


def inspected(server: Any) -> str:
    """What `charonia queue inspect` prints of the model with a target."""
    words = ["queue", "inspect", "targeted", f"--state-dir={server.state_dir}"]
    command = [str(Path(sys.executable).parent / "charonia"), *words]
    return subprocess.run(command, capture_output=True, check=True, timeout=90).stdout.decode()


def value(number: int) -> np.ndarray:
    return np.full((1, 1), number, np.int32)


def test_requests_of_different_lengths_share_an_execution(server: Any) -> None:
    parts = [np.arange(size, dtype=np.float32).reshape(1, size) for size in (3, 4, 5)]
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda part: infer(server, "ragged", kind="grpc", VALUES=part), parts))
    for part, result in zip(parts, results, strict=True):
        assert result.as_numpy("SCALED").tolist() == (3 * part).tolist()
    # each request's end in the batch; their order is that of their arrival
    ends = sorted(int(result.as_numpy("WHERE")[0, 0]) for result in results)
    assert ends[-1] == 12
    assert sorted(np.diff([0, *ends])) == [3, 4, 5]
    assert batches(server, "ragged") == {3: 1}
    status, config = server.get("/v2/models/ragged")
    assert status == 200
    assert [row["name"] for row in json.loads(config)["inputs"]] == ["VALUES"]


def test_a_python_model_gets_requests_of_different_lengths_together_each_as_it_is(server: Any, tmp_path: Path) -> None:
    parts = [np.full((1, size), size, np.int32) for size in (3, 1, 5)]
    with ThreadPoolExecutor(8) as pool:
        with Gate(server, "mixed", tmp_path, pool):
            waiting = [pool.submit(infer, server, "mixed", VALUE=part) for part in parts]
            until("all of them wait", lambda: pending(server, "mixed") == 3)
        for part, future in zip(parts, waiting, strict=True):
            result = future.result(60)
            assert result.as_numpy("ECHO").tolist() == part.tolist()
            assert set(result.as_numpy("REQUESTS").ravel().tolist()) == {3}


def test_models_that_share_a_resource_wait_for_each_other(server: Any, tmp_path: Path) -> None:
    """`shared` is there twice: two executions of any models hold it, a third waits wherever it is (Q2, Q4, M2)."""

    with ThreadPoolExecutor(8) as pool, ExitStack() as held:
        first, second = Gate(server, "one", tmp_path, pool), Gate(server, "other", tmp_path, pool)
        held.enter_context(first)
        held.enter_context(second)
        waiting = [pool.submit(infer, server, model, VALUE=value(1)) for model in ("one", "other", "one")]
        until("all of them wait", lambda: pending(server, "one") == 2 and pending(server, "other") == 1)
        assert not any(future.done() for future in waiting)
        on_the_page(server, '\ncharonia_rate_limit_held{device="global",resource="shared"} 2')
        first.open()
        second.open()
        assert {int(future.result(60).as_numpy("ECHO")[0, 0]) for future in waiting} == {1}
    settle(server, "one", "other")
    assert [statistics(server, model)["execution_count"] for model in ("one", "other")] == [3, 2]
    until("nothing waits", lambda: pending(server, "one") == pending(server, "other") == 0)


def test_a_caller_that_holds_what_its_callee_needs_is_told(server: Any) -> None:
    assert int(infer(server, "asking", VALUE=value(3)).as_numpy("ECHO")[0, 0]) == 3
    started = time.monotonic()
    with pytest.raises(InferenceServerException) as told:
        infer(server, "asking_with_all", VALUE=value(3))
    assert time.monotonic() - started < 50, "the call has 60 s"
    assert told.value.status() == "503"
    assert told.value.message() == (
        "[request id: <id_unknown>] deadlock: asking_with_all -> one: the resource 'shared' that model 'one' needs is "
        "held by requests that wait for calls like this one; a larger count of it is needed"
    )
    # and nothing is held any more
    assert int(infer(server, "asking", VALUE=value(4)).as_numpy("ECHO")[0, 0]) == 4


def test_a_model_that_could_never_run_is_refused_in_words(server: Any) -> None:
    status, body = post(server, "/v2/repository/models/greedy/load")
    assert status == 400
    assert body["error"] == (
        "load failed for model 'greedy': version 1 is at UNAVAILABLE state: Invalid argument: "
        'Resource count for "shared" is limited to 2 which will prevent scheduling of one or more model instances, '
        "the minimum required count is 3;\n"
    )


def test_all_groups_but_the_passive_take_work(server: Any, tmp_path: Path) -> None:
    groups = json.loads(server.get("/v2/models/grouped/config")[1])["instance_group"]
    assert [(g["name"], g["count"], g["passive"]) for g in groups] == [
        ("first", 1, False),
        ("second", 2, False),
        ("idle", 1, True),
    ]
    with ThreadPoolExecutor(8) as pool, ExitStack() as held:
        for _ in range(3):  # three executions at the same time
            held.enter_context(Gate(server, "grouped", tmp_path, pool))
        fourth = pool.submit(infer, server, "grouped", VALUE=value(4))
        until("a fourth waits", lambda: pending(server, "grouped") == 1)
        assert not fourth.done()
        held.close()
        assert int(fourth.result(60).as_numpy("ECHO")[0, 0]) == 4


def test_instances_run_on_the_cores_of_their_policy(server: Any) -> None:
    def cores(model: str) -> list[int]:
        return [int(core) for core in infer(server, model, X=np.zeros(1, np.int32)).as_numpy("CORES")]

    assert cores("placed") == [CORE, -1, CORE]
    everywhere = sorted(os.sched_getaffinity(0))
    assert cores("anywhere") == [*everywhere, -1, *everywhere]


def test_a_model_with_a_target_says_what_was_chosen_for_it(server: Any) -> None:
    def series(name: str) -> float | None:
        found = re.search(rf'^charonia_adaptive_{name}{{model="targeted",version="1"}} (\S+)', server.scrape(), re.M)
        return float(found[1]) if found else None

    def chosen() -> bool:
        with ThreadPoolExecutor(4) as pool:
            echoed = list(pool.map(lambda n: infer(server, "targeted", X=value(n)).as_numpy("Y")[0, 0], range(8)))
        assert echoed == list(range(8))
        return series("in_reach") == 1

    until("something is chosen", chosen)
    on_the_page(server, *(f"\ncharonia_adaptive_{name}{{" for name in ("batch_size", "delay_us")))
    assert 1 <= until("a size is chosen", lambda: series("batch_size") or 0) <= 8
    assert 0 <= (series("delay_us") or 0) < 5_000_000
    shown = until("the operator sees it too", lambda: (text := inspected(server)) and "in reach" in text and text)
    assert re.search(
        r"version 1: batches from \d rows on, after .* ms at the latest, .* the target of 5000 ms is", str(shown)
    )
    assert {batch for batch in batches(server, "targeted") if batch > 8} == set()
    status, body = post(server, "/v2/repository/models/hurried/load")
    assert status == 400
    assert "parameter 'charonia.target_p99_ms' of model 'hurried' needs 'dynamic_batching'" in body["error"]
