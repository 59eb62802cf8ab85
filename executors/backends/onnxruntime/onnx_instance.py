"""Runs arrays in a session: one execution, with strings as text and BF16 as raw memory, or over CUDA graphs.

`onnx_session` opens the session.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from charonia.backend import Array, DeviceLost, Interrupted
from charonia.cuda.lost_contexts import is_lost
from charonia.datatypes import DataType
from charonia.errors import CharoniaError, InternalError, InvalidArgument
from charonia.models.interface import ModelInterface
from charonia.tensors import object_array

from .execution_providers import CUDA
from .onnx_session import Session, reason

_ONNX_BFLOAT16 = 16


class OnnxRuntimeInstance:
    """An `InterruptibleInstance` over a session."""

    stateless = True
    """A graph keeps no state between executions."""

    def __init__(self, interface: ModelInterface, opened: Session) -> None:
        self.session: Any = opened.session
        self._run_options = opened.run_options()
        graph = (*opened.signature.inputs, *opened.signature.outputs)
        self._strings = frozenset(t.name for t in opened.signature.inputs if t.datatype == "BYTES")
        self._typed = any(t.datatype == "BF16" for t in graph)
        self._on_gpu = CUDA in self.session.get_providers()
        self._name = interface.name

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        """Run the graph for the wanted outputs.

        Raises `InvalidArgument` for strings that are not UTF-8, `Interrupted` after `interrupt`, `DeviceLost` for
        what says that this process has lost its GPU, `InternalError` with onnxruntime's message otherwise.
        """
        self._run_options.terminate = False
        if self._strings:
            inputs = {name: self._text(name, a) if name in self._strings else a for name, a in inputs.items()}
        try:
            return self._run(inputs, outputs)
        except CharoniaError:
            raise
        except UnicodeDecodeError:
            raise InternalError(
                f"onnx runtime error: a string output of model '{self._name}' is not UTF-8 text"
            ) from None
        except Exception as error:
            if self._on_gpu and is_lost(error):
                raise DeviceLost(f"model '{self._name}' has lost its GPU: {reason(error)}") from None
            if self._run_options.terminate:
                raise Interrupted(f"an execution of model '{self._name}' was interrupted", blameless=True) from None
            raise InternalError(reason(error)) from None

    def interrupt(self) -> None:
        """End the running execution before its next node."""
        self._run_options.terminate = True

    def close(self) -> None:
        """Release the session. Its memory is freed when nothing else uses it."""
        self.session = None

    def _text(self, name: str, array: Array) -> Array:
        """Convert bytes to text: onnxruntime's Python interface would use the repr of bytes objects."""
        try:
            text = object_array(map(bytes.decode, array.flat), array.size)
        except UnicodeDecodeError:
            raise InvalidArgument(
                f"string input '{name}' of model '{self._name}' must be UTF-8 text for the onnxruntime backend"
            ) from None
        return text.reshape(array.shape)

    def _run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        if self._typed:
            return self._run_typed(inputs, outputs)
        return dict(zip(outputs, self.session.run(outputs, inputs, self._run_options), strict=True))

    def _run_typed(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        """Run with BF16 tensors. NumPy has no BF16, so onnxruntime's values are made from, and read as, raw memory."""
        import onnxruntime as ort

        feeds = {}
        for name, array in inputs.items():
            if array.dtype == DataType.BF16.numpy:
                bits = np.ascontiguousarray(array).view(np.uint16)
                feeds[name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, _ONNX_BFLOAT16)
            else:
                feeds[name] = ort.OrtValue.ortvalue_from_numpy(array)
        values = self.session.run_with_ort_values(outputs, feeds, self._run_options)
        results: dict[str, Array] = {}
        for name, value in zip(outputs, values, strict=True):
            if value.data_type() == "tensor(bfloat16)":
                shape = tuple(value.shape())
                size_bytes = 2 * int(np.prod(shape))
                raw = ctypes.string_at(value.data_ptr(), size_bytes) if size_bytes else b""
                results[name] = np.frombuffer(raw, dtype=DataType.BF16.numpy).reshape(shape)
            else:
                results[name] = value.numpy()
        return results


class GraphInstance(OnnxRuntimeInstance):
    """One with CUDA graphs: its batches run over memory that stays at its place, all in one thread."""

    def __init__(self, interface: ModelInterface, opened: Session) -> None:
        super().__init__(interface, opened)
        assert opened.bound is not None
        self._runs = opened.bound()
        self._fits = not self._strings and not self._typed

    def started(self) -> None:
        """Keep all runs in the thread that calls this: the graphs are this thread's."""

    def _run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        if not self._fits:
            return super()._run(inputs, outputs)
        try:
            return self._runs.run(inputs, outputs)
        finally:
            self._run_options.terminate = self._runs.options.terminate

    def interrupt(self) -> None:
        """End the running execution before its next node; a graph runs to its end."""
        super().interrupt()
        self._runs.options.terminate = True
