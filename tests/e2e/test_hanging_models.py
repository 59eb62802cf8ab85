"""A native model that hangs in a thread: its executor ends itself in order and comes back, the others lose nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_asking import infer, until
from e2e_models import WIDTH, put, scaling

from batcher.scheduling.poison.poison_isolation import CULPRIT_OF_LOSSES

pytestmark = pytest.mark.long

HOURS = 1e12
"""Iterations of a loop that does a million a second."""

CONFIG = """
backend: "onnxruntime"
parameters { key: "charonia.max_execution_s" value { string_value: "3" } }
instance_group { kind: KIND_CPU count: 1 }
"""


def looping() -> bytes:
    """An ONNX model: y [1] = x after x[0] iterations of nothing."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    def tensor(name: str, datatype: int, shape: list[int]) -> Any:
        return helper.make_tensor_value_info(name, datatype, shape)

    body = helper.make_graph(
        [helper.make_node("Identity", ["going"], ["go_on"]), helper.make_node("Add", ["value", "nought"], ["next"])],
        "body",
        [
            tensor("count", TensorProto.INT64, []),
            tensor("going", TensorProto.BOOL, []),
            tensor("value", TensorProto.FLOAT, [1]),
        ],
        [tensor("go_on", TensorProto.BOOL, []), tensor("next", TensorProto.FLOAT, [1])],
    )
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["x"], ["times"], to=TensorProto.INT64),
            helper.make_node("Loop", ["times", "", "x"], ["y"], body=body),
        ],
        "looping",
        [tensor("x", TensorProto.FLOAT, [1])],
        [tensor("y", TensorProto.FLOAT, [1])],
        [numpy_helper.from_array(np.zeros(1, np.float32), "nought")],
    )
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return bytes(model.SerializeToString())


@pytest.mark.parametrize(
    ("role", "flags"), [("executor+batcher", []), ("executor", ["--batcher=separate"])], ids=["inside", "separate"]
)
def test_a_native_hang_ends_its_executor_and_nothing_else(
    serve: Callable[..., Any], tmp_path: Path, role: str, flags: list[str]
) -> None:
    models = tmp_path / "models"
    put(models / "looping" / "1" / "model.onnx", looping())
    put(models / "looping" / "config.pbtxt", CONFIG)
    scaling(models, "double", 2)
    server = serve(models, *flags)
    (before,) = server.pids(role)
    assert infer(server, "looping", x=np.ones(1, np.float32)).as_numpy("y").tolist() == [1.0]
    value = np.ones((1, WIDTH), np.float32)
    with ThreadPoolExecutor(2) as pool:
        hanging = pool.submit(infer, server, "looping", x=np.full(1, HOURS, np.float32))
        behind = pool.submit(infer, server, "looping", x=np.full(1, 2, np.float32))
        until("the executor that hangs has ended", lambda: not Path(f"/proc/{before}").exists())
        # accepted before, during or after: answered by the successor
        assert (infer(server, "double", INPUT0=value).as_numpy("OUTPUT0") == 2).all()
        assert behind.result(60).as_numpy("y").tolist() == [2.0]
        error = hanging.exception(60)
        assert error is not None
        # the second where the executor had no time left to write the first: it was lost, as were its successors
        assert error.message() in ("Stub process 'looping_0_0' is not healthy.", CULPRIT_OF_LOSSES)
    until("a successor runs", lambda: server.pids(role))
    (after,) = server.pids(role)
    assert after != before
    assert "must end: a batch hangs in looping_0_0: it exceeded max_execution_s (3 s)" in server.log()
    assert os.path.exists(f"/proc/{after}")
