"""The names of the modules `tensorrt` and `tensorrt_rtx` that reading a plan needs, over a driver without a device.

A plan is JSON: tensors, profiles and one operation. Execution is work of a stream of `fake_cuda_streams`, so that
copies, waits and graphs count. Shapes, profiles and addresses are checked as the real module does: calls return False.
`tests/backends/test_tensorrt_rtx.py` compares these names with the real module's.
"""

from __future__ import annotations

import asyncio
import ctypes
import enum
import gc
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest

__version__ = "11.4.0"

Dims = tuple[int, ...]

DataType = enum.Enum("DataType", "FLOAT HALF INT8 INT32 BOOL UINT8 FP8 BF16 INT64 INT4")
TensorFormat = enum.Enum("TensorFormat", "LINEAR CHW32 HWC8")
TensorIOMode = enum.Enum("TensorIOMode", "NONE INPUT OUTPUT")
TensorLocation = enum.Enum("TensorLocation", "DEVICE HOST")
ExecutionContextAllocationStrategy = enum.Enum("ExecutionContextAllocationStrategy", "STATIC ON_PROFILE_CHANGE")

_NUMPY = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "INT8": np.int8,
    "INT32": np.int32,
    "INT64": np.int64,
    "BOOL": np.bool_,
    "UINT8": np.uint8,
}
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
LIBRARIES: list[ctypes.CDLL] = []
"""The driver of the running test."""


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    def __init__(self) -> None: ...

    def log(self, severity: int, msg: str) -> None:
        raise NotImplementedError


class IOutputAllocator:
    def __init__(self) -> None: ...

    def reallocate_output_async(self, tensor_name: str, memory: int, size: int, alignment: int, stream: int) -> int:
        raise NotImplementedError

    def notify_shape(self, tensor_name: str, shape: Dims) -> None:
        raise NotImplementedError


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        self._logger = logger
        self.engine_host_code_allowed = False

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None:
        try:
            plan = json.loads(serialized_engine)
        except ValueError:
            self._logger.log(ILogger.ERROR, "IRuntime::deserializeCudaEngine: magic tag does not match")
            return None
        if plan.get("code") and not self.engine_host_code_allowed:
            self._logger.log(ILogger.ERROR, "IRuntime::deserializeCudaEngine: host code is not allowed")
            return None
        return ICudaEngine(plan, self._logger)


class IPluginRegistry:
    loaded: ClassVar[list[str]] = []

    def load_library(self, plugin_path: str) -> object | None:
        if not Path(plugin_path).is_file():
            return None
        self.loaded.append(plugin_path)
        return object()


def get_plugin_registry() -> IPluginRegistry:
    return IPluginRegistry()


def init_libnvinfer_plugins(logger: ILogger, namespace: str) -> bool:
    return True


class EngineStat(enum.Enum):
    TOTAL_WEIGHTS_SIZE = 0


class ICudaEngine:
    device_memory_size_v2 = 4096

    def __init__(self, plan: dict[str, Any], logger: ILogger) -> None:
        self.plan = plan
        self.logger = logger
        self.tensors = {tensor["name"]: tensor for tensor in plan["tensors"]}
        self.num_io_tensors = len(self.tensors)
        self.num_optimization_profiles = len(plan["profiles"])

    def get_engine_stat(self, stat: EngineStat) -> int:
        return int(self.plan.get("weights", -1))

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return 1024 * (profile_index + 1)

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType[self.tensors[name].get("dtype", "FLOAT")]

    def get_tensor_shape(self, name: str) -> Dims:
        return tuple(self.tensors[name]["dims"])

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode[self.tensors[name]["mode"]]

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.HOST if self.tensors[name].get("shape") else TensorLocation.DEVICE

    def is_shape_inference_io(self, name: str) -> bool:
        return bool(self.tensors[name].get("shape"))

    def get_tensor_format(self, name: str) -> TensorFormat:
        return TensorFormat[self.tensors[name].get("format", "LINEAR")]

    def get_tensor_vectorized_dim(self, name: str) -> int:
        return 1 if self.get_tensor_format(name) is not TensorFormat.LINEAR else -1

    def get_tensor_components_per_element(self, name: str) -> int:
        return {"LINEAR": 1, "CHW32": 32, "HWC8": 8}[self.get_tensor_format(name).name]

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Dims]:
        return [tuple(one) for one in self.plan["profiles"][profile_index][name]]

    def get_tensor_profile_values(self, profile_index: int, name: str) -> list[list[int]]:
        found: list[list[int]] = self.plan["profiles"][profile_index].get("values", {}).get(name, [])
        return found

    def create_execution_context(self, strategy: ExecutionContextAllocationStrategy) -> IExecutionContext:
        return IExecutionContext(self, strategy)


class IExecutionContext:
    def __init__(self, engine: ICudaEngine, strategy: ExecutionContextAllocationStrategy) -> None:
        self.engine = engine
        self.strategy = strategy
        self.profile = 0
        self.shapes: dict[str, Dims] = {}
        self.addresses: dict[str, int] = {}
        self.allocators: dict[str, Any] = {}
        self._alive: list[object] = []

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        if not 0 <= profile_index < self.engine.num_optimization_profiles or not stream_handle:
            return False
        self.profile = profile_index
        return True

    def set_input_shape(self, name: str, shape: Dims) -> bool:
        low, _, high = self.engine.get_tensor_profile_shape(name, self.profile)
        if len(shape) != len(low) or not all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True)):
            self.engine.logger.log(ILogger.ERROR, f"IExecutionContext::setInputShape: {shape} is out of range")
            return False
        self.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self.addresses[name] = memory
        return name in self.engine.tensors and memory != 0

    def set_output_allocator(self, name: str, output_allocator: IOutputAllocator) -> bool:
        self.allocators[name] = output_allocator
        return True

    def infer_shapes(self) -> list[str]:
        return [
            t["name"] for t in self._side("INPUT") if t["name"] not in self.shapes or t["name"] not in self.addresses
        ]

    def get_tensor_shape(self, name: str) -> Dims:
        tensor = self.engine.tensors[name]
        if tensor["mode"] == "INPUT":
            return self.shapes.get(name, tuple(tensor["dims"]))
        if tensor.get("shape"):
            return tuple(tensor["dims"])
        operation = self.engine.plan["op"]
        if operation == "add":
            return self.shapes[self._side("INPUT")[0]["name"]]
        if operation == "fill":
            return tuple(int(n) for n in self._array("s"))
        return (-1,)

    def get_max_output_size(self, name: str) -> int:
        if self.engine.plan["op"] == "fill":
            return 4 * int(np.prod(self.engine.get_tensor_profile_values(self.profile, "s")[2]))
        first = self._side("INPUT")[0]["name"]
        size = _NUMPY[self.engine.tensors[name].get("dtype", "FLOAT")]().itemsize
        return size * int(np.prod(self.engine.get_tensor_profile_shape(first, self.profile)[2]))

    def execute_async_v3(self, stream_handle: int) -> bool:
        if self.infer_shapes() or not stream_handle:
            return False
        shapes = dict(self.shapes)  # what is enqueued, or captured, keeps the shapes of now

        def run(_data: object) -> None:
            self._run(shapes)

        function = _HOST_FUNCTION(run)
        self._alive.append(function)
        driver = LIBRARIES[-1]
        return driver.cuLaunchHostFunc(ctypes.c_void_p(stream_handle), function, None) == 0

    def _run(self, shapes: dict[str, Dims]) -> None:
        operation = self.engine.plan["op"]
        if operation == "add":
            total = sum(self._array(t["name"], shapes[t["name"]]) for t in self._side("INPUT"))
            out = self._side("OUTPUT")[0]["name"]
            self._array(out, total.shape)[...] = total
        elif operation == "fill":
            wanted = tuple(int(n) for n in self._array("s"))
            self._array("y", wanted)[...] = self._array("x", shapes["x"]).reshape(-1)[0]
            if "twice" in self.engine.tensors:
                self._array("twice")[...] = 2 * self._array("s")
        else:
            x = self._array("x", shapes["x"])
            found = x[x != 0]
            allocator = self.allocators["y"]
            self.addresses["y"] = allocator.reallocate_output_async(
                "y", self.addresses.get("y", 0), found.nbytes, 256, 1
            )
            allocator.notify_shape("y", found.shape)
            self._array("y", found.shape)[...] = found

    def _side(self, mode: str) -> list[dict[str, Any]]:
        return [tensor for tensor in self.engine.tensors.values() if tensor["mode"] == mode]

    def _array(self, name: str, shape: Dims | None = None) -> Any:
        dtype = np.dtype(_NUMPY[self.engine.tensors[name].get("dtype", "FLOAT")])
        shape = shape if shape is not None else tuple(self.engine.tensors[name]["dims"])
        size = int(np.prod(shape)) * dtype.itemsize
        raw = (ctypes.c_ubyte * size).from_address(self.addresses[name])
        return np.frombuffer(raw, dtype).reshape(shape)


class FakeDriver:
    """The driver library, and what a test asks of it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    @property
    def blocks(self) -> int:
        """Blocks of memory that are allocated."""
        return int(self._library.fake_blocks())

    @property
    def objects(self) -> int:
        """Streams, events and graphs that there are."""
        return int(self._library.fake_objects())

    @property
    def launches(self) -> int:
        """How often a graph was launched."""
        return int(self._library.fake_launches())

    @property
    def registered(self) -> int:
        """Stretches of memory that are pinned without being the driver's."""
        return int(self._library.fake_registered())

    @property
    def drains(self) -> int:
        """How often all work of a GPU was waited for."""
        return int(self._library.fake_drains())

    async def freed(self) -> None:
        """Wait until all memory and objects are given up: a thread that ends, or an error's frames, may hold arrays."""
        async with asyncio.timeout(30):
            while (self.blocks, self.objects) != (0, 0):
                gc.collect()
                await asyncio.sleep(0.01)

    def fail(self, status: int) -> None:
        """Work fails with this status from now on; 0 mends it."""
        self._library.fake_fail(status)


_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def driver_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no compiler for the driver library of these tests")
    library = tmp_path_factory.mktemp("cuda") / "libcuda.so.1"
    source = Path(__file__).with_name("fake_cuda_streams.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source], check=True)
    return library


@pytest.fixture
def driver(driver_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """A driver of its own, and the module `tensorrt` over it."""
    own = tmp_path / f"libcuda_{next(_NUMBERS)}.so"
    shutil.copy(driver_file, own)  # another file is another library, with no memory of other tests
    monkeypatch.setattr("charonia.cuda.cuda_library.LIBRARY", str(own))
    library = ctypes.CDLL(str(own))
    LIBRARIES.append(library)
    monkeypatch.setitem(sys.modules, "tensorrt", module("tensorrt"))
    yield FakeDriver(library)
    LIBRARIES.pop()


def module(name: str) -> ModuleType:
    """This module under the real one's name."""
    made = ModuleType(name)
    made.__dict__.update({key: value for key, value in globals().items() if not key.startswith("_")})
    made.__dict__["__version__"] = __version__
    # what `importlib.util.find_spec` wants of a module that is imported
    made.__spec__ = __spec__
    return made


Plan = Callable[..., bytes]


def add_plan(
    dims: Dims = (-1, 4), profiles: list[tuple[Dims, Dims, Dims]] | None = None, dtype: str = "FLOAT"
) -> bytes:
    """A plan that adds a and b."""
    ranges = profiles or [((1, *dims[1:]), (4, *dims[1:]), (8, *dims[1:]))]
    tensors = [
        {"name": name, "mode": "OUTPUT" if name == "c" else "INPUT", "dims": dims, "dtype": dtype} for name in "abc"
    ]
    found = [{name: list(one) for name in "ab"} for one in ranges]
    return json.dumps({"tensors": tensors, "profiles": found, "op": "add"}).encode()


def fill_plan() -> bytes:
    """A plan with a shape tensor: y has the shape that s says, and is full of x; `twice` is a shape tensor, too."""
    tensors = [
        {"name": "x", "mode": "INPUT", "dims": [1]},
        {"name": "s", "mode": "INPUT", "dims": [2], "dtype": "INT64", "shape": True},
        {"name": "y", "mode": "OUTPUT", "dims": [-1, -1]},
        {"name": "twice", "mode": "OUTPUT", "dims": [2], "dtype": "INT64", "shape": True},
    ]
    ranges = {"x": [[1]] * 3, "s": [[2]] * 3, "values": {"s": [[1, 1], [2, 2], [4, 6]]}}
    return json.dumps({"tensors": tensors, "profiles": [ranges], "op": "fill"}).encode()


def nonzero_plan() -> bytes:
    """A plan whose output's size depends on the values of its input."""
    tensors = [{"name": "x", "mode": "INPUT", "dims": [-1]}, {"name": "y", "mode": "OUTPUT", "dims": [-1]}]
    return json.dumps({"tensors": tensors, "profiles": [{"x": [[1], [4], [64]]}], "op": "nonzero"}).encode()
