"""What all sessions of a process share. Each test has a process of its own: the library is set up once in each."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from charonia.errors import InvalidArgument
from executors.backends.onnxruntime.library_setup import has_global_threads, set_up

SETUP = """
import asyncio, os, sys
from pathlib import Path
import numpy as np
from charonia.backend import InstanceSpec, ModelSource
from charonia.errors import InternalError
from charonia.models.interface import ModelInterface
from executors.backends.onnxruntime import OnnxRuntimeBackend
from executors.configuration.config import normalise
from charonia.models.config_forms import parse

def threads():
    return len(os.listdir("/proc/self/task"))

async def opened(settings, *texts):
    backend = OnnxRuntimeBackend()
    await backend.open(settings)
    before, made = threads(), []
    for text in texts:
        config = normalise(parse('name: "m" backend: "onnxruntime" max_batch_size: 65536 ' + text))
        source = ModelSource("m", 1, Path(sys.argv[1]), config, settings)
        model = await backend.load(source)
        spec = InstanceSpec("m_0", "CPU", -1, source, ModelInterface.of(config))
        made.append((model._create(spec), threads() - before))
    return made
"""
TENSORS = """
input { name: "a" data_type: TYPE_FP32 dims: 4 } output { name: "c" data_type: TYPE_FP32 dims: 4 }
parameters { key: "intra_op_thread_count" value { string_value: "4" } }
"""


def run(directory: Path, code: str) -> None:
    names = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in "ac"]
    graph = helper.make_graph([helper.make_node("Neg", ["a"], ["c"])], "g", names[:1], names[1:])
    (directory / "1").mkdir()
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, directory / "1" / "model.onnx")
    program = SETUP + f"TEXT = '''{TENSORS}'''\n" + textwrap.dedent(code)
    subprocess.run([sys.executable, "-c", program, str(directory)], check=True)


def test_one_pool_of_threads_serves_all_sessions(tmp_path: Path) -> None:
    """A model's own count would start three threads more."""
    run(
        tmp_path,
        """
        settings = {"enable-global-threadpool": "1", "intra_op_thread_count": "3"}
        for instance, more in asyncio.run(opened(settings, TEXT, TEXT)):
            assert more == 0, more
            assert instance.execute({"a": np.ones((2, 4), np.float32)}, ["c"])["c"].sum() == -8
        """,
    )


def test_without_it_each_session_has_its_own(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        assert [more for _, more in asyncio.run(opened({}, TEXT, TEXT))] == [3, 6]
        """,
    )


def test_the_memory_of_all_sessions_is_bounded(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        (one, _), (other, _) = asyncio.run(opened({"cpu_mem_limit": str(1 << 20)}, TEXT, TEXT))
        for instance in (one, other, one):
            instance.execute({"a": np.ones((2, 4), np.float32)}, ["c"])
            try:
                instance.execute({"a": np.ones((1 << 17, 4), np.float32)}, ["c"])
                raise SystemExit("2 MiB were given")
            except InternalError as error:
                assert "Available memory" in error.message, error.message
        """,
    )


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"enable-global-threadpool": "perhaps"}, "enable-global-threadpool must be 0 or 1, got 'perhaps'"),
        ({"intra_op_thread_count": "-1"}, "intra_op_thread_count must be an integer of at least 0, got '-1'"),
        ({"cpu_mem_limit": "1GB"}, "cpu_mem_limit must be an integer of at least 0, got '1GB'"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        set_up(None, settings, 2)


def test_the_pool_is_off_by_default() -> None:
    assert not has_global_threads({})
    assert has_global_threads({"enable-global-threadpool": "true"})
