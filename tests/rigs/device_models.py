"""Models for the exchange of arrays: one that computes on the driver without a GPU, and others on the host.

`OnDevice` does with a stream of its own what torch or JAX do: it takes inputs through DLPack, queues its work, and
returns arrays before the work is done. What is read too early or overwritten too soon gives wrong answers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from charonia.backend import Array, InstanceSpec, ModelSource, Wants
from charonia.cuda import cuda_library
from charonia.cuda.cuda_stream import CudaDevice, CudaDevices, CudaStream, DeviceMemory
from charonia.cuda.dlpack_capsules import CUDA, Described, capsule_of, described
from charonia.datatypes import DataType
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from executors.configuration.config import normalise

TENSORS = """
input { name: "x" data_type: TYPE_FP32 dims: -1 } output { name: "y" data_type: TYPE_FP32 dims: -1 }
"""
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def spec(
    directory: Path, text: str = f"max_batch_size: 8 {TENSORS}", kind: str = "GPU", **settings: str
) -> InstanceSpec:
    config = normalise(parse(f'name: "m" backend: "doubling" {text}'), gpus=2)
    of = ModelSource("m", 1, directory, config, {key.replace("_", "-"): value for key, value in settings.items()})
    return InstanceSpec("m_0_0", kind, 0 if kind == "GPU" else -1, of, ModelInterface.of(config))


class Given:
    """A model that wants something, whose instances do what a function does."""

    def __init__(self, wants: Wants, execute: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        self.wants = wants
        self.seen: list[dict[str, Any]] = []
        self.closed = 0
        self._execute = execute

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Any:
        self.seen.append(dict(inputs))
        return self._execute(inputs)

    def close(self) -> None:
        self.closed += 1


@dataclass
class DeviceTensor:
    """An array on the device that is not there before its stream has come so far."""

    memory: DeviceMemory
    stream: CudaStream
    device: CudaDevice
    datatype: DataType
    shape: tuple[int, ...]

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self.device.device_id

    def __dlpack__(self, *, stream: int) -> Any:
        with self.device.current():
            self.stream.mark()
            self.stream.precede(stream)
        return capsule_of(self, self.__dlpack_device__(), self.memory.address, self.datatype, self.shape)

    def __del__(self) -> None:
        with self.device.current():
            self.memory.free()


class OnDevice:
    """y = 2x on a GPU. One that `waits` returns when its own stream has done its work."""

    wants: Wants = "device"

    def __init__(self, device_id: int = 0, *, waits: bool = False) -> None:
        self.waits = waits
        self.device = CudaDevice(CudaDevices.shared(), device_id)
        with self.device.current():
            self.stream = CudaStream(self.device)
        self.driver = ctypes.CDLL(cuda_library.LIBRARY)
        self.alive: list[object] = []

    def execute(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> Mapping[str, Any]:
        self.alive.clear()  # the work of the batch before has ended: its outputs were fetched
        x = described(inputs["x"], self.stream.handle)
        assert x.device == (CUDA, self.device.device_id)
        with self.device.current():
            made = DeviceMemory(self.device, max(1, x.span_bytes))
            self.launch(x, made)
            if self.waits:
                self.stream.wait()
        return {"y": DeviceTensor(made, self.stream, self.device, x.datatype, x.shape)}

    def launch(self, x: Described, made: DeviceMemory) -> None:
        def run(_data: object) -> None:
            found = Described(None, x.device, made.address, x.datatype, x.shape, x.strides).over(made.address, None)
            found[...] = 2 * x.over(x.address, None)

        function = _HOST_FUNCTION(run)
        self.alive.append(function)
        status = self.driver.cuLaunchHostFunc(ctypes.c_void_p(self.stream.handle), function, None)
        assert status == 0

    def close(self) -> None:
        with self.device.current():
            self.stream.close()
        self.alive.clear()


def numbers(*shape: int, first: int = 0) -> Array:
    return np.arange(first, first + int(np.prod(shape)), dtype=np.float32).reshape(shape)
